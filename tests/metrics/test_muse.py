import pytest

from expunge.metrics import few_shot_answer, few_shot_prompt, scalability, sustainability


def test_few_shot_prompt_and_answer():
    prompt = few_shot_prompt([("A?", "B"), ("C?", "D")], "E?")
    assert prompt == "Question: A?\nAnswer: B\n\nQuestion: C?\nAnswer: D\n\nQuestion: E?\nAnswer: "
    for text in ("F\n\nmore", "F\nQuestion: G?", "F Question: G?", " F "):
        assert few_shot_answer(text) == "F"
    assert few_shot_answer("\n\nF") == ""


def test_sustainability_over_requests():
    found = sustainability([0.5, 0.4, None, 0.2], before=0.8)
    assert found.relative == pytest.approx((0.625, 0.5, None, 0.25))
    assert found.drop == pytest.approx(0.6)
    assert found.slope == pytest.approx(-0.1)
    assert sustainability([None]).drop is None
    assert sustainability([0.5]).slope is None
    assert sustainability([]).values == ()


def test_scalability_over_sizes():
    found = scalability([100, 200, 400], [0.6, 0.5, 0.3])
    assert found.slope == pytest.approx(-0.001)
    assert found.drop == pytest.approx(0.3)
    with pytest.raises(ValueError, match="found 1 for 2"):
        scalability([1], [0.1, 0.2])
