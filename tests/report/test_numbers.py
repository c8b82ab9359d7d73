import math

import pytest

from expunge.report._numbers import bound, embed, histogram, percent, seconds, share, thin


@pytest.mark.parametrize(
    ("nats", "shown"),
    [
        (None, "not measured"),
        (0.0, "≤\xa01.000"),
        (math.log(0.25), "≤\xa00.250"),
        (math.log(9.1e-9), "≤&nbsp;9.1&nbsp;×&nbsp;10<sup>−9</sup>"),
        (math.log(9.99e-9), "≤&nbsp;1.0&nbsp;×&nbsp;10<sup>−8</sup>"),
        (-1e5, "≤&nbsp;3.6&nbsp;×&nbsp;10<sup>−43430</sup>"),
        (math.log(9.11e-9), "≤&nbsp;9.2&nbsp;×&nbsp;10<sup>−9</sup>"),
    ],
)
def test_bounds(nats, shown):
    assert str(bound(nats)) == shown


def test_missing_is_never_zero():
    assert {share(None), percent(None), seconds(None)} == {"not measured"}
    assert share(-0.5) == "−0.500"
    assert [seconds(value) for value in (0.04, 11.2, 90.0, 100.0, 7200.0)] == [
        "0.0\xa0s",
        "11\xa0s",
        "90\xa0s",
        "1.7\xa0min",
        "2.0\xa0h",
    ]


def test_embedded_json_means_nothing_to_html():
    assert str(embed("</script>&\u2028")) == r'"\u003c/script\u003e\u0026\u2028"'
    assert str(embed("\ud800")) == '"?"'
    with pytest.raises(ValueError, match="JSON"):
        embed(math.nan)


def test_histogram_counts_every_value():
    found = histogram([0.0, 1.0, 1.0], [5.0])
    assert sum(found["before"]) == 3
    assert sum(found["after"]) == 1
    assert found["edges"][0] == 0.0
    assert found["edges"][-1] == 5.0
    assert sum(histogram([2.0], [2.0])["before"]) == 1
    assert histogram([], [1.0]) is None


def test_thinning_keeps_the_ends():
    assert thin(3, 10) == [0, 1, 2]
    kept = thin(1000, 100)
    assert (kept[0], kept[-1], len(kept)) == (0, 999, 100)
