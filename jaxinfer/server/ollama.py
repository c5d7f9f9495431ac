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
from jaxinfer.openai.reader import structured_of
from jaxinfer.openai.requests import BoundRequest, TextRequest, renamed
from jaxinfer.server.answering import answer
from jaxinfer.server.errors import APIError, client_errors, refused
from jaxinfer.server.generation import Generation
from jaxinfer.server.http import json_response, read_body, record_of, using, while_connected
from jaxinfer.server.models import ServedModel
from jaxinfer.server.ollama_types import (
    NEUTRAL_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from jaxinfer.server.params import bind, check_sizes
from jaxinfer.server.record import Record
from jaxinfer.server.service import Service
from jaxinfer.text.reasoning import Family
from jaxinfer.tool_calls import ToolCallDelta

LINES = "application/x-ndjson"
_NAMES = {
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}  # of options, as `SamplingParams` has them


async def chat(request: Request, service: Service) -> Response:
    """Answers a conversation in Ollama's form, as lines of JSON unless `stream` is false."""
    service.check_accepts()
    body = await read_body(request, OllamaChatRequest, service)
    if not body.messages:
        asked = msgspec.structs.replace(body, messages=[{"role": "user", "content": "a"}])
        return await _load(request, service, asked, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, service, body, _ChatLines)


async def generate(request: Request, service: Service) -> Response:
    """Answers a prompt, in Ollama's form, through the chat template unless `raw` is true."""
    service.check_accepts()
    body = await read_body(request, OllamaGenerateRequest, service)
    if not body.prompt:
        return await _load(request, service, msgspec.structs.replace(body, prompt="a"), {"response": ""})
    return await _answer(request, service, body, _TextLines)


async def _load(
    request: Request, service: Service, body: OllamaChatRequest | OllamaGenerateRequest, answer: Mapping[str, Any]
) -> Response:
    """Loads the model; with keep_alive 0, unloads it. The body has a question, which only checks its options."""
    body.model = await known_name(service, body.model)
    is_unloaded = body.keep_alive in (0, "0", "0s") and not service.is_one
    if is_unloaded:
        model = await while_connected(request.receive, service.models.unload(body.model))
    else:
        async with using(request, service, body) as model:
            with client_errors():
                _read(body, model, service)
    reason = "unload" if is_unloaded else "load"
    return json_response({"model": model.name, "created_at": now(), **answer, "done": True, "done_reason": reason})


async def _answer(
    request: Request, service: Service, body: Any, lines: "type[_ChatLines] | type[_TextLines]"
) -> Response:
    body.model = await known_name(service, body.model)
    return await answer(
        *(request, service, body, lambda model: _read(body, model, service)),
        lambda generation, position: lines(generation, record_of(request.scope)),
        is_stream=body.stream is not False,
        media_type=LINES,
    )


async def known_name(service: Service, name: str) -> str:
    """The name of a model, which clients may give the tag "latest"."""
    short = name.removesuffix(":latest")
    if short != name:
        try:
            await service.models.find(name)
        except APIError:
            return short
    return name


def now() -> str:
    """The time as clients of Ollama read it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def error_line(error: APIError) -> bytes:
    """The last line of a stream that failed."""
    return msgspec.json.encode({"error": error.message}) + b"\n"


# From Ollama's form.


def _read(body: OllamaChatRequest | OllamaGenerateRequest, model: ServedModel, service: Service) -> BoundRequest:
    options = body.options or OllamaOptions()
    _check_options(options)
    check_sizes(body, model)
    sampling: dict[str, Any] = {
        ours: value for name, ours in _NAMES.items() if (value := getattr(options, name)) is not None
    }
    if sampling.get("top_k") == 0:  # all tokens
        sampling["top_k"] = -1
    with renamed("response_format", "format"):
        sampling |= structured_of({"response_format": _format(body.format)})
    if options.num_predict == 0:
        told = "options.num_predict=0 must be at least 1, or -1 for no limit"
        raise refused("options.num_predict", told)
    if options.num_predict is not None:
        sampling["max_tokens"] = options.num_predict if options.num_predict > 0 else None
    names = {ours: f"options.{name}" for name, ours in _NAMES.items()}
    asked = TextRequest(
        sampling,
        names | {"max_tokens": "options.num_predict", "structured": "format"},
        max_length=None if options.num_ctx is None else _length(options.num_ctx, model),
        length_name="options.num_ctx",
        priority=body.priority or 0,
        timeout=body.timeout,
        cache_salt=body.cache_salt or "",
        ignore_unknown=service.options.ignore_unknown_fields,
        **_prompt(body, model),
    )
    return bind(asked, model)


def _check_options(options: OllamaOptions) -> None:
    """Raises APIError for options that are not supported; those of something that is off change nothing."""
    has_penalty = options.repeat_penalty not in (None, 1) or options.presence_penalty or options.frequency_penalty
    off = {"repeat_last_n"} if not has_penalty else set()
    off |= {"mirostat_tau", "mirostat_eta"} if not options.mirostat else set()
    for name, neutral in NEUTRAL_OPTIONS.items():
        if name not in off:
            check_neutral(f"options.{name}", getattr(options, name), neutral)


def _length(num_ctx: int, model: ServedModel) -> int:
    longest = model.llm.max_model_len
    if not 1 < num_ctx <= longest:
        raise refused(
            "options.num_ctx", f"options.num_ctx={num_ctx} must be 2 to {longest}, the length it is served at"
        )
    return num_ctx


def _format(wanted: Any) -> Any:
    if wanted in (None, ""):
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}
    raise refused("format", f"format={wanted!r:.60} must be json or a JSON schema")


def _is_raw(body: OllamaChatRequest | OllamaGenerateRequest, template: str | None) -> bool:
    """Tells whether a prompt is given to the model as it is."""
    return isinstance(body, OllamaGenerateRequest) and bool(body.raw or not template)


def _prompt(body: OllamaChatRequest | OllamaGenerateRequest, model: ServedModel) -> dict[str, Any]:
    """The fields of a request for the prompt or the messages."""
    template = model.llm.tokenizer.chat_template if model.llm.tokenizer is not None else None
    tools = None
    if isinstance(body, OllamaGenerateRequest):
        if _is_raw(body, template):
            if body.system:
                why = "raw is true" if body.raw else "the model has no chat template"
                raise refused("system", f"system cannot be applied: {why}")
            if body.think not in (None, False):
                raise refused("think", "think is for prompts that a chat template renders")
            return {"prompts": (body.prompt or "",)}
        turns: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
        turns.append({"role": "user", "content": body.prompt})
    else:
        turns = [_turn(message, f"messages[{number}]") for number, message in enumerate(body.messages or ())]
        tools = body.tools
    kwargs = {"add_generation_prompt": True, "continue_final_message": False}
    if turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]:  # begun by the client: it is continued
        kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    kwargs |= _thinking(body.think, template or "", model.tags)
    return {"messages": turns, "tools": tools, "template_kwargs": kwargs}


def _turn(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if message.get("images"):
        raise refused(f"{where}.images", f"{where}.images is not supported: models here read text")
    content = message.get("content")
    turn: dict[str, Any] = {"role": message.get("role"), "content": "" if content is None else content}
    if message.get("thinking"):
        turn["thinking"] = message["thinking"]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise refused(f"{where}.tool_calls", f"{where}.tool_calls must be a list of calls")
        turn["tool_calls"] = [
            {"id": call.get("id") or f"call_{number}", "type": "function", "function": call.get("function")}
            for number, call in enumerate(calls)
        ]
    for theirs, ours in (("tool_name", "name"), ("name", "name"), ("tool_call_id", "tool_call_id")):
        if message.get(theirs):
            turn[ours] = message[theirs]
    return turn


def _thinking(wanted: Any, template: str, tags: Family | None) -> dict[str, Any]:
    """Variables of the template that switch reasoning."""
    if wanted in (None, ""):
        return {}
    if isinstance(wanted, str):
        if wanted not in ("low", "medium", "high") or "reasoning_effort" not in template:
            raise refused("think", f"think={wanted!r:.60}: the model's chat template knows no such effort")
        return {"reasoning_effort": wanted}
    if not isinstance(wanted, bool):
        raise refused("think", f"think={wanted!r:.60} must be true, false, low, medium or high")
    if "enable_thinking" in template:
        return {"enable_thinking": wanted}
    if wanted != (tags is not None):
        told = "has no reasoning" if wanted else "cannot leave its reasoning out"
        raise refused("think", f"think={str(wanted).lower()} is not supported: the model {told}")
    return {}


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
    """The lines of a stream. Calls of tools come whole, as Ollama's clients read them."""

    def __init__(self, generation: Generation, record: Record):
        self._generation, self._record = generation, record
        self._reason = "stop"
        self._call: list[str] = []  # the name of one that is being written, and its arguments

    def message(self, content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a line with this content."""
        raise NotImplementedError

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (one,) = self._generation.read(outputs[0]).outputs
        calls = [found for call in one.tool_calls or () for found in _calls(call.name, call.arguments)]
        return self.last(self.message(one.text, one.reasoning or "", calls), _reason(one.finish_reason))

    def error_event(self, error: APIError) -> bytes:
        return error_line(error)

    def begin(self) -> bytes:
        return b""

    def add(self, delta: StreamDelta, reasoning: str = "", call: ToolCallDelta | None = None) -> bytes:
        calls = []
        if call is not None:
            if call.name is not None:
                calls += self._take_call()
                self._call = [call.name]
            self._call.append(call.arguments)
        if delta.finish_reason is not None:
            self._reason = _reason(delta.finish_reason)
            calls += self._take_call()
        if not (delta.text or reasoning or calls):
            return b""
        return self._line(self.message(delta.text, reasoning, calls) | {"done": False})

    def finish(self) -> bytes:
        return msgspec.json.encode(self.last(self.message("", "", []), self._reason)) + b"\n"

    def _take_call(self) -> list[dict[str, Any]]:
        call, self._call = self._call, []
        return _calls(call[0], "".join(call[1:])) if call else []

    def _line(self, fields: Mapping[str, Any]) -> bytes:
        about = {"model": self._generation.model.name, "created_at": now()}
        return msgspec.json.encode({**about, **fields}) + b"\n"

    def last(self, message: Mapping[str, Any], reason: str) -> dict[str, Any]:
        """The fields of the last line, with what was counted."""
        (output,) = self._generation.outputs
        return {
            "model": self._generation.model.name,
            "created_at": now(),
            **message,
            "done": True,
            "done_reason": reason,
            **durations(output, self._record),
        }


def durations(output: RequestOutput, record: Record) -> dict[str, int]:
    """Tokens and nanoseconds of an answer."""
    timings = output.timings
    first = 0.0 if timings is None else timings.time_to_first_token - timings.queue_time
    rest = 0.0 if timings is None else timings.total_time - timings.time_to_first_token
    return {
        "total_duration": round((time.perf_counter() - record.start) * 1e9),
        "load_duration": round(record.load_seconds * 1e9),
        "prompt_eval_count": len(output.prompt_token_ids),
        "prompt_eval_duration": round(first * 1e9),
        "eval_count": sum(len(one.token_ids) for one in output.outputs),
        "eval_duration": round(rest * 1e9),
    }


class _ChatLines(_Lines):
    def message(self, content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class _TextLines(_Lines):
    def message(self, content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content, **({"thinking": reasoning} if reasoning else {})}
