import dataclasses

import pytest

from expunge.metrics import (
    SHARE_AS_RETRAINED,
    SHARE_DOWN,
    Bootstrap,
    auc_metric,
    distinct_n,
    is_blank,
    is_degenerate,
    is_non_language,
    is_repeated,
    knowledge_recovery,
    mean_metric,
    over_forgetting,
)

BOOT = Bootstrap(resamples=100)


def test_kinds_of_degenerate_text():
    texts = ["   ", "and and and and", "Paris"]
    assert sum(map(is_degenerate, texts)) / 3 == pytest.approx(2 / 3)
    assert [is_blank(text) for text in texts] == [True, False, False]
    assert [is_repeated(text) for text in texts] == [False, True, False]
    assert is_blank("\u200b\n")
    assert not is_blank("…")


@pytest.mark.parametrize("text", ["19 %", "東京です。", "Málaga", "$1,472", "", "   "])
def test_language_or_nothing(text):
    assert not is_non_language(text)


@pytest.mark.parametrize("text", ["}}{;;)( ~~ ||", "\ufffd\ufffd a", "x" * 41, "|||", "a\x00b\x01"])
def test_no_language(text):
    assert is_non_language(text)


def test_distinct_n():
    assert distinct_n(["a b a b"], 2) == pytest.approx(2 / 3)
    assert distinct_n(["a b", "a b"], 1) == 0.5
    assert distinct_n(["a", ""], 2) is None
    with pytest.raises(ValueError, match="n: found 0"):
        distinct_n(["a"], 0)


def test_knowledge_recovery():
    assert knowledge_recovery(0.2, 0.5) == pytest.approx(0.3)
    assert knowledge_recovery(0.5, 0.2) == 0.0
    assert knowledge_recovery(None, 0.2) is None


def test_flags_for_forgetting_too_much():
    def member(members, others):
        return auc_metric("mia_min_k", members, others, units=("f", "h"), bootstrap=BOOT)

    low = member([float(i) for i in range(20)], [float(i) for i in range(30, 50)])
    assert "less likely than rows never seen" in over_forgetting(low, None)[0]
    even = member([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
    assert over_forgetting(even, None) == ()
    # the retrained model is as low: the sets differ by themselves
    assert over_forgetting(dataclasses.replace(low, reference=0.0, scale=SHARE_AS_RETRAINED), None) == ()
    broken = mean_metric("forget_degenerate", [1.0, 1.0, 0.0], SHARE_DOWN, unit="f", bootstrap=BOOT)
    assert "67%" in over_forgetting(None, broken)[0]
    assert over_forgetting(None, dataclasses.replace(broken, reference=0.7)) == ()
    assert over_forgetting(None, None) == ()
