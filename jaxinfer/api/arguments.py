"""Checks of what `LLM` is given: options, prompts, parameters, conversations. Raises sentences for wrong types."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np

from jaxinfer.api.options import LLMOptions
from jaxinfer.checks import did_you_mean
from jaxinfer.engine.request import DEFAULT_REQUEST_OPTIONS, Prompt, Request, RequestOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.steering import Steering
from jaxinfer.loading import LiveModel
from jaxinfer.models import ModelConfig, check_taps
from jaxinfer.option_names import NAMES, find, translated
from jaxinfer.request_arrays import shared
from jaxinfer.sampling import SamplingParams
from jaxinfer.store import alias_options

P = ParamSpec("P")
Method = TypeVar("Method", bound=Callable[..., Any])
Key = TypeVar("Key")

PROMPT_FORM = "a text or a list of token ids"
MESSAGES_FORM = '[{"role": "user", "content": "..."}]'
_MODEL_FORM = "a folder, a GGUF file, a hub id, 'demo', or (ModelConfig, params, tokenizer)"
_MODEL_NAMES = tuple(entry.name for entry in NAMES if entry.ours == "model")
_SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams))
_REQUEST_NAMES = (*(field.name for field in fields(RequestOptions)), "taps")
_ELSEWHERE = {
    "SamplingParams, as in generate(prompts, SamplingParams(max_tokens=64))": _SAMPLING_NAMES,
    "generate, as in generate(llm.chat_prompt(messages), priority=1)": _REQUEST_NAMES,
    "LLM, as in LLM(model, max_model_len=1024)": tuple(field.name for field in fields(LLMOptions)),
}


def takes_options(
    options: Callable[P, LLMOptions],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, str | Path | LiveModel, P], None]]:
    """Gives a constructor's keywords the types of a dataclass's fields; its first argument, the model, is required."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, str | Path | LiveModel, P], None]:
        @functools.wraps(init)
        def run(self: Any, *models: Any, **keywords: Any) -> None:
            models += tuple(keywords.pop(name) for name in ("model", *_MODEL_NAMES) if name in keywords)
            if len(models) != 1:
                raise TypeError(f"LLM takes one model, {_MODEL_FORM}, and options by name; got {len(models)} models")
            init(self, models[0], **keywords)

        return run

    return decorate


def checked_options(model: Any, options: Mapping[str, Any]) -> LLMOptions:
    """The options of `LLM`, by our names or those of other engines; what is not given is as the model's alias says.

    Raises TypeError for an unknown name or a wrong type, ValueError for a value out of range.
    """
    if not isinstance(model, (str, Path, tuple)) or not model:
        raise TypeError(f"model must be {_MODEL_FORM}, got {_shown(model)}")
    known = [field.name for field in fields(LLMOptions)]
    elsewhere = {"SamplingParams, which generate takes": [name for name in _SAMPLING_NAMES if name not in known]}
    given = translated("LLM", options, known, "LLM has no argument {}", elsewhere)
    for name, value in alias_options(model).items() if isinstance(model, str) else ():
        if name not in given and not (name == "quantize" and given.get("requantize") is not None):
            given[name] = value
    return LLMOptions(**given)


def takes_other_names(method: Method) -> Method:
    """Makes a method accept the keywords of `jaxinfer.option_names`; wrong ones raise TypeError with the right form."""
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())[1:]
    known = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    form = f"{method.__name__}({', '.join(str(parameter).partition(':')[0] for parameter in parameters)})"
    is_open = len(known) < len(parameters)

    @functools.wraps(method)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not set(known).issuperset(keywords):
            keywords = _our_keywords(keywords, known, method.__name__, is_open=is_open)
        try:
            signature.bind(self, *arguments, **keywords)
        except TypeError as error:
            raise TypeError(f"{error}; the call is {form}") from None
        return method(self, *arguments, **keywords)

    return run  # type: ignore[return-value]


