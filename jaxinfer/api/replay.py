"""Answers made again from their coordinates, whole or from the middle, and compared token by token.

A range of an answer is made by a sequence that begins with the answer's tokens before it, as one that was preempted
there: seeds, penalties, grammars and stop strings are where they were. With `draft="claimed"` the tokens of the range
are drafts, which the engine's own verification accepts where the sampler chooses them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jaxinfer import __version__
from jaxinfer.api.coordinate import Coordinate, WeightsOrigin
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.client import Client
from jaxinfer.engine.explanation import program_facts
from jaxinfer.engine.grammars import ClaimRefusedError
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.request import CompletionOutput, Prompt, Request, RequestOptions, SequenceState
from jaxinfer.engine.scheduler import QueueFullError
from jaxinfer.engine.steering import Steering
from jaxinfer.models import ModelConfig
from jaxinfer.progress import Stage
from jaxinfer.request_arrays import from_plain
from jaxinfer.sampling import SamplingParams


class ReplayModel(Protocol):
    """The part of `LLM` by which answers are made again."""

    client: Client
    config: ModelConfig

    @property
    def engine(self) -> AnyEngine: ...
    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]: ...
    @property
    def is_alone(self) -> bool: ...
    @property
    def weights_version(self) -> str: ...
    def fingerprint_of(self, version: str) -> str | None: ...
    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request: ...


_ENDS = ("stop", "length")  # by which an answer ends again; others came from outside


def end_of(output: CompletionOutput) -> dict[str, Any]:
    """The part of a coordinate that an answer has."""
    own = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    return {"token_ids": tuple(output.token_ids), **own}


@dataclass(frozen=True)
class Claim:
    """Tokens `start` to `end` (None: all that follow) of an answer that are to be made again. `drafts`: whether they
    are given to `draft="claimed"`. Raises ValueError for no such range."""

    coordinate: Coordinate
    start: int = 0
    end: int | None = None
    drafts: bool = False

    def __post_init__(self) -> None:
        num_tokens = len(self.coordinate.token_ids)
        if not 0 <= self.start <= self.stop <= num_tokens:
            raise ValueError(f"tokens {self.start} to {self.end} of an answer of {num_tokens} tokens")

    @property
    def stop(self) -> int:
        """The token after the last one."""
        return len(self.coordinate.token_ids) if self.end is None else self.end


@dataclass(frozen=True)
class Difference:
    """The first place where an answer is not what it is claimed to be.

    Attributes:
      position: number of the token in the answer. claimed, made: the two tokens; None where the answer has ended.
      reason: a sentence, where it is no token that differs.
    """

    position: int
    claimed: int | None
    made: int | None
    reason: str | None = None


@dataclass(frozen=True)
class AnswerCheck:
    """The result for one answer.

    Attributes:
      num_checked: tokens that were made again and are equal.
      difference: the first that is not; None if there is none.
      refused: why some tokens could not be made again, a sentence for each span of them.
    """

    num_checked: int = 0
    difference: Difference | None = None
    refused: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if every token was made again, and the end, and all are equal."""
        return self.difference is None and not self.refused


def program_of(llm: ReplayModel) -> dict[str, Any]:
    """Facts of a model's programs, as coordinates have them."""
    return {"jaxinfer": __version__, **program_facts(llm.engine)}


