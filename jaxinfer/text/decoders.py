"""The decoders of `tokenizer.json` as streams: tokens in, text out as soon as it cannot change.

`tokenizers` decodes a whole sequence at once: a chain of stages, each a list of strings to a list of strings.
Here every stage takes one piece at a time and emits the text that later tokens cannot change. A stage sees either the
tokens one by one, or (after `Fuse` or `ByteLevel`) pieces of one long string. A stage without an exact
streaming form makes the whole chain unsupported (`build_decoder` returns None).
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import tokenizers

from jaxinfer.text.token_bytes import byte_level, decoder_steps


class DecoderStage:
    """A streaming stage, which by itself passes every piece on."""

    def push(self, piece: str) -> Sequence[str]:
        """Takes a piece; returns those that are finished."""
        return (piece,)

    def flush(self) -> Sequence[str]:
        """Returns the pieces that were held back."""
        return ()


class StreamDecoder:
    """A chain of stages. `push(token)` returns new text, `flush()` the rest."""

    def __init__(self, stages: Sequence[DecoderStage]):
        self._stages = stages

    def push(self, token: str) -> str:
        return "".join(self._through(0, (token,)))

    def flush(self) -> str:
        text = []
        for index, stage in enumerate(self._stages):
            text.extend(self._through(index + 1, stage.flush()))
        return "".join(text)

    def _through(self, first: int, pieces: Sequence[str]) -> Sequence[str]:
        for stage in self._stages[first:]:
            if not pieces:
                break
            pieces = [out for piece in pieces for out in stage.push(piece)]
        return pieces


def build_decoder(spec: Mapping[str, Any] | None) -> StreamDecoder | None:
    """The streaming form of the `decoder` entry of a tokenizer.json, or None if it has no exact one."""
    stages: list[DecoderStage] = []
    if spec is None:
        stages.append(_SpaceJoined())
    is_fused = False
    for step in decoder_steps(spec):
        stage, fuses = _build_stage(step, is_fused)
        if stage is None:
            return None
        stages.append(stage)
        is_fused = is_fused or fuses
    return StreamDecoder(stages)


def _build_stage(spec: Mapping[str, Any], is_fused: bool) -> tuple[DecoderStage | None, bool]:
    """The stage for one step, and whether it fuses its tokens into one string."""
    kind = spec.get("type")
    if is_fused:
        if kind == "Strip" and spec["stop"] == 0:
            return _StripStart(spec["content"], spec["start"]), False
        if kind == "Replace" and len(spec["pattern"].get("String", "")) == 1:
            return _PerToken(spec), False
        return (DecoderStage() if kind == "Fuse" else None), False
    if kind == "Fuse":
        return DecoderStage(), True
    if kind == "ByteLevel":
        return _ByteLevel(), True
    if kind == "ByteFallback":
        return _ByteFallback(), False
    if kind in ("Replace", "Strip"):
        return _PerToken(spec), False
    if kind in ("Metaspace", "WordPiece"):
        return _FirstDiffers(spec), False
    if kind == "BPEDecoder":
        return _BpeSuffix(spec["suffix"]), False
    return None, False


def load_component(kind: str, spec: Mapping[str, Any] | None) -> Any:
    """Build one part (`decoder`, `normalizer`, `pre_tokenizer`, `model`) of a tokenizer from its JSON.

    Small parts are kept: they have no state, and every stream needs the same ones.
    """
    return (_build_component if kind == "model" else _kept_component)(kind, json.dumps(spec))


def _build_component(kind: str, spec_json: str) -> Any:
    whole: dict[str, Any] = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    whole |= {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps({**whole, kind: json.loads(spec_json)})), kind)


_kept_component = lru_cache(maxsize=64)(_build_component)


class _SpaceJoined(DecoderStage):
    """No decoder: tokens joined with spaces."""

    def __init__(self) -> None:
        self._is_first = True

    def push(self, piece: str) -> Sequence[str]:
        is_first, self._is_first = self._is_first, False
        return (piece if is_first else " " + piece,)


class _PerToken(DecoderStage):
    """A stage that treats each token by itself (Replace; Strip before Fuse): the library's own code per token."""

    def __init__(self, spec: Mapping[str, Any]):
        self._decoder = load_component("decoder", spec)

    def push(self, piece: str) -> Sequence[str]:
        return (self._decoder.decode([piece]),)


class _FirstDiffers(DecoderStage):
    """A stage that treats the first token in its own way (Metaspace, WordPiece), again the library's own code."""

    def __init__(self, spec: Mapping[str, Any]):
        self._decoder = load_component("decoder", spec)
        self._is_first = True

    def push(self, piece: str) -> Sequence[str]:
        if self._is_first:
            self._is_first = False
            return (self._decoder.decode([piece]),)
        return (self._decoder.decode(["x", piece])[1:],)


class _StripStart(DecoderStage):
    """Drops up to `count` leading `content` characters of the fused string."""

    def __init__(self, content: str, count: int):
        self._content, self._left = content, count

    def push(self, piece: str) -> Sequence[str]:
        while piece and self._left:
            if piece[0] != self._content:
                self._left = 0
                break
            piece = piece[1:]
            self._left -= 1
        return (piece,)


class _BpeSuffix(DecoderStage):
    """BPEDecoder: the suffix (`</w>`) becomes a space, but in the last token nothing: holds one token back."""

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._held: str | None = None

    def push(self, piece: str) -> Sequence[str]:
        held, self._held = self._held, piece
        return () if held is None else (held.replace(self._suffix, " "),)

    def flush(self) -> Sequence[str]:
        return () if self._held is None else (self._held.replace(self._suffix, ""),)


class _ByteFallback(DecoderStage):
    """Runs of byte tokens (`<0xE4>`): text if the *whole run* is valid UTF-8, else one U+FFFD per byte.

    So a valid run must be held until it ends: one bad byte at its end turns all of it into U+FFFD. A run that already
    has an invalid byte is emitted at once.
    """

    _BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

    def __init__(self) -> None:
        self._num_bytes = 0
        self._text: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._is_broken = False

    def push(self, piece: str) -> Sequence[str]:
        match = self._BYTE_TOKEN.fullmatch(piece)
        if match is None:
            return (*self.flush(), piece)
        self._num_bytes += 1
        if self._is_broken:
            return ("\ufffd",)
        try:
            self._text.append(self._utf8.decode(bytes((int(match[1], 16),))))
        except UnicodeDecodeError:
            self._is_broken = True
            return ("\ufffd" * self._num_bytes,)
        return ()

    def flush(self) -> Sequence[str]:
        num_bytes, is_broken, text = self._num_bytes, self._is_broken, "".join(self._text)
        is_partial = bool(self._utf8.getstate()[0])
        self._num_bytes, self._is_broken, self._text = 0, False, []
        self._utf8.reset()
        if num_bytes == 0 or is_broken:
            return ()
        return ("\ufffd" * num_bytes if is_partial else text,)


class _ByteLevel(DecoderStage):
    """ByteLevel: every character of a token stands for one byte; all bytes together are (lossy) UTF-8.

    Python's "replace" and Rust's `from_utf8_lossy` agree: one U+FFFD per maximal invalid part.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> Sequence[str]:
        return (self._utf8.decode(byte_level(piece)),)

    def flush(self) -> Sequence[str]:
        return (self._utf8.decode(b"", final=True),)
