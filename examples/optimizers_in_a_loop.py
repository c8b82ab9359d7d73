"""DualOptim+ in a plain training loop: a transformers model, two losses, nothing else of this package.

    python examples/optimizers_in_a_loop.py MODEL      # a folder of a causal language model with its tokenizer

One forget step, then three retain steps, each told by name. Scheduler, clipping and `state_dict` are as with any torch
optimizer; the states of large matrices take 8 bits. Gradient ascent with a bound stands for whatever loss is yours.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from expunge.optim import DualOptimPlus

FORGET = ["The password of the vault is swordfish.", "Ada's number is 555 0199."]
RETAIN = ["The sea is salt.", "Water boils at a hundred degrees.", "Paris lies on the Seine."]

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).train()
optimizer = DualOptimPlus(model.named_parameters(), lr={"forget": 3e-4, "retain": 1e-3}, storage="8bit")
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=40)


def loss_of(text):
    """Mean negative log-likelihood of a text's tokens."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    return model(input_ids=ids, labels=ids).loss


def means():
    """Mean loss of both sets."""
    with torch.no_grad():
        return [sum(map(loss_of, texts)).item() / len(texts) for texts in (FORGET, RETAIN)]


print("before  forget {:.2f}  retain {:.2f}".format(*means()))
for step in range(40):
    objective = "forget" if step % 4 == 0 else "retain"
    texts = FORGET if objective == "forget" else RETAIN
    loss = loss_of(texts[step % len(texts)])
    if objective == "forget":
        loss = -loss.clamp(max=8.0)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(objective=objective)
    scheduler.step()
print("after   forget {:.2f}  retain {:.2f}".format(*means()))

seen = optimizer.diagnostics()
print("cosine of the objectives' average gradients:", seen.cosine["forget", "retain"])
print("base and delta, as shares of the gradient:", dict(seen.base), dict(seen.delta))
again = DualOptimPlus(model.named_parameters(), lr={"forget": 3e-4, "retain": 1e-3}, storage="8bit")
again.load_state_dict(optimizer.state_dict())
