"""The sampling parameters of S slots as arrays: one program serves every mix of requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.sampling.keys import seed_words
from jaxinfer.sampling.params import (
    MAX_BAD_WORDS,
    MAX_STOP_TOKEN_IDS,
    MAX_VOCAB_SIZE,
    SamplingParams,
    SamplingParamsError,
)
from jaxinfer.sampling.processors import ProcessorRows

STOP_WIDTH = MAX_STOP_TOKEN_IDS  # stop and end-of-sequence ids together
BAD_WORD_WIDTH = 2 * MAX_BAD_WORDS  # token sequences: a word may have one at the start of a text and one within
BAD_WORD_TOKENS = 16  # tokens per sequence

RowsT = TypeVar("RowsT")


@dataclass(frozen=True)
class SamplingRow:
    """Sampling inputs of one request.

    Attributes:
      params: the request's parameters.
      seed: 0..2**64-1; None uses `params.seed`. The engine gives answer i of n `sample_seed(seed, i)`.
      eos_token_ids: the model's end-of-sequence ids.
      bad_words: the token sequences of `params.bad_words`; see `tokenize_bad_words`.
    """

    params: SamplingParams
    seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of S slots over V tokens: a pytree whose leaves have a leading axis S.

    An empty slot has neutral values. Ids are padded with V, one past the end, which a scatter drops. Filters of a
    greedy row are stored as off. `bias` takes most of the memory, 4 * S * V bytes.

    Attributes:
      temperature: float32[S], 0 for greedy.
      top_k: int32[S], 0 keeps all. top_p: float32[S], 1 keeps all. min_p: float32[S], 0 keeps all.
      presence_penalty, frequency_penalty: float32[S], 0 for none. repetition_penalty: float32[S], 1 for none.
      seed: uint32[S, 2], high and low word.
      has_bias: bool[S], whether the row's `bias` is not all zero.
      bias: float32[S, V], logit_bias, and -inf outside allowed_token_ids.
      stop_ids: int32[S, 64], ids that end the answer; without end-of-sequence ids if ignore_eos.
      min_tokens: int32[S]. min_tokens_ids: int32[S, 64], ids forbidden before that many tokens: stop_ids and the
        model's end-of-sequence ids, even if ignore_eos, as in vLLM.
      has_bad_words: bool[S].
      bad_words: int32[S, 256, 16], token sequences, right-aligned.
      num_logprobs: int32[S], -1 if none are requested.
      processors: functions of users with their arrays; None where there are none.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array
    has_bias: jax.Array
    bias: jax.Array
    stop_ids: jax.Array
    min_tokens: jax.Array
    min_tokens_ids: jax.Array
    has_bad_words: jax.Array
    bad_words: jax.Array
    num_logprobs: jax.Array
    processors: ProcessorRows | None = None

    @property
    def num_slots(self) -> int:
        return self.bias.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.bias.shape[1]

    # bool[S]: the rows that need a step of the chain. Evaluated in the program, which skips a step that no row needs.

    @property
    def has_penalties(self) -> jax.Array:
        return (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)

    @property
    def is_sampled(self) -> jax.Array:
        return self.temperature > 0

    @property
    def has_logprobs(self) -> jax.Array:
        return self.num_logprobs >= 0


def mask_inactive_rows(batch: SamplingBatch, is_used: jax.Array) -> SamplingBatch:
    """The batch with neutral parameters in the rows outside `is_used` bool[S], so that no step of the chain runs for
    them alone. Their tokens are then undefined."""

    def masked(leaf: jax.Array, neutral: Any) -> jax.Array:
        return jnp.where(is_used, leaf, jnp.asarray(neutral, leaf.dtype))

    neutral = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "has_bias": False, "has_bad_words": False}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    neutral |= {"min_tokens": 0, "num_logprobs": -1}
    return replace(batch, **{name: masked(getattr(batch, name), value) for name, value in neutral.items()})


def make_batch(rows: Sequence[SamplingRow | None], vocab_size: int) -> SamplingBatch:
    """Builds a batch on the host, as NumPy arrays for `jax.device_put`, without processors.

    None is an empty slot: greedy, no stop ids, no logprobs. Raises `SamplingParamsError`, with the numbers, for ids
    outside the vocabulary, too many stop ids, bad words of too many tokens, and a row in which no token can be
    generated.
    """
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be in 1..{MAX_VOCAB_SIZE}, got {vocab_size}")
    arrays = _neutral(len(rows), vocab_size)
    for i, row in enumerate(rows):
        if row is not None:
            _fill(arrays, i, row, vocab_size)
    return SamplingBatch(**arrays)


def set_row(rows: RowsT, row: jax.Array, source: RowsT) -> RowsT:
    """Replaces row `row` (an int32 scalar, not static) of a `SamplingBatch` or `SamplingState` by the only row of
    `source`.

    `source` is built by `make_batch([request], V)` or `make_state`. Donate `rows`: the write is in place.
    """
    return jax.tree.map(lambda all_rows, new: lax.dynamic_update_slice_in_dim(all_rows, new, row, 0), rows, source)


def tokenize_bad_words(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad words, by vLLM's rule: each word at the start of a text and, if that has as many tokens
    and a different first one, after a space. `encode` must add no special tokens."""
    sequences = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        if not plain:
            raise SamplingParamsError("bad_words", f"bad word {word!r} has no tokens")
        sequences.append(plain)
        spaced = tuple(encode(" " + word.lstrip()))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return tuple(sequences)


