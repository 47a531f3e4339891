"""Small tokenizers of the kinds in use, with chat templates: byte-level ChatML and [INST], SentencePiece."""

from __future__ import annotations

import json
import random
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Hello world, this is what a user types.\n\nThe assistant answers: yes!  It is 42.",
    "grün 世界 naïve café",
] * 4
CHATML_TOKENS = [
    "<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|image_start|>", "<|image_pad|>", "<|image_break|>",
    "<|image_end|>", "<think>", "</think>",
]  # fmt: skip
CHATML = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}
{%- if p.type == 'image' %}{{ '<|image_pad|>' }}{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# History without thinking, a prompt with an empty thinking block: as the released model's template is described.
CHATML_THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if not enable_thinking %}<think></think>{% endif %}{% endif %}",
)
CHATML_TEXT_ONLY = """{%- for m in messages -%}
<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL_TOKENS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]"]
MISTRAL_TOKENS += ["[/SYSTEM_PROMPT]", "<pad>"]
MISTRAL = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' }}{%- elif m.role == 'user' %}{{- '[INST]' }}{%- endif %}
{%- if m.role not in ('system', 'user', 'assistant') %}{{- raise_exception('no such role here') }}{%- endif %}
{%- if m.content is string %}{{- m.content }}{%- else %}{%- for p in m.content %}
{%- if p.type == 'image' %}{{- '[IMG]' }}{%- else %}{{- p.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- if m.role == 'system' %}{{- '[/SYSTEM_PROMPT]' }}{%- elif m.role == 'user' %}{{- '[/INST]' }}
{%- else %}{{- eos_token }}{%- endif %}{%- endfor %}"""


def byte_level(special: list[str], template: str, **names: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    # Trims the offsets of leading spaces, as the released tokenizers do.
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def chatml_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    return byte_level(CHATML_TOKENS, template, eos_token="<|im_end|>", pad_token="<|pad|>")


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(
        MISTRAL_TOKENS, MISTRAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def sentencepiece_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """`llama`: a normaliser puts ▁ before every segment; `metaspace`: only before the first."""
    special = ["<unk>", "<s>", "</s>", *(token for token in CHATML_TOKENS if token not in ("<think>", "</think>"))]
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    backend.train_from_iterator(
        CORPUS[:1], trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    tree = json.loads(backend.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(tree))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=CHATML, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<unk>"
    )


WORDS = ["Hello", " world", "  ", "\n", "\n\n", "\t", "é", "世界", "👩‍👩‍👧", "🇩🇪", " 42", "naïve", "<", "|", ">", "["]
WORDS += ["]", "▁", "\ufffd", "im_end", "e\u0301", "\u202e", "\x00", "."]


def random_text(rng: random.Random, length: int = 8) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, length)))
