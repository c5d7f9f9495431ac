"""From typed bodies to requests."""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.openai.bodies import (
    OF_VLLM,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    SamplingFields,
    VectorFields,
)
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.fields import UNSET
from jaxinfer.openai.requests import Prompt, TextRequest
from jaxinfer.sampling.params import SamplingParams, our_names
from jaxinfer.text.token_ids import read_token_ids

STRUCTURED_NAMES = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Names of OpenAI and vLLM for `structured`."""
_SAMPLING = tuple(
    param.name
    for param in fields(SamplingParams)
    if param.name in SamplingFields.__struct_fields__ and param.name != "logprobs"
)
_SET_BY_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "max_prompt_tokens")
_OF_VECTORS = ("prompt_name", "prompt", "pooling", "dimensions", "normalize")
MAX_TEXTS = 2048  # of a request, as OpenAI allows

Text = str | list[int]  # or token ids


def read_chat(body: ChatRequest, *, ignore_unknown: bool = False) -> TextRequest:
    """A chat's request; with `ignore_unknown` its messages may have names that nothing reads.

    Raises RequestError, MessageError or SamplingParamsError.
    """
    _check_common(body)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.max_tokens not in (None, limit):
        told = f"max_tokens={body.max_tokens} and max_completion_tokens={limit} are one limit and differ"
        raise RequestError(told, "max_completion_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("log-probabilities of the prompt cannot be streamed", "prompt_logprobs")
    sampling = _sampling(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    if limit is not None:
        sampling["max_tokens"] = limit
    names = {"logprobs": "top_logprobs", "structured": structured_name(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return TextRequest(
        sampling,
        names,
        messages=body.messages,
        ignore_unknown=ignore_unknown,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=template_kwargs(body),
        effort=body.reasoning_effort,
        **_common(body),
    )


def read_completion(body: CompletionRequest) -> TextRequest:
    """A request of completions. Raises RequestError or SamplingParamsError."""
    _check_common(body)
    sampling = _sampling(body)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
        told = "log-probabilities of the prompt cannot be streamed: leave out stream, or echo"
        raise RequestError(told, "stream")
    if body.max_tokens == 0:  # only the prompt is scored: one token is made, and dropped
        sampling["max_tokens"] = 1
    return TextRequest(
        sampling,
        {"structured": structured_name(body)},
        prompts=_prompts(body.prompt),
        num_kept=0 if body.max_tokens == 0 else None,
        adds_special_tokens=body.add_special_tokens is not False,
        echo=bool(body.echo),
        **_common(body),
    )


def _check_common(body: SamplingFields) -> None:
    if body.best_of not in (None, 1, body.n):
        told = "best_of is not supported: n answers are generated and all are returned; leave it out"
        raise RequestError(told, "best_of")
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise RequestError('stream_options needs "stream": true', "stream_options")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise RequestError(f"{name}=True is not supported: leave it out; include_usage is sent at the end", name)


def _common(body: SamplingFields) -> dict[str, Any]:
    if body.return_coordinate and body.max_tokens == 0:
        raise RequestError("return_coordinate is of an answer, and max_tokens=0 makes none", "return_coordinate")
    wanted = {name: bool(getattr(body, name)) for name in ("return_token_ids", "return_coordinate")}
    return {"truncate_to": body.truncate_prompt_tokens, **wanted, **scheduling(body)}


def scheduling(body: Any) -> dict[str, Any]:
    """Fields of a request that the bodies of all routes which generate have."""
    order = {"priority": body.priority or 0, "timeout": body.timeout, "cache_salt": body.cache_salt or ""}
    return {"model": body.model or None, **order}


def _sampling(body: SamplingFields) -> dict[str, Any]:
    return given(body, _SAMPLING) | structured_of({name: getattr(body, name) for name in STRUCTURED_NAMES})


def given(body: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a body with these names, without those that are not given."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def structured_of(given: Mapping[str, Any], place: str | None = None) -> dict[str, Any]:
    """`structured`, from whatever name it is given under; nothing where it is not. Raises RequestError, with the
    `place` in the body where that is not the name."""
    forms = {name: value for name in STRUCTURED_NAMES if not is_unset(name, value := given.get(name))}
    if isinstance(outputs := forms.get("structured_outputs"), dict):
        forms["structured_outputs"] = {
            name: value for name, value in outputs.items() if value is not None and (value or name not in OF_VLLM)
        }
    if "structured" in given:
        forms["structured"] = given["structured"]
    if len(forms) > 1:
        raise RequestError(f"{' and '.join(forms)} say the same: give one of them", list(forms)[1])
    for name, value in forms.items():
        try:
            structured = our_names({name: value}).get("structured")
            return {} if structured is None else {"structured": StructuredOutputs.of(structured)}
        except ValueError as error:
            raise RequestError(f"{place or name}: {error}", place or name) from None
    return {}


def structured_name(body: SamplingFields) -> str:
    """The name under which `structured` is given."""
    given = (name for name in STRUCTURED_NAMES if not is_unset(name, getattr(body, name)))
    return next(given, "structured")


def is_unset(name: str, value: Any) -> bool:
    """Tells whether a value of `structured`, or null, stands for none; a max_tokens of null is as many as fit."""
    if name not in STRUCTURED_NAMES:
        return value is None and name != "max_tokens"
    return value in UNSET and not (value == {} and name == "guided_json")  # the schema of any JSON


def template_kwargs(body: Any) -> dict[str, Any]:
    """Variables of the chat template that a body gives."""
    kwargs = check_template_kwargs(body.chat_template_kwargs)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {**kwargs, "add_generation_prompt": generates, "continue_final_message": continues}


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A body's `chat_template_kwargs`. Raises RequestError for what has a field of its own."""
    for name in _SET_BY_FIELDS:
        if name in (kwargs or ()):
            told = f"{name} cannot be one of chat_template_kwargs: it is set by a field"
            raise RequestError(told, "chat_template_kwargs")
    return dict(kwargs or {})


