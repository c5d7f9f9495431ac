"""The bytes that a token adds to a text, which may be a part of a character."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any


def byte_decoder(spec: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """A function from a token to its bytes within a text.

    Args:
      spec: the `decoder` of a tokenizer.json.

    Raises ValueError if a token's text depends on its neighbours (WordPiece, and tokenizers without a decoder).
    """
    replacements: list[tuple[str, str]] = []
    has_byte_tokens, is_fused = False, False
    for step in decoder_steps(spec):
        kind = step["type"]
        if kind == "ByteLevel" and not replacements and not has_byte_tokens:
            return byte_level
        if kind == "Replace" and "String" in step["pattern"]:
            pattern = step["pattern"]["String"]
            if not pattern or (is_fused and len(pattern) > 1):
                break
            replacements.append((pattern, step["content"]))
        elif kind == "ByteFallback":
            has_byte_tokens = True
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif kind == "Fuse":
            is_fused = True
        elif not (kind == "Strip" and is_fused and (step["content"], step["start"], step["stop"]) == (" ", 1, 0)):
            break
    else:
        if spec is not None:
            return _sentencepiece(replacements, has_byte_tokens)
    kind = spec.get("type") if spec else None
    raise ValueError(
        f"structured output needs a tokenizer whose tokens have texts of their own, not the decoder {kind!r}"
    )


def decoder_steps(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of the `decoder` of a checked tokenizer.json, in order."""
    if spec is None or spec["type"] != "Sequence":
        return [] if spec is None else [spec]
    return [step for child in spec["decoders"] for step in decoder_steps(child)]


def byte_level(token: str) -> bytes:
    """GPT-2's alphabet of printable characters for bytes. A token with any other character is its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, by the characters (openai/gpt-2 src/encoder.py, bytes_to_unicode)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _sentencepiece(replacements: Sequence[tuple[str, str]], has_byte_tokens: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return to_bytes
