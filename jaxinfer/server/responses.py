"""/v1/responses without a store: every request brings its whole conversation."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.batch.requests import structured_of
from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.llm import LLM
from jaxinfer.server.answering import answer_headers, begin, usage_of
from jaxinfer.server.chunks import named_event
from jaxinfer.server.errors import APIError, client_errors, refused
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import EventStream, json_response, read_body, while_connected
from jaxinfer.server.params import Conversation, Job, chosen_tools, make_job, read_messages
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.server.types import ResponsesRequest

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}  # with the values that change nothing
_STORED = ("previous_response_id", "conversation")


async def responses(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream of events."""
    service.check_accepts()
    body = await read_body(request, ResponsesRequest, service)
    generation, position = await begin(
        request, service, body, lambda: _job(body, service), tags=service.tags, can_resume=False
    )
    headers = answer_headers(service, position)
    about = _About(service, body, generation, position)
    if body.stream:
        events = generation.events(about)
        return EventStream(events, generation.close, about.error_event, service.options.send_timeout, headers)
    try:
        (output,) = await while_connected(request.receive, generation.run())
    finally:
        generation.close()
    reasoning, content = generation.split(0, output.outputs[0].text)
    return json_response(about.whole(reasoning, content, output), headers)


# From the form of the responses API.


