"""Language models: loading, LoRA, the body/head split, token statistics, saving and verifying."""

from expunge.lm._activations import LayerOutput, decoder_layers, layer_index, layer_output
from expunge.lm._compute import is_widened
from expunge.lm._fingerprint import fingerprint
from expunge.lm._footprint import PassBytes, head_bytes, pass_bytes, rounded_up
from expunge.lm._head import Head, Split, assumed_split, split_model
from expunge.lm._load import LoadedModel, load_model, pick_device
from expunge.lm._lora import LoraReport, adapter_disabled, adapter_dropouts, add_lora, default_targets, lora_report
from expunge.lm._margin import Margin
from expunge.lm._precision import MasterWeights
from expunge.lm._runner import CACHE_BYTES, PAD_TO, PLAIN_LENGTH, ROWS_AT_ONCE, Labelled, RowRunner
from expunge.lm._save import MergeStats, SaveReport, merged_in_place, probe_logits, save_model
from expunge.lm._scan import Reference
from expunge.lm._shape import ModelShape, read_shape
from expunge.lm._smollm2 import SMOLLM2, smollm2_folder
from expunge.lm._stats import TokenStats, competitor_ids, labelled_positions, token_stats, token_stats_from_logits
from expunge.lm._trunk import Trunk

__all__ = [
    "CACHE_BYTES",
    "PAD_TO",
    "PLAIN_LENGTH",
    "ROWS_AT_ONCE",
    "SMOLLM2",
    "Head",
    "Labelled",
    "LayerOutput",
    "LoadedModel",
    "LoraReport",
    "Margin",
    "MasterWeights",
    "MergeStats",
    "ModelShape",
    "PassBytes",
    "Reference",
    "RowRunner",
    "SaveReport",
    "Split",
    "TokenStats",
    "Trunk",
    "adapter_disabled",
    "adapter_dropouts",
    "add_lora",
    "assumed_split",
    "competitor_ids",
    "decoder_layers",
    "default_targets",
    "fingerprint",
    "head_bytes",
    "is_widened",
    "labelled_positions",
    "layer_index",
    "layer_output",
    "load_model",
    "lora_report",
    "merged_in_place",
    "pass_bytes",
    "pick_device",
    "probe_logits",
    "read_shape",
    "rounded_up",
    "save_model",
    "smollm2_folder",
    "split_model",
    "token_stats",
    "token_stats_from_logits",
]
