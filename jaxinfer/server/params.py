"""From the body of a request to what the engine takes. Every field is applied, or refused by its name."""

import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from jaxinfer.batch.requests import COMPLETIONS_MAX_TOKENS, STRUCTURED_NAMES, is_neutral, structured_of
from jaxinfer.llm import LLM
from jaxinfer.sampling import SamplingParams
from jaxinfer.sampling.params import SamplingParamsError
from jaxinfer.server.errors import APIError, client_errors, refused
from jaxinfer.server.sizes import CHARS_PER_TOKEN, MAX_FIELD, check_length, count_values, weight
from jaxinfer.server.types import (
    MAX_SALT_CHARS,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
)
from jaxinfer.text import read_token_ids
from jaxinfer.text.messages import check_messages, places_of
from jaxinfer.tool_calls import AnswerFormat, ToolOffer

MAX_SEED = 2**53  # of seeds that the server chooses: every JSON parser keeps them

# What is not supported, with the values that change nothing, besides null and those that stand for it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": (),
    "chat_template": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_SAMPLING = tuple(
    one.name
    for one in fields(SamplingParams)
    if one.name in SamplingFields.__struct_fields__ and one.name != "logprobs"
)
_RENDERER = ("messages", "tools", "add_generation_prompt", "continue_final_message", "max_prompt_tokens")


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template. `name`: of the field that has them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = "messages"

    def token_ids(self, llm: LLM) -> list[int]:
        return llm.client.tokenize_chat(self.messages, self.tools, self.template_kwargs)


@dataclass(frozen=True)
class Job:
    """A checked request.

    Attributes:
      prompts: one or several. params: of all of them, with a seed.
      has_limit: whether the client chose max_tokens; else it is lowered to what fits.
      truncate_to: tokens that are kept of a prompt, the last ones; None for all.
      adds_special_tokens: as of a tokenizer. priority, cache_salt: as of `RequestOptions`. timeout: seconds from its
        arrival after which the request is given up, waiting or not.
      num_kept: answer tokens that are returned at most; 0 where only the prompt is scored.
      offer: tools, where calls are told from the text of answers.
      max_length: tokens of a prompt with its answer, where that is less than the model's length.
    """

    prompts: tuple[str | Sequence[int] | Conversation, ...]
    params: SamplingParams
    has_limit: bool = True
    truncate_to: int | None = None
    adds_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    num_kept: int | None = None
    offer: ToolOffer | None = None
    max_length: int | None = None

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n

    @cached_property
    def num_estimated(self) -> int:
        """Prompt tokens, estimated without tokenizing."""
        return sum(_estimate(prompt) for prompt in self.prompts)

    def token_ids(self, llm: LLM, prompt: str | Sequence[int] | Conversation) -> str | Sequence[int]:
        """What `LLM.prepare` takes; a text stays one where nothing is to be changed. Raises ValueError."""
        if isinstance(prompt, Conversation):
            prompt = prompt.token_ids(llm)
        elif isinstance(prompt, str) and (self.truncate_to is not None or not self.adds_special_tokens):
            prompt = llm.client.tokenize(prompt, self.adds_special_tokens)[1]
        return prompt if self.truncate_to is None or isinstance(prompt, str) else prompt[-self.truncate_to :]

    def params_for(self, num_prompt: int, max_model_len: int) -> SamplingParams:
        """The parameters for a prompt of that many tokens. Raises APIError for one longer than `max_length`."""
        if self.max_length is not None:
            if num_prompt >= self.max_length:
                message = f"the prompt has {num_prompt} tokens, and options.num_ctx={self.max_length}"
                raise APIError(400, message, param="options.num_ctx", code="context_length_exceeded")
            room = self.max_length - num_prompt
            return replace(self.params, max_tokens=min(self.params.max_tokens or room, room))
        limit, room = self.params.max_tokens, max_model_len - num_prompt
        if self.has_limit or limit is None or limit <= room:
            return self.params
        if room < 1:  # too long: the error names no max_tokens, which the client did not give
            return replace(self.params, max_tokens=None)
        return replace(self.params, max_tokens=max(room, self.params.min_tokens))


def chat_job(request: ChatRequest, llm: LLM, answers: AnswerFormat, max_n: int) -> Job:
    """Raises APIError or SamplingParamsError."""
    _check_neutral(request)
    values = _sampling(request)
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs", 'top_logprobs needs "logprobs": true')
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    offer = offered_tools(answers, request.tools, request.tool_choice, request.parallel_tool_calls)
    conversation = Conversation(
        read_messages(request.messages), None if offer is None else offer.shown, _template_kwargs(request, llm)
    )
    names = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return make_job((conversation,), request, values, limit, llm, max_n, names=names, answers=answers, offer=offer)


