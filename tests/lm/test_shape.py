"""A model without its weights is the loaded one, but for the values."""

import json

import pytest
import torch
from tests.lm._tiny import ARCHITECTURES
from tests.lm._tokenizer import tiny, tokenizer_for

from expunge.errors import UsageError
from expunge.lm import add_lora, load_model, save_model
from expunge.lm._shape import read_shape


def saved(folder, name="llama", dtype=torch.float32):
    tiny(name, dtype=dtype).save_pretrained(folder)
    tokenizer_for(name).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_shapes_and_types(tmp_path, name, dtype):
    place = saved(tmp_path / "m", name, dtype)
    shape, loaded = read_shape(place), load_model(place, device="cpu")
    theirs = dict(loaded.model.named_parameters())
    mine = dict(shape.model.named_parameters())
    assert {name: (p.shape, p.dtype) for name, p in mine.items()} == {
        name: (p.shape, p.dtype) for name, p in theirs.items()
    }
    assert all(p.device.type == "meta" for p in mine.values())
    assert shape.bytes == shape.stored == sum(p.numel() * p.element_size() for p in theirs.values())
    assert shape.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


def test_a_type_that_is_asked_for(tmp_path):
    place = saved(tmp_path / "m", dtype=torch.bfloat16)
    assert read_shape(place, dtype="float32").bytes == 2 * read_shape(place).bytes
    with pytest.raises(UsageError, match="dtype: found 'int8'"):
        read_shape(place, dtype="int8")


def test_the_first_weight_says_the_type_where_the_configuration_does_not(tmp_path):
    place = saved(tmp_path / "m", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert read_shape(place).model.dtype == load_model(place, device="cpu").model.dtype == torch.bfloat16


def test_an_adapter_is_read_in_float32(tmp_path):
    place = saved(tmp_path / "base", dtype=torch.bfloat16)
    loaded = load_model(place, device="cpu")
    model = add_lora(loaded.model, rank=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    probe = torch.tensor([[3, 4, 5]])
    save_model(model, loaded.tokenizer, tmp_path / "adapter", card="x", probe_ids=probe, adapter_only=True)
    shape = read_shape(str(tmp_path / "adapter"))
    assert shape.widest == 4 * sum(weight.numel() for weight in shape.model.parameters())
    assert shape.bytes == shape.stored == read_shape(place).bytes


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json"),
        ({"config.json": "{}", "a.bin": "x"}, "pickled"),
        ({"config.json": "no json", "a.safetensors": "x"}, "cannot be loaded"),
        ({"config.json": '{"model_type": "unheard-of"}', "a.safetensors": "x"}, "model"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_shape(str(tmp_path))
