"""The tokenizer of a checkpoint as metadata of a GGUF file.

llama.cpp splits text by built-in rules, which a file names. The name is determined as llama.cpp's converter does, by
comparing how a text with all kinds of characters is split. The file's tokenizer is then rebuilt and compared with the
original. Where that fails, llama.cpp is given token ids only (`tokenizer.ggml.model` "no_vocab"), and the complete
tokenizer.json is stored for readers that use it, as `gguf.tokenizer` does.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from checkpoints_convert.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

Files = Mapping[str, Path | str]
# Words, digits, runs of spaces and line ends, contractions, scripts, marks, symbols: what pre-tokenizers differ in.
PROBES = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n",
    "3 33 333 3333 33333 333333 3.14 1,234,567 ½ ² ३३३ ٣٤",
    "I've been 'told he's there, 'RE you sure? WE'LL see; O'Neil's DON'T 'll",
    "camelCase PascalCase HTTPServer snake_case x=3; def f(a, b):\n\treturn a**b  # comment\r\n",
    "!!!!!!@#$%^&*()_+-=[]{}|;':\",./<>? ... «quoted» — – /path/to/file.txt https://a.b/c?d=e",
    "Ünïcödé naïve café e\u0301 Straße ǅ ЖИЗНЬ жизнь 日本語テスト 中文字符 한국어 ไทย عربي हिन्दी \u200d 🦙🦙 👩‍👩‍👧",
    "  leading and trailing   ",
    " a  b   c    d",
)


def tokenizer_metadata(
    files: Files, vocab_size: int, ids: Mapping[str, int | None], read_back: Callable[[dict[str, Any]], Any]
) -> tuple[dict[str, Any], str | None]:
    """Keys below `tokenizer.`, and the reason why llama.cpp gets no tokenizer; None where it does.

    Args:
      files: the checkpoint's, by name. ids: special tokens by GGUF's names, such as "eos_token_id".
      read_back: makes the `tokenizer.json` of the reader from these keys.

    Raises CheckpointError for a malformed tokenizer.json, and for one with more tokens than the model.
    """
    named = {f"tokenizer.ggml.{name}": value for name, value in ids.items() if value is not None}
    if "tokenizer.json" not in files:
        return {"tokenizer.ggml.model": "no_vocab", **named}, "the checkpoint has no tokenizer.json"
    text = _text(files["tokenizer.json"])
    spec, where = json.loads(text), files["tokenizer.json"]
    tokens, kinds = _tokens(spec, vocab_size, where if isinstance(where, Path) else Path("tokenizer.json"))
    shared = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, **named, **_templates(files)}
    original = tokenizers.Tokenizer.from_str(text)
    added = _added_tokens(original, ids)
    keys_or_reason = (
        _byte_level(spec, tokens) if not spec["model"].get("byte_fallback") else _sentencepiece(spec, tokens, kinds)
    )
    if isinstance(keys_or_reason, dict):
        keys = {**shared, **keys_or_reason, **added}
        rebuilt = tokenizers.Tokenizer.from_str(json.dumps(read_back(keys)))
        differing = next((probe for probe in PROBES if rebuilt.encode(probe).ids != original.encode(probe).ids), None)
        if differing is None:
            return keys, None
        keys_or_reason = f"the rebuilt tokenizer encodes {differing[:20]!r} otherwise"
    return {**shared, **added, "tokenizer.ggml.model": "no_vocab", "tokenizer.huggingface.json": text}, keys_or_reason


def _text(file: Path | str) -> str:
    return file.read_text("utf-8") if isinstance(file, Path) else file


def _tokens(spec: dict[str, Any], vocab_size: int, where: Path) -> tuple[list[str], np.ndarray]:
    """Spellings and kinds by id; ids without a token are unused ones."""
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise CheckpointError(where, f"its model is {model.get('type')!r}; only BPE is written as GGUF")
    by_id = {id: token for token, id in model["vocab"].items()}
    kinds = np.full(vocab_size, NORMAL, np.int32)
    if model.get("byte_fallback"):
        for id, token in by_id.items():
            if id < vocab_size and re.fullmatch("<0x[0-9A-F]{2}>", token):
                kinds[id] = BYTE
    added = spec.get("added_tokens") or []
    by_id |= {token["id"]: token["content"] for token in added}
    if by_id and (largest := max(by_id)) >= vocab_size:
        raise CheckpointError(where, f"has the token id {largest}, and the model {vocab_size} tokens")
    for token in added:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    unknown = model.get("unk_token")
    if unknown is not None and unknown in model["vocab"]:
        kinds[model["vocab"][unknown]] = UNKNOWN
    tokens = []
    for id in range(vocab_size):
        if id not in by_id:
            kinds[id] = UNUSED
        tokens.append(by_id.get(id, f"[PAD{id}]"))
    return tokens, kinds


def _byte_level(spec: dict[str, Any], tokens: list[str]) -> dict[str, Any] | str:
    model = spec["model"]
    pieces = _splitter(spec.get("normalizer"), spec.get("pre_tokenizer"))
    wanted = [pieces(probe) for probe in PROBES]

    def is_alike(known: PreTokenizer) -> bool:
        steps = {"type": "Sequence", "pretokenizers": list(known.steps)}
        theirs = _splitter({"type": "NFC"} if known.normalizes else None, steps)
        return bool(model.get("ignore_merges")) == known.ignores_merges and list(map(theirs, PROBES)) == wanted

    name = next((name for name, known in PRE_TOKENIZERS.items() if is_alike(known)), None)
    if name is None:
        return "its pre-tokenizer, which splits text before merging, is none that llama.cpp has a name for"
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}


def _splitter(normalizer: Any, pre_tokenizer: Any) -> Callable[[str], Any]:
    """A function that splits a text as tokenizer.json's parts do."""
    spec = {
        "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }  # fmt: skip
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))

    def split(text: str) -> Any:
        if made.normalizer is not None:
            text = made.normalizer.normalize_str(text)
        return [text] if made.pre_tokenizer is None else made.pre_tokenizer.pre_tokenize_str(text)

    return split


