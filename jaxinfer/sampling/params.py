"""Sampling parameters of a request. Plain Python: nothing here imports JAX."""

import functools
import itertools
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeVar

from jaxinfer.grammar.structured import GrammarError, StructuredOutputs
from jaxinfer.option_names import OptionNameError, check_do_sample, translated
from jaxinfer.options import option

MAX_N = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 100.0
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES, MAX_LOGIT_BIAS = 1024, 100.0
MAX_LOGPROBS = 20
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 256
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-5, 10.0
MAX_VOCAB_SIZE = 2**22
MAX_TOKENS = 2**24


# Fields that change no logit: how many answers, where they end, and what is reported.
_NOT_OF_LOGITS = (
    *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs", "prompt_logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)


class SamplingParamsError(ValueError):
    """An invalid sampling parameter. `parameter` is the name of the field, for an API's error body."""

    def __init__(self, parameter: str, message: str):
        super().__init__(message)
        self.parameter = parameter


_sampling = partial(option, group="Sampling")
_limits = partial(option, group="Length")
_stopping = partial(option, group="Stopping")
_report = partial(option, group="Output")


def read_ids(texts: Sequence[str]) -> list[int]:
    """Token ids from texts such as "13,198"."""
    try:
        return [int(part) for text in texts for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{', '.join(texts)!r} is not a token id, or several with commas between: 13,198") from None


def read_bias(texts: Sequence[str]) -> dict[int, float]:
    """A bias by token id from texts such as "13=-2.5"."""
    bias: dict[int, float] = {}
    for text in texts:
        token, _, number = text.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            raise ValueError(f"{text!r} is not ID=BIAS, such as 13=-2.5") from None
    return bias


def read_limit(text: str) -> int | None:
    """A number of tokens, or None from "none"."""
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of tokens or 'none'") from None


Class = TypeVar("Class", bound=type)


def _takes_other_names(cls: Class) -> Class:
    """Makes a dataclass accept the keywords of `jaxinfer.option_names` beside its fields."""
    own = cls.__init__
    names = frozenset(field.name for field in fields(cls))

    @functools.wraps(own)
    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        if not names.issuperset(keywords):
            keywords = _our_names(keywords)
        own(self, *arguments, **keywords)

    cls.__init__ = init
    return cls


@_takes_other_names
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, with the names, defaults and meanings of vLLM.

    Every field is checked; an unsupported value raises `SamplingParamsError` with the field, the value and the limit.
    Names of other engines, such as `max_new_tokens`, are applied where they mean the same, else refused with the name
    to use (docs/options.md); an unknown name raises TypeError.
    Equivalent values are normalized: `top_k=-1` to 0, one `stop` string and every list to a tuple without duplicates,
    None in place of an empty list to ().

    `structured` is what the answer must match: `StructuredOutputs`, a mapping of its fields such as
    {"json": schema}, or a pydantic or msgspec type; needs the extra `structured`.

    The other fields are described where they are declared, and in docs/options.md.
    """

    n: int = _sampling(1, f"Number of answers for each prompt, 1..{MAX_N}.", "N", "--n -n")
    temperature: float = _sampling(1.0, "0 takes the most probable token; else 1e-5..100 divides the logits.", "X")
    top_p: float = _sampling(1.0, "Keep the most probable tokens up to this probability mass, in (0, 1].", "X")
    top_k: int = _sampling(0, "Keep the K most probable tokens; 0 or -1 keeps all.", "K")
    min_p: float = _sampling(0.0, "Drop tokens less probable than X times the most probable one, 0..1.", "X")
    seed: int | None = _sampling(
        None, "The same seed gives the same answer. Default: derived from the number of the prompt.", "N"
    )
    stop: Sequence[str] = _stopping(
        (), "Text that ends the answer, at most 16 of 1..1024 characters.", "TEXT", is_repeated=True
    )
    stop_token_ids: Sequence[int] = _stopping(
        (), "Token ids that end the answer, at most 64.", "ID,ID", parse=read_ids, is_repeated=True
    )
    ignore_eos: bool = _limits(False, "Continue after the end-of-sequence token.", flag="--ignore-eos/--no-ignore-eos")
    max_tokens: int | None = _limits(
        16, "Maximum number of tokens to generate; none: as many as fit.", "N|none", parse=read_limit
    )
    min_tokens: int = _limits(0, "End-of-sequence and stop ids cannot be chosen before this many tokens.", "N")
    logprobs: int | None = _report(
        None,
        "Report the log-probability of each token and of the N most probable ones, 0..20, from the raw logits.",
        "N",
    )
    prompt_logprobs: int | None = _report(None, "The same for each token of the prompt.", "N")
    presence_penalty: float = _sampling(
        0.0, "Subtracted once from the logit of each token already generated, -2..2.", "X"
    )
    frequency_penalty: float = _sampling(0.0, "Subtracted once for each time the token was generated, -2..2.", "X")
    repetition_penalty: float = _sampling(
        1.0, "Divides a positive and multiplies a negative logit of each token of prompt and answer, 1e-5..10.", "X"
    )
    logit_bias: Mapping[int, float] | None = _sampling(
        None,
        "Added to the logit of a token id, -100..100, at most 1024 ids.",
        "ID=BIAS",
        parse=read_bias,
        is_repeated=True,
        hash=False,
    )
    allowed_token_ids: Sequence[int] | None = _sampling(
        None, "Only these token ids can be chosen.", "ID,ID", parse=read_ids, is_repeated=True
    )
    bad_words: Sequence[str] = _sampling(
        (), "Text that is never completed, at most 128 texts.", "TEXT", is_repeated=True
    )
    skip_special_tokens: bool = _report(
        True, "Leave special tokens out of the text.", flag="--skip-special-tokens/--keep-special"
    )
    include_stop_str_in_output: bool = _stopping(
        False,
        "Keep the stop text in the answer.",
        flag="--include-stop-str-in-output",
    )
    structured: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                "min_tokens", f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}"
            )
        if self.structured is not None and self.ignore_eos:
            raise SamplingParamsError(
                "ignore_eos", "ignore_eos=True cannot be combined with structured: an answer that matches has to end"
            )
        if self.is_greedy and self.n > 1:
            raise SamplingParamsError(
                "n", f"n={self.n} with temperature=0: greedy answers are all the same, the limit is n=1"
            )

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most probable one."""
        return self.temperature == 0

    @property
    def keeps_distribution(self) -> bool:
        """True if log-probabilities under these parameters are the model's own: no logit is changed. Temperature 0
        chooses otherwise, and changes none."""
        return self.temperature in (0, 1) and all(
            getattr(self, field.name) == field.default
            for field in fields(self)
            if field.name not in ("temperature", *_NOT_OF_LOGITS)
        )

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "SamplingParams":
        """Builds parameters from a mapping such as a JSON object, by our names or those of other engines.

        The keys of `logit_bias` may be decimal strings, as in JSON. An unknown name raises SamplingParamsError with the
        nearest field.
        """
        values = our_names(mapping)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = {_decimal(token): bias for token, bias in values["logit_bias"].items()}
        return cls(**values)

    def validate_for_model(self, vocab_size: int, max_model_len: int) -> None:
        """Raises for an id outside the vocabulary or a length above the model's (both in tokens)."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise SamplingParamsError(
                        name, f"{name} has token id {token}, the vocabulary has {vocab_size} tokens"
                    )
        for name in ("max_tokens", "min_tokens"):
            value = getattr(self, name)
            if value is not None and value > max_model_len:
                raise SamplingParamsError(name, f"{name}={value}, the model's length is {max_model_len} tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                raise SamplingParamsError(name, f"{name}={value}, the vocabulary has {vocab_size} tokens")


def our_names(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of our fields. Raises SamplingParamsError for a name without a counterpart."""
    try:
        return _our_names(mapping)
    except OptionNameError as error:
        raise SamplingParamsError(error.name, str(error)) from None


def _our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(SamplingParams)]
    values = translated("SamplingParams", given, names, "{} is not a sampling parameter")
    check_do_sample(given, values.get("temperature"))
    return values


