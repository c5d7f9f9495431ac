"""Requests of rows: bodies of OpenAI's two endpoints, and the plain form. Every field is applied or rejected."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jaxinfer.batch.errors import RowError
from jaxinfer.checks import did_you_mean
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.option_names import find
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError, our_names
from jaxinfer.text import read_token_ids
from jaxinfer.tool_calls import check_tools

Prompt = str | Sequence[int]
Form = Literal["chat", "completions", "plain"]

FORMS_BY_URL: dict[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; chat has no limit

_SAMPLING = tuple(one.name for one in fields(SamplingParams))
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_CHAT = ("messages", *_TOOLS, "chat_template_kwargs")
_CHAT_BODY = (*_CHAT, "max_completion_tokens", "top_logprobs")
_COMPLETIONS_BODY = ("prompt", "echo")
# What OpenAI and vLLM call `structured`.
STRUCTURED_NAMES = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_EVERY_BODY = ("model", "user", "metadata", "best_of", "return_token_ids")

UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values that clients send for a field of text, or of a list, that they leave empty."""


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Tells whether a value of a field that is not supported changes nothing. JSON's false is not 0."""
    return value in UNSET or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


# Fields of OpenAI's API that are not supported, with the values that have no effect, besides those in UNSET.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True)
class BatchRequest:
    """The request of one row, checked as far as possible without the model.

    Attributes:
      form: the form of the answer. model: the name in the body.
      prompts: texts or token ids; empty if there are `messages`.
      messages, template_kwargs: for the chat template.
      tools, tool_choice, parallel_tool_calls: of OpenAI's chat completions.
      sampling: the fields of `SamplingParams` that the row gives.
      structured_name: what the row calls `structured`.
      echo: the answer's text starts with the prompt's. return_token_ids: bodies list token ids too.
    """

    form: Form
    prompts: tuple[Prompt, ...] = ()
    messages: list[Mapping[str, Any]] | None = None
    tools: list[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    structured_name: str = "structured"
    echo: bool = False
    return_token_ids: bool = False


def read_chat(body: Mapping[str, Any]) -> BatchRequest:
    """A body of /v1/chat/completions. Raises RowError, with the field."""
    body = _known(body, (*_CHAT_BODY, *_EVERY_BODY, *_SAMPLING, *STRUCTURED_NAMES))
    return BatchRequest(
        "chat",
        messages=_messages(body),
        **_tools(body),
        template_kwargs=_template_kwargs(body),
        sampling={**_sampling(body), **_chat_max_tokens(body), **_chat_logprobs(body)},
        structured_name=structured_name(body),
        **_common(body),
    )


def read_completions(body: Mapping[str, Any]) -> BatchRequest:
    """A body of /v1/completions; several prompts make one group of choices each. Raises RowError, with the field."""
    body = _known(body, (*_COMPLETIONS_BODY, *_EVERY_BODY, *_SAMPLING, *STRUCTURED_NAMES))
    return BatchRequest(
        "completions",
        prompts=_prompts(body),
        sampling=_sampling(body),
        structured_name=structured_name(body),
        echo=_flag(body, "echo"),
        **_common(body),
    )


def read_plain(record: Mapping[str, Any]) -> BatchRequest:
    """`{"prompt": ...}` or `{"messages": [...]}`, sampling parameters beside it. Raises RowError, with the field."""
    record = _our_names(record)
    if "messages" in record:
        _check_known(record, (*_CHAT, *_SAMPLING))
        return BatchRequest(
            "plain",
            messages=_messages(record),
            **_tools(record),
            template_kwargs=_template_kwargs(record),
            sampling=_sampling(record),
        )
    _check_known(record, ("prompt", *_SAMPLING))
    prompt = record["prompt"]
    if not isinstance(prompt, str):
        if not isinstance(prompt, list) or not prompt or not _has_no_texts(prompt):
            raise RowError(f"prompt must be a text or a list of token ids, got {prompt!r:.60}", "prompt")
        prompt = _ids(prompt)
    return BatchRequest("plain", prompts=(prompt,), sampling=_sampling(record))


# Fields.


def _our_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A plain record with our names in place of those of other engines."""
    others = {name: value for name, value in record.items() if find("SamplingParams", name) is not None}
    found = {name: value for name, value in record.items() if name not in others}
    try:
        renamed = our_names(others)
    except SamplingParamsError as error:
        raise RowError(str(error), error.parameter) from None
    for name in renamed:
        if name in found:
            raise RowError(f"{name} is given twice, under two names", name)
    return {**found, **renamed}


def _known(body: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The given fields; null means not given, as in OpenAI's API."""
    _check_known(body, (*known, *_NEUTRAL))
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if not is_neutral(value, neutral):
            reason = "a batch does not stream" if name == "stream" else "the option has no implementation"
            raise RowError(f"{name}={value!r:.60} is not supported: {reason}", name)
    return {name: value for name, value in body.items() if value is not None and name not in _NEUTRAL}


def _check_known(record: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in record:
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.5, otherwise=f"; the fields are {', '.join(sorted(known))}")
            raise RowError(f"unknown field {name!r:.60}{hint}", name)


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise RowError("best_of is not supported: n answers are generated and all are returned", "best_of")
    if not isinstance(body.get("metadata", {}), dict):
        raise RowError(f"metadata must be an object, got {body['metadata']!r:.60}", "metadata")
    for name in ("model", "user"):
        if not isinstance(body.get(name, ""), str):
            raise RowError(f"{name} must be a string, got {body[name]!r:.60}", name)
    return {"model": body.get("model") or None, "return_token_ids": _flag(body, "return_token_ids")}


def _sampling(record: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: record[name] for name in _SAMPLING if name in record}
    return {**values, **structured_of(record)}


def structured_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """`structured`, from whatever name it is given under; nothing where it is not. Raises RowError."""
    forms = {name: value for name in STRUCTURED_NAMES if not _is_unset(name, value := record.get(name))}
    if "structured" in record:
        forms["structured"] = record["structured"]
    if len(forms) > 1:
        raise RowError(f"{' and '.join(forms)} say the same: give one of them", list(forms)[1])
    for name, value in forms.items():
        try:
            found = our_names({name: value}).get("structured")
            return {} if found is None else {"structured": StructuredOutputs.of(found)}
        except ValueError as error:
            raise RowError(f"{name}: {error}", name) from None
    return {}


def structured_name(record: Mapping[str, Any]) -> str:
    """The name under which `structured` is given."""
    return next((name for name in STRUCTURED_NAMES if not _is_unset(name, record.get(name))), "structured")


def _is_unset(name: str, value: Any) -> bool:
    return value in UNSET and not (value == {} and name == "guided_json")  # the schema of any JSON


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise RowError(f"{name} must be true or false, got {value!r:.60}", name)
    return value


def _messages(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RowError("messages must be a list of at least one message", "messages")
    return messages


def _tools(record: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: record.get(name) for name in _TOOLS}
    try:
        check_tools(**given)
    except ValueError as error:
        name = next((one for one in _TOOLS[1:] if str(error).startswith(one)), "tools")
        raise RowError(str(error), name) from None
    return given


def _template_kwargs(record: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = record.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise RowError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in ("messages", "tools"):
        if name in kwargs:
            raise RowError(f"{name} is a field of its own, not one of chat_template_kwargs", "chat_template_kwargs")
    return kwargs


def _chat_max_tokens(body: Mapping[str, Any]) -> dict[str, Any]:
    if "max_completion_tokens" not in body:
        return {}
    value = body["max_completion_tokens"]
    if body.get("max_tokens", value) != value:
        raise RowError("max_tokens and max_completion_tokens are the same limit and differ", "max_completion_tokens")
    return {"max_tokens": value}


def _chat_logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    if "logprobs" not in body:
        if "top_logprobs" in body:
            raise RowError('top_logprobs needs "logprobs": true', "top_logprobs")
        return {}
    wanted = body["logprobs"]
    if not isinstance(wanted, bool):
        raise RowError("logprobs is true or false in chat; top_logprobs is their number", "logprobs")
    if not wanted and body.get("top_logprobs", 0) != 0:
        raise RowError('top_logprobs needs "logprobs": true', "top_logprobs")
    return {"logprobs": body.get("top_logprobs", 0) if wanted else None}


def _prompts(body: Mapping[str, Any]) -> tuple[Prompt, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if _has_no_texts(prompt):
            return (_ids(prompt),)
        if all(isinstance(one, str) or (isinstance(one, list) and one) for one in prompt):
            return tuple(one if isinstance(one, str) else _ids(one, f"prompt {i}: ") for i, one in enumerate(prompt))
    raise RowError(f"prompt must be a text, token ids, or a list of either, got {prompt!r:.60}", "prompt")


def _has_no_texts(prompt: list[Any]) -> bool:
    """Whether neither texts nor lists are in a list of JSON values, which may be millions of ids."""
    return {str, list}.isdisjoint(map(type, prompt))


def _ids(prompt: list[Any], where: str = "") -> list[int]:
    try:
        return read_token_ids(prompt)
    except ValueError as error:
        raise RowError(f"{where}{error}", "prompt") from None