def _sentencepiece(spec: dict[str, Any], tokens: list[str], kinds: np.ndarray) -> dict[str, Any]:
    """With scores in the order of the tokens, as SentencePiece trains them; whether they give the merges is seen when
    the file is read back."""
    scores = -np.arange(len(tokens), dtype=np.float32)
    scores[kinds != NORMAL] = 0
    adds_space = "Prepend" in json.dumps(spec.get("normalizer")) or "always" in json.dumps(spec.get("pre_tokenizer"))
    adds_space = adds_space or "first" in json.dumps(spec.get("pre_tokenizer"))
    flags = {"tokenizer.ggml.add_space_prefix": adds_space}
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores, **flags}


def _added_tokens(tokenizer: tokenizers.Tokenizer, ids: Mapping[str, int | None]) -> dict[str, bool]:
    """Flags: an encoded text begins with BOS, and it ends with EOS."""
    encoded, bare = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    bos, eos = ids.get("bos_token_id"), ids.get("eos_token_id")
    extra = len(encoded) - len(bare)
    has_bos = extra > 0 and bos is not None and encoded[0] == bos
    has_eos = extra > int(has_bos) and eos is not None and encoded[-1] == eos
    return {"tokenizer.ggml.add_bos_token": has_bos, "tokenizer.ggml.add_eos_token": has_eos}


def _templates(files: Files) -> dict[str, str]:
    key = "tokenizer.chat_template"
    if "chat_template.jinja" in files:
        return {key: _text(files["chat_template.jinja"])}
    if "tokenizer_config.json" not in files:
        return {}
    templates = json.loads(_text(files["tokenizer_config.json"])).get("chat_template")
    if isinstance(templates, str):
        return {key: templates}
    return {
        key if named["name"] == "default" else f"{key}.{named['name']}": named["template"]
        for named in (templates if isinstance(templates, list) else [])
    }
