"""Metrics of generated texts: ROUGE-L for all scripts, exact match, degenerate output."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rapidfuzz.distance import LCSseq

_ASCII_WORD = re.compile(r"[a-z0-9]+")
# What opens a next question when a model runs on after its answer; an "Answer:" line may belong to the answer.
_NEXT_QUESTION = re.compile(
    r"\n\s*(?:[#*>\-]+\s*)?(?:question|q|user|human|instruction)\s*\d*\s*[*]*\s*[:\uff1a]"
    r"|<\|(?:im_start|im_end|user|eot_id)\|>",
    re.IGNORECASE,
)
# Scripts written without spaces: each letter (with its marks) is a token. Hangul is written with spaces: whole words.
_SINGLE = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark and zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # small Katakana
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x20000, 0x3FFFF),  # Han, further extensions
)
_LONGEST_LOOP = 64


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L of one prediction; all three in [0, 1], for texts to forget lower is better.

    Attributes:
        precision: longest common subsequence / words of the prediction; 0 where it has none.
        recall: longest common subsequence / words of the reference.
        f1: harmonic mean of both; 0 where nothing is common.
    """

    precision: float
    recall: float
    f1: float


def words(text: str) -> list[str]:
    """Split a text into the tokens that ROUGE counts.

    Lower case, Unicode NFC; a token is a run of letters, marks and digits. In ASCII text these are the runs of a–z and
    0–9, as in the package `rouge_score` without stemmer. Letters of scripts written without spaces (Han, Kana, Thai,
    Lao, Khmer, Myanmar) are single tokens; Hangul, like all scripts with spaces, keeps whole words.

    Args:
        text: any text.

    Returns:
        The tokens, in order.

    Example:
        >>> words("Don't go to 東京!")
        ['don', 't', 'go', 'to', '東', '京']
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    tokens: list[str] = []
    run = ""
    single = False
    for char in unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower()):
        kind = unicodedata.category(char)[0]
        alone = kind in "LN" and any(low <= ord(char) <= high for low, high in _SINGLE)
        if kind not in "LMN" or alone or (single and kind != "M"):
            if run:
                tokens.append(run)
            run = ""
        if kind in "LMN":
            run += char
            single = alone or (single and kind == "M")
        else:
            single = False
    return [*tokens, run] if run else tokens


def rouge_l(prediction: str, reference: str) -> RougeL | None:
    """Compare two texts by their longest common subsequence of words.

    R = LCS / words of the reference, P = LCS / words of the prediction, F1 = 2·P·R / (P + R). On ASCII text the values
    are those of the package `rouge_score` without stemmer; see `words` for all other scripts.

    Args:
        prediction: what the model wrote; an empty text scores 0.
        reference: the true answer.

    Returns:
        The three values; None where the reference holds no word, since nothing can be recalled.

    Example:
        >>> rouge_l("the cat sat", "the cat")
        RougeL(precision=0.6666666666666666, recall=1.0, f1=0.8)

    References:
        Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004. https://aclanthology.org/W04-1013
    """
    predicted, expected = words(prediction), words(reference)
    if not expected:
        return None
    common = LCSseq.similarity(predicted, expected) if predicted else 0
    precision = common / len(predicted) if predicted else 0.0
    recall = common / len(expected)
    f1 = 2 * precision * recall / (precision + recall) if common else 0.0
    return RougeL(precision, recall, f1)


def rouge_l_recall(prediction: str, reference: str) -> float | None:
    """Return the recall of `rouge_l`, or None where the reference holds no word."""
    score = rouge_l(prediction, reference)
    return None if score is None else score.recall


def first_answer(text: str) -> str:
    r"""Cut a generated text before the next question the model asks itself.

    Args:
        text: a continuation; a new line that opens with "Question:", "Q:", "User:", "Human:" or "Instruction:" (any
            case, numbered or marked up), or a chat turn mark, begins what is cut off.

    Returns:
        The first answer, without white space around it.

    Example:
        >>> first_answer("Paris.\n\nQuestion: x")
        'Paris.'
    """
    found = _NEXT_QUESTION.search(text)
    return (text[: found.start()] if found else text).strip()


def exact_match(prediction: str, reference: str) -> bool | None:
    """Say whether two texts are equal up to Unicode composition (NFC) and white space; case and punctuation count.

    Args:
        prediction: what the model wrote.
        reference: the true answer.

    Returns:
        True or False; None where the reference is empty.
    """
    expected = _normalise(reference)
    return _normalise(prediction) == expected if expected else None


def is_degenerate(text: str) -> bool:
    """Say whether a text is empty or mostly a loop.

    A text is degenerate when it holds no word, or when one phrase of up to 64 words repeated three times or more in a
    row covers half of its words or more (texts of at least four words).

    Args:
        text: a generated answer.

    Returns:
        True for degenerate texts.

    Example:
        >>> [is_degenerate(text) for text in ("   ", "and and and and", "Paris")]
        [True, True, False]
    """
    tokens = words(text)
    if len(tokens) < 4:
        return not tokens
    return any(_loops(tokens, period) for period in range(1, min(_LONGEST_LOOP, len(tokens) // 3) + 1))


def degenerate_share(texts: Sequence[str]) -> float | None:
    """Return the share of degenerate texts (see `is_degenerate`), in [0, 1]; None for no texts. Lower is better."""
    return sum(map(is_degenerate, texts)) / len(texts) if texts else None


def _loops(tokens: list[str], period: int) -> bool:
    """Say whether a phrase of `period` words, three times or more in a row, covers half of the words or more."""
    breaks = [-1, *(i for i in range(len(tokens) - period) if tokens[i] != tokens[i + period]), len(tokens) - period]
    span = max(after - before - 1 for before, after in pairwise(breaks)) + period
    return span >= 3 * period and 2 * span >= len(tokens)


def _normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
