"""/api/chat and /api/generate: Ollama's form of a chat, as lines of JSON. Durations are in nanoseconds."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import RequestOutput, StreamDelta
from jaxinfer.openai.fields import check_neutral
from jaxinfer.openai.reader import given, scheduling, structured_of
from jaxinfer.openai.requests import TextRequest
from jaxinfer.server.answering import answer, bind, continuing, encode, reasoning_switch
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.connected import while_connected
from jaxinfer.server.errors import client_errors
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import json_response, read_body, record_of, using
from jaxinfer.server.models import ServedModel
from jaxinfer.server.resume import StreamPosition
from jaxinfer.server.service import Service
from jaxinfer.server.types import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from jaxinfer.tool_calls import ToolCallDelta

LINES = "application/x-ndjson"
_SAMPLING = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "stop", "max_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_NAMES = {option.name: f"options.{option.encode_name}" for option in msgspec.structs.fields(OllamaOptions)}
_OF_MESSAGES = {name: name for name in ("thinking", "images", "tool_call_id")} | {"tool_name": "name", "name": "name"}


async def chat(request: Request, service: Service) -> Response:
    """Answers a conversation in Ollama's form, as lines of JSON unless `stream` is false."""
    body = await read_body(request, OllamaChatRequest, service)
    if not body.messages:
        asked = msgspec.structs.replace(body, messages=[{"role": "user", "content": "a"}])
        return await _load(request, service, asked, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, service, body, _ChatLines)


async def generate(request: Request, service: Service) -> Response:
    """Answers a prompt, in Ollama's form, through the chat template unless `raw` is true."""
    body = await read_body(request, OllamaGenerateRequest, service)
    if not body.prompt:
        return await _load(request, service, msgspec.structs.replace(body, prompt="a"), {"response": ""})
    return await _answer(request, service, body, _Lines)


async def _load(
    request: Request, service: Service, body: OllamaChatRequest | OllamaGenerateRequest, answer: Mapping[str, Any]
) -> Response:
    """Loads the model; with keep_alive 0, unloads it. The body has a question, which only checks its options."""
    body.model = await known_name(request, service, body.model)
    is_unloaded = body.keep_alive in (0, "0", "0s") and not service.is_one
    if is_unloaded:
        model = await while_connected(request.receive, service.models.unload(body.model))
    else:
        async with using(request, service, body) as model:
            with client_errors():
                bind(request, service, body, lambda model: _read(body, model, service), model)
    reason = "unload" if is_unloaded else "load"
    return json_response({"model": model.name, "created_at": now(), **answer, "done": True, "done_reason": reason})


async def _answer(request: Request, service: Service, body: Any, lines: "type[_Lines]") -> Response:
    body.model = await known_name(request, service, body.model)
    return await answer(
        *(request, service, body, lambda model: _read(body, model, service), lines),
        is_stream=body.stream is not False,
        media_type=LINES,
    )


async def known_name(request: Request, service: Service, name: str) -> str:
    """The name of a model or adapter, which clients may give the tag "latest"."""
    short = name.removesuffix(":latest")
    if short != name:
        try:
            await service.find(name, record_of(request.scope))
        except APIError:
            return short
    return name


def now() -> str:
    return time_text(datetime.now(UTC))


def time_text(moment: datetime) -> str:
    """A time as clients of Ollama read it."""
    return moment.isoformat().replace("+00:00", "Z")


def error_line(error: APIError) -> bytes:
    """The last line of a stream that failed."""
    return encode({"error": error.message}) + b"\n"


# From Ollama's form.


def _read(body: OllamaChatRequest | OllamaGenerateRequest, model: ServedModel, service: Service) -> TextRequest:
    options = body.options or OllamaOptions()
    if options.repetition_penalty not in (None, 1) or options.presence_penalty or options.frequency_penalty:
        check_neutral("options.repeat_last_n", options.repeat_last_n, (-1,))
    sampling = given(options, _SAMPLING) | structured_of({"response_format": _format(body.format)}, "format")
    if sampling.get("top_k") == 0:  # all tokens
        sampling["top_k"] = -1
    if options.max_tokens == 0:
        told = "options.num_predict=0 must be at least 1, or -1 for no limit"
        raise refused("options.num_predict", told)
    if options.max_tokens is not None and options.max_tokens < 0:
        sampling["max_tokens"] = None
    longest = model.llm.max_model_len
    if options.num_ctx is not None and not 1 < options.num_ctx <= longest:
        told = f"options.num_ctx={options.num_ctx} must be 2 to {longest}, the length it is served at"
        raise refused("options.num_ctx", told)
    return TextRequest(
        sampling,
        _NAMES | {"structured": "format"},
        max_length=options.num_ctx,
        length_name="options.num_ctx",
        ignore_unknown=service.options.ignore_unknown_fields,
        **scheduling(body),
        **_prompt(body, model),
    )


def _format(wanted: Any) -> Any:
    if wanted in (None, ""):
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}
    raise refused("format", f"format={wanted!r:.60} must be json or a JSON schema")


