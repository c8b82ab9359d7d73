"""Output that is no answer: blank, looping, or no language; and the flag for forgetting too much."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from expunge.metrics._metric import Metric
from expunge.metrics._texts import is_degenerate, words

_LONGEST_WORD = 40
_FAR_BELOW = 0.4
_MORE_DEGENERATE = 0.1
_BROKEN = "\ufffd"


def is_blank(text: str) -> bool:
    """Say whether a text holds nothing visible."""
    return not any(unicodedata.category(char)[0] not in "ZC" for char in text)


def is_repeated(text: str) -> bool:
    """Say whether a text is mostly a loop of words (see `is_degenerate`)."""
    return bool(words(text)) and is_degenerate(text)


def is_non_language(text: str) -> bool:
    """Say whether a text that is not blank cannot be language, by its characters alone.

    True where fewer than half of its visible characters are letters, marks or digits; where one in twenty or more is a
    replacement, control or private-use character; or where a word has more than 40 letters. Invented words of ordinary
    shape are not seen: that would need a language model.

    Example:
        >>> [is_non_language(text) for text in ("19 %", "東京です。", "}}{;;)( ~~ ||", "\ufffd\ufffd a")]
        [False, False, True, True]
    """
    if is_blank(text):
        return False
    visible = [char for char in text if not char.isspace()]
    kinds = [unicodedata.category(char) for char in visible]
    readable = sum(kind[0] in "LMN" for kind in kinds)
    broken = sum(char == _BROKEN or kind in ("Cc", "Co", "Cn") for char, kind in zip(visible, kinds, strict=True))
    longest = max(map(len, words(text)), default=0)
    return 2 * readable < len(visible) or 20 * broken >= len(visible) or longest > _LONGEST_WORD


def distinct_n(texts: Sequence[str], n: int = 2) -> float | None:
    """Share of different n-grams of words among all in the texts. Near 0: the texts say one thing over and over.

    Args:
        texts: generated answers.
        n: words in a gram, 1 or more.

    Returns:
        In (0, 1]; None where no text has n words.

    Raises:
        ValueError: n below 1.

    Example:
        >>> distinct_n(["a b a b"], 2)
        0.6666666666666666

    References:
        Li et al., A Diversity-Promoting Objective Function for Neural Conversation Models, 2016.
        https://arxiv.org/abs/1510.03055
    """
    if n < 1:
        raise ValueError(f"n: found {n!r}, accepted is a whole number from 1")
    grams: list[tuple[str, ...]] = []
    for text in texts:
        tokens = words(text)
        grams += [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def over_forgetting(member_auc: Metric | None, degenerate: Metric | None) -> tuple[str, ...]:
    """Signs that more was removed than the examples.

    Args:
        member_auc: member AUC (forget against holdout). Under 0.4 with its whole interval: what was to be forgotten
            stands out by being *less* likely than text never seen.
        degenerate: share of degenerate answers to the forget questions, with the retrained model's share as reference.
            0.1 more than that (or than 0): answers were broken, not forgotten.

    Returns:
        One sentence a sign; empty where there is none.
    """
    signs = []
    if member_auc is not None and member_auc.value is not None:
        upper = member_auc.interval[1] if member_auc.interval else member_auc.value
        usual = min(0.5, member_auc.reference if member_auc.reference is not None else 0.5)
        if upper < _FAR_BELOW and member_auc.value < usual - (0.5 - _FAR_BELOW):
            signs.append(
                f"over-forgetting: {member_auc.name} is {member_auc.value:.2f}: the rows to forget stand out by being "
                "less likely than rows never seen"
            )
    if degenerate is not None and degenerate.value is not None:
        usual = degenerate.reference or 0.0
        if degenerate.value >= usual + _MORE_DEGENERATE:
            compared = "expected: few" if degenerate.reference is None else f"retrained model: {usual:.0%}"
            signs.append(
                f"over-forgetting: {degenerate.value:.0%} of the answers to the forget questions are blank, looping or "
                f"no language ({compared})"
            )
    return tuple(signs)


def knowledge_recovery(direct: float | None, paraphrased: float | None) -> float | None:
    """What asking in other words brings back in one row: max(0, s' − s). Lower is better.

    Args:
        direct: s, ROUGE-L recall (or probability) of the answer to the question as trained.
        paraphrased: s', that of the answer to the paraphrased question.

    Returns:
        In [0, 1]; None where a value is missing.
    """
    return None if direct is None or paraphrased is None else max(0.0, paraphrased - direct)
