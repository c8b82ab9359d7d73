"""Texts of the examples to forget, read only when they are to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.errors import UsageError


@dataclass(frozen=True)
class RowText:
    """Texts of a row.

    Attributes:
        prompt: what is asked; None for raw text.
        answer: what is to be forgotten.
        tokens: text of each labelled token.
    """

    prompt: str | None
    answer: str
    tokens: tuple[str, ...]


def token_texts(run: Mapping[str, Any], folder: Path) -> tuple[RowText, ...]:
    """Read the forget file and cut it into the tokens of the score tables.

    Args:
        run: `run.json`.
        folder: of the run; the tokenizer is in its model.

    Raises:
        UsageError: the file or the tokenizer is gone, or the rows are not those of the run.
    """
    # NOTE: imported here since both load torch, which a page without texts does not need.
    from transformers import AutoTokenizer

    from expunge.data import IGNORE, encode_records, read_records

    config = run["config"]
    records = read_records(config["forget"], columns=dict(config.get("columns") or {}), name="forget")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    except (OSError, ValueError):
        raise UsageError(f"show-text: found no tokenizer in {folder / 'model'}, accepted is a finished run") from None
    options = {name: config[name] for name in ("template", "system", "max_length") if name in config}
    corpus = encode_records(records, tokenizer, name="forget", **options)
    expected = run["data"]["forget"]["rows"]
    if len(corpus.rows) != expected:
        raise UsageError(f"show-text: {config['forget']} gives {len(corpus.rows)} rows, the run had {expected}")
    found = []
    for row in corpus.rows:
        record = records[row.record]
        labelled = [label for label in row.labels if label != IGNORE]
        found.append(RowText(record.prompt, record.answer, tuple(str(tokenizer.decode([token])) for token in labelled)))
    return tuple(found)
