"""Loading a causal language model and its tokenizer from the default, a folder, an adapter, a GGUF file or the hub."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from expunge.errors import RunError, UsageError
from expunge.lm._compute import widen
from expunge.lm._fingerprint import fingerprint
from expunge.lm._quiet import first_line, quiet
from expunge.lm._smollm2 import SMOLLM2, read_gguf, smollm2_folder

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ACCEPTED = f"accepted are '{SMOLLM2}', a model or adapter folder with safetensors weights, a .gguf file or a hub id"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_MAX_DEPTH = 4


@dataclass
class LoadedModel:
    """A model in evaluation mode with its tokenizer.

    Attributes:
        model: the model; adapters that came with it are merged.
        tokenizer: the tokenizer exactly as shipped; it may have no pad token.
        source: what was asked for.
        pad_id: id to pad batches with: the tokenizer's pad id, else its end id, else its unknown id, else 0.
        notes: what a user should know about the loaded files (unused weights, vocabulary sizes); often empty.
    """

    model: PreTrainedModel
    tokenizer: Any
    source: str
    pad_id: int
    notes: tuple[str, ...] = ()
    _fingerprint: str | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """Hash of the weights as loaded, taken at the first access and kept: read it before anything changes them.

        Raises:
            RunError: adapters were attached before the first access, so the weights are no longer those loaded.
        """
        if self._fingerprint is None:
            if any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
                raise RunError(f"model '{self.source}': its fingerprint must be read before adapters are attached")
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint


def load_model(
    spec: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> LoadedModel:
    """Load a causal language model and its tokenizer, quietly, with nothing resized.

    Args:
        spec: `smollm2-135m` (the default model), a Hugging Face folder, a PEFT adapter folder (its base is loaded and
            the adapter merged in float32), a `.gguf` file (de-quantised), or a hub id.
        dtype: `auto` (the checkpoint's own; bfloat16 for a quantised GGUF file), `float32`, `bfloat16` or `float16`.
            With `auto`, on a CPU without instructions for the checkpoint's type, the model computes in float32; its
            fingerprint, and what `save_model` writes, are in the checkpoint's type.
        device: `cpu`, `cuda`, `cuda:N`, `mps`; None takes the accelerator if there is one.
        trust_remote_code: run model code that comes with a folder or hub id.

    Returns:
        The model in evaluation mode on the device, its tokenizer and a pad id.

    Raises:
        UsageError: nothing loadable at `spec`, or an option is not one of the accepted.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype: found '{dtype}', accepted are {', '.join(DTYPES)}")
    place = pick_device(device)
    model, tokenizer, notes = _load(str(spec), DTYPES[dtype], trust_remote_code, depth=0)
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if len(tokenizer) > rows:
        notes.append(f"the tokenizer has {len(tokenizer)} entries, the model {rows}; ids from {rows} on cannot be used")
    anything: Any = model  # `PreTrainedModel.to` is annotated for quantised models only
    anything.to(place).eval()
    if dtype == "auto" and (stored := widen(model, place)) is not None:
        name = str(stored).removeprefix("torch.")
        notes.append(f"computed in float32, since this processor is slow in {name}; what is saved is in {name}")
    return LoadedModel(model, tokenizer, str(spec), _pad_id(tokenizer, rows), tuple(notes))


def pick_device(device: str | None) -> torch.device:
    """The device named, or with None the one accelerate would take: this process's GPU, else MPS, else the CPU.

    Raises:
        UsageError: the name is unknown or the device is not there.
    """
    if device is None:
        if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    match = re.fullmatch(r"cpu|mps|cuda(?::(\d+))?", device)
    if match is None:
        raise UsageError(f"device: found '{device}', accepted are cpu, cuda, cuda:N and mps")
    cuda_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda") and int(match.group(1) or 0) >= cuda_count:
        raise UsageError(f"device: found '{device}', but this machine has {cuda_count} CUDA devices")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device: found 'mps', but this machine has none")
    return torch.device(device)


def _load(spec: str, dtype: torch.dtype | None, trust: bool, depth: int) -> tuple[PreTrainedModel, Any, list[str]]:
    check_depth(spec, depth)
    if spec == SMOLLM2:
        model, tokenizer, notes = _from_folder(smollm2_folder(), spec, dtype, trust)
        _set_name(model, SMOLLM2)
        return model, tokenizer, notes
    path = find_folder(spec, trust)
    if path.is_file():
        model, tokenizer, notes = _from_file(path, spec, dtype)
    elif (path / "adapter_config.json").is_file():
        model, tokenizer, notes = _from_adapter(path, spec, dtype, trust, depth)
    else:
        model, tokenizer, notes = _from_folder(path, spec, dtype, trust)
    _set_name(model, str(path) if Path(spec).expanduser().exists() else spec)
    return model, tokenizer, notes


def check_depth(spec: str, depth: int) -> None:
    """Refuse adapters on adapters that go too deep, or name each other.

    Raises:
        UsageError: they do.
    """
    if depth > _MAX_DEPTH:
        raise UsageError(f"model '{spec}': more than {_MAX_DEPTH} adapters on top of each other; merge them first")


def find_folder(spec: str, trust: bool, *, weights: bool = True) -> Path:
    """The folder of a model or adapter, or the GGUF file.

    Args:
        spec: as for `load_model`.
        trust: model code may be downloaded.
        weights: download weights, too, where it is a hub id.

    Raises:
        UsageError: there is nothing.
    """
    if spec == SMOLLM2:
        return smollm2_folder()
    if not spec.strip():
        raise UsageError(f"model '{spec}': no such file or folder; {_ACCEPTED}")
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise UsageError(f"model '{spec}': found a file that is not .gguf; {_ACCEPTED}")
    return path.resolve() if path.exists() else _from_hub(spec, trust, weights)


def _set_name(model: PreTrainedModel, name: str) -> None:
    """Set what an adapter saved later calls its base; PEFT reads it from the model, transformers from the config."""
    model.config.name_or_path = name
    model.name_or_path = name


def _from_folder(
    folder: Path, spec: str, dtype: torch.dtype | None, trust: bool
) -> tuple[PreTrainedModel, Any, list[str]]:
    check_folder(folder, spec)
    options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": True}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, **options)
            check_config(config, spec)
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            loader: Any = AutoModelForCausalLM
            model, info = loader.from_pretrained(
                folder, config=config, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True, **options
            )
    except UsageError:
        raise
    except Exception as error:  # any library on the way may raise anything on a damaged file
        if "Unrecognized configuration class" in str(error):
            kind = config.model_type
            raise UsageError(f"model '{spec}': found type '{kind}', accepted are causal language models") from None
        raise UsageError(f"model '{spec}': cannot be loaded from {folder}: {first_line(error)}") from None
    # transformers fills missing weights with random numbers and only logs it.
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(f"model '{spec}': {len(missing)} weights are missing in {folder}, the first is {missing[0]}")
    unused = sorted(info["unexpected_keys"])
    notes = [f"{len(unused)} weights in {folder} are not used, the first is {unused[0]}"] if unused else []
    return model, tokenizer, notes


def check_config(config: Any, spec: str) -> None:
    """Refuse what is no unquantised causal language model.

    Raises:
        UsageError: it is not.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"model '{spec}': found quantised weights, accepted are unquantised ones")
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        raise UsageError(f"model '{spec}': found type '{config.model_type}', accepted are causal language models")


def check_folder(folder: Path, spec: str) -> None:
    """Refuse a folder without a configuration and safetensors weights; pickled ones are never read.

    Raises:
        UsageError: it is none, or its list of files leads out of it.
    """
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    if any(name.endswith(".safetensors") for name in files) and "config.json" in files:
        return
    if "config.json" in files and any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        raise UsageError(f"model '{spec}': found only pickled weights (.bin) in {folder}, accepted are safetensors")
    gguf = [name for name in files if name.endswith(".gguf")]
    if gguf:
        raise UsageError(f"model '{spec}': found a folder with GGUF files, name the file itself: {folder / gguf[0]}")
    lacking = "config.json" if "config.json" not in files else "*.safetensors"
    raise UsageError(f"model '{spec}': found a folder without {lacking}; {_ACCEPTED}")


def _from_file(file: Path, spec: str, dtype: torch.dtype | None) -> tuple[PreTrainedModel, Any, list[str]]:
    try:
        model, tokenizer = read_gguf(file, dtype)
    except ImportError:
        raise UsageError(f"model '{spec}': the package gguf is not installed; run `pip install gguf`") from None
    except Exception as error:  # any library on the way may raise anything on a damaged file
        raise UsageError(f"model '{spec}': cannot be read as GGUF: {first_line(error)}") from None
    return model, tokenizer, []


def _from_hub(spec: str, trust: bool, weights: bool) -> Path:
    """Download a hub id's files, weights in safetensors only, and return their folder."""
    if spec.startswith((".", "~")) or not _HUB_ID.fullmatch(spec):
        raise UsageError(f"model '{spec}': no such file or folder; {_ACCEPTED}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        with quiet():
            wanted = [name for name in (*_HUB_FILES, "*.py") if trust or name != "*.py"]
            wanted = [name for name in wanted if weights or name != "*.safetensors"]
            return Path(snapshot_download(spec, allow_patterns=wanted, ignore_patterns=["original/*"]))
    except GatedRepoError:
        why = "found no such folder, and the hub asks for permission (set HF_TOKEN)"
    except RepositoryNotFoundError:
        why = "found no such folder, and no such hub id"
    except HfHubHTTPError as error:
        why = f"found no such folder, and the hub answered with an error ({first_line(error)})"
    except Exception as error:  # connection errors come in many types, from several libraries
        why = f"found no such folder, and the hub cannot be reached ({type(error).__name__})"
    raise UsageError(f"model '{spec}': {why}; {_ACCEPTED}") from None


def _from_adapter(
    folder: Path, spec: str, dtype: torch.dtype | None, trust: bool, depth: int
) -> tuple[PreTrainedModel, Any, list[str]]:
    base = adapter_base(folder, spec)
    if not (folder / "adapter_model.safetensors").is_file():
        raise UsageError(f"model '{spec}': found an adapter folder without adapter_model.safetensors")
    # The base keeps its own type until the adapter is merged, so that the sum is rounded once.
    model, tokenizer, notes = _load(base, None, trust, depth + 1)
    try:
        with quiet():
            model = _merge_adapter(model, folder, dtype)
            if (folder / "tokenizer_config.json").is_file():
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    except Exception as error:  # any library on the way may raise anything on a damaged file
        raise UsageError(f"model '{spec}': cannot merge the adapter into {base}: {first_line(error)}") from None
    return model, tokenizer, notes


def adapter_base(folder: Path, spec: str) -> str:
    """What an adapter's folder names as its base: the default's name, a path relative to the folder, or what it says.

    Raises:
        UsageError: the configuration cannot be read, or names none.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"model '{spec}': cannot read adapter_config.json: {first_line(error)}") from None
    if not name:
        raise UsageError(f"model '{spec}': its adapter_config.json names no base_model_name_or_path")
    beside = folder / Path(str(name)).expanduser()
    return str(beside) if name != SMOLLM2 and beside.exists() else str(name)


def _merge_adapter(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Merge in float32, then cast each weight to `dtype` or back to its own type.

    Only parameters are cast: rotary frequencies are buffers that stay float32 in every model.
    """
    own = {name: param.dtype for name, param in model.named_parameters()}
    wrapped: Any = PeftModel.from_pretrained(model, folder)
    for param in wrapped.parameters():
        param.data = param.data.float()
    if not hasattr(wrapped, "merge_and_unload"):
        raise ValueError("adapters of its type cannot be merged, accepted are LoRA and its relatives")
    merged: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
    for name, param in merged.named_parameters():
        param.data = param.data.to(dtype or own.get(name, torch.float32))
        param.requires_grad_(True)
    if dtype is not None:
        merged.config.dtype = dtype
    return merged


def _pad_id(tokenizer: Any, rows: int) -> int:
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id):
        if isinstance(candidate, int) and 0 <= candidate < rows:
            return candidate
    return 0
