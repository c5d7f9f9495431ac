"""Refuses a text that is too long before all of it is tokenized: tokenizing 4 MB takes 6 seconds and 830 MB.

Two bounds are cheap. Where no byte of a text can be lost, a text needs at least its bytes divided by those of the
longest token. Otherwise the text is tokenized in pieces, until they have too many tokens: a cut changes a few tokens
beside it only, and that many are not counted.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxinfer.text.component_checks import steps_of
from jaxinfer.text.library import run

_CHARS_PER_PIECE = 16384
_TOKENS_PER_CUT = 128
_BYTES_PER_TOKEN = 8
"""A text of fewer bytes for each token of the limit is tokenized whole: it costs not much more than one that fits."""
_SMALL = 1 << 16
_MIN_SPACES = 64
_SPACES = re.compile(rf"\s{{{_MIN_SPACES},}}")
_LARGE_GROWTH = 16.0
_GROWN_BYTES = 2 << 20
_MAX_GROWN = 4
"""How many times longer a long text may become by a normalizer that may grow it much."""

# Normalizers that lose nothing, and how many times shorter in bytes they make a text at most.
_SHRINKING = {"ByteLevel": 1, "Prepend": 1, "NFC": 3, "NFD": 1, "NFKC": 12, "NFKD": 4, "Lowercase": 3}
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts", "FixedLength")


class TextTooLongError(ValueError):
    """A text that has more tokens than are allowed; the message has its bytes. `code`: OpenAI's, for programs."""

    code = "context_length_exceeded"


@dataclass(frozen=True)
class LengthBounds:
    """Attributes:
    growth: how many times longer in bytes a text may become before it is split (`check_spec`).
    takes_spaces: whether an added token may take the spaces beside it.
    loses_nothing: whether each byte of a text is in a token.
    max_bytes_per_token: at most as many bytes of a text are one token, if `loses_nothing`.
    tokens_per_cut: at most as many tokens change where a text is cut.
    """

    growth: float
    takes_spaces: bool
    loses_nothing: bool
    max_bytes_per_token: float
    tokens_per_cut: int


def length_bounds(backend: tokenizers.Tokenizer, spec: Mapping[str, Any], growth: float) -> LengthBounds:
    """Bounds of a tokenizer with a checked tokenizer.json; `growth` is from `check_spec`."""
    added = backend.get_added_tokens_decoder().values()
    takes_spaces = any(token.lstrip or token.rstrip for token in added)
    shrinks = None if takes_spaces else _shrinks(spec)
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram's pairs of token and score
        vocab = {token for token, _ in vocab}
    is_byte_level = any(step["type"] == "ByteLevel" for _, step in _text_steps(spec))
    if shrinks is not None and not _has_all_bytes(vocab, spec["model"], is_byte_level):
        shrinks = None
    chars = max(map(len, vocab), default=1)
    longest = chars if is_byte_level else 4 * chars
    longest = max(longest, 4 * max((len(token.content) for token in added), default=1))
    word = spec["model"].get("max_input_chars_per_word") or 0
    return LengthBounds(growth, takes_spaces, shrinks is not None, longest * (shrinks or 1), _TOKENS_PER_CUT + word)


class LengthCheck:
    """Refuses texts that are too long for a tokenizer with these bounds."""

    def __init__(self, backend: tokenizers.Tokenizer, bounds: LengthBounds):
        self._backend, self.bounds, self._growth = backend, bounds, bounds.growth

    def check_bytes(self, num_bytes: int, max_tokens: int, *, factor: int = 1) -> None:
        """Raises TextTooLongError where even the longest tokens would be too many, or `factor` times too many."""
        if num_bytes > max_tokens * self.bounds.max_bytes_per_token * factor:
            raise _too_long(num_bytes, max_tokens)

    def check(self, text: str, max_tokens: int | None) -> None:
        """Raises TextTooLongError for a text that surely has more than `max_tokens` tokens, and ValueError for one that
        the normalizer makes much longer."""
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if max_tokens is not None and self.bounds.loses_nothing:
            self.check_bytes(num_bytes, max_tokens)
        if num_bytes <= _SMALL and num_bytes * self._growth <= _GROWN_BYTES:
            return
        if self._growth > _LARGE_GROWTH:
            self._check_growth(text, num_bytes)
        elif max_tokens is None or num_bytes <= max_tokens * _BYTES_PER_TOKEN:
            return
        if max_tokens is not None:
            self._check_pieces(text, num_bytes, max_tokens)

    def _pieces(self, text: str) -> list[str]:
        if self.bounds.takes_spaces:  # an added token may take all spaces beside it, also those of other pieces
            text = _SPACES.sub(lambda match: match.group()[:_MIN_SPACES], text)
        size = max(int(min(_CHARS_PER_PIECE, _GROWN_BYTES / self._growth / 4)), 1)
        return [text[start : start + size] for start in range(0, len(text), size)]

    def _check_growth(self, text: str, num_bytes: int) -> None:
        normalizer = self._backend.normalizer
        if normalizer is None:
            return
        allowed, grown = _MAX_GROWN * num_bytes + _GROWN_BYTES, 0
        for piece in self._pieces(text):
            grown += len(run(normalizer.normalize_str, piece).encode("utf-8", "replace"))
            if grown > allowed:
                raise ValueError(f"the tokenizer's normalizer makes more than {allowed} bytes of a text of {num_bytes}")

    def _check_pieces(self, text: str, num_bytes: int, max_tokens: int) -> None:
        total = 0
        for piece in self._pieces(text):
            num_tokens = len(run(self._backend.encode, piece, add_special_tokens=False))
            total += max(num_tokens - self.bounds.tokens_per_cut, 0)
            if total > max_tokens:
                raise _too_long(num_bytes, max_tokens)


def _too_long(num_bytes: int, max_tokens: int) -> TextTooLongError:
    return TextTooLongError(f"{num_bytes} bytes of text are more than {max_tokens} tokens")


def _text_steps(spec: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(kind, step) for kind in ("normalizer", "pre_tokenizer") for step in steps_of(spec, kind)]


def _shrinks(spec: Mapping[str, Any]) -> float | None:
    """How many times shorter a text may become before it is split into tokens; None if parts of it may vanish."""
    total = 1.0
    for kind, step in _text_steps(spec):
        name = step["type"]
        if kind == "pre_tokenizer":
            if name not in _KEEPING or step.get("behavior") == "Removed":
                return None
        elif name == "Replace":
            before, after = step["pattern"].get("String", ""), step["content"]
            if not before or not after:
                return None
            total *= max(len(before.encode()) / len(after.encode()), 1.0)
        elif name in _SHRINKING:
            total *= _SHRINKING[name]
        else:
            return None
    return total


def _has_all_bytes(vocab: Collection[str], model: Mapping[str, Any], is_byte_level: bool) -> bool:
    """True if each character has tokens: unknown ones may be dropped, and a run of them may be one token."""
    if is_byte_level:
        return all(char in vocab for char in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
