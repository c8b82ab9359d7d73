"""Saving: merge in float32, write aside, read back, compare, rename. A folder is complete or it is not there."""

import contextlib
import copy
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from expunge._files import sync
from expunge.errors import RunError, UsageError
from expunge.lm._compute import copy_marks, narrowed, rounded, stored_dtype, widen
from expunge.lm._fingerprint import fingerprint, fingerprint_tensors
from expunge.lm._lora import adapter_disabled, match_adapter_dtype, weight_update
from expunge.lm._quiet import first_line, quiet

# Reloaded logits may differ from those in memory by this share of the largest logit (at least 1). The weights are
# compared byte for byte, so this only allows for kernels that sum in another order.
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# A merged model whose updates are mostly rounded away is worth a warning.
_LOST_SHARE = 0.5
_SMALL_FILES = 16 << 20
_TEXT = "It's 12:30, naïve café.\n  日本 w3 w4"


@dataclass
class MergeStats:
    """How much of a LoRA update survives the cast to the base's type.

    Attributes:
        changed: weights whose float32 update is not zero.
        lost: those of them whose merged value, after the cast, equals the base's.
    """

    changed: int = 0
    lost: int = 0

    @property
    def lost_share(self) -> float | None:
        """Lost / changed; None when nothing was changed."""
        return self.lost / self.changed if self.changed else None


@dataclass(frozen=True)
class SaveReport:
    """What was written and how it compares; all logit numbers are largest absolute differences on the probe.

    Attributes:
        path: the folder.
        bytes: size of all files.
        fingerprint: of the saved weights (merged) or of base and adapter together (adapter only).
        max_logit_error: the folder read back against the weights in memory as saved.
        merge_logit_change: the merged and cast weights against the adapted model; None when nothing was merged.
        change_from_base: the saved model against the base; None when no base is known.
        update_below_precision: share of the updated weights that the cast to the base's type leaves at the base's
            value; None when nothing was merged or updated.
        warnings: one line each, for the user.
    """

    path: Path
    bytes: int
    fingerprint: str
    max_logit_error: float
    merge_logit_change: float | None
    change_from_base: float | None
    update_below_precision: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Written:
    """What one of the two writers found, before the folder is renamed."""

    fingerprint: str
    error: float
    merge_change: float | None
    base_change: float | None
    stats: MergeStats
    warnings: tuple[str, ...]


def save_model(
    model: PreTrainedModel | PeftModel,
    tokenizer: Any,
    out: str | Path,
    *,
    card: str,
    probe_ids: Tensor,
    adapter_only: bool = False,
    extra_files: Mapping[str, str | bytes] | None = None,
    base_logits: Tensor | None = None,
) -> SaveReport:
    """Write a model as a plain folder, read it back, compare, and only then give the folder its name.

    LoRA adapters are merged as W + ΔW in float32 and cast to W's type; the model in memory is the same afterwards. A
    model that is held in a wider type than its checkpoint's (see `load_model`) is saved in the checkpoint's. The
    read-back must have the same bytes in every weight and the same logits on the probe (largest difference at most
    1e-5, for bfloat16 1e-2 and for float16 2e-3, times the largest logit if that is above 1), and the logits must
    differ from the base's if anything was trained.

    Args:
        model: a plain model or a PEFT model with LoRA adapters, on one device.
        tokenizer: written as it is, read back and compared.
        out: the folder; absent or empty.
        card: text of README.md.
        probe_ids: token ids, (B, T) int64 without padding.
        adapter_only: write the adapter, not the merged model; its config names the base.
        extra_files: further files by name.
        base_logits: for a model trained without adapters, `probe_logits` of it before training.

    Returns:
        Sizes, differences and warnings.

    Raises:
        UsageError: `out` is taken, or the model cannot be saved in the form asked for.
        RunError: the disk is full or not writable, or the read-back differs; nothing is left at `out`.
    """
    out = Path(out)
    _check_request(model, out, adapter_only, extra_files or {})
    needed = _bytes_needed(model, adapter_only)
    aside = out.parent / f".{out.name}.{uuid.uuid4().hex}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < needed:
            raise RunError(f"cannot write {out}: {needed} bytes are needed, {free} are free")
        aside.mkdir()
        if isinstance(model, PeftModel) and adapter_only:
            written = _write_adapter(model, tokenizer, aside, probe_ids)
        else:
            written = _write_merged(model, tokenizer, aside, probe_ids, base_logits)
        for name, content in {**(extra_files or {}), "README.md": card}.items():
            (aside / name).write_bytes(content.encode() if isinstance(content, str) else content)
        size = _seal(aside)
        if out.exists():
            out.rmdir()
        aside.replace(out)
        sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {out} ({needed} bytes are needed): {first_line(error)}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return SaveReport(
        path=out,
        bytes=size,
        fingerprint=written.fingerprint,
        max_logit_error=written.error,
        merge_logit_change=written.merge_change,
        change_from_base=written.base_change,
        update_below_precision=written.stats.lost_share,
        warnings=written.warnings,
    )