def _job(body: ResponsesRequest, service: Service) -> Job:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            why = ": nothing is stored, send the whole conversation" if name in _STORED else ""
            raise refused(name, f"{name}={value!r:.60} is not supported{why}")
    tools = [_tool(tool) for tool in body.tools or () if tool.get("type") == "function"]
    others = sorted({f"{tool.get('type')!s:.80}" for tool in body.tools or () if tool.get("type") != "function"})
    service.log_unknown([f"tools of type {kind}" for kind in others], "/v1/responses")  # agents send them unasked
    if body.parallel_tool_calls is False and tools:
        raise refused("parallel_tool_calls", "parallel_tool_calls=false is not supported: calls cannot be limited")
    values = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    with client_errors("text"):
        values |= structured_of({"response_format": (body.text or {}).get("format")})
    found = [{"role": "system", "content": body.instructions}] if body.instructions else []
    found += [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _turns(body.input)
    conversation = Conversation(read_messages(found), chosen_tools(tools, body.tool_choice), _effort(body, service.llm))
    names = {"max_tokens": "max_output_tokens"}
    return make_job((conversation,), body, values, body.max_output_tokens, service.llm, 1, names=names)


def _effort(body: ResponsesRequest, llm: LLM) -> dict[str, Any]:
    effort = (body.reasoning or {}).get("effort")
    if effort is None:
        return {}
    if "reasoning_effort" not in ((llm.tokenizer.chat_template if llm.tokenizer is not None else None) or ""):
        raise refused("reasoning", "the model's chat template does not know reasoning_effort")
    return {"reasoning_effort": effort}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _turns(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of an input as messages of a chat template."""
    found: list[dict[str, Any]] = []
    reasoning: str | None = None
    for number, item in enumerate(items):
        kind, where = item.get("type", "message"), f"input[{number}]"
        if kind == "message":
            turn = {"role": item.get("role"), "content": item.get("content")}
            if reasoning is not None and turn["role"] == "assistant":
                turn["reasoning_content"], reasoning = reasoning, None
            found.append(turn)
        elif kind == "reasoning":
            reasoning = "\n".join(_texts(item.get("content") or [], f"{where}.content")) or None
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if found and found[-1]["role"] == "assistant":
                found[-1].setdefault("tool_calls", []).append(call)
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, (str, list)) else str(output)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise refused(where, f"{where}: an item of type {kind!r:.60} is not supported")
    return found


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list):
        raise refused(where, f"{where} must be a list of parts")
    texts: list[str] = []
    for part in parts:
        if isinstance(part, dict) and "text" in part:
            if not isinstance(part["text"], str):
                raise refused(where, f"{where} has a text that is no string")
            texts.append(part["text"])
    return texts


# To the form of the responses API.


class _About:
    """The object of one response, and the events of its stream."""

    def __init__(self, service: Service, body: ResponsesRequest, generation: Generation, position: StreamPosition):
        self._body, self._generation, self._id = body, generation, position.answer_id
        self._number = -1
        self._thought, self._content, self._is_open = "", "", False  # what was streamed
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
            "model": service.name,
            "output": [],
            "parallel_tool_calls": True,
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

    def whole(self, reasoning: str, content: str, output: RequestOutput) -> dict[str, Any]:
        is_cut = output.outputs[0].finish_reason == "length"
        items = [self._reasoning(reasoning)] if reasoning else []
        if content or not reasoning:
            items.append(self._message(content, "incomplete" if is_cut else "completed"))
        counted = usage_of([output])
        return {
            **self._base,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._generation.count_tokens(reasoning)},
                "total_tokens": counted["total_tokens"],
            },
        }

    def _reasoning(self, text: str) -> dict[str, Any]:
        return {"id": f"rs_{self._id}", "type": "reasoning", "summary": [], "content": [_reasoning_part(text)]}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [_text_part(text)] if status != "in_progress" else []
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": self._number, **fields})

    def error_event(self, error: APIError) -> bytes:
        return self._event("error", code=error.code or error.type, message=error.message, param=error.param)

    # The format of its stream.

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._base)
        return created + self._event("response.in_progress", response=self._base)

    def add(self, delta: StreamDelta, reasoning: str = "") -> bytes:
        found = b""
        if reasoning:
            if not self._thought:
                found += self._open_reasoning()
            self._thought += reasoning
            found += self._delta("reasoning_text", 0, reasoning, "rs")
        if delta.text:
            if not self._is_open:
                found += self._end_reasoning() + self._open()
            self._content += delta.text
            found += self._delta("output_text", self._index, delta.text, "msg")
        return found

    def finish(self) -> bytes:
        (output,) = self._generation.outputs
        whole = self.whole(self._thought, self._content, output)
        found = b""
        if not self._is_open:
            found += self._end_reasoning() if self._thought else self._open()
        if self._is_open:
            found += self._close(whole["output"][-1])
        return found + self._event(f"response.{whole['status']}", response=whole)

    @property
    def _index(self) -> int:
        """Of the message among the items."""
        return int(bool(self._thought))

    def _delta(self, kind: str, index: int, text: str, prefix: str) -> bytes:
        more = {"logprobs": []} if kind == "output_text" else {}
        fields = {"item_id": f"{prefix}_{self._id}", "output_index": index, "content_index": 0, "delta": text}
        return self._event(f"response.{kind}.delta", **fields, **more)

    def _open_reasoning(self) -> bytes:
        where = {"item_id": f"rs_{self._id}", "output_index": 0, "content_index": 0}
        added = self._event("response.output_item.added", output_index=0, item={**self._reasoning(""), "content": []})
        return added + self._event("response.content_part.added", **where, part=_reasoning_part(""))

    def _end_reasoning(self) -> bytes:
        text = self._thought
        if not text:
            return b""
        where = {"item_id": f"rs_{self._id}", "output_index": 0, "content_index": 0}
        done = self._event("response.reasoning_text.done", **where, text=text)
        done += self._event("response.content_part.done", **where, part=_reasoning_part(text))
        return done + self._event("response.output_item.done", output_index=0, item=self._reasoning(text))

    def _open(self) -> bytes:
        self._is_open = True
        where = {"item_id": f"msg_{self._id}", "output_index": self._index, "content_index": 0}
        item = self._message("", "in_progress")
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._event("response.content_part.added", **where, part=_text_part(""))

    def _close(self, item: Mapping[str, Any]) -> bytes:
        text, index = self._content, self._index
        where = {"item_id": f"msg_{self._id}", "output_index": index, "content_index": 0}
        done = self._event("response.output_text.done", **where, text=text, logprobs=[])
        done += self._event("response.content_part.done", **where, part=_text_part(text))
        return done + self._event("response.output_item.done", output_index=index, item=item)


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as an answer repeats it: a function's optional fields are there."""
    return tool if tool.get("type") != "function" else {"strict": False, "parameters": None, **tool}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
