"""tokenizer.json and tokenizer_config.json of a GGUF file's metadata.

`tokenizer.ggml.model` names one of two kinds: "gpt2", byte-level BPE (Radford et al. 2019, section 2.2), whose
pre-tokenizer is named by `tokenizer.ggml.pre`; or "llama", SentencePiece's BPE (Kudo &
Richardson 2018) with a score per token and byte fallback."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from jaxinfer.checks import did_you_mean
from jaxinfer.kept_files import KeptFiles, key_of, sources_key

logger = logging.getLogger(__name__)

_GGML = "tokenizer.ggml."
_HUGGING_FACE = "tokenizer.huggingface.json"
_TEMPLATE = "tokenizer.chat_template"
MODELS = ("gpt2", "llama")
MAX_TOKEN_LENGTH = 2**10  # characters; every split of a token in two is tried
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "▁"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# llama.cpp's assumption where the metadata name no id; gpt2's are those of Falcon.
_DEFAULT_IDS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "gpt2": {"bos_token_id": 11, "eos_token_id": 11},
}
_NO_IDS = (-1, 2**32 - 1)
_WITHOUT_BOS = ("glm4", "chatglm-bpe")
# Tokens that end an answer whether or not the metadata name their id: those of llama.cpp (llama-vocab.cpp), since many
# files name only the end of the sequence, which a chat model does not write at the end of its turn.
_END_SPELLINGS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
)
# gpt-oss ends the parts of an answer with <|end|>, and the answer with these.
_PART, _WHOLE = "<|end|>", ("<|return|>", "<|call|>")
_OVERRIDE = "give the tokenizer's folder instead (tokenizer=, --tokenizer)"
LEAST_BYTES = 2**18  # of a tokenizer that is kept: smaller ones are converted in 30 ms
_FOLDER = Path(__file__).parent


def tokenizer_files(index: GGUFIndex) -> dict[str, str]:
    """As `convert_tokenizer`, whose result is kept between processes: by a digest of the file's metadata, not of the
    file, and of the sources that convert it. Small tokenizers are converted each time."""
    kept = KeptFiles.of("tokenizers")
    if kept is None:
        return convert_tokenizer(index)
    key = key_of("tokenizer of GGUF", index.metadata_digest, sources_key(_FOLDER))
    if (content := kept.read(key)) is not None:
        return msgspec.msgpack.decode(content, type=dict[str, str])
    files = convert_tokenizer(index)
    if sum(map(len, files.values())) >= LEAST_BYTES:
        kept.write(key, msgspec.msgpack.encode(files))
    return files


def convert_tokenizer(index: GGUFIndex) -> dict[str, str]:
    """The files of the tokenizer and their contents, as a Hugging Face repository has them; {} where the metadata has
    none.

    Raises CheckpointError, naming the key, for an unsupported kind of tokenizer or pre-tokenizer, and for tokens,
    scores or merges that do not fit together.
    """
    given = index.text(_HUGGING_FACE)
    if given is None and index.text(f"{_GGML}model") is None:
        return {}
    reader = _TokenizerReader(index)
    spec = given if given is not None else _json(reader.specification())
    return {"tokenizer.json": spec, "tokenizer_config.json": _json(reader.configuration())}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def end_token_ids(index: GGUFIndex) -> tuple[int, ...]:
    """Ids that end a generation: the metadata's end of sequence, of turn and of message, then special tokens with the
    spelling of an end token. Raises CheckpointError."""
    named = [token_id(index, name) for name in _ENDS]
    spelled = _spelled_ends(index)
    if all(text in spelled for text in (_PART, *_WHOLE)) and (part := spelled.pop(_PART)) in named:
        named.remove(part)
    return tuple(dict.fromkeys(id for id in (*named, *spelled.values()) if id is not None))


def _spelled_ends(index: GGUFIndex) -> dict[str, int]:
    """Ids by spelling; {} in a file without token types, where ordinary text could have that spelling."""
    kinds = index.numbers(f"{_GGML}token_type")
    if kinds is None or len(kinds) != index.count(f"{_GGML}tokens"):  # reported when the tokenizer is read
        return {}
    places = index.places(f"{_GGML}tokens", _END_SPELLINGS)
    by_id = {ids[0]: text for text, ids in places.items() if kinds[ids[0]] in (CONTROL, USER_DEFINED)}
    return {text: id for id, text in sorted(by_id.items())}


def token_id(index: GGUFIndex, name: str) -> int | None:
    """A token by its role, such as "bos_token_id"; None where the file has none. Raises CheckpointError.

    Where the key is missing, or names no token (-1 means none), it is llama.cpp's assumption: of a byte-level
    tokenizer only if that token is a control token, since it may be a comma.
    """
    key = f"{_GGML}{name}"
    value, count = index.scalar(key), index.count(f"{_GGML}tokens")
    if key in index.keys:
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(index.path, f"{key} is {index.describe(key)}, not the id of a token")
        if value >= 0 and (count is None or value < count):
            return value
    id = _default_id(index, name)
    id = id if index.text(f"{_GGML}model") == "llama" or _is_control(index, id) else None
    if value not in (None, *_NO_IDS):
        _warn(f"{index.path}: {key} is {value}, not the id of one of {count} tokens: {id} is used")
    return id


@cache
def _warn(text: str) -> None:
    logger.warning(text)


def _default_id(index: GGUFIndex, name: str) -> int | None:
    if name == "bos_token_id" and index.text(f"{_GGML}pre") in _WITHOUT_BOS:
        return None
    id = _DEFAULT_IDS.get(index.text(f"{_GGML}model") or "", {}).get(name)
    return id if id is not None and id < (index.count(f"{_GGML}tokens") or 0) else None


def _is_control(index: GGUFIndex, id: int | None) -> bool:
    kinds = index.numbers(f"{_GGML}token_type")
    return id is not None and kinds is not None and id < len(kinds) and kinds[id] == CONTROL


class _TokenizerReader:
    """The tokens with their kinds, read once."""

    def __init__(self, index: GGUFIndex):
        self.index = index
        tokens = index.texts(f"{_GGML}tokens")
        if tokens is None:
            raise self._error("tokens", "not an array of strings")
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]  # as llama.cpp calls them
        kinds = self._numbers("token_type")
        self.kinds = kinds if kinds is not None else np.full(len(self.tokens), NORMAL)

    def specification(self) -> dict[str, Any]:
        """tokenizer.json."""
        model = self.index.text(f"{_GGML}model")
        if model not in MODELS:
            raise self._error("model", f"{model!r}, and only {' and '.join(MODELS)} are read; {_OVERRIDE}")
        if len(set(self.tokens)) != len(self.tokens):
            seen: set[str] = set()
            twice = next(token for token in self.tokens if token in seen or seen.add(token))
            raise self._error("tokens", f"the token {twice!r} twice")
        spec = self._byte_level() if model == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **spec,
            "post_processor": self._post_processor(),
        }

    def configuration(self) -> dict[str, Any]:
        """tokenizer_config.json: the named tokens and the chat templates."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, key in _NAMED.items():
            if (id := token_id(self.index, key)) is not None:
                config[name] = self.tokens[id]
        templates = {
            key.removeprefix(_TEMPLATE).removeprefix(".") or "default": text
            for key in self.index.keys
            if (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")) and (text := self.index.text(key)) is not None
        }
        if set(templates) == {"default"}:
            config["chat_template"] = templates["default"]
        elif templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        return config

    def _byte_level(self) -> dict[str, Any]:
        pre = self._pre_tokenizer()
        merges = self.index.texts(f"{_GGML}merges")
        if merges is None:
            raise self._error("merges", "not an array of strings")
        vocab = {token: id for id, token in enumerate(self.tokens)}
        return {
            "normalizer": {"type": "NFC"} if pre.normalizes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": _bpe(vocab, self._pairs(merges, vocab), ignore_merges=pre.ignores_merges),
        }

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self.index.text(f"{_GGML}pre")
        if name is None:
            raise self._error("pre", f"missing: the pre-tokenizer is unknown; {_OVERRIDE}")
        if name not in PRE_TOKENIZERS:
            hint = did_you_mean(name, PRE_TOKENIZERS)
            raise self._error("pre", f"{name!r}, an unsupported pre-tokenizer{hint}; {_OVERRIDE}")
        return PRE_TOKENIZERS[name]

    def _pairs(self, merges: list[str], vocab: dict[str, int]) -> list[list[str]]:
        cuts = [merge.find(" ", 1) for merge in merges]  # a space in front would be part of the token
        pairs = [[merge[:cut], merge[cut + 1 :]] for merge, cut in zip(merges, cuts, strict=True)]
        for number, (cut, (left, right)) in enumerate(zip(cuts, pairs, strict=True)):
            if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
                text = f"{merges[number]!r} at {number}"
                raise self._error("merges", f"{text}, which does not join two tokens to a token")
        return pairs

    def _sentencepiece(self) -> dict[str, Any]:
        is_gemma = str(self.index.text("general.architecture")).startswith("gemma")
        if is_gemma:
            self._respell_spaces()
        # Gemma's scores do not follow the order in which its pieces are merged; the order of its tokens does.
        scores = None if is_gemma else self._numbers("scores")
        if scores is None:
            scores = -np.arange(len(self.tokens), dtype=np.float32)
        vocab = {token: id for id, token in enumerate(self.tokens)}
        adds_space = self._flag("add_space_prefix", not is_gemma)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
        decoder = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []),
        ]
        unknown = token_id(self.index, "unknown_token_id")
        kinds = self.kinds.tolist()
        # A user-defined piece with U+2581 is spelled as after normalization, and found by merges, as in llama.cpp.
        skipped = {
            token
            for token, id in vocab.items()
            if kinds[id] in (UNKNOWN, CONTROL, BYTE) or (kinds[id] == USER_DEFINED and _SPACE not in token)
        }
        if (longest := max(map(len, vocab), default=0)) > MAX_TOKEN_LENGTH:
            raise self._error("tokens", f"one of {longest} characters, the limit is {MAX_TOKEN_LENGTH}")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]} if adds_space else replace,
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoder},
            "model": _bpe(
                vocab,
                _merges_of(vocab, scores, skipped),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def _respell_spaces(self) -> None:
        """Gemma stores runs of spaces as spaces, and other tokens with U+2581 for a space.

        User-defined runs are spelled with spaces: they are matched in the text before any merge, the longest first, as
        in SentencePiece (33 spaces are 31 and 2; by merges they would be 16 and 17).
        """
        for id, token in enumerate(self.tokens):
            if not token.strip(f" {_SPACE}"):
                self.tokens[id] = (" " if self.kinds[id] == USER_DEFINED else _SPACE) * len(token)

    def _added_tokens(self) -> list[dict[str, Any]]:
        """Control tokens, the unknown token and user-defined tokens, which are matched before any other."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": id, "content": self.tokens[id], **flags, "special": bool(self.kinds[id] != USER_DEFINED)}
            for id in np.flatnonzero(np.isin(self.kinds, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        is_byte_level = self.index.text(f"{_GGML}model") == "gpt2"
        ids = {
            "bos": self._flag("add_bos_token", self._pre_tokenizer().adds_bos if is_byte_level else True),
            "eos": self._flag("add_eos_token", False),
        }
        tokens = {}
        for name, is_added in ids.items():
            if not is_added:
                continue
            id = token_id(self.index, f"{name}_token_id")
            if id is None:
                id = _default_id(self.index, f"{name}_token_id")
                added = "nothing is added" if id is None else f"llama.cpp's default, {id}, is added"
                what = f"a text gets {name.upper()}, and there is no {_GGML}{name}_token_id"
                logger.warning("%s: %s: %s", self.index.path, what, added)
            if id is None:
                continue
            tokens[name] = (self.tokens[id], id)
        if not tokens:
            return None
        before = [{"SpecialToken": {"id": tokens["bos"][0], "type_id": 0}}] if "bos" in tokens else []
        after = [{"SpecialToken": {"id": tokens["eos"][0], "type_id": 0}}] if "eos" in tokens else []
        single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
        second = [{**item, kind: {**part, "type_id": 1}} for item in single for kind, part in item.items()]
        second = [{"Sequence": {"id": "B", "type_id": 1}} if "Sequence" in item else item for item in second]
        special = {text: {"id": text, "ids": [id], "tokens": [text]} for text, id in tokens.values()}
        return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": special}

    def _numbers(self, name: str) -> np.ndarray | None:
        """An array with an entry for every token, or None where the file has none."""
        key = f"{_GGML}{name}"
        if key not in self.index.keys:
            return None
        numbers = self.index.numbers(key)
        if numbers is None or len(numbers) != len(self.tokens):
            raise self._error(name, f"{self.index.describe(key)} for {len(self.tokens)} tokens")
        return numbers

    def _flag(self, name: str, default: bool) -> bool:
        key = f"{_GGML}{name}"
        if key not in self.index.keys:
            return default
        value = self.index.scalar(key)
        if not isinstance(value, bool):
            raise self._error(name, f"{self.index.describe(key)}, not true or false")
        return value

    def _error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(self.index.path, f"{_GGML}{name} is {problem}")


def _bpe(vocab: dict[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**model, **settings, "vocab": vocab, "merges": _as_texts(merges)}


def _as_texts(merges: list[list[str]]) -> list[str] | list[list[str]]:
    """Merges with a space between the tokens, which the library reads in half the time; as they are where a token has a
    space, or they would begin as a comment does."""
    texts = [" ".join(pair) for pair in merges]
    num_spaces = "\n".join(texts).count(" ")
    return merges if num_spaces != len(texts) or any(text.startswith("#version") for text in texts) else texts


def _merges_of(vocab: dict[str, int], scores: np.ndarray, skipped: set[str]) -> list[list[str]]:
    """Every pair of tokens that concatenates to a token, in descending order of that token's score: SentencePiece
    merges the neighbours with the best result. Ties are ordered as in Transformers."""
    known, pairs, ids = vocab.keys() - skipped, [], []
    for token, id in vocab.items():
        if token not in known:
            continue
        for cut in range(1, len(token)):
            if (left := token[:cut]) in known and (right := token[cut:]) in known:
                pairs.append([left, right])
                ids.append(id)
    lengths = np.array([(len(left), len(right)) for left, right in pairs], np.int64).reshape(-1, 2)
    order = np.lexsort((ids, -lengths[:, 1], -lengths[:, 0], -np.asarray(scores, np.float64)[ids]))
    return [pairs[index] for index in order.tolist()]