@torch.no_grad()
def probe_logits(model: nn.Module, probe_ids: Tensor) -> Tensor:
    """Logits of a model as it stands, dropout off: float32 on the CPU, (B, T, V). Training flags are restored."""
    anything: Any = model
    training = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    try:
        return anything(input_ids=probe_ids.to(device), use_cache=False).logits.float().cpu()
    finally:
        for module, flag in training:
            module.training = flag


@contextlib.contextmanager
def merged_in_place(model: PeftModel) -> Iterator[MergeStats]:
    """Inside the block the base weights are W + ΔW (summed in float32, rounded to W's type) and the adapters are off.

    On leaving, the very tensors from before are back. Only the adapted weights are held twice.
    """
    stats = MergeStats()
    originals: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for layer in model.modules():
            if not isinstance(layer, BaseTunerLayer):
                continue
            weight: Any = layer.get_base_layer().weight
            update = weight_update(layer)
            before = weight.data
            after = (before.float() + update).to(stored_dtype(weight)).to(before.dtype)
            changed = update != 0
            stats.changed += int(changed.sum())
            stats.lost += int((changed & (after == before)).sum())
            originals.append((weight, before))
            weight.data = after
        with adapter_disabled(model):
            yield stats
    finally:
        for weight, before in originals:
            weight.data = before


def _write_merged(
    model: PreTrainedModel | PeftModel, tokenizer: Any, folder: Path, probe_ids: Tensor, base_logits: Tensor | None
) -> _Written:
    adapted = probe_logits(model, probe_ids) if isinstance(model, PeftModel) else None
    if isinstance(model, PeftModel):
        with adapter_disabled(model):
            base_logits = probe_logits(model, probe_ids)
        merged: Any = merged_in_place(model)
    else:
        merged = contextlib.nullcontext(MergeStats())
    body: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    rename = _plain_names(body)
    with merged as stats, rounded(body):
        with narrowed(body), quiet():
            state = {new: tensor for name, tensor in body.state_dict().items() if (new := rename(name))}
            params = {new: param for name, param in body.named_parameters() if (new := rename(name))}
            expected, dtype = fingerprint_tensors(params), body.dtype
            body.save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)
            del state
        logits = probe_logits(model, probe_ids)
    again = _read_back(folder, lambda: _reload(body, folder, dtype))
    _check_tokenizer(tokenizer, folder)
    if fingerprint(again) != expected:
        raise RunError(f"verification of {_shown(folder)} failed: the weights read back differ; nothing was kept")
    error = _check_logits(probe_logits(again, probe_ids), logits, body.dtype, folder)
    trained = stats.changed > 0 if isinstance(model, PeftModel) else base_logits is not None
    change = None if base_logits is None else _distance(logits, base_logits)
    if trained and not change:
        raise RunError(_no_change(folder, dtype, stats))
    return _Written(
        fingerprint=expected,
        error=error,
        merge_change=None if adapted is None else _distance(logits, adapted),
        base_change=change,
        stats=stats,
        warnings=_precision_warning(stats, dtype),
    )


def _write_adapter(model: PeftModel, tokenizer: Any, folder: Path, probe_ids: Tensor) -> _Written:
    logits = probe_logits(model, probe_ids)
    with adapter_disabled(model):
        base = probe_logits(model, probe_ids)
    with quiet():
        # The default looks the base up on the hub to learn whether its embeddings were resized; they never are.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        tokenizer.save_pretrained(folder)
    again = _read_back(folder, lambda: _reload_adapter(model, folder))
    _check_tokenizer(tokenizer, folder)
    expected = fingerprint(model)
    if fingerprint(again) != expected:
        raise RunError(f"verification of {_shown(folder)} failed: the weights read back differ; nothing was kept")
    dtype = next(model.parameters()).dtype
    error = _check_logits(probe_logits(again, probe_ids), logits, dtype, folder)
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    change = _distance(logits, base)
    if any(bool(weight_update(layer).any()) for layer in layers) and not change:
        raise RunError(_no_change(folder, dtype, MergeStats()))
    named = model.peft_config[model.active_adapter].base_model_name_or_path
    lines = () if named else ("the adapter's config names no base model: it can only be loaded by hand",)
    return _Written(expected, error, None, change, MergeStats(), lines)


