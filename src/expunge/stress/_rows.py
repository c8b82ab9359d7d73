"""From values per row to the rows of the result: before, after, change and its interval."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from expunge.metrics import Bootstrap, Scale, mean_metric
from expunge.stress._scores import Score, Values, Watched
from expunge.stress._settings import StressSettings
from expunge.stress._tests import BEST, MEAN, PLAIN, REST_EXACT, REST_ROUGE, Job, Outcome

# Of less than this between the original and the stressed model, a share says nothing.
_LEAST_FORGOTTEN = 0.05
_NO_ROWS = "the data has no such rows"
_SIGNED = Scale("share", -1.0, 1.0, "reference")

Found = Mapping[str, Outcome | str]


@dataclass(frozen=True)
class Models:
    """What is compared: for each job's label its outcome, or the reason why there is none.

    Attributes:
        model: of the stressed model.
        retrained: of the retrained model; None without one.
        original: of the model before unlearning; None without one.
    """

    model: Found
    retrained: Found | None = None
    original: Found | None = None


@dataclass(frozen=True)
class _Pair:
    """Two metrics to compare: a job's, and what it was before."""

    job: Job
    setting: str
    name: str
    score: Score
    before: tuple[str, str]
    after: str
    only: Callable[[str], bool] | None = None
    empty: str = _NO_ROWS


def make_rows(
    jobs: Collection[Job], models: Models, watched: Watched, settings: StressSettings
) -> list[dict[str, Any]]:
    """Rows of the result, in the order of the tests.

    Means are taken over the rows that both sides measured, so that the change is the mean of the rows' changes; the
    interval is that of the change, by the bootstrap over pairs.

    Args:
        jobs: what was to be done.
        models: what it gave.
        watched: the suite's scores.
        settings: of the run.
    """
    bootstrap = Bootstrap(seed=settings.evaluate.seed, resamples=settings.evaluate.resamples)
    pairs = [pair for job in jobs for pair in _pairs(job, models.model, watched, settings)]
    return [_row(pair, models, bootstrap) for pair in pairs]


def _pairs(job: Job, found: Found, watched: Watched, settings: StressSettings) -> list[_Pair]:
    options = job.options
    if job.test in ("int8", "int4"):
        return [_Pair(job, "", one.name, one, (PLAIN, one.name), one.name) for one in watched.scores]
    if job.test == "relearn":
        return _relearned(job, found, watched)
    if job.test == "paraphrase":
        scores = [one for one in watched.scores if one.name in watched.paraphrased]
        return [_Pair(job, "", one.name, one, (PLAIN, one.name), one.name) for one in scores or [watched.recall]]
    if job.test == "prefix":
        if options["share"] not in settings.prefix:
            return []
        texts = Score("", watched.texts, "")
        names = (REST_ROUGE, REST_EXACT)
        setting = f"{options['share']} %"
        return [_Pair(job, setting, f"{watched.texts}_{name}", texts, ("prefix 0 %", name), name) for name in names]
    if job.test == "samples":
        recall = watched.recall
        of = f"of {options['samples']}, temperature {options['temperature']:g}"
        of += "" if options["top_p"] == 1 else f", top-p {options['top_p']:g}"
        return [_Pair(job, f"{one} {of}", recall.name, recall, (PLAIN, recall.name), one) for one in (BEST, MEAN)]
    return []


def _relearned(job: Job, found: Found, watched: Watched) -> list[_Pair]:
    outcome = found[job.label]
    taught = set(outcome.details["rows"]) if isinstance(outcome, Outcome) else set()
    setting = f"{len(taught) or job.options['rows']} rows, {job.options['steps']} steps"
    pairs = []
    for scope in ("others", "all"):
        for one in watched.scores:
            # What was not taught again tells whether more than the taught rows comes back.
            if scope == "others" and not (one.forget and one.unit == watched.texts):
                continue
            only = (lambda identity: identity not in taught) if scope == "others" else None
            empty = "all rows were taught again" if scope == "others" and taught else _NO_ROWS
            where = f"{setting}: {scope}"
            pairs.append(_Pair(job, where, one.name, one, (PLAIN, one.name), one.name, only, empty))
    return pairs


def _row(pair: _Pair, models: Models, bootstrap: Bootstrap) -> dict[str, Any]:
    label, score = pair.job.label, pair.score
    row: dict[str, Any] = {"test": pair.job.test, "setting": pair.setting, "metric": pair.name}
    row |= dict.fromkeys(("before", "after", "change", "interval", "n", "retrained", "original", "recovered"))
    row |= {"better": score.scale.better, "reason": None, "recovered_reason": None}
    outcome, plain = models.model[label], models.model[pair.before[0]]
    reason = next((one for one in (outcome, plain) if isinstance(one, str)), None)
    if reason is not None:
        return row | {"reason": reason, "recovered_reason": reason}
    after, before = _values(models.model, label, pair.after), _values(models.model, *pair.before)
    ids = [
        one
        for one, value in after.items()
        if value is not None and before.get(one) is not None and (pair.only is None or pair.only(one))
    ]
    if not ids:
        return row | {"reason": pair.empty, "recovered_reason": pair.empty}
    row |= {"before": _mean(before, ids), "after": _mean(after, ids), "n": len(ids)}
    if models.retrained is not None:
        row["retrained"] = _mean(_values(models.retrained, label, pair.after), ids)
    if models.original is not None:
        row["original"] = _mean(_values(models.original, *pair.before), ids)
    if label == pair.before[0]:
        reason = "nothing is given: what the other shares are compared with"
        return row | {"reason": reason, "recovered_reason": reason}
    changes = [(after[one] or 0.0) - (before[one] or 0.0) for one in ids]
    change = mean_metric(pair.name, changes, _SIGNED, unit=score.unit, bootstrap=bootstrap)
    row |= {"change": change.value, "interval": None if change.interval is None else list(change.interval)}
    return row | _recovered(row, score, models)


def _recovered(row: Mapping[str, Any], score: Score, models: Models) -> dict[str, Any]:
    """(after − before) / (original − before): 0 nothing came back, 1 all of it."""
    if not score.forget:
        return {"recovered_reason": "nothing of these rows was to be forgotten"}
    if models.original is None:
        return {"recovered_reason": "no original model to compare with"}
    if row["original"] is None:
        return {"recovered_reason": "not measured of the original model"}
    forgotten = row["original"] - row["before"]
    if forgotten < _LEAST_FORGOTTEN:
        return {"recovered_reason": f"less than {_LEAST_FORGOTTEN:g} of it was forgotten"}
    return {"recovered": row["change"] / forgotten}


def _values(found: Found, label: str, name: str) -> dict[str, float | None]:
    outcome = found.get(label)
    values: Values = outcome.values if isinstance(outcome, Outcome) else {}
    return values.get(name, {})


def _mean(values: Mapping[str, float | None], ids: Collection[str]) -> float | None:
    measured = [value for one in ids if (value := values.get(one)) is not None]
    return sum(measured) / len(measured) if measured else None
