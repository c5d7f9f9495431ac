"""Checks of a parsed tokenizer.json before the `tokenizers` library reads it.

Checkpoints come from strangers, and the library trusts what it reads: a file can make it allocate until the process
is killed, recurse until its stack is full, or take minutes. Here are limits on counts and lengths, each far above what
known models have.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any

from jaxinfer.text.component_checks import FieldError, check_components, check_count, check_short

MAX_FILE_BYTES = 64 << 20
"""The largest of known models, with 262,144 tokens and 514,906 merges, has 33 MB."""
MAX_ADDED_TOKENS = 100_000
"""Models of speech and pictures add up to 65,536 codes."""
MAX_ADDED_CHARS = 1024
MAX_ALL_ADDED_CHARS = 4 << 20
MAX_TOKEN_ID = (1 << 24) - 1
_MAX_VALUES = {"[": 1_500_000, "{": 400_000, ",": 3_000_000}
_MAX_TOKEN_CHARS = 4096
_MAX_SCORED_CHARS = 2048  # the library frees Unigram's trie by recursion, a step a byte
_MAX_TRIE_NODES = 2_500_000  # Unigram's trie takes 340 bytes a node
_MAX_WORD_CHARS = 1000  # WordPiece's time grows with the square of it
_MAX_PROCESSORS = 16
_MAX_PIECES = 64


def parse_json(text: str, name: Any) -> Any:
    """The value of a JSON text in which no key occurs twice (the library may take another one than Python).

    Raises ValueError, with the file's name.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{name} has {len(text)} characters; at most {MAX_FILE_BYTES} are allowed")
    for mark, limit in _MAX_VALUES.items():
        if (count := text.count(mark)) > limit:
            raise ValueError(f"{name} has {count} times {mark!r}; at most {limit} are allowed")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{name} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r:.60} is given twice in one object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def check_spec(spec: Any) -> float:
    """How many times longer in bytes a text may become before it is split into tokens.

    Raises FieldError, with the field, for what the library would fail on in a bad way, or what is over a limit.
    """
    if not isinstance(spec, dict):
        raise FieldError(f"the file must hold a JSON object, not {type(spec).__name__}")
    _check_added(spec.get("added_tokens"))
    _check_model(spec.get("model"))
    _check_processor(spec.get("post_processor"), "post_processor")
    return check_components(spec)


def check_added(contents: Sequence[str], path: str) -> None:
    """Raises FieldError for too many added tokens, or too long ones."""
    if len(contents) > MAX_ADDED_TOKENS:
        raise FieldError(f"{path} has {len(contents)} tokens; at most {MAX_ADDED_TOKENS} are allowed")
    for index, content in enumerate(contents):
        if len(content) > MAX_ADDED_CHARS:
            raise FieldError(f"{path}[{index}] has {len(content)} characters; at most {MAX_ADDED_CHARS} are allowed")
    total = sum(map(len, contents))
    if total > MAX_ALL_ADDED_CHARS:
        raise FieldError(f"{path} has {total} characters in all; at most {MAX_ALL_ADDED_CHARS} are allowed")


def _check_added(tokens: Any) -> None:
    if not isinstance(tokens or [], list):
        raise FieldError(f"added_tokens must be a list, got {tokens!r:.60}")
    for index, token in enumerate(tokens or ()):
        if type(token) is not dict:
            raise FieldError(f"added_tokens[{index}] must be an object, got {token!r:.60}")
        if type(token.get("content")) is not str or type(token.get("special")) is not bool:
            raise FieldError(f"added_tokens[{index}] needs a text as content, and special as true or false")
        token_id = token.get("id")
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise FieldError(f"added_tokens[{index}].id must be from 0 to {MAX_TOKEN_ID}, got {token_id!r:.60}")
    check_added([token["content"] for token in tokens or ()], "added_tokens")


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        raise FieldError(f"model must be an object, got {model!r:.60}")
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        _check_scored_tokens(vocab, model)
    elif isinstance(vocab, dict):
        _check_vocab(vocab)
    else:
        raise FieldError(f"model.vocab must be an object or a list, got {type(vocab).__name__}")
    for field in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if model.get(field) is not None:
            check_short(model[field], f"model.{field}")
    if "max_input_chars_per_word" in model:
        check_count(model["max_input_chars_per_word"], "model.max_input_chars_per_word", 0, _MAX_WORD_CHARS)
    _check_merges(model)


def _check_vocab(vocab: Mapping[str, Any]) -> None:
    if not set(map(type, vocab.values())) <= {int}:
        token = next(token for token, token_id in vocab.items() if type(token_id) is not int)
        raise FieldError(f"model.vocab[{token!r:.60}] must be a token id, got {vocab[token]!r:.60}")
    for token_id in (min(vocab.values(), default=0), max(vocab.values(), default=0)):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            token = next(token for token, other in vocab.items() if other == token_id)
            raise FieldError(f"model.vocab[{token!r:.60}] must be from 0 to {MAX_TOKEN_ID}, got {token_id!r:.60}")
    _check_lengths(vocab)


