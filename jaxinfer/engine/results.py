"""From what a program sampled to what a `Generation` holds. Mirrors on the host what the program decided."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.request import Generation, Logprob, TokenLogprob
from jaxinfer.sampling import SampleOutput, TokenLogprobs

NOT_A_NUMBER = (
    "the model's logits at position {position} hold NaN or infinity, or no token is allowed there: "
    "are the weights finite and is the dtype wide enough?"
)

End = tuple[str, int | None]  # finish reason, and the token that was one


def take_token(generation: Generation, token: int) -> End | None:
    """Appends a token; why the answer ends with it, if it does."""
    generation.output.append(token)
    if token in generation.ending_ids:
        return "stop", token
    if len(generation.output) >= generation.max_tokens:
        return "length", None
    return None


def take_error(generation: Generation) -> End:
    """The row of the next token was not `ok`."""
    position = len(generation.prompt) + len(generation.output)
    generation.error = NOT_A_NUMBER.format(position=position)
    return "error", None


def take_logprobs(generation: Generation, samples: SampleOutput, index: tuple[int, ...]) -> None:
    """The log-probabilities of the newest token; leaves of `samples` are NumPy arrays."""
    wanted = generation.params.logprobs
    if wanted is not None:
        generation.logprobs.append(logprob_entry(samples, index, generation.output[-1], wanted))


def take_prompt_logprobs(generation: Generation, found: TokenLogprobs, rows: range, start: int) -> None:
    """Rows of `found` are the prompt's tokens from `start` on."""
    wanted = generation.params.prompt_logprobs
    if wanted is None:
        return
    if not generation.prompt_logprobs:
        generation.prompt_logprobs.append(None)
    for offset, row in enumerate(rows):
        token = int(generation.prompt[start + offset])
        generation.prompt_logprobs.append(logprob_entry(found, (row,), token, wanted))


def take_processed(generation: Generation, values: np.ndarray, rows: range, start: int) -> None:
    """The same for log-probabilities under the sampling parameters, from `score_from` on."""
    if generation.score_from is None:
        return
    generation.processed_logprobs += [
        float(values[row]) for offset, row in enumerate(rows) if start + offset >= generation.score_from
    ]


def logprob_entry(
    found: SampleOutput | TokenLogprobs, index: tuple[int, ...], token: int, num_top: int
) -> TokenLogprob:
    """The chosen token first, then the best ones by rank."""
    entry = {token: Logprob(float(found.logprob[index]), int(found.rank[index]))}
    pairs = zip(found.top_ids[index][:num_top], found.top_logprobs[index][:num_top], strict=True)
    for rank, (other, logprob) in enumerate(pairs, 1):
        if np.isfinite(logprob) or int(other) != token:
            entry.setdefault(int(other), Logprob(float(logprob), rank))
    return entry


def padded(tokens: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """int32[size], zeros after the tokens."""
    array = np.zeros(size, np.int32)
    array[: len(tokens)] = tokens
    return array
