"""Random tools, and random answers out of the grammars of their calls."""

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.tool_calls import Tool, ToolForm
from jaxinfer.tool_calls.tools import Mode

END = 256  # the token that ends an answer; 257 and later are special tokens
PLAIN = ("a", "Rome", "two words", "1", "-7", "2.5", "true", "null", "x_y", "A-b")
HARD = (
    *('"', "'", '\\"', "\\\\", "\\/", "\\u00e9", "\\ud83d\\ude00", "\\n", "\\t", "\\", "\n", "\n\n", " ", "\t", "#"),
    *("None", "True", "False", "null", "from", "class", "lambda", "def f(x):", "f(x=1)", "1e5", "1e999", "-0", "1.0"),
    *("{}", "{", "}", "[", "]", "(", ")", "[[1]]", '{"a":', '{"a":{"b":[', "<", ">", "</", "&lt;", "<b>", "=", ":"),
    *(
        "größe",
        "привет",
        "你好",
        "שלום",
        "😀",
        "e\u0301",
        "\u200b",
        "\u2028",
        "\u00a0",
        "ＡＢ",
        "</parameter",
        ",",
        "\x7f",
    ),
    *("<tool_call>", "[TOOL_CALLS]", "<|start|>", "to=functions.", "call:f{", "[f(", "```", "<function=f>"),
    *("</tool_call>", "</arg_value", "\x7f", "</｜DSML｜parameter", "</｜DSML｜invoke>"),
)
ENDINGS = (
    *('"', "}", "]", ")", "\n</parameter>", "</parameter>", "</arg_value>", "<escape>", '<|"|>', "<|end|>", "\n"),
    "</｜DSML｜parameter>",
)
NAMES = ("city", "days", "from", "None", "class", "largest_of_all", "größe", "x1", "_", "lambda", "True", "type")
TOOL_NAMES = ("now", "get-weather", "a.b", "from", "None", "f", "7z", "class", "X_y")


def random_tool(numbers: random.Random, name: str) -> Tool:
    """A tool of up to five parameters."""
    keys = numbers.sample(NAMES, numbers.randint(0, 5))
    properties = {key: random_schema(numbers, 2) for key in keys}
    required = [key for key in keys if numbers.random() < 0.5]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name, schema)


def random_schema(numbers: random.Random, depth: int) -> dict[str, Any]:
    """A schema of an argument, which each form can express or leaves free."""
    kinds = ["string", "string", "text", "integer", "number", "boolean", "null", "enum", "mixed", "any"]
    kind = numbers.choice([*kinds, *(["array", "object"] if depth else [])])
    if kind == "text":
        return {"type": "string", "minLength": numbers.randint(0, 2), "maxLength": numbers.randint(3, 9)}
    if kind == "number":
        return {"type": "number", "minimum": -9.5, "maximum": 1000}
    if kind == "enum":
        return {"enum": numbers.sample(["a b", "c", "None", "5", "true", "größe", '"', "\\", "/", "'", "a\nb"], 3)}
    if kind == "mixed":
        types = numbers.sample(["string", "integer", "boolean", "null"], 2)
        return numbers.choice([{"type": types}, {"anyOf": [{"type": one} for one in types]}])
    if kind == "any":
        return {}
    if kind == "array":
        return {"type": "array", "items": random_schema(numbers, depth - 1), "maxItems": numbers.randint(1, 3)}
    if kind == "object":
        keys = numbers.sample(NAMES, numbers.randint(0, 3))
        properties = {key: random_schema(numbers, depth - 1) for key in keys}
        return {"type": "object", "properties": properties, "required": keys[:1], "additionalProperties": False}
    return {"type": kind}


class ByteTokenizer:
    """A token for each byte, one for the end, and one for each special token."""

    eos_token_id, bos_token_id = END, None

    def __init__(self, special: tuple[str, ...]):
        import llguidance

        self.special = {text: END + 1 + index for index, text in enumerate(special)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [text.encode() for text in special]
        self.special_token_ids = [END, *self.special.values()]
        self.wrapped = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def encode(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, self.special))})", text) if self.special else [text]
        return [token for part in parts for token in ([self.special[part]] if part in self.special else self(part))]

    def text(self, ids: list[int]) -> str:
        return b"".join(self.tokens[token] for token in ids).decode()


