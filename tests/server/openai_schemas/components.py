"""Validates answers against components of OpenAI's own description of its API; see `make.py`."""

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PATH = Path(__file__).with_name("components.json")


@functools.cache
def _schemas() -> dict[str, Any]:
    schemas = _with_nulls(json.loads(PATH.read_text(encoding="utf-8"))["schemas"])
    # What OpenAI's server and every client do, and the description leaves out: a streamed completion has no reason to
    # end until it does, and an echoed prompt's first token has no log-probability.
    chunk = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    choice = chunk["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"] = _or_null(choice["finish_reason"])
    chunk["properties"]["usage"] = _or_null(chunk["properties"]["usage"])
    echo = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    lists = echo["properties"]["choices"]["items"]["properties"]["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        lists[name] = {**lists[name], "prefixItems": [{"type": "null"}]}
    return schemas | {"CompletionChunk": chunk, "EchoedCompletion": echo}


def _or_null(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "null"}]}


def _with_nulls(schema: Any) -> Any:
    """`nullable` is of an older version of OpenAPI, and says nothing to a validator."""
    if isinstance(schema, list):
        return [_with_nulls(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_nulls(value) for name, value in schema.items() if name != "nullable"}
    return _or_null(found) if schema.get("nullable") is True else found


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}})


@functools.cache
def _events() -> dict[str, str]:
    """The component of each event of the responses API, by its type."""
    schemas = _schemas()
    names = [one["$ref"].rpartition("/")[2] for one in schemas["ResponseStreamEvent"]["anyOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def errors(name: str, value: Any) -> list[str]:
    """What of a value is not as the component says; [] for nothing. "ResponseStreamEvent" takes the event's own
    component."""
    if name == "ResponseStreamEvent":
        if value.get("type") not in _events():
            return [f"OpenAI has no event {value.get('type')!r}"]
        name = _events()[value["type"]]
    return [f"{name}{one.json_path[1:]}: {one.message:.300}" for one in _validator(name).iter_errors(value)]
