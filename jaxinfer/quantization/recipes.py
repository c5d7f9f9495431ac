"""Recipes: named ways to quantize a weight."""

from dataclasses import dataclass
from typing import Literal

from jaxinfer.checks import did_you_mean


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


def _integers() -> dict[str, Recipe]:
    recipes = {}
    for bits in (8, 4, 3, 2):
        for group in (None, 128, 64, 32):
            for symmetric in (True, False):
                name = f"int{bits}" + (f"-g{group}" if group else "") + ("" if symmetric else "-asym")
                recipes[name] = Recipe("int", bits, (group, 1), symmetric)
    return recipes


RECIPES = {
    **_integers(),
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
        hint = did_you_mean(name, RECIPES, otherwise=f"; known are {', '.join(RECIPES)}")
        raise ValueError(f"no way to quantize is called {name!r}{hint}")
    return RECIPES[name]