def _prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and {str, list}.isdisjoint(map(type, prompt)):
        return (read_ids(prompt, "prompt"),)
    if not prompt or not all(isinstance(item, str) or (isinstance(item, list) and item) for item in prompt):
        told = f"prompt must be a text, token ids, or a list of either, got {reprlib.repr(prompt)}"
        raise RequestError(told, "prompt")
    return tuple(item if isinstance(item, str) else read_ids(item, f"prompt[{i}]") for i, item in enumerate(prompt))


def read_ids(prompt: list[Any], where: str) -> list[int]:
    """Token ids of JSON data. Raises RequestError."""
    try:
        return list(read_token_ids(prompt))
    except ValueError as error:
        raise RequestError(f"{where}: {error}", "prompt") from None


# Embeddings.


def read_inputs(body: EmbeddingsRequest) -> list[Text]:
    """A text, token ids, or a list of either, as a list. Raises RequestError."""
    given: Any = body.input
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) and not isinstance(item, bool) for item in given):
        return [given]
    if not given:
        raise RequestError("input is empty: it needs at least 1 text", "input")
    check_number(given, "input")
    for number, item in enumerate(given):
        if not isinstance(item, (str, list)) or item == []:
            raise RequestError(f"input[{number}] must be a text or a list of token ids, got {item!r:.60}", "input")
    return given


def check_number(texts: Any, name: str) -> None:
    """Raises RequestError for more texts than one request may have."""
    if len(texts) > MAX_TEXTS:
        raise RequestError(f"{name}: {len(texts):,} texts, at most {MAX_TEXTS:,} are allowed", name)


def options_of(body: EmbeddingsRequest) -> dict[str, Any]:
    """Keyword arguments that `Embedder.embed` takes beside the texts. Raises RequestError."""
    return {**{name: getattr(body, name) for name in _OF_VECTORS}, "truncate": truncates(body)}


def truncates(body: VectorFields) -> bool:
    """Tells whether texts that are too long are cut. Raises RequestError."""
    if body.truncate_prompt_tokens not in (None, -1):
        told = "truncate_prompt_tokens must be -1, for as many tokens as fit, or null"
        raise RequestError(told, "truncate_prompt_tokens")
    return bool(body.truncate) or body.truncate_prompt_tokens == -1
