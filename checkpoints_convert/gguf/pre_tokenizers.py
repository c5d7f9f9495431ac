"""Pre-tokenizers of byte-level BPE by the names that llama.cpp has for them (`tokenizer.ggml.pre`).

Each is written as the steps of a tokenizer.json, with the expressions of the models' own tokenizers.
"""

from dataclasses import dataclass
from typing import Any

Component = dict[str, Any]


@dataclass(frozen=True)
class PreTokenizer:
    """Attributes:
    steps: of tokenizer.json's pre-tokenizer, in order. normalizes: whether text is normalized to NFC first.
    ignores_merges: whether a piece that is a token stays whole without merges.
    adds_bos: whether BOS is added if the file has no `add_bos_token`.
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
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

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
# DeepSeek's first models: letters with case, as the tokenizer of the first of them lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_IDEOGRAPHS = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"
_DEEPSEEK_LLM = _by_regexes(
    r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", rf"[{_IDEOGRAPHS}]+", r"\p{N}+"
)
_DEEPSEEK_CODER = _by_regexes(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_IDEOGRAPHS}]+", r"\p{N}")
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

# The first name of several alike is the one that is written.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), _GPT2),
    "olmo": PreTokenizer(_GPT2.steps, normalizes=True),  # GPT-NeoX's
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_LLAMA3.steps)),
    "glm4": PreTokenizer(_LLAMA3.steps, ignores_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN),
    **dict.fromkeys(("stablelm2", "hunyuan"), PreTokenizer(_QWEN.steps)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SINGLE_DIGITS),
    "command-r": PreTokenizer(_SINGLE_DIGITS.steps, normalizes=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "seed-coder": PreTokenizer(_by_regexes(_SEED)),
    "falcon": PreTokenizer(_FALCON),
    "tekken": PreTokenizer(_by_regexes(_TEKKEN), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), PreTokenizer(_by_regexes(_O200K))),
}
