"""Checks of the input of a chat template: plain JSON data, valid Unicode, known names."""

import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROLE_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEYWORD_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MAX_DEPTH = 32
_MAX_ARGUMENT_VALUES = 1 << 16  # limit on values in the arguments of a call: parsing time grows with their number

# Names of a message, at every depth, that are here for a reason: those that templates read, and those that clients of
# OpenAI and Ollama send back with an answer. A template may read others.
_PART_NAMES = {
    **dict.fromkeys(("type", "text", "annotations", "logprobs", "citations", "cache_control", "parsed")),
    **dict.fromkeys(("prompt_cache_breakpoint", "id", "index", "extras")),
    "*types": ("text", "input_text", "output_text"),  # as of `jaxinfer.checks.TYPES`
}
_CALL_NAMES = {
    **dict.fromkeys(("id", "type", "index", "name", "arguments", "custom", "provider_specific_fields")),
    "function": dict.fromkeys(("name", "arguments", "index", "description", "parsed_arguments")),
}
MESSAGE_NAMES: Mapping[str, Any] = {
    **dict.fromkeys(("role", "name", "tool_call_id", "tool_name", "reasoning_content", "reasoning", "thinking")),
    **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "id", "index", "type", "status", "images")),
    **dict.fromkeys(("parsed", "cache_control", "provider_specific_fields")),
    "content": _PART_NAMES,
    "tool_calls": _CALL_NAMES,
}
_TEXT_PARTS = ("text", "input_text", "output_text")

# The names a message's reasoning is passed under; templates read the first (gpt-oss the second).
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# What the engine passes itself, the functions of the sandbox, and Jinja's own names.
_RESERVED_KEYWORDS = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"),
        *("range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"),
        *("loop", "self", "caller", "varargs", "kwargs", "true", "false", "none"),
    )
)

Message = dict[str, Any]


class MessageError(ValueError):
    """Messages that cannot be rendered. `parameter` is the path of the wrong field, with which the sentence begins."""

    def __init__(self, sentence: str):
        super().__init__(sentence)
        self.parameter = sentence.removeprefix("a key of ").partition(" ")[0].rstrip(":;,")


def check_messages(messages: Sequence[Mapping[str, Any]], places: Sequence[str] | None = None) -> list[Message]:
    """Return the messages as fresh plain JSON data.

    A message is a dict with a `role` of letters, digits, `_` and `-`, and a `content`: a string, a list of
    `{"type": "text", "text": ...}` parts, of which nothing else is kept, or None where there are `tool_calls`. Other
    keys are passed on to the template. Keys with the value None are dropped and a reasoning field is copied to the
    names templates use, both as Transformers does. A `refusal` is the content where there is no other.

    Args:
        places: Names of the messages for errors, `messages[0]` and so on by default.

    Raises MessageError: naming the message and the field.
    """
    if not isinstance(messages, (list, tuple)):
        raise MessageError(f"messages must be a list of dicts, not {type(messages).__name__}")
    if not messages:
        raise MessageError("messages is empty; a chat needs at least one message")
    try:
        places = places or [f"messages[{index}]" for index in range(len(messages))]
        return [_check_message(message, place) for message, place in zip(messages, places, strict=True)]
    except MessageError:
        raise
    except ValueError as error:
        raise MessageError(str(error)) from None


