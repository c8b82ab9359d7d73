"""Toy tokenizers, byte-level (one token a byte, so every text survives) and word-level; three toy chat templates."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<im_start>{{ m.role }}\n{{ m.content }}<im_end>\n{% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<im_start>{{ m.role }}\n\n{{ m.content | trim }}<im_end>{% endfor %}"
    "{% if add_generation_prompt %}<im_start>assistant\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<im_start>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<im_end>\n{% endfor %}{% if add_generation_prompt %}<im_start>model\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA}
SPECIAL = ["<bos>", "<eos>", "<im_start>", "<im_end>"]


def byte_tokenizer(
    template: str | None = None,
    *,
    add_bos: bool = False,
    add_eos: bool = False,
    eos: str = "<eos>",
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """One token a byte but for `merges`; ids 0 to 3 are <bos> <eos> <im_start> <im_end>."""
    words = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(
        single=("<bos> " if add_bos else "") + "$A" + (" <eos>" if add_eos else ""),
        special_tokens=[("<bos>", 0), ("<eos>", 1)],
    )
    extra = [word for word in SPECIAL if word not in ("<bos>", eos)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token=eos, additional_special_tokens=extra
    )
    tokenizer.chat_template = template
    return tokenizer


def word_tokenizer(words: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a word, split at white space; <bos> is 0 and <eos> is 1, the words follow."""
    vocabulary = ["<bos>", "<eos>", "<unk>", *words.split()]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def make_bytes() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_tokenizer


@pytest.fixture
def make_words() -> Callable[..., PreTrainedTokenizerFast]:
    return word_tokenizer


@pytest.fixture
def templates() -> dict[str, str]:
    return TEMPLATES


@pytest.fixture(params=sorted(TEMPLATES))
def chat_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Each template; the tokenizer adds BOS where the template writes one too, and ChatML pads with its end of turn."""
    if request.param == "chatml":
        tokenizer = byte_tokenizer(CHATML, eos="<im_end>")
        tokenizer.pad_token = "<im_end>"
        return tokenizer
    return byte_tokenizer(TEMPLATES[request.param], add_bos=True)
