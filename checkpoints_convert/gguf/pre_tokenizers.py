"""How text is cut before byte pairs are merged: what `tokenizer.ggml.pre` names, as tokenizer.json says it.

Each entry is the pre-tokenizer of the Hugging Face tokenizer that llama.cpp's converter recognises under that name
(convert_hf_to_gguf.py, get_vocab_base_pre; the flags are those of llama-vocab.cpp). Names that are not here have no
entry because no exact one is known to us: a wrong cut changes answers without a word.
"""

from dataclasses import dataclass
from typing import Any

Component = dict[str, Any]


@dataclass(frozen=True)
class PreTokenizer:
    """Attributes:
    steps: of tokenizer.json's pre-tokenizer, in order. normalizes: whether text is brought to Unicode's form C first.
    ignores_merges: whether a piece that is a token stays whole without merges. adds_bos: unless the file says.
    """

    steps: tuple[Component, ...]
    normalizes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


def _byte_level(*, splits: bool) -> Component:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def _split(regex: str) -> Component:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _by_regexes(*regexes: str) -> tuple[Component, ...]:
    return (*map(_split, regexes), _byte_level(splits=False))


def _digits(*, each: bool) -> Component:
    return {"type": "Digits", "individual_digits": each}


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CL100K = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"

# A word is capitals, then small letters; either may be missing, but not both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_STARTS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join((*_WORD_STARTS, r"\p{N}", _SLASHED_REST))
_O200K = "|".join((*(f"{start}{_CONTRACTIONS}?" for start in _WORD_STARTS), r"\p{N}{1,3}", _SLASHED_REST))

_DEEPSEEK3 = _by_regexes(
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
# What llama.cpp falls back to; no Hugging Face tokenizer has it.
_DEFAULT = _by_regexes(
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _byte_level(splits=True),
    _digits(each=False),
    _split("[0-9][0-9][0-9]"),
)

_GPT2 = PreTokenizer((_byte_level(splits=True),))
_LLAMA3 = PreTokenizer(_by_regexes(_CL100K), ignores_merges=True, adds_bos=True)
_QWEN = PreTokenizer(_by_regexes(_QWEN2), normalizes=True)
_SINGLE_DIGITS = PreTokenizer((_digits(each=True), _byte_level(splits=True)))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    "olmo": PreTokenizer(_GPT2.steps, normalizes=True),  # GPT-NeoX's
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    "dbrx": PreTokenizer(_by_regexes(_CL100K)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SINGLE_DIGITS),
    "command-r": PreTokenizer(_SINGLE_DIGITS.steps, normalizes=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "falcon": PreTokenizer(_FALCON),
    "tekken": PreTokenizer(_by_regexes(_TEKKEN), ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(_by_regexes(_O200K)),
}
