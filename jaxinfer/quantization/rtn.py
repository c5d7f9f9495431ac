"""Recipes, named ways to quantize a weight; round-to-nearest quantization, from the weights alone."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.checks import did_you_mean
from jaxinfer.option_names import RECIPE_NAMES
from jaxinfer.quantization.array import NestedScales, QuantizedArray, Scheme
from jaxinfer.quantization.grid import IntegerGrid, find_params, in_groups, to_values
from jaxinfer.quantization.matmul import transposed
from jaxinfer.quantization.on_device import unpacked
from jaxinfer.quantization.tree import is_weight, scheme_of


@dataclass(frozen=True)
class Recipe:
    """How to quantize a weight [K, N] of any size.

    Attributes:
      format: "int", "fp8", or the name of a codebook.
      bits: 2 to 8. Values of 2 and 3 bits are stored in 4.
      block: inputs and outputs that share a scale; None for all of them.
      symmetric: whether the range of integers is centred on zero.
      has_nested_scales: whether scales are quantized to 8 bits in blocks of 256 (QLoRA's double quantization).
      activations: type to which activations are quantized at run time, None for none.
    """

    format: Literal["int", "nf4", "fp4", "mxfp4", "fp8"]
    bits: int
    block: tuple[int | None, int | None] = (None, 1)
    symmetric: bool = True
    has_nested_scales: bool = False
    activations: Literal["int8", "fp8"] | None = None


def _integer_recipes() -> dict[str, Recipe]:
    recipes = {}
    for bits in (8, 4, 3, 2):
        for group in (None, 128, 64, 32):
            for symmetric in (True, False):
                name = f"int{bits}" + (f"-g{group}" if group else "") + ("" if symmetric else "-asym")
                recipes[name] = Recipe("int", bits, (group, 1), symmetric)
    return recipes


RECIPES = {
    **_integer_recipes(),
    "w8a8": Recipe("int", 8, activations="int8"),
    "nf4": Recipe("nf4", 4, (64, 1)),
    "nf4-dq": Recipe("nf4", 4, (64, 1), has_nested_scales=True),
    "fp4": Recipe("fp4", 4, (64, 1)),
    "fp4-dq": Recipe("fp4", 4, (64, 1), has_nested_scales=True),
    "mxfp4": Recipe("mxfp4", 4, (32, 1)),
    "fp8": Recipe("fp8", 8),
    "fp8-tensor": Recipe("fp8", 8, (None, None)),
    "fp8-block": Recipe("fp8", 8, (128, 128)),
    "w8a8-fp8": Recipe("fp8", 8, activations="fp8"),
    "w8a8-fp8-block": Recipe("fp8", 8, (128, 128), activations="fp8"),
}


def recipe(name: str | Recipe) -> Recipe:
    """The recipe with this name. Raises ValueError for an unknown name, with the nearest known one."""
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        if (known := RECIPE_NAMES.get(str(name).lower())) is not None:
            raise ValueError(f"quantize={name!r} is no format that weights are rounded to: {known}")
        hint = did_you_mean(name, RECIPES, otherwise="; the usual ones are int8, int4-g128, nf4, fp8 and w8a8")
        raise ValueError(f"quantize={name!r} is no format that weights are rounded to{hint}")
    return RECIPES[name]


# Dettmers et al. 2023 (QLoRA), appendix E: quantiles of a normal distribution, including 0, -1 and 1. By code.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


_FP4_MAGNITUDES = np.array([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], np.float32)


# bitsandbytes' FP4: a sign and one of eight magnitudes, in the order of its codes, not of their size.
FP4 = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES]) / np.float32(12)


_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


# OCP Microscaling formats 1.0, section 5.3.3: FP4 E2M1, by code.
E2M1 = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])


FP8_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)
CODEBOOKS = {"nf4": NF4, "fp4": FP4, "mxfp4": E2M1}
NESTED_BLOCK = 256
# Never quantized: routers compute in float32, and the matrices of latent attention are also used transposed.
UNQUANTIZED = ("router", "k_up", "v_up")


def quantize(
    weight: jax.Array, how: str | Recipe, *, scale_dtype: Any = None, importance: jax.Array | None = None
) -> QuantizedArray:
    """The weight [..., K, N] with each value rounded to the nearest one of the format; leading axes are experts.

    Integers: scale = 2 max|w| / (2^bits - 1) of a group, or (max - min) / (2^bits - 1) with a zero that maps min to the
    lowest value, as in compressed-tensors. NF4, FP4: scale = max|w| (Dettmers et al. 2023, QLoRA, section 3). MXFP4:
    the scale is the power of two with max|w| / scale in [4, 8) (OCP Microscaling 1.0, section 6.3). FP8: scale =
    max|w| / 448; values are clipped before the cast, which would turn larger ones into NaN.

    Args:
      how: a `Recipe` or its name, such as "int4-g128".
      scale_dtype: of the scales of integers; the weight's by default. Other scales are float32, MXFP4's bfloat16.
      importance: [..., K], at least 0: weights of the squared error of each input, for which the range of every group
        of integers is searched, in 80 steps.

    Raises:
      ValueError: an unknown name, fewer than two axes, importances of another shape or for a format without integers.
    """
    rule = recipe(how)
    if weight.ndim < 2:
        raise ValueError(f"a weight needs at least two axes, inputs and outputs, got shape {weight.shape}")
    if importance is not None and (rule.format != "int" or importance.shape != weight.shape[:-1]):
        raise ValueError(
            f"importances of shape {importance.shape} weigh the inputs of integers, not {rule.format} {weight.shape}"
        )
    return _quantize(weight, rule, jnp.dtype(scale_dtype or weight.dtype).name, importance)


def quantize_params(params: Any, how: str | Recipe, *, keep: Sequence[str] = (), also: Sequence[str] = ()) -> Any:
    """The parameters with quantized linear layers; embedding, head, norms, biases and `UNQUANTIZED` weights stay.

    Args:
      how: a `Recipe` or its name.
      keep: names of weights that stay unchanged, with shell wildcards: "layers.0.*", "*.down_proj.weight".
      also: "embed" and "lm_head", quantized along D, with one scale or group of scales per token.

    Raises:
      ValueError: an unknown name; a pattern that matches no weight; weights that are already quantized.
    """
    selection = Selection(how, keep, also)
    quantized = jax.tree_util.tree_map_with_path(
        lambda path, leaf: selection(tuple(str(key.key) for key in path), leaf), params, is_leaf=is_weight
    )
    selection.check_all_used()
    return quantized


class Selection:
    """Selects the parameters to quantize. Called with one parameter at a time, so that a model need not be held
    twice."""

    def __init__(self, how: str | Recipe, keep: Sequence[str] = (), also: Sequence[str] = ()):
        self.recipe, self.keep, self.also = recipe(how), tuple(keep), tuple(also)
        for name in self.also:
            if name not in ("embed", "lm_head"):
                raise ValueError(f"also={name!r} is neither 'embed' nor 'lm_head'")
        self._unused = {*self.keep, *self.also}

    def __call__(self, path: tuple[str, ...], leaf: Any) -> Any:
        name = ".".join(path)
        is_matrix = path[0] == "layers" and path[-1] == "weight" and leaf.ndim >= 2
        # Some models have a norm with a row for each head.
        is_linear = is_matrix and path[-2] not in UNQUANTIZED and not path[-2].endswith("norm")
        if not is_linear and name not in self.also:
            return leaf
        if (scheme := scheme_of(leaf)) is not None:
            raise ValueError(f"{name} is quantized already: {scheme}")
        fitting = [pattern for pattern in self.keep if fnmatch.fnmatchcase(name, pattern)]
        self._unused -= {*fitting, name}
        if fitting:
            return leaf
        leaf = unpacked(leaf, jnp.float32)
        return transposed(quantize(leaf.T, self.recipe)) if name == "embed" else quantize(leaf, self.recipe)

    def check_all_used(self) -> None:
        """Raises ValueError for a pattern that matched no weight."""
        if self._unused:
            raise ValueError(f"no weight fits {', '.join(sorted(self._unused))}")


@partial(jax.jit, static_argnums=(1, 2))
def _quantize(weight: jax.Array, rule: Recipe, scale_dtype: str, importance: jax.Array | None = None) -> QuantizedArray:
    if weight.ndim > 2:
        quantized = jax.vmap(lambda expert, weights: _quantize(expert, rule, scale_dtype, weights))(weight, importance)
        # Tables belong to the format: one for all experts.
        if isinstance(quantized.scales, NestedScales):
            quantized = replace(quantized, scales=replace(quantized.scales, table=quantized.scales.table[0]))
        return quantized if quantized.codebook is None else replace(quantized, codebook=quantized.codebook[0])
    weight = weight.astype(jnp.float32)
    if rule.format == "int":
        return _integers(weight, rule, scale_dtype, importance)
    return _fp8(weight, rule) if rule.format == "fp8" else _codes(weight, rule)


def _integers(weight: jax.Array, rule: Recipe, scale_dtype: str, importance: jax.Array | None) -> QuantizedArray:
    grid = IntegerGrid(rule.bits, rule.block[0], rule.symmetric, scale_dtype)
    groups = in_groups(weight, grid.group(len(weight)))
    weights = None if importance is None else in_groups(importance[:, None], groups.shape[1])[..., 0]
    scales, zeros = find_params(groups, grid, importance=weights)
    values = to_values(groups, scales[:, None], zeros[:, None], grid).reshape(-1, weight.shape[1])[: len(weight)]
    return QuantizedArray(
        values.astype(jnp.int4 if rule.bits <= 4 else jnp.int8),
        scales.astype(scale_dtype),
        None if rule.symmetric else zeros.astype(jnp.int8),
        scheme=grid.scheme(len(weight), rule.activations),
    )


def _fp8(weight: jax.Array, rule: Recipe) -> QuantizedArray:
    block = tuple(min(size or length, length) for size, length in zip(rule.block, weight.shape, strict=True))
    blocks = _blocks(weight, block)
    largest = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    scales = jnp.where(largest > 0, largest / FP8_MAX, 1.0)
    values = jnp.clip(blocks / scales, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    values = values.reshape(values.shape[0] * block[0], -1)[: weight.shape[0], : weight.shape[1]]
    scheme = Scheme("float", 8, (block[0], block[1]), rule.activations)
    return QuantizedArray(values, scales[:, 0, :, 0], scheme=scheme)


def _codes(weight: jax.Array, rule: Recipe) -> QuantizedArray:
    size = min(rule.block[0] or len(weight), len(weight))
    groups = in_groups(weight, size)
    largest = jnp.max(jnp.abs(groups), axis=1)
    codebook = CODEBOOKS[rule.format]
    if rule.format == "mxfp4":
        _, exponent = jnp.frexp(jnp.where(largest > 0, largest, 1.0))  # largest = m * 2^exponent, m in [0.5, 1)
        scales = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 3, -126))
        codes = _round_to_e2m1(groups / scales[:, None])
    else:
        scales = largest
        codes = _nearest(groups * jnp.where(largest > 0, 1 / largest, 0.0)[:, None], codebook)
    values = (codes - 8).astype(jnp.int4).reshape(-1, weight.shape[1])[: len(weight)]
    nested = _nested(scales) if rule.has_nested_scales else scales
    stored = scales.astype(jnp.bfloat16) if rule.format == "mxfp4" else nested
    return QuantizedArray(values, stored, codebook=jnp.asarray(codebook), scheme=Scheme("codebook", 4, (size, 1)))


def _nearest(x: jax.Array, codebook: np.ndarray) -> jax.Array:
    """int32 codes of the nearest entries; ties go to the lower entry."""
    order = np.argsort(codebook, kind="stable")
    entries = codebook[order]
    between = (entries[:-1] + entries[1:]) / np.float32(2)
    return jnp.asarray(order)[jnp.searchsorted(jnp.asarray(between), x, side="left")].astype(jnp.int32)


def _round_to_e2m1(x: jax.Array) -> jax.Array:
    """int32 codes of the nearest values; ties go to the even code (OCP Microscaling 1.0, section 5.3.3)."""
    magnitudes = E2M1[:8]
    between = (magnitudes[:-1] + magnitudes[1:]) / 2
    size = jnp.abs(x)
    below = jnp.searchsorted(jnp.asarray(between), size, side="left")
    above = jnp.searchsorted(jnp.asarray(between), size, side="right")
    return (jnp.where(below % 2 == 0, below, above) + 8 * jnp.signbit(x)).astype(jnp.int32)


def _nested(scales: jax.Array) -> NestedScales:
    """Scales minus their mean, rounded to the dynamic map times the largest magnitude of each block of 256."""
    table = dynamic_map()
    offset = jnp.mean(scales)
    flat = (scales - offset).T.reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    outer = jnp.max(jnp.abs(blocks), axis=1)
    codes = _nearest(blocks * jnp.where(outer > 0, 1 / outer, 0.0)[:, None], table)
    codes = codes.reshape(-1)[: flat.size].reshape(scales.shape[::-1]).T.astype(jnp.uint8)
    return NestedScales(codes, jnp.asarray(table), outer, offset, NESTED_BLOCK)


def _blocks(weight: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """[K, N] as [K blocks, block[0], N blocks, block[1]], padded with zeros."""
    padded = jnp.pad(weight, [(0, -length % size) for length, size in zip(weight.shape, block, strict=True)])
    return lax.reshape(padded, (padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1]))


def dynamic_map() -> np.ndarray:
    """Dynamic tree quantization (Dettmers et al. 2021, 8-bit optimizers, section 2.1): float32 [256], ascending in [-1,
    1].

    For i = 0..6 and either sign, 2^i values in the decade that ends at 10^(i-6); also 0 and 1.
    """
    magnitudes = []
    for exponent in range(7):
        ends = np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32)
        magnitudes.append((ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - 6)))
    steps = np.concatenate(magnitudes)
    return np.sort(np.concatenate([-steps, [0.0], steps, [1.0]])).astype(np.float32)