def program_differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts of two programs that differ, by name: as recorded, and as they are here."""
    names = dict.fromkeys([*recorded, *here])
    pairs = {name: (recorded.get(name), here.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass
class _Part:
    """Adjacent tokens of a claim that are made by one sequence."""

    number: int  # of the claim
    claim: Claim
    start: int
    end: int
    request: Request
    compared: int = field(init=False)

    def __post_init__(self) -> None:
        self.compared = self.start

    @property
    def has_end(self) -> bool:
        """True if the answer has to end after these tokens, for the reason that it is claimed to end by."""
        return ends_again(self.claim.coordinate) and self.end == len(self.claim.coordinate.token_ids)

    def compare(self, answer: SequenceState) -> AnswerCheck | None:
        """The result, once there is one; `answer` was advanced."""
        coordinate, output = self.claim.coordinate, answer.output
        claimed = coordinate.token_ids
        while self.compared < min(len(output), self.end):
            position = self.compared
            if output[position] != claimed[position]:
                return self._differs(position, claimed[position], output[position])
            self.compared += 1
        if self.has_end and len(output) > self.end:
            return self._differs(self.end, None, output[self.end], "the answer goes on")
        if not answer.is_finished:
            return None
        if answer.finish_reason not in _ENDS:
            told = f"the answer ended with {answer.finish_reason!r} after {len(output)} tokens: {answer.error}"
            return AnswerCheck(self.compared - self.start, refused=(told,))
        ended = f"the answer ends by {_end_of(answer)}"
        if len(output) < self.end:
            return self._differs(len(output), claimed[len(output)], None, ended)
        if self.has_end and (answer.finish_reason, answer.stop_reason) != (
            coordinate.finish_reason,
            coordinate.stop_reason,
        ):
            return self._differs(self.end, None, None, f"{ended}, and is claimed to end by {_end_of(coordinate)}")
        return AnswerCheck(self.end - self.start)

    def _differs(self, position: int, claimed: int | None, made: int | None, reason: str | None = None) -> AnswerCheck:
        return AnswerCheck(max(position - self.start, 0), Difference(position, claimed, made, reason))


def _end_of(answer: SequenceState | Coordinate) -> str:
    return f"{answer.finish_reason}" + ("" if answer.stop_reason is None else f" {answer.stop_reason!r}")


def ends_again(coordinate: Coordinate) -> bool:
    """True if the answer ended by itself."""
    return coordinate.finish_reason in _ENDS


def check_claims(
    llm: ReplayModel, claims: Sequence[Claim], *, force: bool = False, use_tqdm: bool | None = None
) -> list[AnswerCheck]:
    """Makes the tokens of claims again, all in one batch. `force`: with the weights and adapters that are there,
    whatever those of the answers were."""
    if llm.engine.weights.why_not_whole is not None:
        raise RuntimeError(llm.engine.weights.why_not_whole)
    if not llm.is_alone:
        raise ValueError("answers are made again by a model on one host")
    version = llm.weights_version
    loaded = WeightsOrigin(version, llm.fingerprint_of(version))
    checks: list[list[AnswerCheck]] = [[] for _ in claims]
    parts: list[_Part] = []
    for number, claim in enumerate(claims):
        for check in _parts_of(llm, number, claim, loaded, force=force):
            parts.append(check) if isinstance(check, _Part) else checks[number].append(check)
    with Stage("making answers again", len(claims), "answer", show=use_tqdm) as stage:
        for part, check in _run(llm, parts):
            checks[part.number].append(check)
            stage.update()
    return [_merged(those) for those in checks]


def _merged(checks: Sequence[AnswerCheck]) -> AnswerCheck:
    differences = [check.difference for check in checks if check.difference is not None]
    return AnswerCheck(
        sum(check.num_checked for check in checks),
        min(differences, key=lambda difference: difference.position, default=None),
        tuple(told for check in checks for told in check.refused),
    )


def _parts_of(
    llm: ReplayModel, number: int, claim: Claim, loaded: WeightsOrigin, *, force: bool
) -> Iterator[_Part | AnswerCheck]:
    """The parts of a claim that can be made again, and a refusal for each span that cannot."""
    coordinate = claim.coordinate
    acceptance = coordinate.program.get("acceptance", "exact")
    if acceptance != "exact" and not coordinate.params.is_greedy:
        yield AnswerCheck(refused=(f"acceptance={acceptance!r}: the tokens depended on what else ran",))
        return
    try:
        request = _request_of(llm, claim, force=force)
    except ValueError as error:
        yield AnswerCheck(refused=(str(error),))
        return
    spans, position = coordinate.weights or (WeightsOrigin("", None),), claim.start
    for index, span in enumerate(spans):
        last = spans[index + 1].start if index + 1 < len(spans) else len(coordinate.token_ids)
        end = min(last, claim.stop)
        if position >= end and (coordinate.token_ids or not ends_again(coordinate)):
            continue
        if (why := _why_not(span, loaded, force=force)) is not None:
            yield AnswerCheck(refused=(f"tokens {position} to {end}: {why}",))
        elif (early := _early_end(request, coordinate, position)) is not None:
            yield early
        else:
            ends = ends_again(coordinate) and end == len(coordinate.token_ids)
            limit = request.max_tokens if ends else end
            yield _Part(number, claim, position, end, replace(request, max_tokens=limit))
        position = end


def _why_not(span: WeightsOrigin, loaded: WeightsOrigin, *, force: bool) -> str | None:
    """The reason why tokens of a span cannot be made again; None if they can."""
    if span.is_retained:
        return (
            f"weights {span.version!r} made them on cached keys and values of weights before (kv='retain'), which "
            "nothing has any more"
        )
    if force or (span.fingerprint is not None and span.fingerprint == loaded.fingerprint):
        return None
    if span.fingerprint is None:
        return f"weights {span.version!r} made them, whose fingerprint is not known"
    known = "?" if loaded.fingerprint is None else loaded.fingerprint[:12]
    return f"weights {span.version!r} ({span.fingerprint[:12]}) made them, and {loaded.version!r} ({known}) are loaded"


def _early_end(request: Request, coordinate: Coordinate, start: int) -> AnswerCheck | None:
    """The difference of an answer that goes on after a token which ends it, among those that are taken as they are."""
    for position, token in enumerate(coordinate.token_ids[:start]):
        if token in request.ending_ids:
            claimed = coordinate.token_ids[position + 1] if position + 1 < len(coordinate.token_ids) else None
            if claimed is not None:
                told = f"the answer ends by stop {token}"
                return AnswerCheck(0, Difference(position + 1, claimed, None, told))
    return None


def _request_of(llm: ReplayModel, claim: Claim, *, force: bool) -> Request:
    """The request of an answer alone. Raises ValueError where this model cannot answer it."""
    coordinate, name = claim.coordinate, None
    if (use := coordinate.adapter) is not None:
        alike = [name for name, adapter in llm.adapters.items() if adapter.fingerprint == use.fingerprint]
        if not alike and (use.name not in llm.adapters or not force):
            has_name = use.name in llm.adapters
            told = f"another one of that name is ({llm.adapters[use.name].fingerprint[:12]})" if has_name else "none is"
            raise ValueError(f"adapter {use.name!r} ({use.fingerprint[:12]}) is not loaded: {told}")
        name = use.name if use.name in alike or not alike else alike[0]
    num_prompt, num_tokens = len(coordinate.prompt_token_ids), len(coordinate.token_ids)
    if (most := coordinate.params.max_tokens) is not None and num_tokens > most:
        raise ValueError(f"the answer has {num_tokens} tokens, and max_tokens={most}")
    if num_prompt + num_tokens > (limit := llm.engine.spec.max_model_len):
        raise ValueError(f"{num_prompt} prompt tokens and {num_tokens} of the answer are more than {limit}")
    vocab_size = llm.client.prompts_of(name).vocab_size  # an adapter may add tokens
    for token in coordinate.token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} of the answer is none of the model's {vocab_size}")
    options = RequestOptions(
        adapter=name, arrays=from_plain(coordinate.arrays), steering=_steering_of(coordinate.steering)
    )
    request = llm.prepare(list(coordinate.prompt_token_ids), coordinate.params, options)
    if use is not None and request.adapter_start != use.start:
        raise ValueError(f"adapter {use.name!r} starts at token {request.adapter_start}, not at {use.start}")
    return replace(request, claimed=coordinate.token_ids) if claim.drafts else request


def _steering_of(plain: Mapping[str, Any]) -> Steering | None:
    """The vectors of a coordinate. Raises ValueError for what are none."""
    if not plain:
        return None
    try:
        return Steering({int(layer): vector for layer, vector in from_plain(plain).items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"the coordinate's steering is damaged: {error}") from None


def _run(llm: ReplayModel, parts: Sequence[_Part]) -> Iterator[tuple[_Part, AnswerCheck]]:
    """Runs the sequences of parts, as many at once as there is room for; yields the result of each."""
    client, running = llm.client, dict[SequenceState, _Part]()
    waiting, limit = list(reversed(parts)), 2 * llm.engine.spec.max_seqs + 4
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                part = waiting[-1]
                begun = part.claim.coordinate.token_ids[: part.start]
                try:
                    running[client.submit_begun(part.request, begun)] = part
                except ClaimRefusedError as error:
                    claimed = begun[error.position]
                    yield part, AnswerCheck(0, Difference(error.position, claimed, None, str(error)))
                except QueueFullError:
                    if not running:
                        raise
                    break
                waiting.pop()
            if not running:
                continue
            client.step()
            for answer in client.take_progress(running):
                client.advance(answer)
                if (check := running[answer].compare(answer)) is not None:
                    part = running.pop(answer)
                    client.abort([answer])
                    yield part, check
    finally:
        client.abort(list(running))
