"""/v1/responses without a store: every request brings its whole conversation."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.openai import response_types as types
from jaxinfer.openai.bodies import ResponsesRequest
from jaxinfer.openai.response_types import Item
from jaxinfer.openai.responses import ResponseWriter, part, read_response
from jaxinfer.server.answering import answer, named_event, with_position
from jaxinfer.server.api_error import APIError
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import read_body
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.tool_calls import ToolCall, ToolCallDelta

_DELTAS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


async def responses(request: Request, service: Service) -> Response:
    """Answers a conversation, at once or as a stream of events."""
    body = await read_body(request, ResponsesRequest, service)
    ignores = service.options.ignore_unknown_fields
    return await answer(
        request, service, body, lambda model: read_response(body, ignore_unknown=ignores), _ResponseForm
    )


class _ResponseForm:
    """The object of a response, or its events."""

    def __init__(self, body: ResponsesRequest, generation: Generation, position: StreamPosition):
        about = {"id": position.answer_id, "created": position.created, "model": generation.model.name}
        self._writer = ResponseWriter(body, generation.job, about, generation.tokenizer)
        self._generation, self._position = generation, position
        position.num_events = position.num_events or 0
        # What was streamed: items that are complete, and the kind, the text and the call of the one that is not.
        self._items: list[Item] = []
        self._kind, self._text, self._call = "", "", ToolCall("", "", "")

    def whole(self, outputs: list[RequestOutput]) -> types.Response:
        (output,) = outputs
        return self._writer.whole(self._generation.read(output))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = self._position.num_events or 0
        self._position.num_events = number + 1
        return named_event(name, sequence_number=number, **fields)

    def error_event(self, error: APIError) -> bytes:
        return self._event("error", code=error.code or error.type, message=error.message, param=error.param)

    # The format of its stream.

    def begin(self) -> bytes:
        if self._generation.is_resumed:
            return b""
        created = self._event("response.created", response=self._writer.begun)
        begun = self._event("response.in_progress", response=self._writer.begun)
        return created + self._position.event_id() + begun

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        return with_position(self._events(delta, reasoning, call), self._position, delta, reasoning, call)

    def pass_over(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        """The items are open, or complete, that the client has; its position counts their events."""
        num_events = self._position.num_events
        self._events(delta, reasoning, call)
        self._position.num_events = num_events

    def _events(self, delta: StreamDelta, reasoning: str, call: ToolCallDelta | None) -> list[bytes]:
        events: list[bytes] = []
        if reasoning:
            events += self._extend("reasoning", reasoning)
        if delta.text:
            events += self._extend("message", delta.text)
        if call is not None:
            if call.id is not None and call.name is not None:
                events += self._open("function_call", ToolCall(call.id, call.name, ""))
            if call.arguments:
                events += self._extend("function_call", call.arguments)
        return events

    def finish(self) -> bytes:
        (output,) = self._generation.outputs
        events = [] if self._kind else self._open("message")
        is_cut = output.outputs[0].finish_reason == "length"
        events += self._close("incomplete" if is_cut and self._kind == "message" else "completed")
        whole = self._writer.whole(output, self._items)
        return b"".join((*events, self._event(f"response.{whole.status}", response=whole)))

    def _extend(self, kind: str, text: str) -> list[bytes]:
        """Adds text to the open item, or to a new one where that is of another kind."""
        opening = [] if self._kind == kind else self._open(kind)
        self._text += text
        more = {"logprobs": []} if kind == "message" else {}
        return [*opening, self._event(f"response.{_DELTAS[kind]}.delta", **self._where(), delta=text, **more)]

    def _open(self, kind: str, call: ToolCall | None = None) -> list[bytes]:
        events = self._close()
        self._kind, self._text, self._call = kind, "", call or self._call
        item = self._open_item("in_progress")
        events.append(self._event("response.output_item.added", output_index=len(self._items), item=item))
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **self._where(), part=part(kind, "")))
        return events

    def _close(self, status: str = "completed") -> list[bytes]:
        """Ends the open item, if there is one."""
        kind, text = self._kind, self._text
        if not kind:
            return []
        where = self._where()
        if kind == "function_call":
            name = "response.function_call_arguments.done"
            done = [self._event(name, **where, name=self._call.name, arguments=text)]
        else:
            more = {"logprobs": []} if kind == "message" else {}
            done = [self._event(f"response.{_DELTAS[kind]}.done", **where, text=text, **more)]
            done.append(self._event("response.content_part.done", **where, part=part(kind, text)))
        item = self._open_item(status)
        done.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        return done

    def _open_item(self, status: str) -> Item:
        number = sum(item.__struct_config__.tag == self._kind for item in self._items)
        call = self._call if self._kind == "function_call" else None
        return self._writer.item(self._kind, self._text, number, status, call)

    def _where(self) -> dict[str, Any]:
        where = {"item_id": self._open_item("in_progress").id, "output_index": len(self._items)}
        return where if self._kind == "function_call" else {**where, "content_index": 0}