@functools.cache
def tokenizer(special: tuple[str, ...]) -> ByteTokenizer:
    return ByteTokenizer(special)


def matcher(grammar: str, tokens: ByteTokenizer) -> Any:
    import llguidance

    found = llguidance.LLMatcher(tokens.wrapped, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not found.is_error(), found.get_error()
    return found


def walk(one: Any, tokens: ByteTokenizer, numbers: random.Random, is_hard: bool, opening: str = "") -> str | None:
    """A random answer of a grammar; None where it does not end in time. Written in words, not in bytes: what may follow
    is looked for among `PLAIN`, and `HARD` where `is_hard`, and the texts that end a value or, as `opening` does where
    a call is not demanded, begin one."""
    endings, words = _encoded(tokens, is_hard, opening)
    end_rate, max_tokens = 0.05 if opening else 0.5, 1_500
    ids: list[int] = []
    while len(ids) < max_tokens:
        if one.is_accepting() and (numbers.random() < end_rate or one.is_stopped()):
            return tokens.text(ids)
        chosen: list[int] = _forced(one.compute_ff_bytes())
        if not chosen:
            is_late = len(ids) > max_tokens // 3
            tries = [*numbers.choices(endings, k=2 + 9 * is_late), *numbers.choices(words, k=0 if is_late else 3)]
            numbers.shuffle(tries)
            chosen = next((text for text in tries if one.validate_tokens(text) == len(text)), None) or []
        if not chosen:
            allowed = _allowed(one, len(tokens.tokens))
            if not allowed:
                return tokens.text(ids) if one.is_accepting() else None
            chosen = [numbers.choice(allowed)]
        assert one.consume_tokens(chosen)
        ids += chosen
    return None


@functools.cache
def _encoded(tokens: ByteTokenizer, is_hard: bool, opening: str) -> tuple[list[list[int]], list[list[int]]]:
    words = HARD * 2 + PLAIN if is_hard else PLAIN
    endings = [*ENDINGS, *[opening] * (3 if opening else 0)]
    return [tokens.encode(text) for text in endings], [tokens(text) for text in words]


def _allowed(one: Any, num_tokens: int) -> list[int]:
    """Tokens that may follow. Of bytes those of ASCII alone, where there are any: the first byte of another character
    would have to be followed by the others."""
    import llguidance.numpy as masks

    bitmask = np.zeros((1, -(-num_tokens // 32)), np.int32)
    masks.fill_next_token_bitmask(one, bitmask)
    found = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:num_tokens])
    found = found[found != END]
    plain = found[(found > END) | ((found >= 32) & (found < 127))]
    return (plain if plain.size else found).tolist()


def _forced(text: bytes) -> list[int]:
    """Tokens of a text that must follow, in which a special token is written as \\xff[number]."""
    parts = re.split(rb"\xff\[(\d+)\]", text)
    return [token for at, part in enumerate(parts) for token in ([int(part)] if at % 2 else part)]


@dataclass(frozen=True)
class Sample:
    """An answer: its text, the tools that it may call, and whether it must call one."""

    text: str
    offered: tuple[Tool, ...]
    mode: Mode


@functools.lru_cache(maxsize=2)
def _grammar(form: ToolForm, seed: int, mode: Mode) -> tuple[Any, ByteTokenizer, tuple[Tool, ...]]:
    """At the beginning of a grammar of random tools."""
    numbers = random.Random(seed)
    names = numbers.sample(TOOL_NAMES, numbers.randint(1, 3))
    offered = tuple(random_tool(numbers, name) for name in names)
    special = form.special_texts if form.name == "openai" or numbers.random() < 0.7 else ()
    tokens = tokenizer(special)
    grammar = form.grammar(offered, mode, numbers.random() < 0.7, tokens.special)
    return matcher(grammar, tokens), tokens, offered


def samples(form: ToolForm, seeds: range, mode: Mode = "required") -> Iterator[Sample]:
    """Random answers in a form: ten of each grammar, half of them hard. Left out are those that do not end."""
    for seed in seeds:
        first, tokens, offered = _grammar(form, seed // 10, mode)
        opening = form.first if mode == "auto" else ""
        text = walk(first.deep_copy(), tokens, random.Random(seed), seed % 2 == 0, opening)
        if text is not None:
            yield Sample(text, offered, mode)