def completion_job(request: CompletionRequest, llm: LLM, max_n: int) -> Job:
    """Raises APIError or SamplingParamsError."""
    _check_neutral(request)
    values, limit = _sampling(request), request.max_tokens
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo:
            values["prompt_logprobs"] = request.logprobs
    if request.stream and (request.prompt_logprobs is not None or (request.echo and request.logprobs is not None)):
        raise refused("stream", "log-probabilities of the prompt cannot be streamed: leave out stream, or echo")
    if limit is None and llm.default_params.max_tokens is None:
        limit = COMPLETIONS_MAX_TOKENS
    num_kept = None
    if limit == 0:  # only the prompt is scored: one token is made, and dropped
        limit = num_kept = 0
        values["min_tokens"] = 0
    job = make_job(_prompts(request.prompt, max_n), request, values, 1 if limit == 0 else limit, llm, max_n)
    return replace(job, num_kept=num_kept, adds_special_tokens=request.add_special_tokens is not False)


def make_job(
    prompts: tuple[str | Sequence[int] | Conversation, ...],
    request: Any,
    values: dict[str, Any],
    max_tokens: int | None,
    llm: LLM,
    max_n: int,
    *,
    names: Mapping[str, str] | None = None,
    answers: AnswerFormat | None = None,
    offer: ToolOffer | None = None,
) -> Job:
    """A job of these sampling parameters over the checkpoint's defaults; without a seed it is given one. `names`: what
    the client calls parameters, for errors. `answers`: of a chat."""
    defaults = {one.name: getattr(llm.default_params, one.name) for one in fields(SamplingParams)}
    if answers is not None and defaults["max_tokens"] == SamplingParams().max_tokens:
        defaults["max_tokens"] = None  # a conversation has no other limit than the model's length
    if max_tokens is not None:
        values = {**values, "max_tokens": max_tokens}
    _check_counts(prompts, request, llm)
    if answers is not None:
        values = {**values, **_structured(values, answers, offer)}
    try:
        params = SamplingParams.from_dict({**defaults, **values})
    except SamplingParamsError as error:
        name = (names or {}).get(error.parameter, error.parameter)
        raise refused(name, str(error).replace(error.parameter, name, 1)) from None
    if params.seed is None:
        params = replace(params, seed=0 if params.is_greedy else secrets.randbelow(MAX_SEED))
    job = Job(
        prompts,
        params,
        has_limit=max_tokens is not None,
        truncate_to=_truncation(getattr(request, "truncate_prompt_tokens", None), llm.max_model_len),
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        timeout=request.timeout,
        offer=offer if offer is not None and offer.is_read else None,
    )
    if not -(2**31) <= job.priority < 2**31:
        raise refused("priority", f"priority={job.priority} must be an integer of 32 bits")
    if len(job.cache_salt) > MAX_SALT_CHARS:
        raise refused(
            "cache_salt", f"cache_salt has {len(job.cache_salt)} characters, at most {MAX_SALT_CHARS} are allowed"
        )
    _check_answers(len(prompts), params.n, max_n)
    return job


# Fields.


def _check_answers(num_prompts: int, n: int, max_n: int) -> None:
    if num_prompts * n > max_n:
        raise refused("n", f"{num_prompts} prompts times n={n} are more than the server's limit of {max_n}")


def _check_counts(prompts: Sequence[str | Sequence[int] | Conversation], request: Any, llm: LLM) -> None:
    """Raises APIError for more than the model can take, before each of it is looked at."""
    for prompt in prompts:
        if isinstance(prompt, Conversation):
            check_length(len(prompt.messages), "messages", llm.max_model_len)
        elif not isinstance(prompt, str) and getattr(request, "truncate_prompt_tokens", None) is None:
            check_length(len(prompt), "token ids of the prompt", llm.max_model_len)
    num_allowed, vocab_size = len(getattr(request, "allowed_token_ids", None) or ()), llm.client.config.vocab_size
    if num_allowed > vocab_size:
        raise refused("allowed_token_ids", f"allowed_token_ids has {num_allowed:,} ids, the vocabulary {vocab_size:,}")


def _check_neutral(request: Any) -> None:
    check_neutral(request, NEUTRAL)
    if request.best_of not in (None, 1, request.n):
        raise refused("best_of", "best_of is not supported: n answers are generated and all are returned; leave it out")
    if request.stream_options is not None and request.stream_options.include_usage and not request.stream:
        raise refused("stream_options", 'stream_options needs "stream": true')


def check_neutral(body: Any, neutral: Mapping[str, tuple[Any, ...]], prefix: str = "", why: str = "") -> None:
    """Raises APIError for a field that is not supported, unless its value changes nothing."""
    for name, values in neutral.items():
        value = getattr(body, name, None)
        if is_neutral(value, values):
            continue
        use = f", or send {values[0]!r}" if values else ""
        raise refused(prefix + name, f"{prefix}{name}={value!r:.60} is not supported{why}: leave it out{use}")


def _sampling(request: SamplingFields) -> dict[str, Any]:
    values = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    return values | structured_of({name: getattr(request, name, None) for name in STRUCTURED_NAMES})


def _truncation(wanted: int | None, max_model_len: int) -> int | None:
    if wanted is None:
        return None
    if wanted == -1:
        return max_model_len - 1
    if not 1 <= wanted <= max_model_len:
        raise refused(
            "truncate_prompt_tokens", f"truncate_prompt_tokens={wanted} must be 1 to {max_model_len}, or -1 for all"
        )
    return wanted


