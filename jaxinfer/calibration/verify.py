"""Is a model that was written the one that was calibrated? Unit by unit, so that neither is ever held whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.driver import FloatModel, ReadUnit
from jaxinfer.calibration.layer import dequantized
from jaxinfer.calibration.quality import logits
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import describe_scheme, is_quantized


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    problems: parameters that are not bit for bit the same, each with what differs.
    difference: the largest absolute difference of logits, infinite where one is NaN. largest: the largest logit.
    """

    problems: list[str]
    difference: float
    largest: float


def compare_models(
    config: ModelConfig, made: ReadUnit, found: ReadUnit, rest: tuple[str, ...], tokens: np.ndarray
) -> Comparison:
    """Compares parameters and schemes, and the logits of tokens [rows, T].

    The logits of `made` are those that calibration measured, with weights as floats; `found` multiplies as an engine
    will, by the integers, and with activations quantized where its own schemes say so.

    Args:
      made, found: give a unit's parameters, as of `FloatModel`. rest: units that are no layers.
    """
    problems = [problem for name in rest for problem in _differences(name, made(name), found(name))]
    first = FloatModel(config, made, rest).embedded(tokens)
    second = FloatModel(config, found, rest).embedded(tokens)
    for number in range(config.num_layers):
        name = f"layers.{number}"
        first, second, found_here = _through_layer(config, number, made(name), found(name), first, second)
        problems += found_here
    largest = difference = 0.0
    if problems:
        return Comparison(problems, float("inf"), largest)
    head = FloatModel(config, found, rest).without_layers()  # that of `made`, as was compared
    for one, other in zip(first, second, strict=True):
        for rows in zip(one, other, strict=True):
            exact, written = (np.asarray(logits(config, head, row[None])) for row in rows)
            worst = np.abs(exact - written).max()
            difference = max(difference, float("inf") if np.isnan(worst) else float(worst))
            largest = max(largest, float(np.abs(exact).max()))
    return Comparison(problems, difference, largest)


def _through_layer(config: ModelConfig, number: int, made: Params, found: Params, first: Any, second: Any):
    """Hidden states after a layer of both models, and how their parameters differ."""
    problems = list(_differences(f"layers.{number}", made, found))
    if problems:
        return first, second, problems
    program = LayerProgram.of(config, number)
    made = dequantized(made, keeps_activations=True)
    found = jax.tree.map(jax.numpy.asarray, found)
    first = [np.asarray(program.forward(made, chunk)) for chunk in first]
    return first, [np.asarray(program.forward(found, chunk)) for chunk in second], problems


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
        return _unequal(leaf.dequantize(), jax.tree.map(jax.numpy.asarray, other).dequantize())
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
