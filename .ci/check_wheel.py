"""Parts of `.ci/run`: look at an installed wheel, write the inputs of a tiny run, look at what the run left."""

import json
import sys
from pathlib import Path


def contents(site: Path) -> None:
    """The package is the wheel's, complete, and light to import."""
    import expunge

    package = Path(expunge.__file__).resolve().parent
    assert package == site.resolve() / "expunge", f"imported from {package}"
    assert "torch" not in sys.modules, "import expunge loads torch"
    for name in (
        "py.typed",
        "demo/people.jsonl",
        "demo/holdout.jsonl",
        "data/refusals.txt",
        "report/assets/run.html",
        "report/vendor/echarts.common.min.js",
    ):
        assert (package / name).is_file(), f"the wheel has no {name}"
    assert not (site / "tests").exists(), "the wheel has tests"


def inputs(folder: Path) -> None:
    """Write a random Llama of two layers with a tokenizer of whole words, and two files of examples."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, 64)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, first in (("forget", 3), ("retain", 33)):
        rows = [
            {"prompt": f"w{first + i} w{first + i + 1}", "completion": f"w{first + i + 2} w{first + i + 3} w{first}"}
            for i in range(8)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(folder: Path) -> None:
    """The run left a model that loads, a result and a log."""
    import expunge

    expunge.load_model(str(folder / "model"))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["forget_after"], "result.json has no measurement"
    assert any(file.suffix == ".jsonl" for file in folder.iterdir()), "no log"
    assert (folder / "report.html").stat().st_size > 500_000, "no report, or one without its charts"


if __name__ == "__main__":
    {"contents": contents, "inputs": inputs, "run": run}[sys.argv[1]](Path(sys.argv[2]))
