"""From records to token rows: what is read, and which tokens are labelled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from expunge.data._records import Message, Record, one_line
from expunge.data._templates import RenderedIds, RenderedText, check_template, render, token_ids
from expunge.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
_PLACEHOLDER = "Answer"


@dataclass(frozen=True)
class Row:
    """One row of tokens.

    Attributes:
        id: id of the record.
        record: index of the record; windows of one text share it.
        input_ids: the tokens.
        labels: as long as `input_ids`; the token where it is labelled, else -100. The first is never labelled: nothing
            predicts it.
        prompt_length: tokens before the first labelled one, at least 1.
    """

    id: str
    record: int
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class Dropped:
    """A record that has nothing to label.

    Attributes:
        id: id of the record.
        reason: "empty answer", or "no token to label".
    """

    id: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """Encoded records.

    Attributes:
        rows: in the order of the records; at least one.
        dropped: records without a row.
        truncated: how many rows lost the start of their prompt.
    """

    rows: tuple[Row, ...]
    dropped: tuple[Dropped, ...]
    truncated: int


@dataclass
class _Draft:
    """What `encode_records` has so far; `too_long` has the id and the answer's tokens of rows that do not fit."""

    tokenizer: "PreTrainedTokenizerBase"
    max_length: int
    ends: frozenset[int]
    name: str
    rows: list[Row] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    too_long: list[tuple[str, int]] = field(default_factory=list)
    truncated: int = 0

    def add_text(self, record: Record, index: int) -> None:
        rows = _windows(record, index, token_ids(self.tokenizer(record.answer, verbose=False)), self.max_length)
        self.rows += rows
        self.dropped += [] if rows else [Dropped(record.id, "no token to label")]

    def add_chat(self, record: Record, index: int, form: tuple[str, str | None]) -> None:
        where = f"{self.name}: row id {one_line(record.id, 40)}"
        ids, start = _chat_ids(record.messages or (), self.tokenizer, form, self.ends, where)
        start = max(start, 1)
        answer = len(ids) - start
        if answer < 1:
            self.dropped.append(Dropped(record.id, "no token to label"))
        elif answer > self.max_length - 1:
            self.too_long.append((record.id, answer))
        else:
            prompt = _cut(ids[:start], self.max_length - answer, self.tokenizer)
            self.truncated += len(prompt) < start
            self.rows.append(_row(record.id, index, prompt + ids[start:], len(prompt)))


def encode_records(
    records: Sequence[Record],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    template: str = "chat",
    system: str | None = None,
    max_length: int = 512,
    name: str = "data",
) -> Corpus:
    r"""Turn records into token rows.

    Chats: the last answer and its end-of-turn token are labelled, and nothing else; what a template writes after the
    end of turn is cut off. Too long rows lose the start of the prompt (a leading BOS stays), never a token of the
    answer.

    Raw text: encoded by the tokenizer's own rule for special tokens, and every token but the first is labelled, once.
    Text longer than `max_length` becomes several windows; each but the first starts with up to `max_length // 4`
    unlabelled tokens of the window before. `template` and `system` have no effect on raw text.

    Args:
        records: what to encode.
        tokenizer: left as it is; needs no pad token.
        template: "chat" is the tokenizer's own chat template, tokenised without adding special tokens. "plain" is
            "Question: {prompt}\nAnswer: {completion}". Any other text with {prompt} and {completion} is used in the
            same way as "plain": the tokenizer adds its special tokens (unless the text starts with BOS), earlier turns
            and a system text go before with an empty line between, and the end-of-sequence token follows the answer.
        system: text of a system turn, added where a chat has none; put before the first user text where the template
            refuses or ignores system turns. None adds nothing, though a model's chat template may have a default of its
            own.
        max_length: most tokens in a row, at least 2.
        name: what errors call the data.

    Raises:
        UsageError: an answer of more than `max_length - 1` tokens; no row left; a template that does not fit.
    """
    if max_length < 2:
        raise UsageError(f"{name}: max_length is {max_length}, at least 2 is needed")
    if any(record.messages is not None for record in records):
        check_template(template, tokenizer, name)
    draft = _Draft(tokenizer, max_length, _end_ids(tokenizer), name)
    for index, record in enumerate(records):
        if not record.answer.strip():
            draft.dropped.append(Dropped(record.id, "empty answer"))
        elif record.messages is None:
            draft.add_text(record, index)
        else:
            draft.add_chat(record, index, (template, system))
    if draft.too_long:
        identity, count = draft.too_long[0]
        needed = max(answer for _, answer in draft.too_long) + 1
        raise UsageError(
            f"{name}: the answer of row id {one_line(identity, 40)} has {count} tokens, max_length {max_length} has "
            f"room for {max_length - 1} ({len(draft.too_long)} such rows); raise max_length to {needed} or more"
        )
    if not draft.rows:
        raise UsageError(f"{name}: nothing to label, all {len(records)} rows have an empty answer or text")
    return Corpus(tuple(draft.rows), tuple(draft.dropped), draft.truncated)


