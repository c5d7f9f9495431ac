"""Is a model that was written the one that was calibrated? Unit by unit, so that neither is ever held whole."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.inputs import FloatModel, ReadUnit
from jaxinfer.calibration.quality import logits
from jaxinfer.calibration.work import dequantized
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import describe_scheme, is_quantized

_OTHER_EXPERTS = 1e-4  # of the largest hidden state: a difference that float errors of products alone do not make
_MAX_SHARE = 0.01  # of the tokens


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    problems: parameters that are not bit for bit the same, each with what differs.
    difference: the largest absolute difference of logits, infinite where one is NaN. largest: the largest logit.
    """

    problems: list[str]
    difference: float
    largest: float


@dataclass(frozen=True)
class Side:
    """A model to compare. Attributes: read: gives a unit's parameters, as of `FloatModel`. rest: units that are no
    layers."""

    config: ModelConfig
    read: ReadUnit
    rest: tuple[str, ...]

    def model(self) -> FloatModel:
        return FloatModel(replace(self.config, dtype="float32"), self.read, self.rest)


def compare_models(calibrated: Side, written: Side, tokens: np.ndarray) -> Comparison:
    """Compares parameters and schemes, and the logits of tokens [rows, T].

    The logits of `calibrated` are those that calibration measured, with weights as floats; `written` multiplies as an
    engine will, by the integers, with activations quantized where its own schemes say so, and by its own configuration.
    A few tokens may go to other experts in a layer, see `settled`.
    """
    models = calibrated.model(), written.model()
    problems: list[str] = []
    for name in dict.fromkeys(calibrated.rest + written.rest):
        problems += _differences(name, *(model.read(name) if name in model.rest else {} for model in models))
    states = [model.embedded(tokens) for model in models]
    for number in range(calibrated.config.num_layers):
        problems += _advance(models, number, states)
    largest = difference = 0.0
    if problems:
        return Comparison(problems, float("inf"), largest)
    head = models[1].without_layers()  # the other's too, as was compared
    for chunks in zip(*states, strict=True):
        for rows in zip(*chunks, strict=True):
            pairs = zip(models, rows, strict=True)
            exact, found = (np.asarray(logits(model.config, head, row[None])) for model, row in pairs)
            worst = np.abs(exact - found).max()
            difference = max(difference, float("inf") if np.isnan(worst) else float(worst))
            largest = max(largest, float(np.abs(exact).max()))
    return Comparison(problems, difference, largest)


def _advance(models: tuple[FloatModel, FloatModel], number: int, states: list[list[np.ndarray]]) -> list[str]:
    """Takes the hidden states of both through a layer, unless its parameters differ; returns how."""
    made, found = (model.read(f"layers.{number}") for model in models)
    if problems := list(_differences(f"layers.{number}", made, found)):
        return problems
    runnable = dequantized(made, keeps_activations=True), jax.tree.map(jnp.asarray, found)
    for side, (model, params) in enumerate(zip(models, runnable, strict=True)):
        program = LayerProgram.of(model.config, number)
        states[side] = [np.asarray(program.forward(params, chunk)) for chunk in states[side]]
    if models[0].config.experts_of(number) is not None:
        states[1] = [settled(exact, found) for exact, found in zip(*states, strict=True)]
    return []


def settled(exact: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Hidden states [B, T, D] after a layer with experts, in which a few tokens that went to other experts are as
    in `exact`.

    Two experts may be so nearly as good that the last bits decide between them. Of all layers and tokens of a large
    model that happens to some, and says nothing of the weights, which are compared bit for bit.
    """
    differs = np.abs(found - exact).max(-1, keepdims=True) > _OTHER_EXPERTS * np.abs(exact).max()
    return np.where(differs, exact, found) if differs.mean() <= _MAX_SHARE else found


def _differences(name: str, made: Params, found: Params) -> Iterator[str]:
    leaves, others = (
        {
            ".".join([name, *(str(key.key) for key in path)]): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
        }
        for params in (made, found)
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
