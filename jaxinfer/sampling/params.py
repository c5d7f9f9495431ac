"""Sampling parameters of a request. Plain Python: nothing here imports JAX."""

import itertools
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from jaxinfer.checks import did_you_mean

MAX_N = 16
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


class SamplingParamsError(ValueError):
    """An invalid sampling parameter. `parameter` is the name of the field, for an API's error body."""

    def __init__(self, parameter: str, message: str):
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request: vLLM's names, defaults and meanings.

    Every field is checked; an unsupported value raises `SamplingParamsError` with the field, the value and the limit.
    Equivalent values are normalized: `top_k=-1` to 0, one `stop` string and every list to a tuple without duplicates,
    None in place of an empty list to ().

    Attributes:
      n: answers to return for one prompt, 1..16. Answer 0 is the same as with n=1; see `seeds.sample_seed`.
      temperature: 0 for greedy, else 1e-5..100; divides the logits.
      top_p: keep the smallest set of most probable tokens whose probability reaches top_p, in (0, 1].
      top_k: keep the k most probable tokens; 0 or -1 keeps all.
      min_p: drop tokens less probable than min_p times the most probable one, 0..1.
      seed: 0..2**64-1, or None for one derived from the engine's seed.
      stop: a string or strings that end the answer, at most 16 of 1..1024 characters.
      stop_token_ids: ids that end the answer, at most 64.
      ignore_eos: continue after the model's end-of-sequence token.
      max_tokens: most tokens to generate; None is as many as the model's length allows.
      min_tokens: stop and end-of-sequence ids are forbidden before this many tokens.
      logprobs: report the log-probability of the sampled token and of this many most probable ones, 0..20, under the
        model's raw logits, before any processor.
      prompt_logprobs: the same for each token of the prompt.
      presence_penalty: subtracted once from the logit of each token already generated, -2..2.
      frequency_penalty: subtracted once per time the token was generated, -2..2.
      repetition_penalty: divides a positive and multiplies a negative logit of each token of the prompt or the
        answer, 1e-5..10.
      logit_bias: token id to a number in -100..100 added to its logit, at most 1024 entries. Treat it as read-only.
      allowed_token_ids: only these ids can be generated.
      bad_words: strings whose token sequences cannot be generated, at most 128.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: leave the stop string in the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                "min_tokens", f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}"
            )
        if self.is_greedy and self.n > 1:
            raise SamplingParamsError(
                "n", f"n={self.n} with temperature=0: greedy answers are all the same, the limit is n=1"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "SamplingParams":
        """Builds parameters from a mapping such as a JSON object. An unknown name raises, with the nearest field.

        The keys of `logit_bias` may be decimal strings, as in JSON.
        """
        names = [f.name for f in fields(cls)]
        for name in mapping:
            if name not in names:
                hint = did_you_mean(name, names, cutoff=0.5, otherwise=f"; the fields are {', '.join(names)}")
                raise SamplingParamsError(str(name), f"{name!r} is not a sampling parameter{hint}")
        values = dict(mapping)
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


def _decimal(token: Any) -> Any:
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token


def _error(name: str, value: Any, limit: str) -> SamplingParamsError:
    return SamplingParamsError(name, f"{name} must be {limit}, got {reprlib.repr(value)}")


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
        raise SamplingParamsError(name, f"{name} must be {limit}, got {_length(value)}")
    return items


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, Sized) else "more"


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


_CHECKS = {
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
