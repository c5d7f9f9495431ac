"""Comparing two checkpoints of one model: parameters, hidden states of every layer, logits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.checkpoint import Checkpoint
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.load import load, open_checkpoint
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import ModelConfig, Params, bind, collect, tap_names
from jaxinfer.quantization import QuantizedArray

NUM_TOKENS = 320  # short prompts have missed wrong rotations
_LOGIT_BLOCK = 64  # positions whose logits are held at once


@dataclass(frozen=True)
class TensorDifference:
    """A parameter that differs: the number of values that do, of `size`, and the largest difference."""

    name: str
    num_different: int
    size: int
    max_difference: float


@dataclass(frozen=True)
class VerifyReport:
    """Differences of a checkpoint from its reference, on the same tokens.

    Attributes:
      max_logit_difference: largest absolute difference of a logit; infinite if one is NaN.
      mean_kl: KL(reference || checkpoint) per token, in nats.
      top1_agreement: share of positions with the same most likely token.
      layer_differences: largest absolute difference of each hidden state, by name, in the order of computation.
      first_diverging: name of the first hidden state that differs by more than the tolerance, or None.
    """

    num_tokens: int
    max_logit_difference: float
    mean_kl: float
    top1_agreement: float
    layer_differences: dict[str, float]
    first_diverging: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def verify_against(
    path: str | Path,
    reference_path: str | Path,
    *,
    token_ids: Sequence[int] | None = None,
    tolerance: float = 0.0,
    dtype: str = "auto",
) -> VerifyReport:
    """Loads two checkpoints of one model and compares their forward passes.

    Args:
      token_ids: input tokens; by default 320 ids drawn with a fixed seed.
      tolerance: absolute difference from which a hidden state counts as diverging.
      dtype: of both; "auto" keeps each one's own.

    Raises:
      CheckpointError: as `load`; configurations that differ in more than dtype, by field.
    """
    config, params = load(path, dtype=dtype, progress=True)
    reference_config, reference = load(reference_path, dtype=dtype, progress=True)
    _check_same_model(config, reference_config, path)
    tokens = _tokens(config, token_ids)
    forward, logits = _programs(replace(config, dtype="float32"))
    hidden, states = forward(params, tokens)
    reference_hidden, reference_states = forward(reference, tokens)
    layers = {
        name: float(_largest(jnp.abs(states[name].astype(jnp.float32) - reference_states[name].astype(jnp.float32))))
        for name in _compared_states(config)
    }
    blocks = [
        _compare_logits(
            logits(params, hidden[first : first + _LOGIT_BLOCK]),
            logits(reference, reference_hidden[first : first + _LOGIT_BLOCK]),
        )
        for first in range(0, len(tokens), _LOGIT_BLOCK)
    ]
    return VerifyReport(
        num_tokens=len(tokens),
        max_logit_difference=max(float(block.max_difference) for block in blocks),
        mean_kl=sum(float(block.kl) for block in blocks) / len(tokens),
        top1_agreement=sum(int(block.num_agreeing) for block in blocks) / len(tokens),
        layer_differences=layers,
        first_diverging=next((name for name, value in layers.items() if value > tolerance), None),
    )


def compare_tensors(
    path: str | Path, reference: str | Path | Checkpoint, *, tolerance: float = 0.0
) -> list[TensorDifference]:
    """Parameters of two checkpoints that differ by more than `tolerance`, in float32, after dequantization.

    Holds two layers at a time, on the host. Raises CheckpointError as `verify_against` does.

    Args:
      reference: a path, or an open checkpoint, which is not closed.
    """
    with ExitStack() as stack:
        source = stack.enter_context(open_checkpoint(path))
        if not isinstance(reference, Checkpoint):
            reference = stack.enter_context(open_checkpoint(reference))
        _check_same_model(source.config, reference.config, path)
        return [
            difference
            for unit in source.units()
            for difference in _unit_differences(source, reference, unit)
            if not difference.max_difference <= tolerance
        ]


def _unit_differences(source: Checkpoint, reference: Checkpoint, unit: str) -> list[TensorDifference]:
    others = dict(reference.read(unit))
    differences = []
    for path, array in source.read(unit):
        a, b = _as_float32(array), _as_float32(others.pop(path))
        different = a != b
        if different.any():
            size = float(np.max(np.abs(a - b)))
            differences.append(TensorDifference(".".join(path), int(different.sum()), a.size, size))
    return differences


def _as_float32(array: np.ndarray | QuantizedArray) -> np.ndarray:
    return np.asarray(array.dequantize()) if isinstance(array, QuantizedArray) else array.astype(np.float32)


def _check_same_model(config: ModelConfig, reference: ModelConfig, where: str | Path) -> None:
    own, wanted = config.to_dict(), reference.to_dict()
    problems = [
        f"{name} is {own[name]!r}, the reference has {wanted[name]!r}"
        for name in wanted
        if name != "dtype" and own[name] != wanted[name]
    ]
    if problems:
        raise CheckpointError(where, *problems)


def _tokens(config: ModelConfig, token_ids: Sequence[int] | None) -> jax.Array:
    if token_ids is None:
        return jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, NUM_TOKENS), jnp.int32)
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids must be a list of integers, got shape {ids.shape} of {ids.dtype}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token_ids lie in [{ids.min()}, {ids.max()}], the vocabulary in [0, {config.vocab_size})")
    return jnp.asarray(ids, jnp.int32)


def _compared_states(config: ModelConfig) -> list[str]:
    """Names of the states after the embedding, every layer and the final norm, in that order."""
    return [name for name in tap_names(config) if not name.endswith((".attention", ".mlp"))]


@lru_cache(maxsize=4)
def _programs(config: ModelConfig) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Jitted programs: tokens [T] to final hidden states [T, D] and those that are compared, hidden states to logits.

    They are compiled once for both sides. The dtype is that of the parameters."""
    names = _compared_states(config)

    def forward(params: Params, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        states, tap = collect(names)
        positions = jnp.arange(tokens.shape[0])[None]
        hidden = bind(config, params)(tokens[None], positions, attend_without_cache, tap)
        return hidden[0], {name: states[name][0] for name in names}

    return jax.jit(forward), jax.jit(lambda params, hidden: bind(config, params).logits(hidden))


class _LogitComparison(NamedTuple):
    """Sums over the positions of a block."""

    max_difference: jax.Array
    kl: jax.Array
    num_agreeing: jax.Array


@jax.jit
def _compare_logits(logits: jax.Array, reference: jax.Array) -> _LogitComparison:
    log_p, log_q = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    return _LogitComparison(
        max_difference=_largest(jnp.abs(logits - reference)),
        kl=jnp.sum(jnp.maximum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1), 0.0)),
        num_agreeing=jnp.sum(jnp.argmax(logits, axis=-1) == jnp.argmax(reference, axis=-1)),
    )


def _largest(differences: jax.Array) -> jax.Array:
    """The maximum, infinite where a value is NaN: XLA's maximum on CPUs drops NaN."""
    return jnp.max(jnp.where(jnp.isnan(differences), jnp.inf, differences))
