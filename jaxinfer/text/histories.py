"""Rewrites chats into the form that a chat template reads, which is found by rendering small chats with it.

OpenAI's messages have the arguments of calls as JSON text and no content beside calls. Of the templates, most print
`arguments | tojson` or loop over them, those of DeepSeek add them to a string; some look into `content`, some ask
whether it is none. Every API passes messages on unchanged, and `fitted` adapts them to the template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxinfer.text.messages import Message, plain_json

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str | None]
"""Messages and tools to text; None where the template fails on them."""
Empty = Literal["missing", "text", "null"]
"""Content of a message that has only calls: no key, "", or None."""

_KEY, _VALUE, _CALLED, _SECOND, _TOLD, _OFFERED = "zqkey", "zqvalue", "zqcalled", "zqsecond", "zqtold", "zqoffered"
_OBJECT = {_KEY: _VALUE}
_TEXT = json.dumps(_OBJECT)
_ASKS: Message = {"role": "user", "content": "zqasked"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _OFFERED,
            "description": "zqdescribed",
            "parameters": {"type": "object", "properties": {"zqgiven": {"type": "string", "description": "zq"}}},
        },
    }
]


@dataclass(frozen=True)
class HistoryForm:
    """The form of chats that a template reads.

    Attributes:
      shows_tools, shows_calls: whether tools and calls are printed at all.
      has_text_arguments: arguments of calls are JSON text; else objects.
      empties: ways to leave the content empty with which the template prints the calls of a message that has calls and
        no content.
      keeps_calls_with_content: calls are printed beside content too. takes_reasoning_and_content: beside both.
      keeps_all_calls: all calls of a message are printed, not the first one only.
      keeps_systems: each of several system messages at the beginning is printed.
    """

    shows_tools: bool = True
    shows_calls: bool = True
    has_text_arguments: bool = False
    empties: tuple[Empty, ...] = ("missing", "text", "null")
    keeps_calls_with_content: bool = True
    takes_reasoning_and_content: bool = True
    keeps_all_calls: bool = True
    keeps_systems: bool = True

    def empty(self, wanted: Sequence[Empty] = ()) -> Empty:
        """The content of a message with calls only: the first wanted form that the template takes, or any."""
        order: tuple[Empty, ...] = (*wanted, *self.empties, "text")
        return next(form for form in order if form in self.empties or not self.empties)


def probe(render: Render) -> HistoryForm:
    """The form that a template reads; the default one where it renders not even one question."""
    if render([_ASKS], None) is None:
        return HistoryForm()
    chats = ([_ASKS], [{"role": "system", "content": "zq"}, _ASKS])
    shows_tools = any(_OFFERED in (render(chat, _TOOLS) or "") for chat in chats)
    systems = [{"role": "system", "content": text} for text in ("zqfirst", "zqsecond")]
    text = render([*systems, _ASKS], None) or ""
    form = HistoryForm(shows_tools, keeps_systems="zqfirst" in text and "zqsecond" in text)
    tools = _TOOLS if shows_tools else None
    for is_text in (False, True):
        rendered = {empty: render(_calling(is_text, empty), tools) or "" for empty in form.empties}
        num_none = min((text.count("None") for text in rendered.values() if text), default=0)
        good = tuple(empty for empty, text in rendered.items() if _is_good(text) and text.count("None") == num_none)
        beside = _is_good(render(_calling(is_text, "text", content=_TOLD), tools) or "")
        if not good and not beside:
            continue
        form = replace(form, has_text_arguments=is_text, empties=good, keeps_calls_with_content=beside)
        thought = _calling(is_text, "text", content=_TOLD)
        thought[1] |= _reasoning("zqthought")
        form = replace(form, takes_reasoning_and_content=not beside or _is_good(render(thought, tools) or ""))
        both = render(_calling(is_text, form.empty(), "" if good else _TOLD, (_CALLED, _SECOND)), tools) or ""
        return replace(form, keeps_all_calls=_SECOND in both)
    return replace(form, shows_calls=False)


def _calling(is_text: bool, empty: Empty, content: str = "", names: Sequence[str] = (_CALLED,)) -> list[Message]:
    functions = [{"name": name, "arguments": _TEXT if is_text else _OBJECT} for name in names]
    # Mistral's templates ask for ids of nine characters.
    calls = [{"id": f"zqcall00{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    turn = _with_empty({"role": "assistant", "tool_calls": calls}, empty)
    results = [{"role": "tool", "tool_call_id": call["id"], "name": _CALLED, "content": "zqresult"} for call in calls]
    return [_ASKS, {**turn, "content": content} if content else turn, *results]


def _is_good(text: str) -> bool:
    """Tells whether the call is printed, with arguments that are neither encoded twice nor Python's."""
    is_shown = all(mark in text for mark in (_CALLED, _KEY, _VALUE)) and f'\\"{_KEY}' not in text
    return is_shown and f"'{_KEY}'" not in text


