"""Checks of what a tokenizer.json does with text: its normalizer, pre-tokenizer and decoder.

A chain of seven harmless-looking replacements can make gigabytes out of one letter, so each step has a bound on how
much it may lengthen a text, and the bounds of steps that feed one another are multiplied.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.text.patterns import Node, PatternError, can_match, check_cost, min_length

MAX_STEPS = 128
MAX_DEPTH = 8
MAX_TEXT_BYTES = 1024
"""Bytes of a replacement, a prefix, a suffix, and the like."""
_MAX_GROWTH = {"normalizer": 500.0, "pre_tokenizer": 32.0, "decoder": 500.0}
"""How many times longer in bytes a text may become. Unicode's own normal form KC makes some characters 11 times longer,
and with lower case and sentencepiece's marks, known normalizers come to about 50, pre-tokenizers to 8."""

_CHILDREN = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
# How much a step can lengthen a text, in bytes. A step that changes nothing when it runs again counts once.
_ONCE = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD"), 3.0),
        **dict.fromkeys(("NFKC", "NFKD"), 11.0),
        "BertNormalizer": 5.0,
        "Lowercase": 1.5,
        "Strip": 1.0,
        "StripAccents": 1.0,
        "Nmt": 1.0,
    },
    "pre_tokenizer": dict.fromkeys(
        (
            *("BertPreTokenizer", "Delimiter", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit", "Punctuation"),
            *("Digits", "UnicodeScripts", "FixedLength", "Split"),
        ),
        1.0,
    ),
    "decoder": dict.fromkeys(("Fuse", "ByteFallback", "ByteLevel", "Strip", "WordPiece", "Metaspace"), 3.0),
}
_EACH_TIME = {
    "normalizer": {"ByteLevel": 2.0},
    "pre_tokenizer": {"ByteLevel": 2.0, "Metaspace": 4.0},
    "decoder": {"CTC": 2.0, "BPEDecoder": 2.0},
}
_OWN_CHECKS = {"normalizer": ("Replace", "Prepend", "Precompiled"), "pre_tokenizer": (), "decoder": ("Replace",)}


class FieldError(ValueError):
    """A field of a tokenizer file is invalid, or asks for too much; the message starts with the field."""


def check_components(spec: Mapping[str, Any]) -> float:
    """How many times longer in bytes the normalizer and the pre-tokenizer may make a text. Raises FieldError."""
    growth = check_component("normalizer", spec.get("normalizer"))
    growth *= check_component("pre_tokenizer", spec.get("pre_tokenizer"))
    check_component("decoder", spec.get("decoder"))
    return growth


def check_component(kind: str, spec: Any) -> float:
    """As `check_components`, for one part: "normalizer", "pre_tokenizer" or "decoder"."""
    chain = _Chain(kind)
    for path, step in flatten(spec, kind, _CHILDREN[kind]):
        chain.add(path, step)
    return chain.growth()