def _decimal(token: Any) -> Any:
    is_id = isinstance(token, str) and len(token) < 20 and token.isascii() and token.isdigit()
    return int(token) if is_id else token


# What an extreme value is meant to say, or one that means "not given" in other engines.
_HINTS = {
    "max_tokens": "leave it out for as many as fit",
    "min_p": "0 keeps all tokens",
    "min_tokens": "0 is no minimum",
    "logprobs": "leave it out for none",
    "prompt_logprobs": "leave it out for none",
    "repetition_penalty": "1 changes nothing",
    "seed": "leave it out for a random one",
    "stop": "leave it out for none",
    "temperature": "0 takes the most probable token",
    "top_k": "-1 or 0 keeps all tokens",
    "top_p": "1 keeps all tokens, and top_k=1 the most probable one",
}


def _error(name: str, value: Any, limit: str) -> SamplingParamsError:
    hint = f": {_HINTS[name]}" if name in _HINTS else ""
    return SamplingParamsError(name, f"{name} must be {limit}, got {reprlib.repr(value)}{hint}")


def _to_int(name: str, value: Any, limit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _error(name, value, limit)
    return int(value)


def _integer(low: int, high: int, *, optional: bool = False):
    limit = f"an integer in {low}..{high}" + (" or None" if optional else "")

    def check(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        number = _to_int(name, value, limit)
        if not low <= number <= high:
            raise _error(name, value, limit)
        return number

    return check


def _to_float(name: str, value: Any, limit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _error(name, value, limit)
    try:
        number = float(value)
    except OverflowError:
        raise _error(name, value, limit) from None
    if not math.isfinite(number):
        raise _error(name, value, limit)
    return number


def _real(low: float, high: float, *, includes_low: bool = True):
    limit = f"a finite number in {'[' if includes_low else '('}{low:g}, {high:g}]"

    def check(name: str, value: Any) -> float:
        number = _to_float(name, value, limit)
        if not low <= number <= high or (number == low and not includes_low):
            raise _error(name, value, limit)
        return number

    return check


def _temperature(name: str, value: Any) -> float:
    limit = f"0 (greedy) or a finite number in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"
    number = _to_float(name, value, limit)
    if number != 0 and not MIN_TEMPERATURE <= number <= MAX_TEMPERATURE:
        raise _error(name, value, limit)
    return abs(number)


def _top_k(name: str, value: Any) -> int:
    number = _integer(-1, MAX_VOCAB_SIZE)(name, value)
    return 0 if number is None or number == -1 else number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _error(name, value, "True or False")
    return value


def _items(name: str, value: Any, what: str, max_items: int) -> list[Any]:
    limit = f"at most {max_items} {what}"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _error(name, value, limit)
    items = list(itertools.islice(value, max_items + 1))
    if len(items) > max_items:
        length = len(value) if isinstance(value, Sized) else "more"
        raise SamplingParamsError(name, f"{name} must be {limit}, got {length}")
    return items


def _strings(max_items: int, max_chars: int):
    def check(name: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        items = _items(name, [value] if isinstance(value, str) else value, "strings", max_items)
        for item in items:
            if not isinstance(item, str):
                raise _error(name, item, "strings")
            if not 1 <= len(item) <= max_chars:
                raise _error(name, item, f"strings of 1..{max_chars} characters, not {len(item)}")
        return tuple(dict.fromkeys(items))

    return check


def _token_ids(max_items: int, *, none_is_all: bool = False):
    limit = f"token ids in 0..{MAX_VOCAB_SIZE - 1}"

    def check(name: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None if none_is_all else ()
        ids = [_to_int(name, item, limit) for item in _items(name, value, "token ids", max_items)]
        for token in ids:
            if not 0 <= token < MAX_VOCAB_SIZE:
                raise _error(name, token, limit)
        if none_is_all and not ids:
            raise _error(name, value, "at least one token id, or None to allow all")
        return tuple(dict.fromkeys(ids))

    return check


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    limit = f"a mapping of at most {MAX_LOGIT_BIAS_ENTRIES} token ids to numbers in +-{MAX_LOGIT_BIAS:g}"
    if not isinstance(value, Mapping):
        raise _error(name, value, limit)
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise SamplingParamsError(name, f"{name} must be {limit}, got {len(value)} entries")
    _token_ids(MAX_LOGIT_BIAS_ENTRIES)(name, list(value))
    bias = _real(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return {int(token): bias(name, number) for token, number in value.items()}


def _structured(name: str, value: Any) -> StructuredOutputs | None:
    if value is None:
        return None
    try:
        return StructuredOutputs.of(value)
    except GrammarError as error:
        raise SamplingParamsError(name, f"{name}: {error}") from None


_CHECKS = {
    "structured": _structured,
    "n": _integer(1, MAX_N),
    "temperature": _temperature,
    "top_p": _real(0, 1, includes_low=False),
    "top_k": _top_k,
    "min_p": _real(0, 1),
    "seed": _integer(0, 2**64 - 1, optional=True),
    "stop": _strings(MAX_STOP_STRINGS, MAX_STOP_CHARS),
    "stop_token_ids": _token_ids(MAX_STOP_TOKEN_IDS),
    "ignore_eos": _flag,
    "max_tokens": _integer(1, MAX_TOKENS, optional=True),
    "min_tokens": _integer(0, MAX_TOKENS),
    "logprobs": _integer(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS, optional=True),
    "presence_penalty": _real(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _real(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": _real(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids(MAX_VOCAB_SIZE, none_is_all=True),
    "bad_words": _strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    "skip_special_tokens": _flag,
    "include_stop_str_in_output": _flag,
}