def _prompts(prompt: str | list[Any], max_n: int) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and not any(isinstance(one, (str, list)) for one in prompt):
        return (_ids(prompt, "prompt"),)
    _check_answers(len(prompt), 1, max_n)
    if not prompt or not all(isinstance(one, str) or (isinstance(one, list) and one) for one in prompt):
        raise refused("prompt", f"prompt must be a text, token ids, or a list of either, got {reprlib.repr(prompt)}")
    return tuple(one if isinstance(one, str) else _ids(one, f"prompt[{i}]") for i, one in enumerate(prompt))


def _ids(prompt: list[Any], where: str) -> list[int]:
    with client_errors("prompt"):
        try:
            return list(read_token_ids(prompt))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def read_messages(messages: Sequence[Mapping[str, Any]], places: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Messages as `jaxinfer.text` takes them, checked: parts are plain texts, null is not given.

    `places` are the names of the messages in the body. Raises APIError, with the place.
    """
    if not messages:
        raise refused("messages", "messages is empty; a chat needs at least one message")
    places = places or places_of(messages)
    found = [_message(message, place) for message, place in zip(messages, places, strict=True)]
    with client_errors("messages"):
        check_messages(found, places)
    return found


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None}
    content, calls = found.get("content"), found.get("tool_calls")
    if isinstance(content, list):
        found["content"] = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str) and count_values(arguments.encode("utf-8", "replace")) > MAX_FIELD:
            raise refused("messages", f"{where}: the arguments of a tool call have more than {MAX_FIELD:,} values")
    return found


def _part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        raise refused(where, f"{where}: only parts of type text are supported, not {reprlib.repr(kind or part)}")
    if not isinstance(part.get("text"), str):
        raise refused(f"{where}.text", f"{where}.text must be a string, not {reprlib.repr(part.get('text'))}")
    return {"type": "text", "text": part["text"]}


def offered_tools(
    answers: AnswerFormat, tools: Sequence[Mapping[str, Any]] | None, choice: Any, is_parallel: bool | None
) -> ToolOffer | None:
    """The tools that may be called, as chat completions name them. Raises APIError."""
    try:
        return answers.offer(tools, choice, is_parallel)
    except ValueError as error:
        name = str(error).partition("[")[0].partition(".")[0].partition("=")[0].partition(" ")[0]
        raise refused(name if name in ("tool_choice", "parallel_tool_calls") else "tools", str(error)) from None


def _structured(values: Mapping[str, Any], answers: AnswerFormat, offer: ToolOffer | None) -> dict[str, Any]:
    """What a chat's answers must match after their reasoning, where that is asked for. The grammar of calls is made
    later, in a thread. Raises APIError."""
    structured = values.get("structured")
    if offer is not None and offer.is_read:
        if structured is not None:
            either = "leave one out, or use tool_choice none"
            raise refused("tools", f"tools and structured output exclude each other: {either}")
    elif structured is not None and structured.reasoning is None:
        structured = replace(structured, reasoning=answers.reasoning_name)
    return {} if structured is None else {"structured": structured}


def _template_kwargs(request: ChatRequest | TokenizeRequest, llm: LLM) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    for name in _RENDERER:
        if name in kwargs:
            raise refused("chat_template_kwargs", f"{name} cannot be one of chat_template_kwargs: it is set by a field")
    kwargs |= effort_variables(getattr(request, "reasoning_effort", None), llm, "reasoning_effort")
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return {**kwargs, "add_generation_prompt": generates, "continue_final_message": continues}


def effort_variables(effort: Any, llm: LLM, field: str) -> dict[str, Any]:
    """Variables of the chat template that set the effort of reasoning; "none" switches it off where a template has
    only a switch. Raises APIError, with the body's field."""
    if not effort:
        return {}
    template = (llm.tokenizer.chat_template if llm.tokenizer is not None else None) or ""
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    raise refused(field, f"{field}={effort!r:.60}: the model's chat template does not know reasoning_effort")


def tokenize_ids(request: TokenizeRequest, llm: LLM) -> list[int]:
    """Token ids of a prompt or of messages. Raises APIError or ValueError."""
    if (request.prompt is None) == (request.messages is None):
        raise refused("prompt", "give either prompt or messages")
    if request.messages is not None:
        tools = request.tools or None
        if tools:
            llm.answer_format.check_shown()
        return Conversation(read_messages(request.messages), tools, _template_kwargs(request, llm)).token_ids(llm)
    return llm.client.tokenize(request.prompt or "", request.add_special_tokens is not False)[1]


def _estimate(prompt: str | Sequence[int] | Conversation) -> int:
    if isinstance(prompt, Conversation):
        return -(-weight([prompt.messages, prompt.tools]) // CHARS_PER_TOKEN) + 1
    return -(-len(prompt) // CHARS_PER_TOKEN) if isinstance(prompt, str) else len(prompt)
