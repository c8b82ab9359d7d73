"""Scoring and generating before and after: tables go to the run folder, texts stay in memory."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from expunge.data import encode_prompt
from expunge.errors import RunError
from expunge.lm import LoadedModel, split_model
from expunge.metrics import rouge_l_recall
from expunge.objectives import MascSettings
from expunge.scoring import Scores, ScoreSettings, ScoreTable, generate, score_rows
from expunge.train._config import RunConfig
from expunge.train._folder import RunFolder
from expunge.train._prepare import Data, Part
from expunge.train._progress import Progress, Watch
from expunge.train._result import Answer, Summary, summarise_scores

_SCORE_BATCH = 16
_ANSWER_TOKENS = 80


class Evaluation:
    """What is measured of the data with a model, and the answers of the samples.

    Args:
        config: of the run.
        masc: gives the margin and its threshold.
        data: encoded.
        folder: gets the tables.
        watch: told of progress.

    Attributes:
        answers: of the samples, by name of the file.
        forget_table: of the last evaluation; None before the first.
        earlier_table: the same of what was forgotten before; None without such files.
    """

    def __init__(self, config: RunConfig, masc: MascSettings, data: Data, folder: RunFolder, watch: Watch) -> None:
        self.config, self.masc, self.data, self.folder, self.watch = config, masc, data, folder, watch
        self.answers: dict[str, list[Answer]] = {}
        self.forget_table: ScoreTable | None = None
        self.earlier_table: ScoreTable | None = None

    def score(self, loaded: LoadedModel, part: Part, stage: str, rows: list[int] | None = None) -> ScoreTable:
        """Score the rows of a file, or some of them."""
        return self._score(loaded, part, stage, rows).rows

    def _score(
        self, loaded: LoadedModel, part: Part, stage: str, rows: list[int] | None, *, tokens: bool = False
    ) -> Scores:
        corpus = part.corpus
        if rows is not None:
            corpus = dataclasses.replace(corpus, rows=tuple(corpus.rows[row] for row in rows))
        settings = ScoreSettings(
            rho=self.masc.rho, k=self.masc.k, beta=self.masc.beta, batch_size=_SCORE_BATCH, tokens=tokens
        )
        return score_rows(
            split_model(loaded.model),
            corpus,
            pad_id=loaded.pad_id,
            settings=settings,
            progress=lambda done, total: self.watch(Progress(stage, done, total)),
        )

    def evaluate(self, loaded: LoadedModel, when: str) -> dict[str, Summary | None]:
        """Score all forget rows and a sample of the others, and generate the answers of a sample of each."""
        found: dict[str, Summary | None] = {"retain": None, "earlier": None}
        for part in (self.data.forget, self.data.retain, self.data.earlier):
            if part is None:
                continue
            rows = list(range(len(part.corpus.rows)))
            if part.name == "retain":
                rows = _sample(rows, self.config.retain_sample, self.config.seed)
            if not rows:
                continue
            scores, folder = (
                self._score(loaded, part, when, rows, tokens=part.name == "forget"),
                self.folder.path / "scores",
            )
            table = scores.rows
            if part.name == "forget":
                self.forget_table = table
            elif part.name == "earlier":
                self.earlier_table = table
            try:
                table.to_parquet(folder / f"{part.name}-{when}.parquet")
                if scores.tokens is not None:
                    scores.tokens.to_parquet(folder / f"{part.name}-{when}-tokens.parquet")
            except OSError as error:
                raise RunError(f"scores: cannot write to {self.folder.path}: {error.strerror or error}") from None
            # What was forgotten before is measured, not asked for again.
            asked = [] if part.name == "earlier" else self._generate(loaded, part, when)
            found[part.name] = summarise_scores(table, asked)
        return found

    def _generate(self, loaded: LoadedModel, part: Part, when: str) -> list[float | None]:
        chosen = _sample(list(range(len(part.records))), self.config.sample, self.config.seed)
        records = [part.records[index] for index in chosen]
        if not records:
            return []
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        # A prompt that fills a short model's positions leaves no room for an answer: its start is cut.
        new = _ANSWER_TOKENS if limit is None else min(_ANSWER_TOKENS, limit // 2)
        options: dict[str, Any] = {
            "template": self.config.template,
            "system": self.config.system,
            "max_length": self.config.max_length if limit is None else min(self.config.max_length, limit - new),
        }
        prompts = [encode_prompt(record, loaded.tokenizer, **options) for record in records]
        outputs = generate(loaded.model, loaded.tokenizer, prompts, pad_id=loaded.pad_id, max_new_tokens=new)
        former = {answer.id: answer.before for answer in self.answers.get(part.name, [])}
        texts = [output.text.strip() for output in outputs]
        self.answers[part.name] = [
            Answer(
                id=record.id,
                question=record.prompt,
                reference=record.answer,
                before=text if when == "before" else former.get(record.id),
                after=text if when == "after" else None,
            )
            for record, text in zip(records, texts, strict=True)
        ]
        return [rouge_l_recall(text, record.answer) for record, text in zip(records, texts, strict=True)]


def _sample(items: list[int], count: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(items, min(count, len(items))))
