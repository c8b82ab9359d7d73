"""Small tokenizers made in code, and tiny models cast as `from_pretrained` casts them."""

import torch
from tests.lm._tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"


def tiny_tokenizer(
    *, words: int = 60, pad: bool = False, eos: bool = True, unk: bool = True
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of `words` entries: <unk>, <s>, <end>, then w3, w4, …; <pad> takes the last place."""
    vocab = {"<unk>": 0, "<s>": 1, "<end>": 2} | {f"w{index}": index for index in range(3, words)}
    if pad:
        del vocab[f"w{words - 1}"]
        vocab["<pad>"] = words - 1
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>"} if eos else {}
    special |= {"pad_token": "<pad>"} if pad else {}
    special |= {"unk_token": "<unk>"} if unk else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tokenizer_for(name: str):
    """The tokenizer class transformers reads back depends on the model type; Qwen2 has its own."""
    if not name.startswith("qwen"):
        return tiny_tokenizer()
    vocab = {"<unk>": 0, "<s>": 1, "<|endoftext|>": 2} | {f"w{index}": index for index in range(3, 60)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny(name: str, *, dtype: torch.dtype = torch.float32, **settings) -> PreTrainedModel:
    """A tiny model whose parameters are cast, but not its rotary frequencies: those are float32 in loaded models."""
    model = tiny_model(name, **settings)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    model.config.dtype = dtype
    return model
