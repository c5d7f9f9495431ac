"""The named ways to quantize a weight."""

import difflib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """How a weight [K, N] is quantized, whatever its size.

    Attributes:
      format: "int", "fp8", or a codebook's name.
      bits: 2 to 8. Values of 2 and 3 bits are stored in 4.
      block: inputs and outputs that share a scale; None for all of them.
      symmetric: of integers, whether zero is in the middle of the range.
      has_nested_scales: whether the scales are quantized too, to 8 bits in blocks of 256 (QLoRA's double quantization).
      activations: what activations are quantized to on the way, None for not at all.
    """

    format: Literal["int", "nf4", "fp4", "mxfp4", "fp8"]
    bits: int
    block: tuple[int | None, int | None] = (None, 1)
    symmetric: bool = True
    has_nested_scales: bool = False
    activations: Literal["int8", "fp8"] | None = None


def _integers() -> dict[str, Recipe]:
    found = {}
    for bits in (8, 4, 3, 2):
        for group in (None, 128, 64, 32):
            for symmetric in (True, False):
                name = f"int{bits}" + (f"-g{group}" if group else "") + ("" if symmetric else "-asym")
                found[name] = Recipe("int", bits, (group, 1), symmetric)
    return found


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
    """The recipe of that name. Raises ValueError for an unknown one, with the nearest that is known."""
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        near = difflib.get_close_matches(str(name), RECIPES, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(RECIPES)}"
        raise ValueError(f"no way to quantize is called {name!r}{hint}")
    return RECIPES[name]