def _prompt(body: OllamaChatRequest | OllamaGenerateRequest, model: ServedModel) -> dict[str, Any]:
    """The fields of a request for the prompt or the messages."""
    if isinstance(body, OllamaChatRequest):
        turns = [_turn(message) for message in body.messages or ()]
        kwargs = continuing(turns) | _thinking(body.think, model)
        return {"messages": turns, "tools": body.tools, "template_kwargs": kwargs}
    if body.raw or not model.template:  # the prompt is given to the model as it is
        if body.system:
            why = "raw is true" if body.raw else "the model has no chat template"
            raise refused("system", f"system cannot be applied: {why}")
        if body.think not in (None, False):
            raise refused("think", "think is for prompts that a chat template renders")
        return {"prompts": (body.prompt or "",)}
    system = [{"role": "system", "content": body.system}] if body.system else []
    turns = [*system, {"role": "user", "content": body.prompt}]
    return {"messages": turns, "template_kwargs": continuing(turns) | _thinking(body.think, model)}


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat completions have it."""
    content, calls = message.get("content"), message.get("tool_calls")
    turn: dict[str, Any] = {"role": message.get("role"), "content": "" if content is None else content}
    turn |= {ours: message[theirs] for theirs, ours in _OF_MESSAGES.items() if message.get(theirs)}
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        calls = [
            {"id": call.get("id") or f"call_{number}", "type": "function", "function": call.get("function")}
            for number, call in enumerate(calls)
        ]
    return {**turn, "tool_calls": calls} if calls else turn


def _thinking(wanted: Any, model: ServedModel) -> dict[str, Any]:
    """Variables of the template that switch reasoning."""
    if wanted in (None, ""):
        return {}
    if isinstance(wanted, bool):
        return reasoning_switch(wanted, model, "think", f"think={str(wanted).lower()}")
    if not isinstance(wanted, str):
        raise refused("think", f"think={wanted!r:.60} must be true, false, low, medium or high")
    if wanted not in ("low", "medium", "high") or "reasoning_effort" not in model.template:
        raise refused("think", f"think={wanted!r:.60}: the model's chat template knows no such effort")
    return {"reasoning_effort": wanted}


# Answers.


def _calls(name: str, arguments: str) -> list[dict[str, Any]]:
    """A call as Ollama has it; none where the answer ended in the middle of its arguments."""
    try:
        return [{"function": {"name": name, "arguments": json.loads(arguments or "{}")}}]
    except ValueError:
        return []


def _reason(finish_reason: str | None) -> str:
    return "length" if finish_reason == "length" else "stop"


class _Lines:
    """The lines of /api/generate, of which an answer that is no stream is the last."""

    def __init__(self, body: object, generation: Generation, position: StreamPosition):
        self._generation, self._position = generation, position
        self._reason = "stop"
        self._call: list[str] = []  # the name of one that is being written, and its arguments

    def message(self, content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a line with this content."""
        return {"response": content, **({"thinking": reasoning} if reasoning else {})}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (answer,) = self._generation.read(outputs[0]).outputs
        calls = [entry for call in answer.tool_calls or () for entry in _calls(call.name, call.arguments)]
        return self._last(self.message(answer.text, answer.reasoning or "", calls), _reason(answer.finish_reason))

    def error_event(self, error: APIError) -> bytes:
        is_gone = error.status == 503 and self._generation.has_front
        return (b":unavailable\n" if is_gone else b"") + error_line(error)

    def begin(self) -> bytes:
        return b""

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        self._position.count(delta, reasoning, call)
        calls = self._finished_calls(delta, call)
        if not (delta.text or reasoning or calls):
            return b""
        line = encode({**self._about(), **self.message(delta.text, reasoning, calls), "done": False}) + b"\n"
        return b":%b%b" % (self._position.event_id(), line) if self._generation.has_front else line

    def pass_over(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> None:
        """The client has nothing of a call that is not complete."""
        self._finished_calls(delta, call)

    def _finished_calls(self, delta: StreamDelta, call: ToolCallDelta | None) -> list[dict[str, Any]]:
        calls = []
        if call is not None:
            if call.name is not None:
                calls += self._take_call()
                self._call = [call.name]
            self._call.append(call.arguments)
        if delta.finish_reason is not None:
            self._reason = _reason(delta.finish_reason)
            calls += self._take_call()
        return calls

    def finish(self) -> bytes:
        return encode(self._last(self.message("", "", []), self._reason)) + b"\n"

    def _take_call(self) -> list[dict[str, Any]]:
        call, self._call = self._call, []
        return _calls(call[0], "".join(call[1:])) if call else []

    def _about(self) -> dict[str, Any]:
        return {"model": self._generation.model.name, "created_at": now()}

    def _last(self, message: Mapping[str, Any], reason: str) -> dict[str, Any]:
        """The fields of the last line, with what was counted."""
        (output,) = self._generation.outputs
        record, timings = self._generation.record, output.timings
        first = 0.0 if timings is None else timings.time_to_first_token - timings.queue_time
        rest = 0.0 if timings is None else timings.total_time - timings.time_to_first_token
        return {
            **self._about(),
            **message,
            "done": True,
            "done_reason": reason,
            "total_duration": round((time.perf_counter() - record.start) * 1e9),
            "load_duration": round(record.load_seconds * 1e9),
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": round(first * 1e9),
            "eval_count": sum(len(answer.token_ids) for answer in output.outputs),
            "eval_duration": round(rest * 1e9),
        }


class _ChatLines(_Lines):
    """The lines of /api/chat. Calls of tools come whole, as Ollama's clients read them."""

    def message(self, content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}
