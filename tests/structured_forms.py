"""Random schemas, patterns and choices, and whether a text is what they ask for."""

import json
import random
import re
from typing import Any

import jsonschema

NAMES = ("name", "age", "is_ok", "items", "x", "größe", "a b", "next")
WORDS = ("red", "green", "blue", "yes", "no", "maybe", "def", "return", "naïve", "1.5")
PIECES = (
    "[a-z]{1,4}",
    "[0-9]{2,3}",
    "(foo|bar|baz)",
    "def ",
    "x?",
    "[A-Z][a-z]*",
    "(ab)+",
    r"\d{1,2}",
    "[ -~]{0,3}",
    "é|ü",
)


def random_form(number: int) -> dict[str, Any]:
    """A value of `SamplingParams(structured=)`: of ten, six are schemas, three patterns, one a list of choices."""
    numbers = random.Random(number)
    kind = number % 10
    if kind < 6:
        return {"json": random_schema(numbers, 3)}
    if kind < 9:
        return {"regex": "".join(numbers.choices(PIECES, k=numbers.randint(1, 4))) + "[.!]"}
    return {"choice": numbers.sample(WORDS, numbers.randint(1, 6))}


def random_schema(numbers: random.Random, depth: int) -> dict[str, Any]:
    """Of every kind that JSON has. Most strings, arrays and objects end soon, so that most answers do."""
    kinds = ["boolean", "integer", "number", "string", "enum", "const", "null"]
    kind = numbers.choice([*kinds, *(["array", "object", "object", "anyOf"] if depth else ())])
    if depth == 3 and numbers.random() < 0.7:
        kind = numbers.choice(["object", "object", "array"])
    if kind == "integer":
        low = numbers.randint(-100, 100)
        return {"type": "integer", "minimum": low, "maximum": low + numbers.randint(0, 1000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "exclusiveMaximum": numbers.choice([1, 10, 2.5])}
    if kind == "string":
        pattern = {"pattern": numbers.choice(["^[a-z]{2,5}$", "^x", "^(a|b)+$"])} if numbers.random() < 0.2 else {}
        return {"type": "string", "maxLength": numbers.randint(2, 12), **pattern}
    if kind == "enum":
        return {"enum": [*numbers.sample(WORDS, 3), numbers.randint(0, 9), None, {"a": [1]}]}
    if kind == "const":
        return {"const": numbers.choice([*WORDS, 7, True, [1, "a"]])}
    if kind == "array":
        least = numbers.randint(0, 2)
        items = random_schema(numbers, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + numbers.randint(0, 2)}
    if kind == "object":
        names = numbers.sample(NAMES, numbers.randint(1, 4))
        required = [name for name in names if numbers.random() < 0.7]
        properties: dict[str, Any] = {name: random_schema(numbers, depth - 1) for name in names}
        schema = {"type": "object", "properties": properties, "required": required}
        if depth == 3 and numbers.random() < 0.1:
            properties["next"] = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
        return schema if numbers.random() < 0.2 else {**schema, "additionalProperties": False}
    if kind == "anyOf":
        return {"anyOf": [random_schema(numbers, depth - 1) for _ in range(2)]}
    return {"type": kind}


def matches(form: dict[str, Any], text: str) -> bool:
    """Judged without any code of this project."""
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(form["json"]).is_valid(value)
