"""/v1/responses without a store: every request brings its whole conversation."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import CompletionOutput, RequestOutput, StreamDelta
from jaxinfer.openai.bodies import Names, ResponsesRequest, any_of
from jaxinfer.openai.fields import check_names, check_neutral
from jaxinfer.openai.requests import BoundRequest, TextRequest, renamed, structured_of
from jaxinfer.server.answering import answer_headers, begin, usage_of
from jaxinfer.server.chunks import named_event
from jaxinfer.server.errors import APIError, refused
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import EventStream, json_response, read_body, while_connected
from jaxinfer.server.models import ServedModel
from jaxinfer.server.params import bind, check_sizes
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.text.messages import check_call
from jaxinfer.tool_calls import ToolCall, ToolCallDelta

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
_TOOL = any_of("type", "name", "description", "parameters", "strict")
_CHOICE: Names = {**_TOOL, "mode": None, "tools": _TOOL}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of the ids of items
_DELTAS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


async def responses(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream of events."""
    service.check_accepts()
    body = await read_body(request, ResponsesRequest, service)

    def read(model: ServedModel) -> BoundRequest:
        check_sizes(body, model)
        return bind(_read(body, service), model)

    generation, position = await begin(request, service, body, read, can_resume=False)
    headers = answer_headers(generation.model, position)
    about = _About(body, generation, position)
    if body.stream:
        events = generation.events(about)
        return EventStream(events, generation.close, about.error_event, service.options.send_timeout, headers)
    try:
        (output,) = await while_connected(request.receive, generation.run())
    finally:
        generation.close()
    return json_response(about.whole(about.items(generation.read(output).outputs[0]), output), headers)


# From the form of the responses API.


