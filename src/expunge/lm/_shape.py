"""A model without its weights: what can be counted before anything large is read."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from expunge.errors import UsageError
from expunge.lm._compute import widen
from expunge.lm._load import DTYPES, adapter_base, check_config, check_depth, check_folder, find_folder, pick_device
from expunge.lm._quiet import first_line, quiet
from expunge.lm._smollm2 import SMOLLM2, gguf_dtype

_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a model, its types and its tokenizer.

    Attributes:
        model: on the meta device: every weight has its shape and type, none has values.
        tokenizer: as `load_model` gives it.
        source: what was asked for.
        widest: bytes of the weights in the type in which they are read: float32 where an adapter is merged or a file is
            de-quantised, else that of the model.
        stored: bytes of the weights in the type in which they are saved.
    """

    model: PreTrainedModel
    tokenizer: Any
    source: str
    widest: int
    stored: int

    @property
    def bytes(self) -> int:
        """Bytes of the weights; tied ones count once."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())


def read_shape(
    spec: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> ModelShape:
    """Read configuration and tokenizer of a model, and the headers of its files; no weight is read.

    Of a hub id only the small files are downloaded. The default model is converted on its first use, as by
    `load_model`.

    Args:
        spec: as for `load_model`.
        dtype: as for `load_model`.
        device: as for `load_model`.
        trust_remote_code: as for `load_model`.

    Raises:
        UsageError: there is no model of a known architecture at `spec`, or an option is not one of the accepted.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype: found '{dtype}', accepted are {', '.join(DTYPES)}")
    shape = _read(spec, DTYPES[dtype], trust_remote_code, depth=0)
    if dtype == "auto":
        widen(shape.model, pick_device(device))
    return shape


def _read(spec: str, dtype: torch.dtype | None, trust: bool, depth: int) -> ModelShape:
    check_depth(spec, depth)
    place = find_folder(spec, trust, weights=False)
    if place.is_file():
        return _make(place.parent, spec, dtype or gguf_dtype(place), trust, file=place)
    if not (place / "adapter_config.json").is_file():
        if spec == SMOLLM2 or Path(spec).expanduser().exists():  # the folder of a hub id has no weights yet
            check_folder(place, spec)
        return _make(place, spec, dtype, trust)
    base = _read(adapter_base(place, spec), dtype, trust, depth + 1)
    with_own = (place / "tokenizer_config.json").is_file()
    tokenizer = _tokenizer(place, spec, trust) if with_own else base.tokenizer
    widest = 4 * sum(weight.numel() for weight in base.model.parameters())
    return ModelShape(base.model, tokenizer, spec, widest, base.stored)


def _make(place: Path, spec: str, dtype: torch.dtype | None, trust: bool, file: Path | None = None) -> ModelShape:
    options: dict[str, Any] = {} if file is None else {"gguf_file": file.name}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust, local_files_only=True, **options)
            if file is None:
                check_config(config, spec)
            chosen = dtype or getattr(config.get_text_config(), "dtype", None) or _first_dtype(place)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=chosen, trust_remote_code=trust)
    except UsageError:
        raise
    except Exception as error:  # any library on the way may raise anything on a damaged file
        raise UsageError(f"model '{spec}': cannot be loaded from {place}: {first_line(error)}") from None
    widest = sum(
        weight.numel() * (weight.element_size() if file is None else max(4, weight.element_size()))
        for weight in model.parameters()
    )
    stored = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return ModelShape(model.eval(), _tokenizer(place, spec, trust, file), spec, widest, stored)


def _tokenizer(place: Path, spec: str, trust: bool, file: Path | None = None) -> Any:
    options: dict[str, Any] = {} if file is None else {"gguf_file": file.name}
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            return AutoTokenizer.from_pretrained(place, trust_remote_code=trust, local_files_only=True, **options)
    except Exception as error:  # as above
        raise UsageError(f"model '{spec}': cannot be loaded from {place}: {first_line(error)}") from None


def _first_dtype(place: Path) -> torch.dtype:
    """The type of the first weight, by its file's header: what transformers takes where the configuration says none."""
    index = place / "model.safetensors.index.json"
    files = sorted(place.glob("*.safetensors"))
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [place / name for name in sorted(set(names))]
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                if (found := _TORCH.get(opened.get_slice(key).get_dtype())) is not None:
                    return found
    return torch.float32
