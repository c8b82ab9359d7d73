"""A method of one's own: a forget term, registered by name, in the same engine as all others.

    python examples/custom_method.py MODEL FORGET RETAIN OUT      # files as for `expunge unlearn`

The term pushes each token's log-probability below a ceiling and no further, so a token that is unlikely enough gets no
gradient. It is paired with KL on the retain file, and MASC's online rule ends the run. Whatever the loop can do it does
for this term, too: full weights or LoRA, accumulation, resume, every optimizer.
"""

import sys

import expunge
from expunge.objectives import FORGET_TERMS, Option, SumCount, Term


def ceiling(logprob, rows, n_rows, *, top):
    """1/N Σ_t max(0, log π(y_t) − top)."""
    excess = (logprob - top).clamp(min=0)
    return SumCount(excess.sum(), len(excess))


FORGET_TERMS["ceiling"] = Term(
    name="ceiling",
    formula="mean over tokens of max(0, log π(y) − top)",
    loss=ceiling,
    needs=("logprob",),
    per="token",
    options={"top": Option(-3.0, "a number below 0", lambda x: x < 0)},
    reference="this file",
)

if __name__ == "__main__":
    model, forget, retain, out = sys.argv[1:5]
    result = expunge.unlearn(
        model=model,
        forget=forget,
        retain=retain,
        out=out,
        method="forget=ceiling,retain=kl",
        method_options={"top": -2.0},
        stop="rule",
        tolerance=0.4,
        lora=True,
        lr=1e-2,
        batch=2,
        epochs=30,
    )
    print(
        f"{result.reason}: probability {result.forget_before.probability:.3f} -> {result.forget_after.probability:.3f}"
    )