def flatten(spec: Any, path: str, children: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The steps of a component with their places in the file. Raises FieldError for too many, or nested too deeply."""
    if spec is None:
        return
    if not isinstance(spec, Mapping):
        raise FieldError(f"{path} must be an object, got {spec!r:.60}")
    if spec.get("type") != "Sequence":
        yield path, spec
        return
    steps = spec.get(children)
    if not isinstance(steps, list):
        raise FieldError(f"{path}.{children} must be a list, got {steps!r:.60}")
    if depth == MAX_DEPTH or len(steps) > MAX_STEPS:
        raise FieldError(
            f"{path} has {len(steps)} steps at depth {depth + 1}; at most {MAX_STEPS} at depth {MAX_DEPTH}"
        )
    for index, step in enumerate(steps):
        if step is None:
            raise FieldError(f"{path}.{children}[{index}] is null")
        yield from flatten(step, f"{path}.{children}[{index}]", children, depth + 1)


def check_short(value: Any, path: str, *, may_be_empty: bool = True) -> str:
    """A short text. Raises FieldError."""
    if not isinstance(value, str):
        raise FieldError(f"{path} must be a string, got {value!r:.60}")
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES or not (size or may_be_empty):
        raise FieldError(
            f"{path} has {size} bytes; {'at most' if size else 'between 1 and'} {MAX_TEXT_BYTES} are allowed"
        )
    return value


def check_count(value: Any, path: str, low: int, high: int) -> None:
    """Raises FieldError unless the value is an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise FieldError(f"{path} must be an integer from {low} to {high}, got {value!r:.60}")


class _Replacement:
    """A `Replace` step: what it looks for and what it writes."""

    def __init__(self, path: str, step: Mapping[str, Any]):
        self.content = check_short(step.get("content"), f"{path}.content")
        pattern = step.get("pattern")
        searched = check_pattern(pattern, f"{path}.pattern")
        self._searched = searched
        shortest = len(searched.encode()) if isinstance(searched, str) else min_length(searched)
        size = len(self.content.encode())
        self.growth = max(size / shortest, 1.0) if shortest else 1.0 + size

    def reads(self, text: str) -> bool:
        """True if it may match where an earlier step wrote `text`."""
        if isinstance(self._searched, str):
            return not set(self._searched).isdisjoint(text)
        return min_length(self._searched) == 0 or can_match(self._searched, text)


def check_pattern(pattern: Any, path: str) -> str | Node:
    """The text, or the parsed regular expression, of a `pattern` entry. Raises FieldError."""
    if not isinstance(pattern, Mapping) or len(pattern) != 1 or not pattern.keys() <= {"String", "Regex"}:
        raise FieldError(f'{path} must be {{"String": ...}} or {{"Regex": ...}}, got {pattern!r:.60}')
    ((name, source),) = pattern.items()
    if not isinstance(source, str) or not source:
        raise FieldError(f"{path}.{name} must be a text that is not empty, got {source!r:.60}")
    if name == "String":
        return check_short(source, f"{path}.{name}")
    try:
        return check_cost(source).root
    except PatternError as error:
        raise FieldError(f"{path}.{name} {source!r:.60} is refused: {error}") from None


class _Chain:
    """The steps of one component, with a bound on how much they lengthen a text."""

    def __init__(self, kind: str):
        self._kind = kind
        self._once: dict[str, float] = {}
        self._factor = 1.0
        self._replacements: list[tuple[float, _Replacement]] = []  # with the growth up to and with each one

    def add(self, path: str, step: Mapping[str, Any]) -> None:
        name = step.get("type")
        known = (*_ONCE[self._kind], *_EACH_TIME[self._kind], *_OWN_CHECKS[self._kind])
        if not isinstance(name, str) or name not in known:
            raise FieldError(f"{path}.type must be one of {', '.join(sorted(known))}, got {name!r:.60}")
        if name == "Replace":
            replacement = _Replacement(path, step)
            fed = (growth for growth, other in self._replacements if replacement.reads(other.content))
            before = max(fed, default=1.0)
            self._replacements.append((before * replacement.growth, replacement))
        elif name == "Split":
            check_pattern(step.get("pattern"), f"{path}.pattern")
        elif name == "Prepend":
            check_short(step.get("prepend"), f"{path}.prepend")
        elif name == "Precompiled":
            self._once[name] = _check_charsmap(step.get("precompiled_charsmap"), f"{path}.precompiled_charsmap")
        elif name == "FixedLength":
            check_count(step.get("length", 5), f"{path}.length", 1, 1 << 20)
        elif name == "Strip" and self._kind == "decoder":
            for field in ("start", "stop"):
                check_count(step.get(field), f"{path}.{field}", 0, 64)
        self._check_texts(step, path)
        if name in _ONCE[self._kind]:
            self._once[name] = _ONCE[self._kind][name]
        self._factor *= _EACH_TIME[self._kind].get(name, 1.0)
        if (growth := self.growth()) > (limit := _MAX_GROWTH[self._kind]):
            raise FieldError(
                f"{path} could make a text {growth:.3g} times longer; at most {limit:.0f} times is allowed"
            )

    def _check_texts(self, step: Mapping[str, Any], path: str) -> None:
        """`BPEDecoder` and the like put something between all characters where they look for nothing."""
        for field in ("suffix", "prefix", "pad_token", "word_delimiter_token", "replacement", "delimiter"):
            if step.get(field) is not None:
                may_be_empty = field == "prefix" or self._kind != "decoder"
                check_short(step[field], f"{path}.{field}", may_be_empty=may_be_empty)

    def growth(self) -> float:
        total = self._factor * max((growth for growth, _ in self._replacements), default=1.0)
        for factor in self._once.values():
            total *= factor
        return total


def steps_of(spec: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """The steps of a part of a checked tokenizer.json: "normalizer", "pre_tokenizer" or "decoder"."""
    return [step for _, step in flatten(spec.get(kind), kind, _CHILDREN[kind])]


def _check_charsmap(value: Any, path: str) -> float:
    """Sentencepiece's table of replacements: the size of a trie, the trie, and texts that end with a zero byte each."""
    if not isinstance(value, str):
        raise FieldError(f"{path} must be a base64 text, got {value!r:.60}")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FieldError(f"{path} is not base64: {error}") from None
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise FieldError(f"{path} has {len(data)} bytes, of which {size} should be its trie")
    try:
        texts = data[4 + size :].decode("utf-8").split("\0")
    except UnicodeDecodeError as error:
        raise FieldError(f"{path} has texts that are not UTF-8: {error}") from None
    longest = max(len(text.encode()) for text in texts)
    if longest > MAX_TEXT_BYTES:
        raise FieldError(f"{path} has a replacement of {longest} bytes; at most {MAX_TEXT_BYTES} are allowed")
    return 11.0 if longest <= 33 else float(longest)  # Unicode's longest: 33 bytes for a character of 3