def encode_prompt(
    record_or_question: Record | str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    template: str = "chat",
    system: str | None = None,
    max_length: int = 512,
) -> list[int]:
    """Encode what stands before an answer, for generation.

    For a record that `encode_records` did not cut these are the first `prompt_length` ids of its row. For raw text it
    is the first half of its tokens, at least one, to be continued.

    Args:
        record_or_question: a record, or the text of a question, such as a record's paraphrase.
        tokenizer: as in `encode_records`.
        template: as in `encode_records`.
        system: as in `encode_records`.
        max_length: most ids returned; a longer prompt loses its start (a leading BOS stays). At least 1.

    Returns:
        Between 1 and `max_length` ids.

    Raises:
        UsageError: a template that does not fit; or an empty prompt for a tokenizer without any token to start with.
    """
    if max_length < 1:
        raise UsageError(f"max_length is {max_length}, at least 1 is needed")
    if isinstance(record_or_question, str):
        messages: tuple[Message, ...] = (Message("user", record_or_question), Message("assistant", _PLACEHOLDER))
        where = "question"
    elif record_or_question.messages is None:
        ids = token_ids(tokenizer(record_or_question.answer, verbose=False))
        return _cut(ids[: max(1, len(ids) // 2)] or _start_ids(tokenizer), max_length, tokenizer)
    else:
        messages = record_or_question.messages
        where = f"row id {one_line(record_or_question.id, 40)}"
        if not messages[-1].content.strip():
            messages = (*messages[:-1], Message("assistant", _PLACEHOLDER))
    check_template(template, tokenizer, where)
    ids, start = _chat_ids(messages, tokenizer, (template, system), _end_ids(tokenizer), where)
    return _cut(ids[:start] or _start_ids(tokenizer), max_length, tokenizer)


def _row(identity: str, record: int, ids: Sequence[int], unlabelled: int) -> Row:
    labels = (IGNORE,) * unlabelled + tuple(ids[unlabelled:])
    return Row(identity, record, tuple(ids), labels, unlabelled)


def _cut(prompt: list[int], room: int, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Keep the end of a prompt, and its BOS: models are used to a first token that is always the same."""
    if len(prompt) <= room:
        return prompt
    bos = getattr(tokenizer, "bos_token_id", None)
    if room >= 2 and bos is not None and prompt[0] == bos:
        return [bos, *prompt[len(prompt) - room + 1 :]]
    return prompt[len(prompt) - room :]


def _windows(record: Record, index: int, ids: list[int], max_length: int) -> list[Row]:
    """Split a text so that each token but the first is labelled once; max_length >= 2."""
    rows = []
    context, place = max(1, max_length // 4), 1
    while place < len(ids):
        unlabelled = 1 if place == 1 else context
        start = place - unlabelled
        rows.append(_row(record.id, index, ids[start : start + max_length], unlabelled))
        place = start + max_length
    return rows


def _end_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Ids that can end a turn: special and added tokens, as not every tokenizer declares its end of turn as special."""
    found = set(getattr(tokenizer, "all_special_ids", ())) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset(found if eos is None else found | {eos})


def _start_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    for token in (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if token is not None:
            return [token]
    raise UsageError("the prompt is empty and the tokenizer has no token to start with")


def _chat_ids(
    messages: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    form: tuple[str, str | None],
    ends: frozenset[int],
    where: str,
) -> tuple[list[int], int]:
    """Ids of a chat up to its last end of turn, and how many stand before the answer; `form` is (template, system)."""
    rendered = render(messages, tokenizer, *form, where)
    if isinstance(rendered, RenderedIds):
        return _ids_of_ids(rendered, ends)
    return _ids_of_text(rendered, tokenizer, ends)


def _ids_of_ids(rendered: RenderedIds, ends: frozenset[int]) -> tuple[list[int], int]:
    ids = list(rendered.full)
    start = _common(rendered.prompt, ids)
    stop = len(ids)
    last = next((place for place in range(stop - 1, start - 1, -1) if ids[place] in ends), None)
    return ids[: stop if last is None else last + 1], start


def _ids_of_text(
    rendered: RenderedText, tokenizer: "PreTrainedTokenizerBase", ends: frozenset[int]
) -> tuple[list[int], int]:
    if getattr(tokenizer, "is_fast", False):
        ids, start, tail, blank = _span_by_offsets(rendered, tokenizer)
    else:
        ids, start, tail, blank = _span_by_parts(rendered, tokenizer)
    for place in range(tail, len(ids)):
        if ids[place] in ends:
            return ids[: place + 1], start
    # No end token: keep text that ends the turn, without white space, and close with the end-of-sequence token.
    eos = getattr(tokenizer, "eos_token_id", None)
    unclosed = rendered.always_eos or not rendered.text[rendered.end :].strip()
    closing = [eos] if eos is not None and unclosed else []
    return ids[: max(tail, blank)] + closing, start


def _span_by_offsets(rendered: RenderedText, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], int, int, int]:
    """Ids; the first that overlaps the answer; the first that goes beyond it; the first of closing white space."""
    output = tokenizer(rendered.text, add_special_tokens=rendered.specials, return_offsets_mapping=True, verbose=False)
    ids, offsets = token_ids(output), [tuple(pair) for pair in output["offset_mapping"]]
    count = len(ids)
    start = next((i for i, (_, end) in enumerate(offsets) if end > rendered.start), count)
    # (0, 0) after the start: added by the tokenizer, such as its end-of-sequence token. Ends, not starts, are compared:
    # an end-of-turn token may swallow white space that ends the answer.
    tail = next((i for i in range(start, count) if offsets[i][1] > rendered.end or offsets[i] == (0, 0)), count)
    written = max(rendered.end, len(rendered.text.rstrip()))
    blank = next((i for i in range(tail, count) if offsets[i][0] >= written or offsets[i] == (0, 0)), count)
    return ids, start, tail, blank


def _span_by_parts(rendered: RenderedText, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], int, int, int]:
    """The same for tokenizers without offsets: what the whole shares with its beginning and its end, encoded alone."""

    def encode(text: str) -> list[int]:
        return token_ids(tokenizer(text, add_special_tokens=rendered.specials, verbose=False))

    ids = encode(rendered.text)
    start = _common(encode(rendered.text[: rendered.start]), ids)
    after = _common(encode(rendered.text[rendered.end :])[::-1], ids[::-1])
    tail = max(start, len(ids) - after)
    written = max(rendered.end, len(rendered.text.rstrip()))
    white = _common(encode(rendered.text[written:])[::-1], ids[::-1])
    return ids, start, tail, max(tail, len(ids) - white)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
