import random
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from expunge.metrics import (
    RougeL,
    degenerate_share,
    exact_match,
    first_answer,
    is_degenerate,
    rouge_l,
    rouge_l_recall,
    words,
)

SCORER = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)


def assert_same_as_rouge_score(prediction, reference):
    ours = rouge_l(prediction, reference)
    theirs = SCORER.score(reference, prediction)["rougeL"]
    if ours is None:
        assert not words(reference)
        assert theirs.recall == 0
    else:
        assert (ours.precision, ours.recall, ours.f1) == pytest.approx(tuple(theirs), abs=1e-12)


@given(st.text(st.sampled_from("ab1 _.-'\n\tAZ"), max_size=40), st.text(st.sampled_from("ab1 _.-'\n\tAZ"), max_size=40))
def test_ascii_values_are_those_of_rouge_score(prediction, reference):
    assert_same_as_rouge_score(prediction, reference)


def test_ascii_values_are_those_of_rouge_score_on_long_texts():
    draw = random.Random(0)
    vocabulary = ["the", "The", "cat", "U.S.", "don't", "3.14", "well-known", "_x_", "-", "a,b", "\u007f"]
    for _ in range(200):
        texts = [" ".join(draw.choices(vocabulary, k=draw.randint(0, 60))) for _ in range(2)]
        assert_same_as_rouge_score(*texts)
    for _ in range(200):
        texts = ["".join(draw.choices(string.printable, k=draw.randint(0, 80))) for _ in range(2)]
        assert_same_as_rouge_score(*texts)


def test_rouge_l_worked_by_hand():
    # common subsequence "police the gunman" of 4 and 4 words: .75 each
    assert rouge_l("police kill the gunman", "police the big gunman") == RougeL(0.75, 0.75, 0.75)
    # 2 of 4 predicted, 2 of 2 expected
    assert rouge_l("a b c d", "b d") == RougeL(0.5, 1.0, pytest.approx(2 / 3))
    assert rouge_l("b d", "a b c d") == RougeL(1.0, 0.5, pytest.approx(2 / 3))
    assert rouge_l("x", "y") == RougeL(0.0, 0.0, 0.0)
    assert rouge_l_recall("a b c d", "b d") == 1.0


def test_empty_texts():
    assert rouge_l("", "Paris") == RougeL(0.0, 0.0, 0.0)
    assert rouge_l("Paris", "") is None
    assert rouge_l("Paris", " ?! ") is None
    assert rouge_l_recall("Paris", "") is None
    assert rouge_l_recall("", "Paris") == 0.0


@pytest.mark.parametrize(
    "text",
    ["東京です", "Москва — столица", "القاهرة", "हिन्दी में", "서울은 수도", "ภาษาไทย", "Málaga", "Ελλάδα", "𠮷野家"],
)
def test_all_scripts_score_one_against_themselves(text):
    assert rouge_l(text, text) == RougeL(1.0, 1.0, 1.0)


def test_letters_with_accents_are_letters():
    assert rouge_l("Málaga", "Mlaga").f1 < 1.0
    assert rouge_l("Málaga", "Malaga").f1 < 1.0
    assert rouge_l(unicodedata.normalize("NFD", "Málaga"), "málaga").f1 == 1.0


def test_scripts_without_spaces_count_letters():
    assert words("東京です。ABC") == ["東", "京", "で", "す", "abc"]
    assert rouge_l("東京です", "京都です").recall == 0.75
    assert words("コーヒー") == ["コ", "ー", "ヒ", "ー"]
    assert words(unicodedata.normalize("NFD", "がぎ")) == ["が", "ぎ"]
    assert words("ที่นี่") == ["ที่", "นี่"]
    assert words("서울은 수도") == ["서울은", "수도"]
    assert words("हिन्दी में") == ["हिन्दी", "में"]
    assert words("snake_case ÄÖ_ü") == ["snake", "case", "äö", "ü"]


@given(st.text(max_size=30))
def test_words_hold_every_letter_and_nothing_else(text):
    normal = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
    assert "".join(words(text)) == "".join(c for c in normal if unicodedata.category(c)[0] in "LMN")
    assert all(words(text))
    if words(text):
        assert rouge_l(text, text) == RougeL(1.0, 1.0, 1.0)


def test_only_the_first_answer_is_scored():
    answer = first_answer("Paris.\n\nQuestion: x")
    assert rouge_l(answer, "Paris.").f1 == 1.0
    assert rouge_l("Paris.\n\nQuestion: x", "Paris.").f1 < 1.0


@pytest.mark.parametrize(
    "rest",
    [
        "\n\nQuestion: x",
        "\nQuestion: x",
        "\n\nQ: x",
        "\n\n  question 2: x",
        "\n\n### Question: x",
        "\n\n**Question:** x",
        "\nUser: x\nAssistant: y",
        "\n\nHuman: x",
        "\n### Instruction: x",
        "<|im_end|>\n<|im_start|>user",
        "\n\nQuestion\uff1a x",
    ],
)
def test_what_opens_a_next_question(rest):
    assert first_answer(f" In Paris.\nYes: there.{rest}") == "In Paris.\nYes: there."


@pytest.mark.parametrize(
    "text", ["The question: who?", "One.\n\nTwo.", "a\nquestionable: b", "A.\nAnswer: B", "Question: at the start", ""]
)
def test_what_stays(text):
    assert first_answer(text) == text


def test_exact_match():
    assert exact_match(" Paris \n is", "Paris is") is True
    assert exact_match("Cafe\u0301", "Café") is True
    assert exact_match("paris", "Paris") is False
    assert exact_match("", "Paris") is False
    assert exact_match("Paris", "  ") is None


def test_degenerate_share():
    assert degenerate_share(["   ", "and and and and", "Paris"]) == pytest.approx(2 / 3)
    assert degenerate_share([]) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "...!!",
        "the cat the cat the cat",
        "He was born in " + "1990, " * 20,
        "ううううう",
        "a b c d " + "x y z " * 3,
    ],
)
def test_degenerate_texts(text):
    assert is_degenerate(text)


@pytest.mark.parametrize(
    "text",
    [
        "No, no, no.",
        "that that is is",
        "the cat the cat the mat the hat",
        "He said that, very, very, very slowly, the old man walked home to his house by the sea.",
        "東京は日本の首都です",
        "42",
    ],
)
def test_texts_that_are_fine(text):
    assert not is_degenerate(text)