def _check_message(message: Any, path: str) -> Message:
    plain = plain_json(message, path)
    if not isinstance(plain, dict):
        raise MessageError(f"{path} must be a dict with a role and a content, not {type(message).__name__}")
    plain = {key: value for key, value in plain.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or ROLE_PATTERN.fullmatch(role) is None:
        raise MessageError(f"{path}.role must be 1 to 64 letters, digits, '_' or '-', not {role!r:.80}")
    if "function_call" in plain:
        raise MessageError(f"{path}.function_call is not supported: give the call in a list, as tool_calls")
    for name in ("audio", "images"):
        if plain.pop(name, None):
            raise MessageError(f"{path}.{name} is not supported: models here read text")
    refusal = plain.pop("refusal", None)
    if refusal and not plain.get("content"):
        plain["content"] = refusal
    calls = plain.get("tool_calls")
    if calls is not None:
        _check_calls(calls, f"{path}.tool_calls")
    given = next((name for name in _REASONING_FIELDS if name in plain), None)
    reasoning = None if given is None else plain[given]
    if reasoning is not None and not isinstance(reasoning, str):
        raise MessageError(f"{path}.{given} must be a string, not {type(reasoning).__name__}")
    content = plain.get("content")
    if content is None:
        if reasoning and not calls:  # an answer that was cut within its reasoning
            plain["content"] = ""
        elif not calls:
            raise MessageError(f"{path}.content is missing; only a message with tool_calls may leave it out")
    elif isinstance(content, list):
        plain["content"] = [_text_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
    elif not isinstance(content, str):
        raise MessageError(f"{path}.content must be a string or a list of text parts, not {type(content).__name__}")
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _text_part(part: Any, path: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise MessageError(f"{path}: only parts of type text are supported, not {reprlib.repr(kind or part)}")
    if not isinstance(part.get("text"), str):
        raise MessageError(f"{path}.text must be a string, not {reprlib.repr(part.get('text'))}")
    return {"type": "text", "text": part["text"]}


def _check_calls(calls: Any, path: str) -> None:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MessageError(f"{path} must be a list of dicts")
    for index, call in enumerate(calls):
        place = f"{path}[{index}]"
        if call.get("type") not in (None, "", "function"):
            raise MessageError(f"{place}.type must be function, not {call['type']!r:.60}")
        if "function" in call:
            check_call(call["function"], f"{place}.function")
        else:
            check_call(call, place)


def check_call(function: Any, path: str) -> None:
    """Refuse a call without a name, or with arguments that are neither JSON text nor an object.

    Raises MessageError: naming the field.
    """
    if not isinstance(function, dict):
        raise MessageError(f"{path} must be a dict with a name and arguments, not {type(function).__name__}")
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str) and sum(map(arguments.count, ",[{")) > _MAX_ARGUMENT_VALUES:
        raise MessageError(f"{path}.arguments has more than {_MAX_ARGUMENT_VALUES:,} values")
    if not isinstance(name, str):
        raise MessageError(f"{path}.name must be a string, not {type(name).__name__}")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise MessageError(f"{path}.arguments must be JSON text or an object, not {type(arguments).__name__}")


def with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> Sequence[Mapping[str, Any]]:
    """Prepends a system message with this text, unless it is None or the messages have a system or developer
    message."""
    roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
    if system is None or "system" in roles or "developer" in roles:
        return messages
    return [{"role": "system", "content": system}, *messages]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools (JSON schemas) as fresh plain JSON data, or None."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"tools must be a list of dicts, not {type(tools).__name__}")
    plain = [plain_json(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    for index, tool in enumerate(plain):
        if not isinstance(tool, dict):
            raise ValueError(f"tools[{index}] must be a dict (a JSON schema), not {type(tool).__name__}")
    return plain


def check_template_kwargs(kwargs: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """Return extra template variables (`enable_thinking=False`) as plain JSON data.

    Raises ValueError: a value that is not JSON data, or a name that would replace something a template relies on.
    """
    for name in kwargs:
        if _KEYWORD_PATTERN.fullmatch(name) is None:
            raise ValueError(f"template variable {name!r:.80} must start with a letter and be a plain name")
        if name in _RESERVED_KEYWORDS or name in special_tokens or name.endswith("_token"):
            raise ValueError(f"template variable {name!r} is set by the engine and cannot be overridden")
    return {name: plain_json(value, name) for name, value in kwargs.items()}


def plain_json(value: Any, path: str, depth: int = 0) -> Any:
    """Copy JSON data, refusing everything else: an object's methods would be open to the template."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return check_text(str.__str__(value), path)
    if type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON cannot hold")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r:.80}; keys must be strings")
        # Keys are cut in the path: it is copied for every value below, and long keys would take quadratic time.
        return {
            check_text(str.__str__(key), f"a key of {path}"): plain_json(item, f"{path}.{key:.40}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise ValueError(f"{path} must be plain JSON data, not {type(value).__name__}")


def check_text(text: str, path: str) -> str:
    """Refuse text that is not valid Unicode (half a surrogate pair, from a cut JSON escape)."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} has a lone surrogate at character {error.start}: not valid text") from None
    return text


def text_leaves(value: Any) -> Iterator[str]:
    """Every string in JSON data, dict keys included, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from text_leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from text_leaves(item)


def num_chars(value: Any, depth: int = 0) -> int:
    """Total length of all strings, not keys, in data that was not checked yet, down to the depth that is allowed."""
    if isinstance(value, str):
        return len(value)
    if depth > _MAX_DEPTH or not isinstance(value, (Mapping, list, tuple)):
        return 0
    return sum(num_chars(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value))
