"""Benchmark files of a few rows, in words the tiny tokenizer knows."""

import json

from tests.train._runs import FORGET, HOLDOUT, RETAIN, examples


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tofu_row(number, *, wrong=3, paraphrase=True):
    one, *others = examples([number, *(number + 20 + i for i in range(wrong))])
    row = {"question": one["prompt"], "answer": one["completion"]}
    row["perturbed_answer"] = [other["completion"] for other in others]
    if paraphrase:
        words = one["completion"].split()
        row["paraphrased_answer"] = " ".join(words[::-1])
        row["paraphrased_question"] = " ".join(one["prompt"].split()[::-1])
    return row


def write_tofu(folder, *, parts=("retain", "real_authors", "world_facts")):
    rows = [tofu_row(number) for number in [*FORGET, *HOLDOUT]]
    write_lines(folder / "forget10_perturbed.jsonl", rows)
    for start, part in enumerate(parts):
        numbers = [*RETAIN][2 * start : 2 * start + 3]
        kept = [tofu_row(number, paraphrase=part == "retain") for number in numbers]
        write_lines(folder / f"{part}_perturbed.jsonl", kept)
    return folder


def write_muse(folder):
    texts = [f"{row['prompt']} {row['completion']}" for row in examples(range(14))]
    (folder / "knowmem").mkdir(parents=True)
    for part, numbers in (("forget", FORGET), ("holdout", HOLDOUT)):
        write_json(folder / "privleak" / f"{part}.json", [texts[number] for number in numbers])
    rows = [{"prompt": row["prompt"], "gt": row["completion"]} for row in examples(FORGET)]
    write_json(folder / "verbmem" / "forget.json", rows)
    for name, numbers in (("forget_qa", FORGET), ("retain2_qa", RETAIN), ("forget_qa_icl", [20, 21])):
        rows = [{"question": row["prompt"], "answer": row["completion"]} for row in examples(numbers)]
        write_json(folder / "knowmem" / f"{name}.json", rows)
    return folder


def write_json(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
