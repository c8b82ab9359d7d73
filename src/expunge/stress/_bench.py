"""A loaded model with the data that the tests put to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expunge.data import Corpus, Row
from expunge.lm import LoadedModel
from expunge.metrics import first_answer
from expunge.scoring import Generation, Sampling, end_ids, generate
from expunge.stress._quantise import NotMeasuredError
from expunge.stress._scores import Score, Values, Watched, reduced, values_of
from expunge.stress._settings import StressSettings
from expunge.suites import Encoded, Plan, QuestionTable, Watch, end_of, fitting, measure


@dataclass(frozen=True)
class Bench:
    """What a test needs.

    Attributes:
        loaded: the model, as it is.
        plan: all tables that any test looks at.
        encoded: the plan's texts.
        watched: the scores.
        settings: of the run.
        watch: called with (stage, done, in all).
    """

    loaded: LoadedModel
    plan: Plan
    encoded: Encoded
    watched: Watched
    settings: StressSettings
    watch: Watch

    def score(self, scores: Sequence[Score], model: Any = None) -> tuple[Values, tuple[str, ...]]:
        """Values per row of scores, and notes.

        Args:
            scores: what to measure.
            model: in the place of the loaded one, with its tokenizer and fingerprint.
        """
        plan = reduced(self.plan, {score.table for score in scores})
        loaded = self.loaded if model is None else dataclasses.replace(self.loaded, model=model)
        measured = measure(loaded, plan, self.settings.evaluate.measure, watch=self.watch)
        return values_of(measured, tuple(scores)), measured.notes

    def rows(self) -> dict[str, Row]:
        """Token rows of the texts to forget by id; the windows of a long text are numbered."""
        places = self.encoded.places.get(self.watched.texts, [])
        windows = Counter(identity for _, identity, _ in places)
        seen: Counter[str] = Counter()
        found = {}
        for index, identity, _ in places:
            seen[identity] += 1
            name = identity if windows[identity] == 1 else f"{identity}#{seen[identity]}"
            found[name] = self.encoded.rows[index]
        if not found:
            raise NotMeasuredError("the data has no texts to forget for this test")
        return found

    def corpus(self, ids: Sequence[str]) -> Corpus:
        """Token rows of the named texts to forget, windows included."""
        wanted = set(ids)
        places = self.encoded.places[self.watched.texts]
        return Corpus(tuple(self.encoded.rows[index] for index, one, _ in places if one in wanted), (), 0)

    @property
    def questions(self) -> QuestionTable:
        """The questions about what is to be forgotten.

        Raises:
            NotMeasuredError: the data has none.
        """
        found = next((one for one in self.plan.questions if one.name == self.watched.answers), None)
        if found is None:
            raise NotMeasuredError("the data has no questions about what is to be forgotten")
        return found

    def answer_of(self, row: Row) -> list[int]:
        """Tokens of a row's answer without the end of its turn."""
        ends = end_ids(self.loaded.model, self.loaded.tokenizer)
        answer = list(row.input_ids[row.prompt_length :])
        while answer and answer[-1] in ends:
            answer.pop()
        return answer

    @property
    def new_tokens(self) -> int:
        """Longest continuation in tokens."""
        settings = fitting(self.loaded, self.settings.evaluate.measure)
        asked = next((one.max_new_tokens for one in self.plan.questions if one.name == self.watched.answers), None)
        limit = getattr(self.loaded.model.config, "max_position_embeddings", None)
        wanted = asked or settings.max_new_tokens
        return wanted if limit is None else min(wanted, max(1, limit // 2))

    def go_on(self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[Generation]:
        """Continue prompts of token ids; too long ones lose their start."""
        limit = getattr(self.loaded.model.config, "max_position_embeddings", None)
        room = 1 << 20 if limit is None else limit - self.new_tokens
        cut = [end_of(self.loaded.tokenizer, list(prompt), room) for prompt in prompts]
        return generate(
            self.loaded.model,
            self.loaded.tokenizer,
            cut,
            pad_id=self.loaded.pad_id,
            max_new_tokens=self.new_tokens,
            batch_size=4 * self.settings.evaluate.measure.batch_size,
            sampling=sampling,
            progress=lambda done, total: self.watch("generate", done, total),
        )

    def first(self, text: str) -> str:
        """What is scored of a continuation."""
        found = next((one for one in self.plan.questions if one.name == self.watched.answers), None)
        return text.strip() if found is not None and found.cut == "none" else first_answer(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens."""
        text: str = self.loaded.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
