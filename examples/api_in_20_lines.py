"""The Python API in 20 lines: forget, read the numbers, score each example, ask again.

    python examples/api_in_20_lines.py MODEL FORGET RETAIN HOLDOUT OUT

The files are those of `expunge unlearn`; OUT is a new folder.
"""

import sys

import expunge
from expunge.data import encode_prompt, encode_records

model, forget, retain, holdout, out = sys.argv[1:]
result = expunge.unlearn(model=model, forget=forget, retain=retain, holdout=holdout, out=out)
print("all forgotten" if result.forgotten else f"left: {', '.join(result.left)}", "after", result.steps, "steps")
print(f"violation {result.forget_before.violation:.3f} -> {result.forget_after.violation:.3f}")

loaded = expunge.load_model(result.model)
records = expunge.read_records(forget)
corpus = encode_records(records, loaded.tokenizer)
table = expunge.score(loaded.model, corpus, pad_id=loaded.pad_id)
for name, tokens, logprob in zip(table.values("id"), table.values("tokens"), table.values("logprob_sum"), strict=True):
    print(f"{name}: {tokens} tokens, log-probability {logprob:.1f}")

prompts = [encode_prompt(record, loaded.tokenizer) for record in records[:3]]
answers = expunge.generate(loaded.model, loaded.tokenizer, prompts, pad_id=loaded.pad_id, max_new_tokens=40)
for record, answer in zip(records, answers, strict=False):
    print(f"{record.prompt} -> {answer.text.strip()}")
