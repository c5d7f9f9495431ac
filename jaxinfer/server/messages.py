"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat."""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.openai.reader import given, scheduling, structured_of
from jaxinfer.openai.requests import TextRequest
from jaxinfer.openai.writer import ending
from jaxinfer.server.answering import answer, bind, continuing, named_event, reasoning_switch, with_position
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.errors import client_errors
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import in_thread, json_response, read_body, record_of, using
from jaxinfer.server.models import ServedModel
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.server.types import CountTokensRequest, MessagesRequest
from jaxinfer.text.messages import check_call
from jaxinfer.tool_calls import ToolCall, ToolCallDelta

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_FORMAT = "output_config.format"


async def messages(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream."""
    body = await read_body(request, MessagesRequest, service)
    return await answer(request, service, body, lambda model: _read(body, model), _MessageForm)


async def count_tokens(request: Request, service: Service) -> Response:
    """The number of tokens of a conversation."""
    body = await read_body(request, CountTokensRequest, service)

    async with using(request, service, body) as model:

        def read() -> int:
            (ids,) = bind(request, service, body, lambda model: _read(body, model), model).prompts(model.texts)
            return len(ids)

        with client_errors("messages"):
            num_tokens = await in_thread(record_of(request.scope), read)
    return json_response({"input_tokens": num_tokens})


# From Anthropic's form.


def _read(body: MessagesRequest | CountTokensRequest, model: ServedModel) -> TextRequest:
    turns: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else "\n".join(_texts(body.system, "system"))
        turns.append({"role": "system", "content": system})
    places = ["system"] * len(turns)
    for number, message in enumerate(body.messages):
        turns += _turns(message, f"messages[{number}]")
        places += [f"messages[{number}]"] * (len(turns) - len(places))
    if not turns:
        raise refused("messages", "messages is empty; a chat needs at least one message")
    kwargs, output = continuing(turns), body.output_config or {}
    if body.thinking is not None:
        about = f"thinking of type {body.thinking.type}"
        kwargs |= reasoning_switch(body.thinking.type != "disabled", model, "thinking", about)
    if (effort := output.get("effort")) and "reasoning_effort" in model.template:  # clients send it unasked
        kwargs["reasoning_effort"] = effort
    choice, is_alone = _choice(body.tool_choice or {})
    more: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise refused("max_tokens", f"max_tokens={body.max_tokens} must be at least 1")
        sampling = given(body, _SAMPLING) | structured_of({"response_format": output.get("format")}, _FORMAT)
        if body.stop_sequences:
            sampling["stop"] = body.stop_sequences
        more = {"sampling": {**sampling, "max_tokens": body.max_tokens}, **scheduling(body)}
    return TextRequest(
        messages=turns,
        places=places,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=choice,
        parallel_tool_calls=not is_alone,
        tool_path="",
        schema_name="input_schema",
        names={"stop": "stop_sequences", "structured": _FORMAT},
        template_kwargs=kwargs,
        **more,
    )


def _choice(choice: Mapping[str, Any]) -> tuple[Any, bool]:
    """A choice of tools as OpenAI has it, and whether at most one call may be made."""
    kind, wanted = choice.get("type", "auto"), None
    if kind in ("auto", "none"):
        wanted = kind
    elif kind == "any":
        wanted = "required"
    elif kind == "tool":
        wanted = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        raise refused("tool_choice", f"tool_choice.type must be auto, any, tool or none, not {kind!r:.60}")
    is_alone = choice.get("disable_parallel_tool_use")
    if is_alone not in (None, True, False):
        raise refused("tool_choice", f"disable_parallel_tool_use must be true or false, not {is_alone!r:.60}")
    return wanted, bool(is_alone)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise refused("tools", f"tools of type {tool['type']!r:.60} are not supported, only those of the client")
    if not isinstance(tool.get("name"), str):
        raise refused("tools", f"a tool needs a name, got {reprlib.repr(tool)}")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        **({"strict": tool["strict"]} if "strict" in tool else {}),
    }
    return {"type": "function", "function": function}


def _turns(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A message as those of a chat template: the results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refused(f"{where}.role", f"{where}.role must be user or assistant, not {role!r:.60}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise refused(f"{where}.content", f"{where}.content must be a text or a list of blocks")
    texts, calls, results, thoughts = [], [], [], []
    for number, block in enumerate(content):
        kind, at = block.get("type"), f"{where}.content[{number}]"
        if kind == "text":
            texts += _texts([block], at)
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and role == "assistant":
            check_call({"name": block.get("name")}, at)
            if not isinstance(block.get("input") or {}, dict):
                raise refused(f"{at}.input", f"{at}.input must be an object, not {block['input']!r:.60}")
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = block.get("content") or ""
            text = result if isinstance(result, str) else "\n".join(_texts(result, f"{at}.content"))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            raise refused(at, f"{at}: a block of type {kind!r:.60} is not supported")
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return [*results, *([turn] if texts or calls or not results else [])]


def _texts(blocks: Any, where: str) -> list[str]:
    for block in blocks if isinstance(blocks, list) else [blocks]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise refused(where, f"{where}: only blocks of type text are supported")
    return [block["text"] for block in blocks]


# To Anthropic's form.


def _ending(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish_reason or "")
    if reason is None and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": reason or "end_turn", "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, int]:
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(len(answer.token_ids) for answer in output.outputs),
    }


class _MessageForm:
    """A message, or the events of its blocks, one after another."""

    def __init__(self, body: MessagesRequest, generation: Generation, position: StreamPosition):
        self._generation, self._position = generation, position
        about = {"id": f"msg_{position.answer_id}", "model": generation.model.name}
        self._message = {**about, "type": "message", "role": "assistant"}
        self._ending: dict[str, Any] = {}
        self._kind: str | int | None = None  # of the open block, or the index of its call
        self._index = -1

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (answer,) = self._generation.read(output).outputs
        blocks = [_block("thinking", answer.reasoning)] if answer.reasoning else []
        if answer.text or not (answer.reasoning or answer.tool_calls):
            blocks.append(_block("text", answer.text))
        blocks += [_call_block(call, json.loads(call.arguments)) for call in answer.tool_calls or ()]
        end = _ending(ending(answer), answer.stop_reason)
        return {**self._message, "content": blocks, **end, "usage": _usage(output)}

    def error_event(self, error: APIError) -> bytes:
        return named_event("error", error=error.anthropic()["error"])

    def begin(self) -> bytes:
        if self._generation.is_resumed:
            return b""
        usage = {"input_tokens": self._generation.requests[0].num_prompt, "output_tokens": 0}
        message = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return named_event("message_start", message=message) + self._position.event_id() + named_event("ping")

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        if delta.finish_reason is not None:
            self._ending = _ending(delta.finish_reason, delta.stop_reason)
        return with_position(self._events(delta, reasoning, call), self._position, delta, reasoning, call)

    def pass_over(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        """The blocks are open, or complete, that the client has."""
        self._events(delta, reasoning, call)

    def finish(self) -> bytes:
        events = self._open("text", _block("text", "")) if self._kind is None else []
        (output,) = self._generation.outputs
        ending = named_event("message_delta", delta=self._ending, usage=_usage(output))
        return b"".join((*events, self._stop(), ending, named_event("message_stop")))

    def _events(self, delta: StreamDelta, reasoning: str, call: ToolCallDelta | None) -> list[bytes]:
        events = self._extend("thinking", reasoning) if reasoning else []
        if delta.text:
            events += self._extend("text", delta.text)
        if call is not None and call.name is not None:
            events += self._open(call.index, _call_block(call, {}))
        if call is not None and call.arguments:
            events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def _extend(self, kind: str, text: str) -> list[bytes]:
        opening = self._open(kind, _block(kind, "")) if kind != self._kind else []
        return [*opening, self._delta(f"{kind}_delta", **{kind: text})]

    def _delta(self, kind: str, **fields: str) -> bytes:
        return named_event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _open(self, kind: str | int, block: Mapping[str, Any]) -> list[bytes]:
        closing = [] if self._kind is None else [self._stop()]
        self._index, self._kind = self._index + 1, kind
        return [*closing, named_event("content_block_start", index=self._index, content_block=block)]

    def _stop(self) -> bytes:
        return named_event("content_block_stop", index=self._index)


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _call_block(call: ToolCall | ToolCallDelta, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