def _read(body: ResponsesRequest, service: Service) -> TextRequest:
    if "message.output_text.logprobs" in (body.include or ()):
        raise refused("include", "include: message.output_text.logprobs is not supported: leave it out")
    check_neutral("text.verbosity", (body.text or {}).get("verbosity"), ("medium",))
    others = sorted({f"{tool.get('type')!s:.80}" for tool in body.tools or () if tool.get("type") != "function"})
    service.log_unknown([f"tools of type {kind}" for kind in others], "/v1/responses")  # agents send them unasked
    tools = [_tool(tool) for tool in body.tools or () if tool.get("type") == "function"]
    if not service.options.ignore_unknown_fields:
        check_names([tool for tool in body.tools or () if tool.get("type") == "function"], _TOOL, "tools")
        check_names(body.tool_choice, _CHOICE, "tool_choice")
    sampling = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.max_output_tokens is not None:
        sampling["max_tokens"] = body.max_output_tokens
    with renamed("response_format", "text.format"):
        sampling |= structured_of({"response_format": (body.text or {}).get("format")})
    found = [({"role": "system", "content": body.instructions}, "instructions")] if body.instructions else []
    if isinstance(body.input, str):
        found.append(({"role": "user", "content": body.input}, "input"))
    elif not body.input:
        raise refused("input", "input is empty: a conversation needs at least one item")
    else:
        found += _turns(body.input)
    return TextRequest(
        sampling,
        {"max_tokens": "max_output_tokens", "structured": "text.format"},
        messages=[one for one, _ in found],
        places=[place for _, place in found],
        source="input",
        tools=tools,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        tool_path="",
        effort=(body.reasoning or {}).get("effort"),
        effort_name="reasoning.effort",
        priority=body.priority or 0,
        timeout=body.timeout,
        cache_salt=body.cache_salt or "",
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    """A choice of tools as chat completions have it: there the name of a function is in an object of its own."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def _turns(items: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Items of an input as messages of a chat template, each with the place of its first item.

    Reasoning belongs to the assistant's turn that goes on after it, with text or with calls; where none does, it is a
    turn of its own.
    """
    found: list[tuple[dict[str, Any], str]] = []
    thoughts: list[str] = []
    last: dict[str, Any] = {}

    def add(turn: dict[str, Any], where: str) -> dict[str, Any]:
        found.append((turn, where))
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
            last = add({"role": item.get("role"), "content": item.get("content")}, where)
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
                raise refused(f"{where}.output", f"{where}.output is missing; it may be an empty text")
            text = output if isinstance(output, (str, list)) else json.dumps(output)
            last = add({"role": "tool", "tool_call_id": item.get("call_id"), "content": text}, where)
        else:
            raise refused(where, f"{where}: an item of type {kind!r:.60} is not supported")
        if thoughts:
            before = [last["reasoning_content"]] if "reasoning_content" in last else []
            last["reasoning_content"], thoughts = "\n".join([*before, *thoughts]), []
    if thoughts:
        add({"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)}, f"input[{len(items) - 1}]")
    return found


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list):
        raise refused(where, f"{where} must be a list of parts")
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise refused(f"{where}[{number}]", f"{where}[{number}] must be a part with a text, not {part!r:.60}")
    return [part["text"] for part in parts]


# To the form of the responses API.


class _About:
    """The object of one response, and the events of its stream."""

    def __init__(self, body: ResponsesRequest, generation: Generation, position: StreamPosition):
        self._body, self._generation, self._id = body, generation, position.answer_id
        self._number = -1
        # What was streamed: items that are complete, and the kind, the text and the call of the one that is not.
        self._items: list[dict[str, Any]] = []
        self._kind, self._text, self._call = "", "", ToolCall("", "", "")
        params = generation.job.params
        self._base: dict[str, Any] = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": position.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": generation.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
        }
        if body.user is not None:
            self._base["user"] = body.user

    def items(self, answer: CompletionOutput) -> list[dict[str, Any]]:
        """A whole answer as items."""
        found, calls = (
            [self._item("reasoning", answer.reasoning, 0)] if answer.reasoning else [],
            answer.tool_calls or (),
        )
        if answer.text or not (answer.reasoning or calls):
            status = "incomplete" if answer.finish_reason == "length" else "completed"
            found.append(self._item("message", answer.text, 0, status))
        return found + [self._item("function_call", one.arguments, i, call=one) for i, one in enumerate(calls)]

    def whole(self, items: list[dict[str, Any]], output: RequestOutput) -> dict[str, Any]:
        """The object of the response when it is complete."""
        is_cut = output.outputs[0].finish_reason == "length"
        counted = usage_of([output])
        thought = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
        return {
            **self._base,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": counted.prompt_tokens,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": counted.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._generation.count_tokens(thought)},
                "total_tokens": counted.total_tokens,
            },
        }

    def _item(
        self, kind: str, text: str, number: int, status: str = "completed", call: ToolCall | None = None
    ) -> dict[str, Any]:
        """An item. `number`: how many of its kind are before it."""
        item_id = f"{_PREFIXES[kind]}_{self._id}{f'_{number}' if number else ''}"
        if call is not None:
            about = {"call_id": call.id, "name": call.name, "arguments": text}
            return {"id": item_id, "type": kind, "status": status, **about}
        content = [_part(kind, text)] if text or status != "in_progress" else []
        if kind == "reasoning":
            return {"id": item_id, "type": kind, "summary": [], "content": content}
        return {"id": item_id, "type": kind, "status": status, "role": "assistant", "content": content}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": self._number, **fields})

    def error_event(self, error: APIError) -> bytes:
        return self._event("error", code=error.code or error.type, message=error.message, param=error.param)

    # The format of its stream.

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._base)
        return created + self._event("response.in_progress", response=self._base)

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        found = b""
        if reasoning:
            found += self._extend("reasoning", reasoning)
        if delta.text:
            found += self._extend("message", delta.text)
        if call is not None:
            if call.id is not None and call.name is not None:
                found += self._open("function_call", ToolCall(call.id, call.name, ""))
            if call.arguments:
                found += self._extend("function_call", call.arguments)
        return found

    def finish(self) -> bytes:
        (output,) = self._generation.outputs
        found = b"" if self._kind else self._open("message")
        is_cut = output.outputs[0].finish_reason == "length"
        found += self._close("incomplete" if is_cut and self._kind == "message" else "completed")
        whole = self.whole(self._items, output)
        return found + self._event(f"response.{whole['status']}", response=whole)

    def _extend(self, kind: str, text: str) -> bytes:
        """Adds text to the open item, or to a new one where that is of another kind."""
        found = b"" if self._kind == kind else self._open(kind)
        self._text += text
        more = {"logprobs": []} if kind == "message" else {}
        return found + self._event(f"response.{_DELTAS[kind]}.delta", **self._where(), delta=text, **more)

    def _open(self, kind: str, call: ToolCall | None = None) -> bytes:
        found = self._close()
        self._kind, self._text, self._call = kind, "", call or self._call
        item = self._open_item("in_progress")
        found += self._event("response.output_item.added", output_index=len(self._items), item=item)
        if kind == "function_call":
            return found
        return found + self._event("response.content_part.added", **self._where(), part=_part(kind, ""))

    def _close(self, status: str = "completed") -> bytes:
        """Ends the open item, if there is one."""
        kind, text = self._kind, self._text
        if not kind:
            return b""
        if kind == "function_call":
            done = self._event(
                "response.function_call_arguments.done", **self._where(), name=self._call.name, arguments=text
            )
        else:
            more = {"logprobs": []} if kind == "message" else {}
            done = self._event(f"response.{_DELTAS[kind]}.done", **self._where(), text=text, **more)
            done += self._event("response.content_part.done", **self._where(), part=_part(kind, text))
        item = self._open_item(status)
        done += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return done

    def _open_item(self, status: str) -> dict[str, Any]:
        number = sum(item["type"] == self._kind for item in self._items)
        call = self._call if self._kind == "function_call" else None
        return self._item(self._kind, self._text, number, status, call)

    def _where(self) -> dict[str, Any]:
        where = {"item_id": self._open_item("in_progress")["id"], "output_index": len(self._items)}
        return where if self._kind == "function_call" else {**where, "content_index": 0}


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as an answer repeats it: a function's optional fields are there."""
    return tool if tool.get("type") != "function" else {"strict": False, "parameters": None, **tool}


def _part(kind: str, text: str) -> dict[str, Any]:
    """The only part of a message or of the reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