def _our_keywords(keywords: Mapping[str, Any], known: Sequence[str], name: str, *, is_open: bool) -> dict[str, Any]:
    """With `is_open`, unknown names are variables of the chat template, unless they are sampling parameters."""
    template: dict[str, Any] = {}
    if is_open:
        rest = {key: keywords[key] for key in keywords if key != "chat_template_kwargs"}
        template = {key: rest[key] for key in rest if not (key in known or _is_option(key))}
        more = keywords.get("chat_template_kwargs")
        if not (more is None or isinstance(more, Mapping)):
            raise TypeError(f"chat_template_kwargs must be a dict, got {_shown(more)}")
        keywords = {key: value for key, value in rest.items() if key not in template}
        template |= more or {}
    return {**translated("call", keywords, known, f"{name} has no argument {{}}", _ELSEWHERE), **template}


def _is_option(name: str) -> bool:
    """True of names of a request's or a method's fields, ours or another engine's, which are no template variables."""
    is_ours = name in _SAMPLING_NAMES or name in _REQUEST_NAMES
    return is_ours or find("call", name) is not None or find("SamplingParams", name) is not None


def unknown_attribute(self: Any, name: str) -> NoReturn:
    """The `__getattr__` of a class. Raises AttributeError with its public methods."""
    named = [
        attribute for kind in type(self).__mro__[:-1] for attribute, value in vars(kind).items() if callable(value)
    ]
    methods = [method for method in dict.fromkeys(named) if not method.startswith("_")]
    known = "" if name.startswith("_") else f"; its methods are {', '.join(methods)}"
    raise AttributeError(
        f"{type(self).__name__} has no attribute {name!r}{did_you_mean(name, methods, otherwise=known)}"
    )


def as_prompt(prompt: Any, what: str) -> Prompt:
    """A prompt, whose token ids are not checked yet. Raises TypeError, with `what`, for anything else."""
    if isinstance(prompt, str):
        return prompt
    if _is_array(prompt) and prompt.ndim == 1 and prompt.dtype.kind in "iu":
        return [int(token) for token in prompt]
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) and _are_scalars(prompt):
        return prompt
    hint = ""
    if isinstance(prompt, Mapping) and "content" in prompt:
        hint = "; messages are for llm.chat"
    elif isinstance(prompt, Mapping) and "prompt" in prompt:
        hint = "; pass what its 'prompt' is"
    elif isinstance(prompt, (bytes, bytearray)):
        hint = "; decode it first"
    raise TypeError(f"{what} must be {PROMPT_FORM}, got {_shown(prompt)}{hint}")


def as_prompts(prompts: Any, name: str = "prompt") -> list[Prompt]:
    """One prompt (a text, or a sequence of integers) as a list of one; several as they are.

    Raises TypeError, with its number, for what is no prompt.
    """
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or (_is_array(prompts) and prompts.ndim == 1):
        return [as_prompt(prompts, f"a {name}")]
    if not isinstance(prompts, Iterable) or (_is_array(prompts) and np.asarray(prompts).ndim != 2):
        raise TypeError(f"{name}s must be {PROMPT_FORM}, or a list of these, got {_shown(prompts)}")
    items = list(prompts)
    if items and _are_scalars(items):
        return [items]
    return [as_prompt(prompt, f"{name} {number}") for number, prompt in enumerate(items)]


def as_params(params: Any, default: SamplingParams, what: str = "params") -> SamplingParams:
    """Sampling parameters, `default` for None. Raises TypeError for anything else."""
    if params is None:
        return default
    if not isinstance(params, SamplingParams):
        hint = ": SamplingParams.from_dict reads one" if isinstance(params, Mapping) else ""
        raise TypeError(f"{what} must be SamplingParams, got {_shown(params)}{hint}")
    return params


