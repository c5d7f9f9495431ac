"""From what a program sampled to the results in a `SequenceState`; mirrors on the host what the program decided."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxinfer.engine.plans import Chunk
from jaxinfer.engine.request import (
    Logprob,
    Request,
    RequestOutput,
    RequestTimings,
    Score,
    SequenceState,
    TokenLogprob,
    tap_name,
)
from jaxinfer.sampling import SampleOutput, TokenLogprobs

NOT_A_NUMBER = (
    "the model's logits at position {position} hold NaN or infinity, or no token is allowed there: "
    "are the weights finite and is the dtype wide enough?"
)

End = tuple[str, int | None]  # finish reason, and the token that was one


def end_of(sequence: SequenceState, token: int) -> End | None:
    """Why the answer ends with its newest token, if it does."""
    if token in sequence.request.ending_ids:
        return "stop", token
    if sequence.num_output >= sequence.request.max_tokens:
        return "length", None
    return None


def take_error(sequence: SequenceState, processors: Sequence[str] = ()) -> End:
    """Ends the answer with an error: no token could be sampled, with these processors."""
    position, params = len(sequence.tokens), sequence.params
    sequence.error = NOT_A_NUMBER.format(position=position)
    if processors:
        names = ", ".join(map(repr, processors))
        told = "hold NaN or infinity, or leave no token"
        sequence.error = f"the logits at position {position} {told}, after the processors {names} or before them"
    given = {
        f"min_tokens={params.min_tokens}": sequence.num_output < params.min_tokens,
        "bad_words": params.bad_words,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
    }
    names = " and ".join(name for name, is_given in given.items() if is_given)
    if sequence.grammar is not None and names:
        told = f"those that the answer must match are excluded by {names}"
        sequence.error, sequence.excludes_itself = f"no token is left at position {position}: {told}", True
    elif params.bad_words and params.allowed_token_ids:
        told = "allowed_token_ids are excluded by bad_words"
        sequence.error, sequence.excludes_itself = f"no token is left at position {position}: {told}", True
    return "error", None


def take_logprobs(sequence: SequenceState, samples: SampleOutput, index: tuple[int, ...]) -> None:
    """The log-probabilities of the newest token; leaves of `samples` are NumPy arrays."""
    wanted = sequence.params.logprobs
    if wanted is not None:
        sequence.logprobs.append(logprob_entry(samples, index, sequence.tokens[-1], wanted))


class TappedFlight(Protocol):
    """The part of a dispatch that has hidden states: those of a step with prompts [rows, D], whose decoding slots come
    first, or those of `StepOutput`."""

    @property
    def chunks(self) -> Sequence[tuple[int, Chunk]]: ...
    @property
    def decodes(self) -> Sequence[tuple[int, SequenceState]]: ...
    @property
    def states(self) -> Mapping[str, Any]: ...
    @property
    def output(self) -> Any: ...


def states_of_slots(flight: TappedFlight) -> dict[int, dict[str, np.ndarray]]:
    """Tapped hidden states [tokens, D] by slot and name: of a chunk's tokens, or of the tokens that a slot stored, one
    a step. Waits for those that one of its requests wants, and leaves the others on the device."""
    sequences = [*(sequence for _, sequence in flight.decodes), *(chunk.sequence for _, chunk in flight.chunks)]
    wanted = {tap_name(layer) for sequence in sequences for layer in sequence.request.options.tapped_layers}
    if not wanted:
        return {}
    if not flight.chunks:
        steps = {name: np.asarray(flight.output.states[name]) for name in wanted}
        return {slot: {name: rows[:, slot] for name, rows in steps.items()} for slot, _ in flight.decodes}
    rows, row = {name: np.asarray(flight.states[name]) for name in wanted}, len(flight.decodes)
    places = {slot: slice(number, number + 1) for number, (slot, _) in enumerate(flight.decodes)}
    for slot, chunk in flight.chunks:
        places[slot], row = slice(row, row + chunk.length), row + chunk.length
    return {slot: {name: of_rows[place] for name, of_rows in rows.items()} for slot, place in places.items()}


def take_states(sequence: SequenceState, start: int, states: dict[str, np.ndarray], count: int | None = None) -> None:
    """The first `count` hidden states [tokens, D], or all, by names of taps: of the tokens from position `start` on.
    Copied, since the arrays are of all slots; those of tokens that are computed anew are dropped."""
    for layer in sequence.request.options.tapped_layers:
        pieces = sequence.states.setdefault(layer, [])
        while pieces and pieces[-1][0] >= start:
            pieces.pop()
        pieces.append((start, states[tap_name(layer)][:count].copy()))


def states_of(sequence: SequenceState) -> dict[int, np.ndarray] | None:
    """`CompletionOutput.hidden_states`."""
    if not sequence.states or not sequence.is_finished:
        return None
    most, by_layer = max(len(sequence.tokens) - 1, sequence.num_prompt), {}
    for layer, pieces in sequence.states.items():
        num_known = min(most, max(start + len(own) for start, own in pieces))
        whole = np.empty((num_known, pieces[0][1].shape[1]), np.float32)
        for start, own in pieces:
            end = min(start + len(own), num_known)
            whole[start:end] = own[: max(end - start, 0)]
        by_layer[layer] = whole
    return by_layer


def take_prompt_logprobs(sequence: SequenceState, scores: TokenLogprobs, rows: range, start: int) -> None:
    """Rows of `scores` are the prompt's tokens from `start` on."""
    wanted = sequence.params.prompt_logprobs
    if wanted is None:
        return
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
    for offset, row in enumerate(rows):
        token = int(sequence.tokens[start + offset])
        sequence.prompt_logprobs.append(logprob_entry(scores, (row,), token, wanted))


