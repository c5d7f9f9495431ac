"""Requirements on the text of an answer, as a request states them."""

import dataclasses
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_CHARS = 2**20  # of a schema, pattern or grammar; calls of 128 tools of 10 parameters make up to 376,000
MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar")


class GrammarError(ValueError):
    """A requirement that cannot be served: not a schema, a pattern or a grammar, or too large."""


_JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


@dataclass(frozen=True)
class StructuredOutputs:
    r"""A requirement on the text of an answer: exactly one of the first five, by the names of vLLM.

    Attributes:
      json: a JSON schema (draft 2020-12) as a mapping or text, or a pydantic model, msgspec Struct, dataclass or other
        type. Kept as text; the order of its properties is the order in the answer.
      json_object: any JSON object.
      regex: a regular expression that matches the whole answer, in the syntax of Rust's regex crate.
      choice: texts, one of which is the answer.
      grammar: a context-free grammar in llguidance's Lark syntax.
      whitespace_pattern: of JSON, a regular expression for what may stand between its parts, such as `[ \n]{0,2}`;
        nothing by default.
      reasoning: the family whose tags stand around the reasoning (`jaxinfer.text.reasoning.FAMILIES`), where an answer
        may begin with one; what comes after it must match. None, the default of texts, for an answer that must match
        from its first token; chats take what their template says. "none" turns that off.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    reasoning: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise GrammarError(f"json_object must be True or False, got {self.json_object!r}")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            expected = "exactly one of json, json_object, regex, choice and grammar"
            raise GrammarError(f"structured output needs {expected}, got {', '.join(given) or 'none of them'}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.reasoning is not None:
            _check_family(self.reasoning)
        if self.whitespace_pattern is not None and given[0] not in ("json", "json_object"):
            raise GrammarError(f"whitespace_pattern belongs to json and json_object, not to {given[0]}")

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputs":
        """From a mapping of these fields, OpenAI's `response_format`, or a type that stands for its JSON schema."""
        if isinstance(value, cls):
            return value
        if isinstance(value, type):
            return cls(json=value)
        if not isinstance(value, Mapping):
            raise GrammarError(
                f"must be StructuredOutputs, a mapping of its fields such as {{'regex': '[0-9]+'}}, or a type, "
                f"got {reprlib.repr(value)}"
            )
        if value.get("type") == "json_object":
            return _object_of_format(value)
        if value.get("type") == "json_schema":
            return cls(json=_schema_of_format(value))
        if value.get("type") == "text":
            raise GrammarError(f"type text has no other fields, got {reprlib.repr(value)}")
        if "type" in value and not isinstance(value.get("properties"), Mapping):
            hint = "; a schema goes under 'json'" if value["type"] in _JSON_TYPES else ""
            raise GrammarError(
                f"its type must be text, json_object or json_schema, not {reprlib.repr(value['type'])}{hint}"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in value if name not in names]
        if unknown:
            hint = "; a schema goes under 'json'" if "properties" in value else ""
            raise GrammarError(f"has no field {unknown[0]!r}, only {', '.join(names)}{hint}")
        return cls(**value)


def _object_of_format(value: Mapping[str, Any]) -> StructuredOutputs:
    """`{"type": "json_object"}`, to which other engines add the `schema` of the object."""
    schema = value.get("schema")
    unknown = next((name for name in value if name not in ("type", "schema")), None)
    if unknown is not None:
        raise GrammarError(f"json_object has a schema at most, not {unknown!r:.60}")
    if schema is None:
        return StructuredOutputs(json_object=True)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise GrammarError(f"the schema of json_object must be that of an object, got {reprlib.repr(schema)}")
    return StructuredOutputs(json={"type": "object", **schema})


def _schema_of_format(value: Mapping[str, Any]) -> Any:
    """The schema of `{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}`. It is always kept to,
    `strict` or not. In the Responses API the schema stands beside the type."""
    form = value.get("json_schema", value)
    if not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping):
        raise GrammarError(f"json_schema needs an object with a schema, got {reprlib.repr(form)}")
    return form["schema"]


def _check_family(name: Any) -> None:
    from jaxinfer.text.reasoning import FAMILIES  # loads the tokenizers library

    if name not in (*FAMILIES, "none"):
        raise GrammarError(f"reasoning must be one of {', '.join((*FAMILIES, 'none'))}, got {name!r:.60}")


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{name} must be a text that is not empty, got {reprlib.repr(value)}")
    if len(value) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{name} has {len(value):,} characters, the limit is {MAX_GRAMMAR_CHARS:,}")


def _schema_text(schema: Any) -> str:
    if isinstance(schema, type):
        from jaxinfer.grammar.python_types import schema_of

        schema = schema_of(schema)
    if isinstance(schema, (Mapping, bool)):
        try:
            schema = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"json is not a JSON schema: {error}") from None
    _check_text("json", schema)
    return schema


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise GrammarError(f"choice must be a list of texts, got {reprlib.repr(value)}")
    choices = tuple(value)
    for number, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise GrammarError(f"choice {number} must be a text that is not empty, got {reprlib.repr(text)}")
    size = sum(map(len, choices))
    if not choices or len(choices) > MAX_CHOICES or size > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"choice has {len(choices)} texts of {size:,} characters, the limits are 1..{MAX_CHOICES} and "
            f"{MAX_GRAMMAR_CHARS:,}"
        )
    return tuple(dict.fromkeys(choices))