def params_of_each(params: Any, default: SamplingParams, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts, from those for all or one for each."""
    if isinstance(params, Iterable) and not isinstance(params, (str, bytes, Mapping)):
        each = [as_params(item, default, f"params {number}") for number, item in enumerate(params)]
        return _of_each(each, count, "sampling parameters")
    return [as_params(params, default)] * count


def priorities_of_each(priority: Any, count: int) -> list[int]:
    """The priority of each of `count` prompts, from one for all or one for each."""
    is_list = isinstance(priority, Iterable) and not isinstance(priority, (str, bytes, Mapping))
    each: list[Any] = list(priority) if is_list else [priority]
    for value in each:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"priority must be an integer, or one for each prompt, got {_shown(value)}")
    each = [int(value) for value in each]
    return _of_each(each, count, "priorities") if is_list else each * count


def adapters_of_each(adapter: Any, count: int, what: str = "prompts") -> list[str | None]:
    """The adapter's name, or None, of each of `count` prompts, or of what they are called, from one for all or one for
    each."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if not isinstance(adapter, Sequence) or not all(name is None or isinstance(name, str) for name in adapter):
        raise TypeError(f"adapter must be a name or None, or one for each of the {count} {what}, got {_shown(adapter)}")
    return _of_each(list(adapter), count, "adapters", what)


def arrays_of_each(arrays: Any, count: int) -> list[Mapping[str, Any] | None]:
    """The arrays for processors of each of `count` prompts, from those for all or a list with one for each."""
    if arrays is None or isinstance(arrays, Mapping):
        return [arrays and shared(arrays)] * count
    if not isinstance(arrays, (list, tuple)) or not all(
        given is None or isinstance(given, Mapping) for given in arrays
    ):
        told = 'arrays must be a mapping such as {"name": array}, or one for each prompt'
        raise TypeError(f"{told}, got {_shown(arrays)}")
    return _of_each(list(arrays), count, "mappings of arrays")


def options_of_each(
    count: int, *, priority: Any, adapter: Any, arrays: Any, steering: Any, **for_all: Any
) -> list[RequestOptions]:
    """The options of each of `count` prompts, from one priority, adapter, arrays and steering for all or one for
    each, and what is for all of them."""
    each = zip(
        priorities_of_each(priority, count),
        adapters_of_each(adapter, count),
        arrays_of_each(arrays, count),
        steering_of_each(steering, count),
        strict=True,
    )
    return [
        RequestOptions(priority=rank, adapter=name, arrays=given, steering=added, **for_all)
        for rank, name, given, added in each
    ]


def as_taps(taps: Any, spec: EngineSpec, *, has_hosts: bool) -> tuple[str, ...]:
    """Names of hidden states that a pass of its own computes. Raises TypeError, ValueError for other things, on several
    hosts, and under a policy that drops keys."""
    names = check_taps(spec.config, as_names("taps", taps))
    if names and has_hosts:
        raise ValueError(f"taps={list(names)}: hidden states are for a model on one host")
    if names and spec.policy.drops:
        policy = spec.policy
        raise ValueError(f"taps={list(names)}: hidden states are computed over all tokens, not kv_policy='{policy}'")
    return names


def check_processors(options: LLMOptions, name: str, *, has_head: bool, has_hosts: bool) -> None:
    """Raises ValueError for processors of a model without a head, and on several hosts."""
    if options.processors and not has_head:
        raise ValueError(f"processors change logits, and {name} has no head: it makes vectors only")
    if options.processors and has_hosts:
        raise ValueError("processors are for one process, and this model runs on several hosts")


def with_steering(options: LLMOptions, config: ModelConfig, has_hosts: bool) -> tuple[LLMOptions, Steering | None]:
    """The options with the layers of their vectors among the steered ones, and these vectors. Raises ValueError for
    vectors that do not fit the model, and for steered and tapped layers on several hosts."""
    steering = None if options.steering is None else Steering(options.steering)
    if steering is not None:
        options = replace(options, steered_layers=tuple({*options.steered_layers, *steering.vectors}))
        steering.check(config.hidden_size, config.num_layers, tuple(options.steered_layers))
    if has_hosts and (options.steered_layers or options.tapped_layers):
        raise ValueError("steered_layers and tapped_layers are for one process, not for several hosts")
    return options, steering


def steering_of_each(steering: Any, count: int) -> list[Steering | None]:
    """The added vectors of each of `count` prompts, from those for all or those for each."""
    for_all: Any = steering
    if steering is None or isinstance(steering, Steering):
        return [for_all] * count
    if isinstance(steering, str) or not isinstance(steering, Sequence):
        return [Steering(for_all)] * count
    each = [own if own is None or isinstance(own, Steering) else Steering(own) for own in steering]
    return _of_each(each, count, "mappings of steering")


def _of_each(values: list[Any], count: int, name: str, what: str = "prompts") -> list[Any]:
    if len(values) != count:
        raise ValueError(f"{len(values)} {name} for {count} {what}: give one for all, or one for each")
    return values


def as_conversations(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation as a list of one; several as they are. Raises TypeError for what is no conversation."""
    if isinstance(messages, str):
        raise TypeError(f"chat takes messages, {MESSAGES_FORM}, got a text: generate takes texts")
    if isinstance(messages, Mapping):
        raise TypeError(f"chat takes a list of messages, {MESSAGES_FORM}, got one message: put it in a list")
    if not isinstance(messages, Iterable):
        raise TypeError(f"chat takes messages, {MESSAGES_FORM}, or a list of conversations, got {_shown(messages)}")
    items = list(messages)
    if items and isinstance(items[0], Mapping):
        for number, message in enumerate(items):
            if not isinstance(message, Mapping):
                raise TypeError(f"message {number} must be a dict with a role and a content, got {_shown(message)}")
        return [items]
    for number, conversation in enumerate(items):
        if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Sequence):
            raise TypeError(
                f"conversation {number} must be a list of messages, {MESSAGES_FORM}, got {_shown(conversation)}"
            )
    return items


def as_pairs(prompts: Any, continuations: Any) -> list[tuple[Prompt, Prompt]]:
    """Prompts with their continuations. Raises TypeError as `as_prompts`, ValueError for numbers that differ."""
    before, after = as_prompts(prompts), as_prompts(continuations, "continuation")
    if len(before) != len(after):
        hint = f": for one prompt with several, [prompt] * {len(after)}" if len(before) == 1 else ""
        raise ValueError(f"{len(before)} prompts and {len(after)} continuations do not pair up{hint}")
    return list(zip(before, after, strict=True))


def each_request(
    requests: Any, default: SamplingParams
) -> Iterator[tuple[Any, Prompt | Request, SamplingParams, RequestOptions]]:
    """The requests of `generate_each`, checked one by one as they are taken."""
    form = "(key, prompt, params)"
    if isinstance(requests, (str, bytes, Mapping)) or not isinstance(requests, Iterable):
        raise TypeError(f"generate_each takes tuples {form}, got {_shown(requests)}")

    def checked() -> Iterator[tuple[Any, Prompt | Request, SamplingParams, RequestOptions]]:
        for number, request in zip(itertools.count(), requests, strict=False):
            if isinstance(request, (str, bytes)) or not isinstance(request, Sequence) or len(request) not in (3, 4):
                told = f"{form}, params may be None and RequestOptions may follow"
                raise TypeError(f"request {number} must be {told}; got {_shown(request)}")
            key, prompt, params, *more = request
            what = f"request {number} with key {key!r:.40}"
            options = more[0] if more else DEFAULT_REQUEST_OPTIONS
            if not isinstance(options, RequestOptions):
                raise TypeError(f"{what}: options must be RequestOptions, got {_shown(options)}")
            if not isinstance(prompt, Request):  # of an `Embedder`, for one
                prompt = as_prompt(prompt, f"{what}: the prompt")
            yield key, prompt, as_params(params, default, f"{what}: params"), options

    return checked()


def as_count(name: str, value: Any) -> int:
    """A positive integer. Raises TypeError or ValueError, with the name."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer, got {_shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def as_one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of some words. Raises ValueError, with them all."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {_shown(value)}")
    return value


def as_names(name: str, value: Any) -> list[str]:
    """A list of names. Raises TypeError for one text, or anything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, got {_shown(value)}")
    names = list(value)
    for item in names:
        if not isinstance(item, str):
            raise TypeError(f"{name} must be a list of names, got {_shown(item)} in it")
    return names


def _is_array(value: Any) -> bool:
    return hasattr(value, "ndim") and hasattr(value, "dtype") and value.ndim > 0


def _are_scalars(values: Sequence[Any]) -> bool:
    return {int}.issuperset(map(type, values)) or all(map(_is_scalar, values))


def _is_scalar(value: Any) -> bool:
    """Tells whether a value stands where a token id does: a number, or an array of one element without axes."""
    return isinstance(value, (int, float, complex, np.generic)) or (hasattr(value, "ndim") and value.ndim == 0)


def _shown(value: Any) -> str:
    """A value with its type, for messages."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"
