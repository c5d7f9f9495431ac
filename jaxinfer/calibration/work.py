"""A decoder layer under way: what it came with, what replaces it, and what was found on the way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import InputStatistics, LayerProgram
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.awq import output_error

Chunks = Sequence[np.ndarray]


@dataclass(frozen=True)
class LinearError:
    """Squared error of a linear layer's outputs over their squares on the calibration text, and what it would be
    rounded to nearest. None without activations.

    Attributes:
      num_experts: of a stack, whose error is over all of them; 0 of a linear layer.
      num_few: how many of these saw too few tokens to look at, and were rounded to nearest.
    """

    error: float | None
    rounded: float | None
    bits: int
    num_experts: int = 0
    num_few: int = 0


class QuantizedLayer(NamedTuple):
    """Attributes:
    params: of the layer, its linear layers quantized. errors: of these, by name.
    value_divisors: by how much each key-value head's values were divided, None for a head whose channels were divided
      by different amounts; () where none was.
    notes: what was done otherwise than asked, for people.
    """

    params: Params
    errors: dict[str, LinearError]
    value_divisors: tuple[float | None, ...] = ()
    notes: tuple[str, ...] = ()


class Work:
    """A layer under way: the parameters it came with, and those that replace them."""

    def __init__(self, program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions):
        self.program, self.number, self.chunks, self.options = program, number, chunks, options
        self.original = params
        self.result: Params = jax.tree.map(lambda leaf: leaf, params)
        self.errors: dict[str, LinearError] = {}
        self.value_divisors: tuple[float | None, ...] = ()
        self.notes: list[str] = []

    @property
    def config(self) -> ModelConfig:
        return self.program.config

    def bits(self, name: str) -> int:
        return self.options.bits_of(f"layers.{self.number}.{name}")

    def is_quantized(self, name: str) -> bool:
        return self.bits(name) != KEEP_AS_IS

    def statistics(self, names: tuple[str, ...], params: Params | None = None) -> InputStatistics:
        return self.program.statistics(dequantized(params or self.original), self.chunks, names)

    def expert_statistics(self, name: str, params: Params | None = None) -> Iterator[InputStatistics]:
        """As `LayerProgram.expert_statistics`."""
        floats = dequantized(params or self.original)
        return self.program.expert_statistics(floats, self.chunks, name, self.options.expert_memory)

    def weight(self, name: str) -> jax.Array:
        return find(self.original, name)["weight"].astype(jnp.float32)

    def set(
        self,
        name: str,
        weight: QuantizedArray | jax.Array,
        hessian: jax.Array | None = None,
        undo: Callable[[jax.Array], jax.Array] = lambda weight: weight,
    ) -> None:
        """Replaces a weight; `undo` takes the scales out of it that its neighbours hold the inverse of."""
        find(self.result, name)["weight"] = weight
        if not isinstance(weight, QuantizedArray):
            return
        error = rounded = None
        if hessian is not None:
            original, recipe = self.weight(name), self.options.recipe(self.bits(name))
            nearest = quantize(original, recipe, scale_dtype=self.options.dtype).dequantize()
            rounded = float(output_error(original, nearest, hessian))
            error = float(output_error(original, undo(weight.dequantize()), hessian))
        self.errors[name] = LinearError(error, rounded, self.bits(name))

    def set_stack(self, name: str, weight: QuantizedArray, error: LinearError) -> None:
        find(self.result, name)["weight"] = weight
        self.errors[name] = error


def linear_names(program: LayerProgram) -> list[str]:
    """The linear layers in the order of computation, and the stacks of experts, named within the decoder layer."""
    return [*(name for names in program.groups for name in names), *program.stacks]


def find(params: Params, name: str) -> dict[str, Any]:
    """The parameters of a module by its path."""
    for part in name.split("."):
        params = params[part]
    return params


def dequantized(params: Params, *, keeps_activations: bool = False) -> Params:
    """float32, to run a layer of which some weights are quantized: without a new program for each combination.

    With `keeps_activations`, weights that multiply quantized activations stay, for their products are others.
    """
    return jax.tree.map(
        lambda leaf: (
            leaf.dequantize()
            if isinstance(leaf, QuantizedArray) and not (keeps_activations and leaf.scheme.activations)
            else leaf
        ),
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedArray),
    )