def _check_request(model: nn.Module, out: Path, adapter_only: bool, extra_files: Mapping[str, Any]) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "a folder that is not empty" if out.is_dir() else "a file"
        raise UsageError(f"output '{out}': found {kind}, accepted is a new or empty folder")
    if adapter_only and not isinstance(model, PeftModel):
        raise UsageError("adapter_only: the model has no adapters, only a merged model can be saved")
    for name in extra_files:
        if Path(name).name != name or name == "README.md":
            raise UsageError(f"extra file '{name}': accepted are plain file names other than README.md")
    if not isinstance(model, PeftModel):
        return
    config: Any = model.peft_config[model.active_adapter]
    special = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")
    found = [name for name in special if getattr(config, name, None)]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or config.bias != "none" or found:
        raise UsageError(f"adapter: found {', '.join(found) or config.peft_type}, accepted is plain LoRA on weights")
    if any(layer.merged for layer in model.modules() if isinstance(layer, BaseTunerLayer)):
        raise UsageError("adapter: it is merged already; unmerge it before saving")


def _bytes_needed(model: nn.Module, adapter_only: bool) -> int:
    if adapter_only:
        sizes = [param.numel() * param.element_size() for name, param in model.named_parameters() if "lora_" in name]
    else:
        sizes = [param.numel() * stored_dtype(param).itemsize for param in model.parameters()]
    return sum(sizes) + _SMALL_FILES


def _plain_names(body: nn.Module) -> Callable[[str], str | None]:
    """A function from the name of a weight under adapters to its name without; None for the adapters' own."""
    adapted = [name for name, module in body.named_modules() if isinstance(module, BaseTunerLayer)]

    def rename(name: str) -> str | None:
        owner = next((layer for layer in adapted if name.startswith(f"{layer}.")), None)
        if owner is None:
            return name
        rest = name[len(owner) + 1 :]
        return f"{owner}.{rest.removeprefix('base_layer.')}" if rest.startswith("base_layer.") else None

    return rename


def _reload(body: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    again = type(body).from_pretrained(
        folder, dtype=dtype, use_safetensors=True, attn_implementation=body.config._attn_implementation
    )
    if dtype != body.dtype:
        widen(again, body.device)
    return again.to(body.device).eval()


def _reload_adapter(model: PeftModel, folder: Path) -> nn.Module:
    twin: Any = copy.deepcopy(model)
    copy_marks(model, twin)
    again = PeftModel.from_pretrained(twin.unload(), str(folder), autocast_adapter_dtype=False)
    match_adapter_dtype(again)
    return again.eval()


def _read_back(folder: Path, read: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return read()
    except Exception as error:  # whatever it is, the folder cannot be used
        raise RunError(f"verification of {_shown(folder)} failed: cannot be read back: {first_line(error)}") from None


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Compare the tokenizer read back: transformers chooses its class by model type, which may be another one."""
    views: dict[str, Callable[[Any], Any]] = {
        "vocabulary": lambda one: one.get_vocab(),
        "token ids": lambda one: one(_TEXT)["input_ids"],
        "special tokens": lambda one: one.special_tokens_map,
        "chat template": lambda one: one.chat_template,
    }
    again: Any = _read_back(folder, lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True))
    for what, view in views.items():
        if view(tokenizer) != view(again):
            raise RunError(f"verification of {_shown(folder)} failed: the tokenizer read back has other {what}")


def _check_logits(found: Tensor, expected: Tensor, dtype: torch.dtype, folder: Path) -> float:
    error = _distance(found, expected)
    limit = _TOLERANCE.get(dtype, 1e-2) * max(1.0, expected.abs().max().item())
    if not error <= limit:
        raise RunError(
            f"verification of {_shown(folder)} failed: logits read back differ by {error:.3g} "
            f"(at most {limit:.3g} is accepted); nothing was kept"
        )
    return error


def _distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def _shown(folder: Path) -> str:
    """The name the folder was going to get: `.name.<hex>` without dot and hex."""
    return str(folder.parent / folder.name[1:].rpartition(".")[0])


def _no_change(folder: Path, dtype: torch.dtype, stats: MergeStats) -> str:
    why = "the logits equal the base model's though weights were trained"
    if stats.changed and stats.lost == stats.changed:
        name = str(dtype).removeprefix("torch.")
        why = f"the whole update is below the precision of {name}; load the model in float32 or save the adapter only"
    return f"verification of {_shown(folder)} failed: {why}; nothing was kept"


def _precision_warning(stats: MergeStats, dtype: torch.dtype) -> tuple[str, ...]:
    share = stats.lost_share
    if share is None or share <= _LOST_SHARE:
        return ()
    name = str(dtype).removeprefix("torch.")
    return (f"{share:.0%} of the updated weights are unchanged after the cast: the update is below {name} precision",)


def _seal(folder: Path) -> int:
    """Give all files the folder's own read and write rights (safetensors writes 0600), and wait for the disk.

    Returns:
        Their total size.
    """
    mode = folder.stat().st_mode & 0o666
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        file.chmod(mode)
        sync(file)
    sync(folder)
    return sum(file.stat().st_size for file in files)
