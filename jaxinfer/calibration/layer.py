"""Quantizing the linear layers of one decoder layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.capture import InputStatistics, LayerProgram
from jaxinfer.calibration.options import KEEP_AS_IS, CalibrationOptions
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.awq import candidate_scales, clip, output_error, relative_sizes, scaled_error, search_scale
from jaxinfer.quantization.folding import fold_into_norm, fold_into_outputs
from jaxinfer.quantization.gptq import gptq
from jaxinfer.quantization.smoothquant import smoothing_scale

Chunks = Sequence[np.ndarray]


@dataclass(frozen=True)
class Fold:
    """Linear layers that read one input, and what can divide that input: a norm, or the outputs of a linear layer."""

    linears: tuple[str, ...]
    norm: str | None = None
    previous: str | None = None
    is_by_kv_head: bool = False  # each head of the previous layer's outputs is read by several heads of queries


FOLDS = (
    Fold(("attention.q_proj", "attention.k_proj", "attention.v_proj"), norm="attention_norm"),
    Fold(("attention.o_proj",), previous="attention.v_proj", is_by_kv_head=True),
    Fold(("mlp.gate_proj", "mlp.up_proj"), norm="mlp_norm"),
    Fold(("mlp.down_proj",), previous="mlp.up_proj"),
)


@dataclass(frozen=True)
class LinearError:
    """Squared error of a linear layer's outputs over their squares on the calibration text, and what it would be
    rounded to nearest. None without activations."""

    error: float | None
    rounded: float | None
    bits: int


class QuantizedLayer(NamedTuple):
    """Attributes:
    params: of the layer, its linear layers quantized. errors: of these, by name.
    value_divisors: by how much each key-value head's values were divided, None for a head whose channels were divided
      by different amounts; () where none was.
    """

    params: Params
    errors: dict[str, LinearError]
    value_divisors: tuple[float | None, ...] = ()


def quantize_layer(
    program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions
) -> QuantizedLayer:
    """Decoder layer `number` with its linear layers quantized.

    Args:
      params: float32. chunks: hidden states [B, T, D] before the layer, which is all that is calibrated on; unused by
        round-to-nearest.
    """
    work = _Work(program, number, params, chunks, options)
    {"rtn": _rtn, "gptq": _gptq, "awq": _awq, "smoothquant": _smoothquant}[options.method](work)
    stored = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, QuantizedArray) else leaf.astype(options.dtype).astype(jnp.float32),
        work.result,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedArray),
    )
    return QuantizedLayer(stored, work.errors, work.value_divisors)


class _Work:
    """A layer under way: the parameters it came with, and those that replace them."""

    def __init__(self, program: LayerProgram, number: int, params: Params, chunks: Chunks, options: CalibrationOptions):
        self.program, self.number, self.chunks, self.options = program, number, chunks, options
        self.original = params
        self.result: Params = jax.tree.map(lambda leaf: leaf, params)
        self.errors: dict[str, LinearError] = {}
        self.value_divisors: tuple[float | None, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return self.program.config

    def bits(self, name: str) -> int:
        return self.options.bits_of(f"layers.{self.number}.{name}")

    def is_quantized(self, name: str) -> bool:
        return self.bits(name) != KEEP_AS_IS

    def statistics(self, names: tuple[str, ...], params: Params | None = None) -> InputStatistics:
        return self.program.statistics(dequantized(params or self.original), self.chunks, names)

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


def _rtn(work: _Work) -> None:
    for names in work.program.groups:
        names = tuple(name for name in names if work.is_quantized(name))
        hessian = work.statistics(names).hessian if names and work.chunks else None
        for name in names:
            recipe = work.options.recipe(work.bits(name))
            work.set(name, quantize(work.weight(name), recipe, scale_dtype=work.options.dtype), hessian)


def _gptq(work: _Work) -> None:
    """In the order of computation, each with the inputs that the quantized layers before it make ("true
    sequential")."""
    for names in work.program.groups:
        names = tuple(name for name in names if work.is_quantized(name))
        if not names:
            continue
        hessian = work.statistics(names, work.result).hessian
        for name in names:
            grid = work.options.grid(work.bits(name))
            try:
                found, _ = gptq(work.weight(name), hessian, grid, work.options.gptq)
            except ValueError as error:
                raise ValueError(f"layers.{work.number}.{name}: {error}") from None
            work.set(name, found, hessian)


def _awq(work: _Work) -> None:
    found: dict[Fold, tuple[jax.Array, InputStatistics]] = {}
    for fold in FOLDS:
        names = tuple(name for name in fold.linears if work.is_quantized(name))
        if not names:
            continue
        statistics = work.statistics(fold.linears)
        found[fold] = _awq_scale(work, fold, names, statistics), statistics
    _fold_and_round(work, found)


def _awq_scale(work: _Work, fold: Fold, names: tuple[str, ...], statistics: InputStatistics) -> jax.Array:
    """The scale with which the outputs of the layers `names` err least."""
    weights = [work.weight(name) for name in fold.linears]
    relative = (
        relative_sizes(weights, work.options.grid(work.bits(names[0])).group_size) if work.options.duo_scaling else None
    )
    share = _sharing(work.config, fold)
    relative = None if relative is None else share(relative)

    def losses(scale: jax.Array) -> list[float]:
        grids = [work.options.grid(work.bits(name)) for name in names]
        errors = [
            scaled_error(work.weight(name), scale, statistics.hessian, grid)
            for name, grid in zip(names, grids, strict=True)
        ]
        return [float(error) for error in errors]

    return search_scale(candidate_scales(share(statistics.mean_absolute), relative), losses)


def _smoothquant(work: _Work) -> None:
    found: dict[Fold, tuple[jax.Array, InputStatistics]] = {}
    for fold in FOLDS:
        if any(work.is_quantized(name) for name in fold.linears):
            statistics = work.statistics(fold.linears)
            weights = [work.weight(name) for name in fold.linears]
            is_smoothed = fold.norm is not None
            scale = smoothing_scale(statistics.largest, weights, work.options.alpha) if is_smoothed else None
            found[fold] = jnp.ones(len(weights[0])) if scale is None else scale, statistics
    _fold_and_round(work, found)


def _fold_and_round(work: _Work, found: dict[Fold, tuple[jax.Array, InputStatistics]]) -> None:
    """Divides inputs by their scales, multiplies the weights that read them, clips those if asked, and rounds."""
    options, result = work.options, work.result
    divisors: dict[str, jax.Array] = {}  # of a linear layer's outputs
    multipliers: dict[str, jax.Array] = {}  # of its inputs
    for fold, (scale, _) in found.items():
        if fold.norm is not None:
            norm = result[fold.norm]
            norm["weight"], scale = fold_into_norm(
                norm["weight"], scale, zero_centred=options.zero_centred_norms, dtype=options.dtype
            )
        elif fold.previous is not None:
            divisors[fold.previous] = _of_kv_heads(work.config, scale) if fold.is_by_kv_head else scale
        multipliers |= dict.fromkeys(fold.linears, scale)
    if (divisor := divisors.get("attention.v_proj")) is not None:
        by_head = np.asarray(divisor).reshape(work.config.num_kv_heads, -1)
        work.value_divisors = tuple(float(head[0]) if (head == head[0]).all() else None for head in by_head)
    hessians = {name: statistics.hessian for fold, (_, statistics) in found.items() for name in fold.linears}
    for name in linear_names(work.program):
        linear, weight = find(result, name), work.weight(name)
        rows = multipliers.get(name, jnp.ones(weight.shape[0]))
        columns = divisors.get(name, jnp.ones(weight.shape[1]))
        weight, bias = fold_into_outputs(weight * rows[:, None], linear.get("bias"), columns)
        if bias is not None:
            linear["bias"] = bias
        if not work.is_quantized(name):
            work.set(name, weight)
            continue
        # AutoAWQ does not clip q and k, whose outputs are multiplied with one another. With an exact criterion it pays
        # there too: the KL of the embedded model is 0.0168 with it and 0.0174 without (4 bits).
        if options.method == "awq" and options.clip:
            weight = clip(weight, hessians[name] / (rows[:, None] * rows), options.grid(work.bits(name)))
        rounded = quantize(weight, options.recipe(work.bits(name)), scale_dtype=options.dtype)
        # What smoothing gains is in the activations; the error of weights alone would say nothing of it.
        hessian = hessians[name] if options.method == "awq" else None
        work.set(name, rounded, hessian, _undoing(rows, columns))


def _undoing(rows: jax.Array, columns: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda weight: weight / rows[:, None] * columns


def _sharing(config: ModelConfig, fold: Fold) -> Callable[[jax.Array], jax.Array]:
    """Makes one of what belongs to inputs that are divided together: the mean, for all of them."""
    if not fold.is_by_kv_head:
        return lambda values: values

    def share(values: jax.Array) -> jax.Array:
        by_head = values.reshape(config.num_kv_heads, -1, config.head_dim)
        return jnp.broadcast_to(by_head.mean(axis=1, keepdims=True), by_head.shape).reshape(-1)

    return share


def _of_kv_heads(config: ModelConfig, scale: jax.Array) -> jax.Array:
    """[Hkv * K] of [Hq * K], where the query heads of a key-value head have the same."""
    return scale.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)


def linear_names(program: LayerProgram) -> list[str]:
    """The linear layers in the order of computation, named within the decoder layer."""
    return [name for names in program.groups for name in names]


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