def take_processed(sequence: SequenceState, values: np.ndarray, rows: range, start: int) -> None:
    """As `take_prompt_logprobs`, for log-probabilities under the sampling parameters, from `score_from` on."""
    if sequence.request.score_from is None:
        return
    sequence.processed_logprobs += [
        float(values[row]) for offset, row in enumerate(rows) if start + offset >= sequence.request.score_from
    ]


def logprob_entry(
    scores: SampleOutput | TokenLogprobs, index: tuple[int, ...], token: int, num_top: int
) -> TokenLogprob:
    """The chosen token first, then the best ones by rank."""
    entry = {token: Logprob(float(scores.logprob[index]), int(scores.rank[index]))}
    pairs = zip(scores.top_ids[index][:num_top], scores.top_logprobs[index][:num_top], strict=True)
    for rank, (other, logprob) in enumerate(pairs, 1):
        if np.isfinite(logprob) or int(other) != token:
            entry.setdefault(int(other), Logprob(float(logprob), rank))
    return entry


def score_of(answer: SequenceState) -> Score:
    """The scores of a request from `prepare_score` that has ended."""
    first = answer.request.score_from or 0
    entries = answer.prompt_logprobs[first:]
    tokens = list(answer.request.token_ids[first:])
    if answer.finish_reason == "error" or len(entries) != len(tokens):
        raise FloatingPointError(answer.error or "the score was not computed")
    pairs = [(entry or {})[token] for entry, token in zip(entries, tokens, strict=True)]
    raw = [pair.logprob for pair in pairs]
    return Score(
        token_ids=tokens,
        raw=raw,
        processed=answer.processed_logprobs if answer.request.scores_under_params else list(raw),
        is_greedy=all(pair.rank == 1 for pair in pairs),
    )


def pooled_of(answer: SequenceState) -> np.ndarray | None:
    """The vector float32 [D] of a request with `pooling`; None where it was aborted or failed."""
    request = answer.request
    if request.pooling is None or answer.pooled is None or answer.finish_reason not in ("stop", "length"):
        return None
    return request.pooling.finish(answer.pooled, request.num_prompt)


def timings(answers: Sequence[SequenceState]) -> RequestTimings:
    """Timings of a request with these answers: the first token of any, the end of the last."""
    arrived = min(answer.arrived for answer in answers)
    admitted = min(answer.admitted or answer.finished for answer in answers)
    first = min(answer.first_token or answer.finished for answer in answers)
    finished = max(answer.finished for answer in answers)
    num_tokens = max(answer.num_output for answer in answers)
    return RequestTimings(
        queue_time=admitted - arrived,
        time_to_first_token=first - arrived,
        total_time=finished - arrived,
        time_per_output_token=(finished - first) / max(num_tokens - 1, 1),
    )


@dataclass(frozen=True)
class RequestJob:
    """Requests that run together, in their order."""

    requests: list[Request]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts."""
        return sum(request.num_prompt for request in self.requests)


@dataclass(frozen=True)
class VectorJob(RequestJob):
    """Requests whose answers are vectors, and what makes the result of the vectors, given in the requests' order."""

    finish: Callable[[Sequence[np.ndarray]], np.ndarray]

    def result(self, outputs: Sequence[RequestOutput]) -> np.ndarray:
        """The result. Raises FloatingPointError where a request failed: its hidden states were not finite."""
        vectors = []
        for output in outputs:
            if output.pooled is None:
                raise FloatingPointError(output.outputs[0].error or "the vector was not computed")
            vectors.append(output.pooled)
        return self.finish(vectors)
