"""Comparing a written model with the calibrated one, unit by unit, so that neither is held whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.inputs import FloatModel
from jaxinfer.calibration.layer_state import dequantized
from jaxinfer.calibration.quality import logits
from jaxinfer.models import Params
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import describe_scheme, is_quantized

_OTHER_EXPERTS = 1e-4  # of the largest hidden state: above the rounding errors of products
_MAX_SHARE = 0.01  # of the tokens


@dataclass(frozen=True)
class ModelComparison:
    """Attributes:
    problems: a sentence for each parameter that is not bit for bit the same.
    difference: the largest absolute difference of logits, infinite where one is NaN. largest: the largest logit.
    """

    problems: list[str]
    difference: float
    largest: float


def compare_models(
    calibrated: FloatModel,
    written: FloatModel,
    tokens: np.ndarray,
    *,
    report: Callable[[int], None] = lambda layer: None,
) -> ModelComparison:
    """Compares parameters and schemes, and the logits of tokens [rows, T].

    The logits of `calibrated` are computed as during calibration, with dequantized weights; those of `written` as by an
    engine, with quantized weights and activations and its own configuration. A few tokens may be routed to other
    experts, see `align_rerouted_tokens`. `report` is called after each layer.
    """
    models = tuple(replace(model, config=replace(model.config, dtype="float32")) for model in (calibrated, written))
    problems: list[str] = []
    for name in dict.fromkeys(calibrated.rest + written.rest):
        problems += _differences(name, *(model.read(name) if name in model.rest else {} for model in models))
    states = [model.embedded(tokens) for model in models]
    for number in range(calibrated.config.num_layers):
        problems += _advance(models, number, states)
        report(number)
    largest = difference = 0.0
    if problems:
        return ModelComparison(problems, float("inf"), largest)
    head = models[1].without_layers()  # equal in both models, as compared above
    for chunks in zip(*states, strict=True):
        for rows in zip(*chunks, strict=True):
            pairs = zip(models, rows, strict=True)
            exact, actual = (np.asarray(logits(model.config, head, row[None])) for model, row in pairs)
            worst = np.abs(exact - actual).max()
            difference = max(difference, float("inf") if np.isnan(worst) else float(worst))
            largest = max(largest, float(np.abs(exact).max()))
    return ModelComparison(problems, difference, largest)


def _advance(models: tuple[FloatModel, ...], number: int, states: list[list[np.ndarray]]) -> list[str]:
    """Differences of a layer's parameters; if there are none, advances the hidden states of both models."""
    made, written = (model.read(f"layers.{number}") for model in models)
    if problems := list(_differences(f"layers.{number}", made, written)):
        return problems
    runnable = dequantized(made, keeps_activations=True), jax.tree.map(jnp.asarray, written)
    for side, (model, params) in enumerate(zip(models, runnable, strict=True)):
        program = LayerProgram.of(model.config, number)
        states[side] = [np.asarray(program.forward(params, chunk)) for chunk in states[side]]
    if models[0].config.experts_of(number) is not None:
        states[1] = [align_rerouted_tokens(exact, written) for exact, written in zip(*states, strict=True)]
    return []


def align_rerouted_tokens(exact: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Hidden states [B, T, D] after a layer with experts: `actual`, with the few tokens that were routed to other
    experts replaced by those of `exact`.

    Where two experts have nearly equal scores, rounding decides between them. That is no difference of the weights,
    which are compared bit for bit.
    """
    differs = np.abs(actual - exact).max(-1, keepdims=True) > _OTHER_EXPERTS * np.abs(exact).max()
    return np.where(differs, exact, actual) if differs.mean() <= _MAX_SHARE else actual


def _differences(name: str, made: Params, written: Params) -> Iterator[str]:
    leaves, others = (
        {
            ".".join([name, *(str(key.key) for key in path)]): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
        }
        for params in (made, written)
    )
    for param in sorted(leaves.keys() | others.keys()):
        if param not in leaves or param not in others:
            yield f"{param} is {'missing' if param in leaves else 'new'}"
        elif (reason := _difference(leaves[param], others[param])) is not None:
            yield f"{param}: {reason}"


def _difference(leaf: Any, other: Any) -> str | None:
    if not isinstance(leaf, QuantizedArray) or not isinstance(other, QuantizedArray):
        if is_quantized(leaf) or is_quantized(other):
            return f"{_kind(other)} instead of {_kind(leaf)}"
        return _unequal(leaf, other)
    if leaf.scheme != other.scheme or _kind(leaf) != _kind(other):
        return f"{_kind(other)} instead of {_kind(leaf)}"
    if leaf.permutation is not None:  # inputs of a group may come in another order
        return _unequal(leaf.dequantize(), jax.tree.map(jnp.asarray, other).dequantize())
    parts = zip(jax.tree.leaves(leaf), jax.tree.leaves(other), strict=True)
    return next((reason for pair in parts if (reason := _unequal(*pair)) is not None), None)


def _kind(leaf: Any) -> str:
    return describe_scheme(leaf) if is_quantized(leaf) else f"{leaf.dtype} not quantized"


def _unequal(array: Any, other: Any) -> str | None:
    array, other = np.asarray(array), np.asarray(other)
    if (array.dtype, array.shape) != (other.dtype, other.shape):
        return f"{other.dtype}{list(other.shape)} instead of {array.dtype}{list(array.shape)}"
    count = int(np.sum(array != other))
    return f"{count} of {array.size} values differ" if count else None
