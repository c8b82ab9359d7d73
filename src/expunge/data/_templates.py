"""Writing a chat as the text a model reads, and knowing where in it the answer stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expunge.data._records import Message, one_line
from expunge.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = "Question: {prompt}\nAnswer: {completion}"
_PROMPT, _COMPLETION = "{prompt}", "{completion}"
# Stands in for the answer to see where a template puts it. Private-use characters, which no template changes.
_SENTINEL = "\ue000expunge\ue001"


@dataclass(frozen=True)
class RenderedText:
    """A chat as text; the answer is `text[start:end]`.

    Attributes:
        text: the whole chat.
        start: first character of the answer.
        end: one past the last character of the answer.
        specials: whether the tokenizer is to add its own special tokens. False where a chat template has already
            written them.
        always_eos: whether the answer is followed by the end-of-sequence token even if the template has text after the
            answer.
    """

    text: str
    start: int
    end: int
    specials: bool
    always_eos: bool


@dataclass(frozen=True)
class RenderedIds:
    """A chat as token ids, for tokenizers whose template call knows no text.

    Attributes:
        prompt: ids up to the answer.
        full: ids of the whole chat.
    """

    prompt: tuple[int, ...]
    full: tuple[int, ...]


def token_ids(output: Any) -> list[int]:
    """Take the ids of one row from what a tokenizer or template call returned.

    That is a list, a mapping, a tensor, or one of these nested.

    Example:
        >>> token_ids({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]})
        [1, 2, 3]
    """
    if isinstance(output, Mapping):
        output = output["input_ids"]
    if hasattr(output, "ids"):
        output = output.ids
    if hasattr(output, "tolist"):
        output = output.tolist()
    ids = list(output)
    if len(ids) == 1 and not isinstance(ids[0], int):
        return token_ids(ids[0])
    return [int(token) for token in ids]


def check_template(template: str, tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Refuse a template that cannot work.

    Raises:
        UsageError: an unknown name, a template string without both fields in order, or "chat" for a tokenizer without
            chat template.
    """
    if template == "chat":
        if not getattr(tokenizer, "chat_template", True):
            raise UsageError(
                f"{name}: the tokenizer has no chat template; use --template plain, or give one with {_PROMPT}"
            )
        return
    if template == "plain":
        return
    counts = template.count(_PROMPT), template.count(_COMPLETION)
    if counts != (1, 1) or template.index(_PROMPT) > template.index(_COMPLETION):
        raise UsageError(
            f"{name}: template {one_line(template, 60)!r} is not accepted: use chat, plain, "
            f"or a text with one {_PROMPT} and, after it, one {_COMPLETION}"
        )


def render(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", template: str, system: str | None, where: str
) -> RenderedText | RenderedIds:
    """Write a chat whose last message is the answer.

    Args:
        messages: the turns.
        tokenizer: whose chat template is used for "chat".
        template: see `encode_records`.
        system: text of a system turn for chats without one; None adds none.
        where: how errors name the row.

    Raises:
        UsageError: the template refuses these turns.
    """
    if system is not None and messages[0].role != "system":
        messages = [Message("system", system), *messages]
    if template == "chat":
        return _render_chat(messages, tokenizer, where)
    return _render_text(messages, PLAIN_TEMPLATE if template == "plain" else template, tokenizer)


def _render_text(messages: Sequence[Message], template: str, tokenizer: "PreTrainedTokenizerBase") -> RenderedText:
    """Fill a template string; the system text and earlier question-answer pairs go before, set off by an empty line."""
    head, rest = template.split(_PROMPT)
    middle, tail = rest.split(_COMPLETION)
    blocks: list[str] = []
    questions: list[str] = []
    for message in messages[:-1]:
        if message.role == "system":
            blocks += [message.content] if message.content else []
        elif message.role == "user":
            questions.append(message.content)
        else:
            blocks.append(head + "\n".join(questions) + middle + message.content + tail)
            questions = []
    before = "\n\n".join([*blocks, head + "\n".join(questions) + middle])
    answer = messages[-1].content
    bos = getattr(tokenizer, "bos_token", None)
    return RenderedText(
        text=before + answer + tail,
        start=len(before),
        end=len(before) + len(answer),
        specials=not (bos and before.startswith(bos)),
        always_eos=True,
    )


def _render_chat(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", where: str
) -> RenderedText | RenderedIds:
    try:
        full = _apply(messages, tokenizer, where)
        # Some templates refuse a system turn, others leave it out without a word.
        lost = messages[0].role == "system" and isinstance(full, str) and messages[0].content.strip() not in full
    except UsageError:
        if messages[0].role != "system":
            raise
        lost = True
    if lost:
        messages = _fold_system(messages, where)
        full = _apply(messages, tokenizer, where)
    if not isinstance(full, str):
        prompt = _apply(messages[:-1], tokenizer, where, generation=True) if len(messages) > 1 else []
        return RenderedIds(tuple(token_ids(prompt)), tuple(full))
    start, end = _find_answer(messages, full, tokenizer, where)
    return RenderedText(full, start, end, specials=False, always_eos=False)


def _fold_system(messages: Sequence[Message], where: str) -> list[Message]:
    """Put the system text before the first user text."""
    system, *turns = messages
    for place, turn in enumerate(turns):
        if turn.role == "user":
            turns[place] = Message("user", f"{system.content}\n\n{turn.content}" if system.content else turn.content)
            return turns
    raise UsageError(
        f"{where}: the chat template refuses a system turn, and there is no user turn to put its text into"
    )


def _apply(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", where: str, generation: bool = False
) -> str | list[int]:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        output = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation)
    except Exception as error:  # templates are programs: jinja2, type and value errors, and what they raise themselves
        # A template may quote the turn it refuses; then its message is not shown.
        quoted = any(message.content.strip() and message.content.strip() in str(error) for message in messages)
        reason = type(error).__name__ if quoted or not str(error) else one_line(error, 120)
        roles = ", ".join(message.role for message in messages)
        raise UsageError(f"{where}: the chat template refuses the turns {roles} ({reason})") from None
    return output if isinstance(output, str) else token_ids(output)


def _find_answer(
    messages: Sequence[Message], full: str, tokenizer: "PreTrainedTokenizerBase", where: str
) -> tuple[int, int]:
    """Find the answer in the rendered chat.

    By what stands before and after a stand-in for it; else after the generation prompt.
    """
    answer = messages[-1].content
    try:
        model = _apply([*messages[:-1], Message("assistant", _SENTINEL)], tokenizer, where)
    except UsageError:
        model = ""
    if isinstance(model, str) and model.count(_SENTINEL) == 1:
        before, after = model.split(_SENTINEL)
        fits = full.startswith(before) and full.endswith(after) and len(before) + len(after) < len(full)
        # What stands there is the answer, but for white space the template trims; else the template rewrote it.
        if fits and full[len(before) : len(full) - len(after)].strip() in answer:
            return len(before), len(full) - len(after)
    prompt = _apply(messages[:-1], tokenizer, where, generation=True) if len(messages) > 1 else ""
    from_here = len(prompt) if isinstance(prompt, str) and full.startswith(prompt) else 0
    shown = answer if answer in full[from_here:] else answer.strip()
    start = full.find(shown, from_here) if from_here else full.rfind(shown)
    if start < 0:
        raise UsageError(f"{where}: the chat template does not show the answer as it is; use --template plain")
    return start, start + len(shown)
