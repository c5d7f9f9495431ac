"""The coordinate of an answer: everything that its tokens follow from, and the tokens, as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.engine.request import AdapterUse, AnswerOrigin
from jaxinfer.sampling.params import SamplingParams

FORM = 1  # of `Coordinate.to_dict`
# Of what is asked of the sampler these choose no token: how many answers there are, and what is reported of them.
_NO_CHOICE = ("n", "logprobs", "prompt_logprobs")
NAMED = ("coordinates", "coordinate")  # under which rows and answers have them


class CoordinateError(ValueError):
    """A value that is no coordinate."""


@dataclass(frozen=True)
class WeightsOrigin:
    """Tokens of an answer that were made with the same weights: from number `start` on, until the next span.

    Attributes:
      version: what the weights were called. fingerprint: `LLM.fingerprint` of the model with them; None if they were
        replaced before it was computed.
      is_retained: whether cached keys and values of weights before were read.
    """

    version: str
    fingerprint: str | None
    start: int = 0
    is_retained: bool = False


@dataclass(frozen=True)
class Coordinate:
    """Everything that an answer's tokens follow from, and the tokens.

    Attributes:
      model: the name that it was opened by. prompt_token_ids: the prompt.
      params: sampling parameters of this answer alone: n=1, its own seed, and the limit of its tokens. index: its
        number among the request's n.
      weights: which weights made its tokens. adapter: None for the model without one.
      options: those of the `LLM` that change its tokens. program: facts that change the bits of numbers.
      arrays: those that the request gave processors, by name, as `request_arrays.to_plain` has them. steering: vectors
        that it added, by the layer's number as text, in the same form.
      token_ids: the answer. finish_reason, stop_reason: as of `CompletionOutput`.
    """

    model: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    weights: tuple[WeightsOrigin, ...]
    index: int = 0
    adapter: AdapterUse | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)
    steering: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with the version of this form."""
        params = {name: _plain(value) for name, value in vars(self.params).items() if name not in _NO_CHOICE}
        own = {name: _plain(value) for name in _OWN if (value := getattr(self, name)) or name not in _OPTIONAL}
        return {"form": FORM, **own, "params": params}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "Coordinate":
        """The inverse. Raises CoordinateError, with the field, for what is none, or of another version."""
        if not isinstance(mapping, Mapping) or "form" not in mapping:
            raise CoordinateError(f"a coordinate is an object with a form, got {mapping!r:.60}")
        if (form := mapping["form"]) != FORM:
            raise CoordinateError(f"the coordinate has form {form!r:.20}, and this version reads form {FORM}")
        given = {
            **{name: {} for name in _OPTIONAL},
            **{name: value for name, value in mapping.items() if name != "form"},
        }
        known = [*_OWN, "params"]
        for name in [*given, *known]:
            if name not in known or name not in given:
                raise CoordinateError(f"the coordinate {'has an unknown' if name in given else 'lacks its'} {name!r}")
        try:
            read = {name: msgspec.convert(given[name], kind) for name, kind in _OWN.items()}
            if not isinstance(given["params"], Mapping):
                raise ValueError(f"expected an object, got {given['params']!r:.60}")
            params = SamplingParams.from_dict(given["params"])
        except (ValueError, TypeError) as error:
            raise CoordinateError(f"the coordinate is damaged: {error}") from None
        return cls(**read, params=params)


_OPTIONAL = ("arrays", "steering")  # left out where there are none
_OWN = {item.name: item.type for item in fields(Coordinate) if item.name != "params"}


def _plain(value: Any) -> Any:
    """A value of a coordinate as JSON has it."""
    if isinstance(value, (WeightsOrigin, AdapterUse)):
        return asdict(value)
    if hasattr(value, "kind") and hasattr(value, "reasoning"):  # structured output, of which most is not given
        return {name: _plain(part) for name, part in vars(value).items() if part not in (None, False)}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def own_params(origin: AnswerOrigin, seed: int) -> SamplingParams:
    """The parameters under which an answer with this seed is the only one of a request."""
    limits = {"max_tokens": origin.max_tokens, "min_tokens": min(origin.params.min_tokens, origin.max_tokens)}
    return replace(origin.params, n=1, seed=seed, logprobs=None, prompt_logprobs=None, **limits)


class Fingerprints:
    """The fingerprints of the weights that a model has had, by what they were called; each is computed once.

    Weights that are called as others before have none: the name does not say which of them made an answer.

    Args:
      compute: computes that of the weights that are there. label: what they are called.
    """

    def __init__(self, compute: Callable[[], str], label: str):
        self._compute = compute
        self._labels, self._repeated = {label}, set[str]()
        self._known: dict[str, str] = {}
        self._num_named = 0

    @property
    def is_used(self) -> bool:
        """True if one was wanted so far."""
        return bool(self._known)

    def named(self, label: str) -> None:
        """Other weights are there, which are called so."""
        self._num_named += 1
        (self._repeated if label in self._labels else self._labels).add(label)
        self._known.pop(label, None)

    def keep(self, label: str) -> None:
        """Computes that of the weights that are there, unless it is known."""
        if label not in self._known and label not in self._repeated:
            count = self._num_named
            computed = self._compute()
            if count == self._num_named:  # others may have come meanwhile
                self._known[label] = computed

    def of(self, label: str) -> str | None:
        """That of weights; None if it was not computed while they were there."""
        return self._known.get(label)


def read_coordinates(path: str | Path) -> Iterator[tuple[str, Coordinate | CoordinateError | None]]:
    """The coordinates of a file with their places: one coordinate or one answer as JSON, or JSON lines of coordinates,
    of answers, or of a batch's results. None stands for an answer without one, an error for what cannot be read.

    Raises CoordinateError for a file that is no JSON.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CoordinateError(f"{path} cannot be read: {error}") from None
    try:
        values = [(str(path), json.loads(text))]
    except (json.JSONDecodeError, RecursionError):
        values = list(_lines(path, text))
    if not values:
        raise CoordinateError(f"{path} is empty")
    for where, value in values:
        within = list(_within(value))
        for number, given in enumerate(within, 1):
            place = where if len(within) == 1 else f"{where}, answer {number}"
            try:
                yield place, None if given is None else Coordinate.from_dict(given)
            except CoordinateError as error:
                yield place, CoordinateError(f"{place}: {error}")


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path} line {number}", json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise CoordinateError(f"{path} line {number} is not JSON: {error}") from None


def _within(value: Any) -> Iterator[Any]:
    """The coordinates of a JSON value; one None for a value without any."""
    if isinstance(value, list):
        for item in value:
            yield from _within(item)
        return
    body = value
    if isinstance(value, Mapping) and isinstance(response := value.get("response"), Mapping) and NAMED[0] not in value:
        body = response.get("body")  # a row of a batch in OpenAI's form
    if not isinstance(body, Mapping):
        yield None
        return
    if "form" in body:
        yield body
        return
    given = next((body[name] for name in NAMED if name in body), None)
    yield from given if isinstance(given, list) and given else [given]
