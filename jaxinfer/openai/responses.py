"""The responses API: its items as messages of a chat, and answers as its items. Nothing is stored."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, structs

from jaxinfer.openai import response_types as types
from jaxinfer.openai.bodies import ResponsesRequest
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.fields import check_neutral
from jaxinfer.openai.reader import given, scheduling, structured_of
from jaxinfer.openai.requests import BoundRequest, TextRequest
from jaxinfer.openai.response_types import Item
from jaxinfer.openai.writer import usage
from jaxinfer.text.messages import check_call
from jaxinfer.tool_calls import ToolCall

if TYPE_CHECKING:
    from jaxinfer.engine.request import CompletionOutput, RequestOutput
    from jaxinfer.text import Tokenizer

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
_FORMAT = "text.format"
_FUNCTION = ("name", "description", "parameters", "strict")
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of the ids of items


# From items.


def read_response(body: ResponsesRequest, *, ignore_unknown: bool = False) -> TextRequest:
    """A response's request: its items as messages. Raises RequestError or another ValueError, with the place.

    Tools that only OpenAI has, which agents send unasked, are among what is ignored.
    """
    if "message.output_text.logprobs" in (body.include or ()):
        raise RequestError("include: message.output_text.logprobs is not supported: leave it out", "include")
    check_neutral("text.verbosity", (body.text or {}).get("verbosity"), ("medium",))
    sampling = given(body, _SAMPLING) | structured_of({"response_format": (body.text or {}).get("format")}, _FORMAT)
    if body.max_output_tokens is not None:
        sampling["max_tokens"] = body.max_output_tokens
    turns = [({"role": "system", "content": body.instructions}, "instructions")] if body.instructions else []
    if isinstance(body.input, str):
        turns.append(({"role": "user", "content": body.input}, "input"))
    elif not body.input:
        raise RequestError("input is empty: a conversation needs at least one item", "input")
    else:
        turns += _turns(body.input)
    hosted = {_kind(tool, number) for number, tool in enumerate(body.tools or ())} - {"function"}
    return TextRequest(
        sampling,
        {"max_tokens": "max_output_tokens", "structured": _FORMAT},
        messages=[turn for turn, _ in turns],
        places=[place for _, place in turns],
        source="input",
        ignore_unknown=ignore_unknown,
        tools=[_as_chat(tool) for tool in body.tools or () if tool.get("type") == "function"],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        tool_path="",
        effort=(body.reasoning or {}).get("effort"),
        effort_name="reasoning.effort",
        ignored=tuple(f"tools of type {kind:.80}" for kind in sorted(hosted)),
        **scheduling(body),
    )


def _kind(tool: Mapping[str, Any], number: int) -> str:
    if not isinstance(kind := tool.get("type"), str) or not kind:
        raise RequestError(f"tools[{number}].type must be a text such as 'function', got {kind!r:.60}", "tools")
    return kind


def _as_chat(tool: Mapping[str, Any], names: Sequence[str] = _FUNCTION) -> dict[str, Any]:
    """A tool, or the choice of one, as chat completions have it: there a function is an object of its own."""
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _choice(choice: Any) -> Any:
    """A choice of tools as chat completions have it. Raises RequestError for one of a tool that only OpenAI has."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return _as_chat(choice, ("name",))
    if kind == "allowed_tools":
        tools = choice.get("tools")
        named = [_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    told = f"tool_choice names a tool of type {kind!r:.60}: only functions can be called"
    raise RequestError(told, "tool_choice")


def _turns(items: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Items of an input as messages of a chat template, each with the place of its first item.

    Reasoning belongs to the assistant's turn that goes on after it, with text or with calls; where none does, it is a
    turn of its own.
    """
    turns: list[tuple[dict[str, Any], str]] = []
    thoughts: list[str] = []
    last: dict[str, Any] = {}

    def add(turn: dict[str, Any], where: str) -> dict[str, Any]:
        turns.append((turn, where))
        return turn

    for number, item in enumerate(items):
        kind, where = item.get("type") or "message", f"input[{number}]"
        if kind == "reasoning":
            name = "content" if item.get("content") else "summary"
            thoughts += _texts(item.get(name) or [], f"{where}.{name}")
            continue
        is_assistants = kind == "function_call" or (kind == "message" and item.get("role") == "assistant")
        if thoughts and not is_assistants:
            last = add({"role": "assistant", "content": ""}, where)
            last["reasoning_content"], thoughts = "\n".join(thoughts), []
        if kind == "message":
            named = {"name": item["name"]} if item.get("name") else {}
            last = add({"role": item.get("role"), "content": item.get("content"), **named}, where)
        elif kind == "function_call":
            check_call(item, where)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if last.get("role") != "assistant":
                last = add({"role": "assistant"}, where)
            calls = last.setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            output = item.get("output")
            if output is None:
                raise RequestError(f"{where}.output is missing; it may be an empty text", f"{where}.output")
            text = output if isinstance(output, (str, list)) else json.dumps(output)
            last = add({"role": "tool", "tool_call_id": item.get("call_id"), "content": text}, where)
        else:
            raise RequestError(f"{where}: an item of type {kind!r:.60} is not supported", where)
        if thoughts:
            before = [last["reasoning_content"]] if "reasoning_content" in last else []
            last["reasoning_content"], thoughts = "\n".join([*before, *thoughts]), []
    if thoughts:
        add({"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)}, f"input[{len(items) - 1}]")
    return turns


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list):
        raise RequestError(f"{where} must be a list of parts", where)
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{number}] must be a part with a text, not {part!r:.60}", f"{where}[{number}]")
    return [part["text"] for part in parts]


# To items.


class ResponseWriter:
    """The object of one response.

    Args:
      about: its id without a prefix, its time and the model's name. tokenizer: of the model, which counts tokens of
        reasoning, about: a model may write it with others.
    """

    def __init__(
        self, body: ResponsesRequest, request: BoundRequest, about: Mapping[str, Any], tokenizer: "Tokenizer | None"
    ):
        self._id, self._tokenizer = about["id"], tokenizer
        self.begun = types.Response(
            id=f"resp_{self._id}",
            object="response",
            created_at=about["created"],
            status="in_progress",
            error=None,
            incomplete_details=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=about["model"],
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={"effort": (body.reasoning or {}).get("effort"), "summary": None},
            store=False,
            temperature=request.params.temperature,
            text={"format": {"type": "text"}, **(body.text or {})},
            tool_choice=body.tool_choice or "auto",
            tools=[_shown(tool) for tool in body.tools or ()],
            top_p=request.params.top_p,
            truncation="disabled",
            user=UNSET if body.user is None else body.user,
        )

    def whole(self, output: "RequestOutput", items: Sequence[Item] | None = None) -> types.Response:
        """The response when it is complete; `items` are made of the output where they are not given."""
        (answer,) = output.outputs
        items = self._items_of(answer) if items is None else items
        is_cut, counted = answer.finish_reason == "length", usage([output])
        thought = "".join(part.text for item in items if isinstance(item, types.ReasoningItem) for part in item.content)
        num_thought = 0
        if thought and self._tokenizer is not None:
            num_thought = len(self._tokenizer.encode(thought, add_special_tokens=False))
        return structs.replace(
            self.begun,
            status="incomplete" if is_cut else "completed",
            incomplete_details=types.Incomplete(reason="max_output_tokens") if is_cut else None,
            output=list(items),
            usage=types.ResponseUsage(
                input_tokens=counted.prompt_tokens,
                input_tokens_details=types.InputDetails(cached_tokens=output.num_cached_tokens, cache_write_tokens=0),
                output_tokens=counted.completion_tokens,
                output_tokens_details=types.OutputDetails(reasoning_tokens=num_thought),
                total_tokens=counted.total_tokens,
            ),
        )

    def _items_of(self, answer: "CompletionOutput") -> list[Item]:
        """A whole answer, told apart, as items."""
        calls = answer.tool_calls or ()
        items = [self.item("reasoning", answer.reasoning, 0)] if answer.reasoning else []
        if answer.text or not (answer.reasoning or calls):
            status = "incomplete" if answer.finish_reason == "length" else "completed"
            items.append(self.item("message", answer.text, 0, status))
        return items + [self.item("function_call", call.arguments, i, call=call) for i, call in enumerate(calls)]

    def item(self, kind: str, text: str, number: int, status: Any = "completed", call: ToolCall | None = None) -> Item:
        """An item. `number`: how many of its kind are before it."""
        item_id = f"{_PREFIXES[kind]}_{self._id}{f'_{number}' if number else ''}"
        if call is not None:
            return types.FunctionCall(id=item_id, status=status, call_id=call.id, name=call.name, arguments=text)
        content: list[Any] = [part(kind, text)] if text or status != "in_progress" else []
        if kind == "reasoning":
            return types.ReasoningItem(id=item_id, summary=[], content=content)
        return types.OutputMessage(id=item_id, status=status, role="assistant", content=content)


def part(kind: str, text: str) -> types.OutputText | types.ReasoningText:
    """The only part of a message or of the reasoning."""
    if kind == "reasoning":
        return types.ReasoningText(text=text)
    return types.OutputText(text=text, annotations=[], logprobs=[])


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as an answer repeats it: a function's optional fields are there."""
    return dict(tool) if tool.get("type") != "function" else {"strict": False, "parameters": None, **tool}
