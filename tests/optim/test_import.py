"""The optimizers need torch alone, and their import has no side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import expunge.optim

SCRIPT = """
import sys

# numpy is not among them: torch imports it for itself where it is installed.
HEAVY = {"transformers", "peft", "datasets", "safetensors", "accelerate", "bitsandbytes", "rich", "yaml", "pyarrow",
         "rapidfuzz", "huggingface_hub", "scipy"}


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Block())
import torch

threads, state = torch.get_num_threads(), torch.random.get_rng_state()
from expunge.optim import DualOptimPlus, Storage

weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = DualOptimPlus([weight], lr=0.1, storage="8bit")
for objective in ("forget", "retain"):
    weight.grad = torch.ones_like(weight)
    optimizer.step(objective=objective)
assert optimizer.diagnostics().cosine["forget", "retain"] > 0.99
optimizer.load_state_dict(optimizer.state_dict())
assert torch.get_num_threads() == threads
assert torch.equal(torch.random.get_rng_state(), state)
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("expunge.")}
assert rooms == {"errors", "optim"}, rooms
"""


def test_import_and_use_need_torch_alone():
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_sources_import_torch_and_the_standard_library_alone():
    allowed = {"expunge", "torch"} | set(sys.stdlib_module_names)
    for path in Path(expunge.optim.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= allowed, path.name
