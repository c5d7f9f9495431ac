"""The state of one decoder layer while it is quantized: original and new parameters, errors, notes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import InputStatistics, KeptInputs, LayerProgram
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.awq import output_error

Chunks = Sequence[np.ndarray]


@dataclass(frozen=True)
class LinearError:
    """Relative squared error of a linear layer's outputs on the calibration text; None without activations.

    Attributes:
      error: squared error of the outputs over their squares. rounded: the same for rounding to nearest.
      num_experts: of a stack, whose error is over all of them; 0 for a linear layer.
      num_few: experts with too few tokens for calibration, which are rounded to nearest.
    """

    error: float | None
    rounded: float | None
    bits: int
    num_experts: int = 0
    num_few: int = 0


class QuantizedLayer(NamedTuple):
    """Attributes:
    params: of the layer, with its linear layers quantized. errors: of these, by name.
    value_divisors: factor by which smoothing made the values of each key-value head smaller, for whoever scales the
      cache; None for a head whose channels were divided by different numbers; () if no head was divided.
    notes: sentences on what differs from the options.
    kept: inputs of o_proj and down_proj over the text (`KeptInputs`), from which the hidden states of the next layer
      are computed.
    """

    params: Params
    errors: dict[str, LinearError]
    value_divisors: tuple[float | None, ...] = ()
    notes: tuple[str, ...] = ()
    kept: KeptInputs | None = None


class CalibratedLayer:
    """A decoder layer that is being quantized: its original parameters, and those that replace them."""

    def __init__(self, program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions):
        self.program, self.number, self.chunks, self.options = program, number, chunks, options
        self.original = params
        self.result: Params = jax.tree.map(lambda leaf: leaf, params)
        self.errors: dict[str, LinearError] = {}
        self.value_divisors: tuple[float | None, ...] = ()
        self.notes: list[str] = []
        self.kept = KeptInputs()

    @property
    def config(self) -> ModelConfig:
        return self.program.config

    def bits(self, name: str) -> int:
        return self.options.bits_of(f"layers.{self.number}.{name}")

    def is_quantized(self, name: str) -> bool:
        return self.bits(name) != KEEP_AS_IS

    def statistics(self, names: tuple[str, ...], params: Params | None = None) -> InputStatistics:
        return self.program.statistics(dequantized(params or self.original), self.chunks, names, self.kept)

    def expert_statistics(self, name: str, params: Params | None = None) -> Iterator[InputStatistics]:
        """As `LayerProgram.expert_statistics`."""
        floats = dequantized(params or self.original)
        return self.program.expert_statistics(floats, self.chunks, name, self.options.expert_memory, self.kept)

    def weight(self, name: str) -> jax.Array:
        return find(self.original, name)["weight"].astype(jnp.float32)

    def set(
        self,
        name: str,
        weight: QuantizedArray | jax.Array,
        hessian: jax.Array | None = None,
        undo: Callable[[jax.Array], jax.Array] = lambda weight: weight,
    ) -> None:
        """Replaces a weight. `undo` removes scales whose inverse is folded into other weights, for the error."""
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


def linear_names(program: LayerProgram) -> list[str]:
    """Names in the decoder layer of its linear layers, in the order of computation, then of its stacks of experts."""
    return [*(name for names in program.groups for name in names), *program.stacks]


def find(params: Params, name: str) -> dict[str, Any]:
    """The parameters of a module, by its path."""
    for part in name.split("."):
        params = params[part]
    return params


def dequantized(params: Params, *, keeps_activations: bool = False) -> Params:
    """Parameters with quantized weights as float32, so that one program runs any combination of them.

    With `keeps_activations`, weights with quantized activations stay quantized, since their products differ.
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
