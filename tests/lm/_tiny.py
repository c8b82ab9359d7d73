"""Tiny random models of many architectures, for the tests of `expunge.lm`."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_GROUPS = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}

# name → (config class, its settings)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "llama_tied": ("LlamaConfig", _COMMON | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _COMMON),
    "qwen2": ("Qwen2Config", _COMMON | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _COMMON | {"head_dim": 8}),
    "phi": ("PhiConfig", _COMMON),
    "gemma2": ("Gemma2Config", _COMMON | {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "gpt_neox": ("GPTNeoXConfig", _NO_GROUPS),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "cohere": ("CohereConfig", _COMMON | {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", _COMMON | {"logits_scaling": 4.0}),
}


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model of an architecture of `ARCHITECTURES`, in eval mode, with logits of order one.

    Weights have standard deviation 0.3 (0.02 gives logits near 0, which hide mistakes) and biases are not zero.
    """
    config_name, common = ARCHITECTURES[name]
    config = getattr(transformers, config_name)(**(common | settings))
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.random.set_rng_state(state)
    return model.to(dtype).eval()
