"""Small vocabularies for GGUF files, in which a wrong split of a text shows: merges cross every boundary."""

from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np

TEXTS = [
    "Hello, world! The year 2024 cost $1,234.50; isn't that  odd?\n\n\tYes   it is.  ",
    "naïve café — “quotes”… 日本語のテキスト 中文字符 한국어 ру́сский ΑΒΓ 123456789 x² ½ ٣٤",
    "def f(x):\n    return x**2  # comment\r\n    if x != 3: HTTPServerError(camelCase)\r\r\n",
    "I'LL we're THEY'VE don't O'Neil's 'tis 👩‍👩‍👧 zero\u200bwidth \u212b !!!???...",
    " leading", "\n", "   ", "a", "\n\n\n  \n", "1 22 333 4444", "。你好，世界！ ｆｕｌｌ／ｗｉｄｔｈ",
    "a+b=c<d>e^f~g|h`i",
    "/path/to/file.txt https://a.b/c?d=e&f=%20 [x](y) {z}\t\t\tend  \r\n",
]  # fmt: skip
_CONTROL, _USER_DEFINED = 3, 4


def byte_chars() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, by byte (Radford et al. 2019)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


def merges(num: int = 300) -> list[tuple[str, str]]:
    """Byte-pair merges learned from the texts as they are, not split before, with ties in order of the alphabet."""
    alphabet = byte_chars()
    lines = [[alphabet[byte] for byte in text.encode()] for text in TEXTS * 2]
    found: list[tuple[str, str]] = []
    while len(found) < num:
        counts = Counter(pair for line in lines for pair in pairwise(line))
        counts = Counter({pair: count for pair, count in counts.items() if len("".join(pair)) <= 12})
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        found.append(best)
        lines = [_merged(line, best) for line in lines]
    return found


def _merged(line: list[str], pair: tuple[str, str]) -> list[str]:
    joined, at = [], 0
    while at < len(line):
        width = 2 if tuple(line[at : at + 2]) == pair else 1
        joined.append("".join(line[at : at + width]))
        at += width
    return joined


def byte_level(pre: str, **changes) -> dict:
    """Metadata of a byte-level tokenizer whose pre-tokenizer is named `pre`."""
    pairs = merges()
    tokens = list(dict.fromkeys([*byte_chars(), *map("".join, pairs), "<|bos|>", "<|eos|>", "<think>"]))
    kinds = [1] * (len(tokens) - 3) + [_CONTROL, _CONTROL, _USER_DEFINED]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "merges": list(dict.fromkeys(" ".join(pair) for pair in pairs)),
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    }
    return _metadata({**keys, **changes})


def sentencepiece(**changes) -> dict:
    """Metadata of a tokenizer of the kind "llama", with a user-defined `▁▁`, and `▁▁▁`."""
    pieces = ["▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab", "▁▁▁▁", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "▁▁", "▁▁▁", "<tag>"]
    scores = [0.0] * 259 + [-1.0 - at for at in range(len(pieces))] + [0.0] * 3
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": np.array([2, 3, 3, *[6] * 256, *[1] * len(pieces), *[_USER_DEFINED] * 3], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata({**keys, **changes})


def _metadata(keys: dict) -> dict:
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
    return {"general.architecture": "llama", **named}


# Names of pre-tokenizers whose ids are compared; others that are read normalize texts, as llama.cpp does not.
PRE = (
    *("default", "gpt-2", "phi-2", "exaone4", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    *("stablelm2", "hunyuan", "smollm", "starcoder", "refact", "deepseek-llm", "deepseek-coder", "deepseek-v3"),
    *("hunyuan-dense", "seed-coder", "tekken", "gpt-4o", "minimax-m2"),
)
_SPACED = ("a  b", "a   b", "  a", "a    b     c", " ab ", "▁▁", "a▁▁b", "<tag>a  b<tag> b", "é b", "ab ab", "x", "")
CASES = {
    **{f"gpt2 {pre}": partial(byte_level, pre) for pre in PRE},
    "gpt2 without ids": partial(byte_level, "llama-bpe", bos_token_id=None, eos_token_id=None),
    "gpt2 add_bos_token without ids": partial(byte_level, "gpt-2", bos_token_id=None, add_bos_token=True),
    "llama": sentencepiece,
    "llama without ids": partial(sentencepiece, bos_token_id=None, eos_token_id=None, unknown_token_id=None),
    "llama add_bos_token without ids": partial(sentencepiece, bos_token_id=None, add_bos_token=True),
    "llama add_eos_token without ids": partial(sentencepiece, eos_token_id=None, add_eos_token=True),
    "llama without a prefix": partial(sentencepiece, add_space_prefix=False),
    "llama with empty tokens": lambda: sentencepiece(
        tokens=[*sentencepiece()["tokenizer.ggml.tokens"], "", ""],
        scores=[*sentencepiece()["tokenizer.ggml.scores"], 0.0, 0.0],
        token_type=np.append(sentencepiece()["tokenizer.ggml.token_type"], [5, 5]).astype(np.int32),
    ),
}


def texts_of(case: str) -> list[str]:
    return list(_SPACED) if case.startswith("llama") else TEXTS