def _check_lengths(tokens: Iterable[str], limit: int = _MAX_TOKEN_CHARS) -> None:
    if (longest := max(map(len, tokens), default=0)) > limit:
        raise FieldError(f"model.vocab has a token of {longest} characters; at most {limit} are allowed")


def _check_scored_tokens(vocab: list[Any], model: Mapping[str, Any]) -> None:
    """Unigram's vocabulary: pairs of token and score."""
    for index, pair in enumerate(vocab):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) not in (int, float):
            raise FieldError(f"model.vocab[{index}] must be a token and its score, got {pair!r:.60}")
        if not math.isfinite(pair[1]):
            raise FieldError(f"model.vocab[{index}] has the score {pair[1]}")
    tokens = [token for token, _ in vocab]
    _check_lengths(tokens, _MAX_SCORED_CHARS)
    if (unknown := model.get("unk_id")) is not None:
        check_count(unknown, "model.unk_id", 0, len(vocab) - 1)
    if sum(map(len, tokens)) * 4 > _MAX_TRIE_NODES:
        ordered = sorted(token.encode("utf-8", "replace") for token in tokens)
        nodes = sum(map(len, ordered)) - sum(starmap(_common, pairwise(ordered)))
        if nodes > _MAX_TRIE_NODES:
            raise FieldError(f"model.vocab needs a trie of {nodes} nodes; at most {_MAX_TRIE_NODES} are allowed")


def _common(one: bytes, other: bytes) -> int:
    """Number of bytes at the start of both."""
    return next((index for index, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))  # noqa: B905


def _check_merges(model: Mapping[str, Any]) -> None:
    """The library cuts the prefix off the right side of each merge without looking."""
    merges = model.get("merges")
    if not isinstance(merges or [], list):
        raise FieldError(f"model.merges must be a list, got {type(merges).__name__}")
    prefix = model.get("continuing_subword_prefix")
    for index, merge in enumerate(merges or () if prefix else ()):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str) and pair[1].startswith(prefix)):
            raise FieldError(
                f"model.merges[{index}] is {merge!r:.60}: its right side does not start with {prefix!r:.60}"
            )


def _check_processor(spec: Any, path: str, depth: int = 0) -> None:
    if spec is None:
        return
    if not isinstance(spec, dict):
        raise FieldError(f"{path} must be an object, got {spec!r:.60}")
    if spec.get("type") == "Sequence":
        parts = spec.get("processors")
        if not isinstance(parts, list) or len(parts) > _MAX_PROCESSORS or depth > 2:
            raise FieldError(
                f"{path}.processors must be a list of at most {_MAX_PROCESSORS} processors, nested at most twice"
            )
        for index, part in enumerate(parts):
            _check_processor(part, f"{path}.processors[{index}]", depth + 1)
    elif spec.get("type") == "TemplateProcessing":
        _check_template(spec, path)


def _check_template(spec: Mapping[str, Any], path: str) -> None:
    """The library looks up what a template names without asking whether it is there."""
    special = spec.get("special_tokens")
    entries = list(special.values()) if isinstance(special, dict) else special
    if not isinstance(entries, list) or len(entries) > _MAX_PIECES:
        raise FieldError(f"{path}.special_tokens must be an object of at most {_MAX_PIECES} tokens")
    for token in entries:
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list) or not 0 < len(ids) <= _MAX_PIECES:
            raise FieldError(f"{path}.special_tokens needs 1 to {_MAX_PIECES} ids each, got {token!r:.60}")
    names = {token["id"] for token in entries if isinstance(token.get("id"), str)}
    pieces, num_texts = spec.get("single"), 0
    if not isinstance(pieces, list) or len(pieces) > _MAX_PIECES:
        raise FieldError(f"{path}.single must be a list of at most {_MAX_PIECES} pieces")
    for index, piece in enumerate(pieces):
        ((kind, value),) = piece.items() if isinstance(piece, dict) and len(piece) == 1 else (("", None),)
        name = value.get("id") if isinstance(value, dict) else None
        num_texts += kind == "Sequence" and name == "A"
        if not (kind == "Sequence" and name == "A") and not (kind == "SpecialToken" and name in names):
            raise FieldError(
                f"{path}.single[{index}] is neither the text A nor one of its special tokens: {piece!r:.60}"
            )
    if num_texts != 1:
        raise FieldError(f"{path}.single must have the text A once, not {num_texts} times")


__all__ = ["FieldError", "check_added", "check_spec", "parse_json"]
