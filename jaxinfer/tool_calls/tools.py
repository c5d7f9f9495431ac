"""The tools that a request offers, which of them may be called, and whether one must be."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxinfer.text.messages import plain_json

Mode = Literal["none", "auto", "required"]

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 32_768
MAX_SCHEMA_CHARS = 262_144
"""Characters of one tool's parameters as JSON."""
MAX_TOTAL_CHARS = 1_048_576
"""Characters of the parameters and descriptions of all tools together."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the caller may run for the model.

    Attributes:
      parameters: JSON schema of the arguments, an object. is_strict: the caller wants arguments that match it, always.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_PARAMETERS))
    description: str = ""
    is_strict: bool = False


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how they may be called.

    Attributes:
      tools: those that may be called. mode: whether a call is impossible, possible or demanded. is_parallel: whether an
        answer may have several calls.
    """

    tools: tuple[Tool, ...]
    mode: Mode
    is_parallel: bool

    @property
    def needs_grammar(self) -> bool:
        """True if only a grammar gives what is requested: a call, at most one, or arguments that match a schema."""
        if self.mode == "auto":
            return bool(self.tools) and (not self.is_parallel or any(tool.is_strict for tool in self.tools))
        return self.mode == "required"


def check_tools(tools: Any, tool_choice: Any = None, parallel_tool_calls: bool | None = None) -> ToolUse:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls` of an OpenAI chat completion.

    `tool_choice` is "none", "auto", "required", `{"type": "function", "function": {"name": ...}}` (exactly one call of
    it) or `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`.

    Raises ValueError: with the place of what is wrong or too large.
    """
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise ValueError(f"tools must be a list, not {type(tools).__name__}")
    if tools is not None and len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools):,} entries; at most {MAX_TOOLS} are allowed")
    by_name: dict[str, Tool] = {}
    num_chars = 0
    for index, entry in enumerate(tools or ()):
        tool, size = _read_tool(entry, f"tools[{index}]")
        if tool.name in by_name:
            raise ValueError(f"tools[{index}].function.name {tool.name!r} is the name of two tools")
        by_name[tool.name] = tool
        num_chars += size
        if num_chars > MAX_TOTAL_CHARS:
            raise ValueError(f"tools[0] to tools[{index}] have more than {MAX_TOTAL_CHARS:,} characters together")
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise ValueError(f"parallel_tool_calls must be true or false, not {parallel_tool_calls!r:.80}")
    mode, names = _read_choice(tool_choice, by_name)
    is_parallel = parallel_tool_calls is not False
    if names is not None:
        by_name = {name: by_name[name] for name in names}
        is_parallel = is_parallel and tool_choice.get("type") != "function"
    return ToolUse(tuple(by_name.values()), mode, is_parallel)


def _read_tool(entry: Any, path: str) -> tuple[Tool, int]:
    """A tool, and the characters of its schema and description."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{path} must be an object, not {type(entry).__name__}")
    if entry.get("type") != "function":
        raise ValueError(f"{path}.type must be 'function', not {entry.get('type')!r:.80}")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{path}.function must be an object, not {type(function).__name__}")
    path += ".function"
    name = function.get("name")
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        raise ValueError(f"{path}.name must be 1 to 64 letters, digits, '_', '-' or '.', not {name!r:.80}")
    description = function.get("description")
    if description is None:
        description = ""
    if not isinstance(description, str):
        raise ValueError(f"{path}.description must be a string, not {type(description).__name__}")
    if len(description) > MAX_DESCRIPTION_CHARS:
        raise ValueError(
            f"{path}.description has {len(description):,} characters; at most {MAX_DESCRIPTION_CHARS:,} are allowed"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{path}.strict must be true or false, not {strict!r:.80}")
    given = function.get("parameters")
    parameters = dict(_NO_PARAMETERS) if given is None else plain_json(given, f"{path}.parameters")
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError(f"{path}.parameters must be a JSON schema of type 'object'")
    size = len(json.dumps(parameters, ensure_ascii=False))
    if size > MAX_SCHEMA_CHARS:
        raise ValueError(f"{path}.parameters has {size:,} characters as JSON; at most {MAX_SCHEMA_CHARS:,} are allowed")
    return Tool(name, parameters, description, bool(strict)), size + len(description)


def _read_choice(choice: Any, tools: Mapping[str, Tool]) -> tuple[Mode, Sequence[str] | None]:
    """The mode, and the names of the tools that may be called where the choice says so."""
    if choice in (None, ""):
        return ("auto" if tools else "none"), None
    if choice in ("none", "auto", "required") and isinstance(choice, str):
        if choice == "required" and not tools:
            raise ValueError("tool_choice='required' needs tools")
        return (choice if tools else "none"), None
    if not isinstance(choice, Mapping):
        raise ValueError(f"tool_choice must be 'none', 'auto', 'required' or an object, not {choice!r:.80}")
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(entries, (list, tuple)) or not entries:
            raise ValueError("tool_choice.allowed_tools must have a mode, 'auto' or 'required', and a list of tools")
        if len(entries) > MAX_TOOLS:
            raise ValueError(f"tool_choice.allowed_tools.tools has more than {MAX_TOOLS} entries")
        names = [
            _chosen_name(entry, tools, f"tool_choice.allowed_tools.tools[{index}]")
            for index, entry in enumerate(entries)
        ]
        return mode, list(dict.fromkeys(names))
    return "required", [_chosen_name(choice, tools, "tool_choice")]


def _chosen_name(entry: Any, tools: Mapping[str, Tool], path: str) -> str:
    function = entry.get("function") if isinstance(entry, Mapping) and entry.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"{path} must be {{'type': 'function', 'function': {{'name': ...}}}}, not {entry!r:.80}")
    if name not in tools:
        raise ValueError(f"{path}.function.name {name!r:.80} is not among the tools")
    return name