def _neutral(num_slots: int, vocab_size: int) -> dict[str, Any]:
    slots = (num_slots,)
    arrays = {
        "temperature": np.zeros(slots, np.float32),
        "top_k": np.zeros(slots, np.int32),
        "top_p": np.ones(slots, np.float32),
        "min_p": np.zeros(slots, np.float32),
        "presence_penalty": np.zeros(slots, np.float32),
        "frequency_penalty": np.zeros(slots, np.float32),
        "repetition_penalty": np.ones(slots, np.float32),
        "seed": np.zeros((*slots, 2), np.uint32),
        "has_bias": np.zeros(slots, np.bool_),
        "bias": np.zeros((*slots, vocab_size), np.float32),
        "stop_ids": np.full((*slots, STOP_WIDTH), vocab_size, np.int32),
        "min_tokens": np.zeros(slots, np.int32),
        "min_tokens_ids": np.full((*slots, STOP_WIDTH), vocab_size, np.int32),
        "has_bad_words": np.zeros(slots, np.bool_),
        "bad_words": np.full((*slots, BAD_WORD_WIDTH, BAD_WORD_TOKENS), vocab_size, np.int32),
        "num_logprobs": np.full(slots, -1, np.int32),
    }
    assert arrays.keys() == {f.name for f in fields(SamplingBatch)} - {"processors"}
    return arrays


def _fill(arrays: dict[str, np.ndarray], i: int, row: SamplingRow, vocab_size: int) -> None:
    params = row.params
    seed = params.seed if row.seed is None else row.seed
    if seed is None:
        raise ValueError("a row needs a seed: params.seed and SamplingRow.seed are both None")
    arrays["seed"][i] = seed_words(seed)
    arrays["temperature"][i] = params.temperature
    if not params.is_greedy:
        arrays["top_k"][i] = params.top_k
        arrays["top_p"][i] = params.top_p
        arrays["min_p"][i] = params.min_p
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"):
        arrays[name][i] = getattr(params, name)
    if params.logprobs is not None:
        arrays["num_logprobs"][i] = params.logprobs
    _fill_bias(arrays, i, params, vocab_size)
    _fill_stop_ids(arrays, i, row, vocab_size)
    _fill_bad_words(arrays, i, row, vocab_size)
    _check_any_token_possible(arrays, i, row, vocab_size)


def _fill_bias(arrays: dict[str, np.ndarray], i: int, params: SamplingParams, vocab_size: int) -> None:
    if params.allowed_token_ids is not None:
        arrays["bias"][i] = -np.inf
        arrays["bias"][i, _ids("allowed_token_ids", params.allowed_token_ids, vocab_size)] = 0
    if params.logit_bias:
        ids = _ids("logit_bias", list(params.logit_bias), vocab_size)
        arrays["bias"][i, ids] += np.array(list(params.logit_bias.values()), np.float32)
    arrays["has_bias"][i] = params.allowed_token_ids is not None or bool(params.logit_bias)


def _fill_stop_ids(arrays: dict[str, np.ndarray], i: int, row: SamplingRow, vocab_size: int) -> None:
    stop = list(_ids("stop_token_ids", row.params.stop_token_ids, vocab_size))
    both = list(dict.fromkeys([*stop, *_ids("eos_token_ids", row.eos_token_ids, vocab_size)]))
    if len(both) > STOP_WIDTH:
        raise SamplingParamsError(
            "stop_token_ids",
            f"{len(stop)} stop_token_ids and {len(row.eos_token_ids)} end-of-sequence ids make {len(both)}, "
            f"the limit is {STOP_WIDTH}",
        )
    arrays["min_tokens_ids"][i, : len(both)] = both
    ending = stop if row.params.ignore_eos else both
    arrays["stop_ids"][i, : len(ending)] = ending


def _fill_bad_words(arrays: dict[str, np.ndarray], i: int, row: SamplingRow, vocab_size: int) -> None:
    if row.params.bad_words and not row.bad_words:
        raise ValueError(f"{len(row.params.bad_words)} bad_words have no token sequences: set SamplingRow.bad_words")
    if len(row.bad_words) > BAD_WORD_WIDTH:
        raise SamplingParamsError(
            "bad_words", f"bad_words make {len(row.bad_words)} token sequences, the limit is {BAD_WORD_WIDTH}"
        )
    for j, sequence in enumerate(row.bad_words):
        if not 1 <= len(sequence) <= BAD_WORD_TOKENS:
            raise SamplingParamsError(
                "bad_words",
                f"sequence {j} of bad_words has {len(sequence)} tokens, the limits are 1..{BAD_WORD_TOKENS}",
            )
        arrays["bad_words"][i, j, BAD_WORD_TOKENS - len(sequence) :] = _ids("bad_words", sequence, vocab_size)
    arrays["has_bad_words"][i] = bool(row.bad_words)


def _check_any_token_possible(arrays: dict[str, np.ndarray], i: int, row: SamplingRow, vocab_size: int) -> None:
    is_possible = arrays["bias"][i] > -np.inf
    is_possible[[sequence[0] for sequence in row.bad_words if len(sequence) == 1]] = False
    if row.params.min_tokens > 0:
        ids = arrays["min_tokens_ids"][i]
        is_possible[ids[ids < vocab_size]] = False
    if not is_possible.any():
        causes = ["bad_words"] if row.bad_words else []
        causes += [f"before min_tokens={row.params.min_tokens} the stop ids"] if row.params.min_tokens > 0 else []
        told = f"{' and '.join(causes) or 'other parameters'} forbid all allowed_token_ids"
        raise SamplingParamsError("allowed_token_ids", f"no token can be generated: {told}")


def _ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    array = np.array(ids, np.int64).reshape(-1)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise SamplingParamsError(name, f"{name} has token id {outside[0]}, the vocabulary has {vocab_size} tokens")
    return array.astype(np.int32)
