"""The nano model's tokenizer: byte-level BPE for any text, one token for every word of the synthetic corpus.

`python -m trimode_vlm.training.nano_tokenizer FOLDER` writes it.
"""

from __future__ import annotations

import re
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trimode_vlm.training.pictures import Cell
from trimode_vlm.training.synthetic import all_texts
from trimode_vlm.training.tasks import SPELLED

SPECIAL_TOKENS = (
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|image_start|>", "<|image_pad|>", "<|image_break|>",
    "<|image_end|>", "<|mask|>", "<think>", "</think>",
)  # fmt: skip

# Letters take the space before them and digits stand alone, as in GPT's pattern; a run of punctuation keeps its
# spaces and line ends, so that `": "` and ` |\n| ` are one piece.
PIECE = r" ?\p{L}+|\p{N}|[^\p{L}\p{N}]+?(?= ?\p{L}|\p{N})|[^\p{L}\p{N}]+"

# The table rule ` |\n|---|---|\n| ` must be one token per column; other text should not fall into bytes altogether.
_MERGES = """
- -|-- -|--- ¦|␣ ¦|⏎ ¦|␣¦ ⏎¦|⏎¦ ␣|¦ ␣|" :|": ␣|":␣ "|" ,|", ␣|",␣ "|␣ "|{ "|" }|[ {|[{ "|} ,|] ,|} ]|. ⏎|. ␣|⏎ ⏎|␣ ␣
␣ t|h e|i n|␣ a|r e|o n|␣t he|e r|␣ s|a t|␣ w|␣ o|e n|␣ c|i t|i s|a n|o r|e s|␣ b|e d|␣ f|in g|␣ p|o u|␣a n|a l|a r|␣t o
␣ m|␣o f|␣ in|␣ d|␣ h|␣an d|i c|a s|l e|␣t h|i on|o m|l l|en t|␣ n|␣ l|s t|␣ re|v e|␣ e|r o|l y|␣b e|␣ g|c t|␣ T|u r|i d
"""
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] }}"
    "{%- elif part['type'] in ('image', 'image_url') %}{{- '<|image_pad|>' }}"
    "{%- else %}{{- raise_exception('unknown content part: ' + part['type']) }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, the same one every time: 12 special tokens, 256 bytes, merges, corpus pieces and words."""
    merges = _merges()
    texts = list(all_texts())
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    names += [_spelling(piece) for piece in _punctuation(texts) + _words(texts)]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    # ignore_merges: a piece that is in the vocabulary is that token, whether merges lead to it or not.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, _BYTE_LEVEL])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        mask_token="<|mask|>",
        extra_special_tokens=[name for name in SPECIAL_TOKENS if name.startswith(("<|im", "<think", "</think"))],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def cell_token_ids(tokenizer: PreTrainedTokenizerFast, cell: Cell) -> list[int]:
    """The token of each word of a picture cell: words with a leading space, single characters bare."""
    return [single_token_id(tokenizer, word if len(word) == 1 else f" {word}") for word in cell]


def twin_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """(bare, with leading space) ids of the words and letters that have both, which should start from one embedding."""
    vocabulary = tokenizer.get_vocab()
    space = _spelling(" ")
    twins = [(vocabulary[name[1:]], index) for name, index in vocabulary.items() if name[1:].isalpha()
             and name[0] == space and name[1:] in vocabulary]  # fmt: skip
    return sorted(twins)


def single_token_id(tokenizer: PreTrainedTokenizerFast, piece: str) -> int:
    """The id of a piece that is one token; ValueError when it is not."""
    ids = tokenizer.encode(piece, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{piece!r} is {len(ids)} tokens, expected 1")
    return ids[0]


def _merges() -> list[tuple[str, str]]:
    merges = []
    for item in _MERGES.replace("\n", "|").strip("|").split("|"):
        left, right = item.replace("¦", "|").replace("␣", "Ġ").replace("⏎", "Ċ").split(" ")
        merges.append((left, right))
    return merges


def _spelling(piece: str) -> str:
    """A piece as byte-level BPE writes it, for example `Ġred`."""
    return "".join(part for part, _ in _BYTE_LEVEL.pre_tokenize_str(piece))


def _punctuation(texts: list[str]) -> list[str]:
    """The runs of punctuation between words and digits, except table rules, whose length varies."""
    runs = {run for text in texts for run in re.findall(r"[^A-Za-z0-9]+?(?= ?[A-Za-z]|[0-9])|[^A-Za-z0-9]+", text)}
    return sorted(run for run in runs if "---" not in run)


def _words(texts: list[str]) -> list[str]:
    """Every word bare and with a space, in lower case and as it is written; every letter likewise."""
    written = {word for text in texts for word in re.findall(r"[A-Za-z]+", text)}
    lower = sorted({word.lower() for word in written} | set(SPELLED) | set("abcdefghijklmnopqrstuvwxyz"))
    upper = sorted(written - set(lower))
    spaced = {word for text in texts for word in re.findall(r" ([A-Za-z]+)", text)}
    words = [form for word in lower for form in (word, f" {word}")]
    return words + [form for word in upper for form in ((word, f" {word}") if word in spaced else (word,))]


if __name__ == "__main__":
    build_tokenizer().save_pretrained(sys.argv[1])