def _reasoning(text: str) -> Message:
    return {"thinking": text, "reasoning_content": text}


def _with_empty(message: Message, empty: Empty) -> Message:
    message = {name: value for name, value in message.items() if name != "content"}
    return message if empty == "missing" else {**message, "content": "" if empty == "text" else None}


def needs_form(messages: Sequence[Message]) -> bool:
    """True if rendering these messages depends on the template's form: calls, or several system messages first."""
    return any(message.get("tool_calls") for message in messages) or _num_systems(messages) > 1


def fitted(messages: Sequence[Message], form: HistoryForm | None) -> list[Message]:
    """Checked messages as a template reads them. Role developer is system, and an empty list of calls is no calls.

    Args:
      form: the template's form; None if `needs_form(messages)` is False.
    """
    chat: list[Message] = []
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
        if message.get("tool_calls") == []:
            message = {name: value for name, value in message.items() if name != "tool_calls"}
        chat += _with_calls(message, form) if form is not None and "tool_calls" in message else [message]
    if form is None:
        return chat
    if not form.keeps_all_calls:
        chat = _one_by_one(chat, form)
    num = _num_systems(chat)
    if form.keeps_systems or num < 2:
        return chat
    texts = [_text_of(message["content"]) for message in chat[:num]]
    return [{**chat[0], "content": "\n\n".join(texts)}, *chat[num:]]


def _with_calls(message: Message, form: HistoryForm) -> list[Message]:
    """A message with calls; two, where the template prints either content or calls. Where it prints no calls, they are
    JSON at the end of the content."""
    calls = [_call(call, form) for call in message["tool_calls"]]
    if not form.shows_calls:
        texts = [_text_of(message.get("content"))] if message.get("content") else []
        return [{**message, "content": "\n".join([*texts, *map(_json_of, calls)]), "tool_calls": calls}]
    message = {**message, "tool_calls": calls}
    if message.get("content") and message.get("thinking") and not form.takes_reasoning_and_content:
        message |= _reasoning(f"{message['thinking']}\n{_text_of(message['content'])}") | {"content": ""}
    if message.get("content"):
        if form.keeps_calls_with_content:
            return [message]
        said = {name: value for name, value in message.items() if name != "tool_calls"}
        return [said, _with_empty(message, form.empty())]
    return [_with_empty(message, form.empty(("text",) if "content" in message else ("missing", "text")))]


def _one_by_one(messages: Sequence[Message], form: HistoryForm) -> list[Message]:
    """The messages with each call in one of its own, before its results."""
    chat: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            chat.append(message)
            continue
        num = next((number for number, later in enumerate(rest) if later["role"] != "tool"), len(rest))
        results, rest = rest[:num], rest[num:]
        for call in calls:
            bare = _with_empty({"role": message["role"]}, form.empty())
            chat.append({**(message if call is calls[0] else bare), "tool_calls": [call]})
            named = [result for result in results if (name := result.get("tool_call_id")) and name == call.get("id")]
            own = named or [result for result in results if not result.get("tool_call_id")][:1]
            chat += own
            results = [result for result in results if all(result is not other for other in own)]
        chat += results
    return chat


def _call(call: Message, form: HistoryForm) -> Message:
    """A call of either shape, with its function in an object of its own or without one."""
    function = call.get("function")
    if isinstance(function, dict):
        return {"type": "function", **call, "function": {**function, "arguments": _arguments(function, form)}}
    return {**call, "arguments": _arguments(call, form)}


def _json_of(call: Message) -> str:
    function = call.get("function", call)
    return json.dumps({name: function.get(name) for name in ("name", "arguments")}, ensure_ascii=False)


def _arguments(function: Message, form: HistoryForm) -> Any:
    """Arguments as an object or as JSON text; text that is no object, such as that of a call that was cut, stays."""
    given = function.get("arguments")
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        given = {}
    if form.has_text_arguments:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if not isinstance(given, str):
        return given
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return plain_json(read, f"arguments of the call of {function.get('name')}") if isinstance(read, dict) else given


def _num_systems(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are instructions."""
    roles = (message["role"] in ("system", "developer") for message in messages)
    return next((number for number, is_system in enumerate(roles) if not is_system), len(messages))


def _text_of(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
