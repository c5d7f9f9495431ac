"""Takes from OpenAI's description of its API what the tests validate our answers against:

    git clone https://github.com/openai/openai-openapi
    python -m tests.server.openai_schemas.make openai-openapi/openapi.json

Keeps the components of the answers and all that they refer to, unchanged but for descriptions and examples.
"""

import json
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("components.json")
ANSWERS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "ErrorResponse",
    "ListModelsResponse",
    "Response",
    "ResponseStreamEvent",
)
_PROSE = ("description", "example", "examples", "title")


def main(source: Path) -> None:
    """Writes components.json."""
    whole = json.loads(source.read_text(encoding="utf-8"))
    every = whole["components"]["schemas"]
    kept: dict[str, Any] = {}
    missing = list(ANSWERS)
    while missing:
        name = missing.pop()
        if name not in kept:
            kept[name] = _without_prose(every[name])
            missing += _references(kept[name])
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name], sort_keys=True)}" for name in sorted(kept))
    version = json.dumps(f"{whole['info']['title']} {whole['info']['version']}")
    text = f'{{"source": {version}, "schemas": {{\n' + ",\n".join(lines) + "\n}}\n"
    PATH.write_text(text, encoding="utf-8")
    print(f"{len(kept)} components, {len(text) // 1000} KB")


def _without_prose(schema: Any, is_properties: bool = False) -> Any:
    if isinstance(schema, list):
        return [_without_prose(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_prose(value, name == "properties" and not is_properties)
        for name, value in schema.items()
        if is_properties or (name not in _PROSE and not name.startswith("x-"))
    }


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for one in schema for name in _references(one)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + _references(list(schema.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
