"""Writes docs/implementations.md: which implementation multiplies by each form of weight, on each platform."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.quantization import QuantizedArray, Scheme
from jaxinfer.quantization.array import NestedScales
from jaxinfer.quantization.packed import packed_shapes, why_not_packed
from jaxinfer.quantization.reads import MOST_READ, WeightUse, lookup_use, product_use
from pallas_kernels import ahead_of_time

FILE = Path(__file__).parent / "implementations.md"
INPUTS, OUTPUTS, EXPERTS = 1024, 4096, 8
DECODE_ROWS = 4
# A platform, the chip that it is seen as while an implementation is chosen, and the dtype that models compute in there.
PLATFORMS = (("cpu", None, "float32"), ("tpu", "v6e", "bfloat16"), ("gpu", "h100", "bfloat16"))


def shaped(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class Form:
    """A form in memory: `block` inputs share a scale, None for one scale per output."""

    values: Any
    kind: Any = "int"
    bits: int = 8
    block: int | None = None
    across: int = 1
    extras: tuple[str, ...] = ()
    activations: Any = None

    def weight(self, *leading: int, is_transposed: bool = False) -> QuantizedArray:
        """The abstract weight [..., K, N], or [N, K]."""
        block = (self.block or INPUTS, self.across)
        shape, groups = (INPUTS, OUTPUTS), (INPUTS // block[0], OUTPUTS // block[1])
        if is_transposed:
            shape, groups, block = shape[::-1], groups[::-1], (block[1], block[0])
        scales: Any = shaped(jnp.float32, *leading, *groups)
        if "nested" in self.extras:
            outer = shaped(jnp.float32, *leading, -(-groups[0] * groups[1] // 256))
            scales = NestedScales(
                shaped(jnp.uint8, *leading, *groups), shaped(jnp.float32, 256), outer, shaped(jnp.float32, *leading)
            )
        return QuantizedArray(
            shaped(self.values, *leading, *shape),
            scales,
            shaped(jnp.int8, *leading, *groups) if "zeros" in self.extras else None,
            shaped(jnp.float32, 16) if self.kind == "codebook" else None,
            shaped(jnp.int32, *leading, INPUTS) if "permuted" in self.extras else None,
            Scheme(self.kind, self.bits, block, self.activations),
            shaped(jnp.float32, *leading, *groups) if self.kind == "affine" else None,
        )


FORMS: dict[str, Form | Any] = {
    "int8, a scale per output": Form(jnp.int8),
    "int4, a scale per output": Form(jnp.int4, bits=4),
    "int8, groups of 16 (Q6_K)": Form(jnp.int8, bits=6, block=16),
    "int8, groups of 32 (Q8_0, Q5_0)": Form(jnp.int8, block=32),
    "int8, groups of 32 with minima (Q5_K)": Form(jnp.int8, "affine", 5, 32),
    "int8, groups of 128": Form(jnp.int8, block=128),
    "int4, groups of 32 (Q4_0)": Form(jnp.int4, bits=4, block=32),
    "int4, groups of 32 with minima (Q4_1, Q4_K)": Form(jnp.int4, "affine", 4, 32),
    "int4, groups of 16 with minima (Q2_K)": Form(jnp.int4, "affine", 2, 16),
    "int4, groups of 128": Form(jnp.int4, bits=4, block=128),
    "int4, groups of 128 with zeros (AWQ, GPTQ)": Form(jnp.int4, bits=4, block=128, extras=("zeros",)),
    "int4, groups of 128, permuted (GPTQ)": Form(jnp.int4, bits=4, block=128, extras=("zeros", "permuted")),
    "codebook, groups of 32 (MXFP4)": Form(jnp.int4, "codebook", 4, 32),
    "codebook, groups of 64 (NF4)": Form(jnp.int4, "codebook", 4, 64),
    "codebook, groups of 64, nested scales (NF4)": Form(jnp.int4, "codebook", 4, 64, extras=("nested",)),
    "fp8, a scale per output": Form(jnp.float8_e4m3fn, "float"),
    "fp8, blocks of 128 x 128": Form(jnp.float8_e4m3fn, "float", 8, 128, 128),
    "int8, activations in int8": Form(jnp.int8, activations="int8"),
    "bfloat16": jnp.bfloat16,
}


def held(form: Any, platform: str, *leading: int, is_transposed: bool = False) -> Any:
    """The abstract weight as a platform's programs take it: packed on a CPU, where it can be."""
    shape = (OUTPUTS, INPUTS) if is_transposed else (INPUTS, OUTPUTS)
    plain = not isinstance(form, Form)
    weight = shaped(form, *leading, *shape) if plain else form.weight(*leading, is_transposed=is_transposed)
    if platform != "cpu" or why_not_packed(weight, is_transposed=is_transposed) is not None:
        return weight
    return packed_shapes(weight, is_transposed=is_transposed)


def linear(form: Any, platform: str, dtype: str) -> WeightUse:
    return product_use(held(form, platform), DECODE_ROWS, dtype, platform=platform)


def tied_head(form: Any, platform: str, dtype: str) -> WeightUse | None:
    if isinstance(form, Form) and ({"nested", "permuted"} & set(form.extras) or form.across > 1 or form.activations):
        return None
    weight = held(form, platform, is_transposed=True)
    return product_use(weight, DECODE_ROWS, dtype, is_transposed=True, platform=platform)


def experts(form: Any, platform: str, dtype: str) -> WeightUse:
    return product_use(held(form, platform, EXPERTS), DECODE_ROWS, dtype, platform=platform)


def look_up(form: Any, platform: str, dtype: str) -> WeightUse | None:
    if tied_head(form, platform, dtype) is None:
        return None
    return WeightUse(lookup_use(held(form, platform, is_transposed=True), platform), 1, 1)


# An untied head is a linear layer's weight [K, N].
PLACES: dict[str, Callable[[Any, str, str], WeightUse | None]] = {
    "linear, untied head": linear,
    "tied head": tied_head,
    "stack of experts": experts,
    "embedding look-up": look_up,
}


def cells() -> dict[tuple[str, str, str], WeightUse | None]:
    """By place, form and platform; None where a weight of the form has no such place.

    Needs the compilers for v6e and h100, whose kernels are chosen by the chip.
    """
    found = {}
    for platform, chip, dtype in PLATFORMS:
        with contextlib.nullcontext() if chip is None else ahead_of_time.as_if_on(chip):
            for place, use in PLACES.items():
                for name, form in FORMS.items():
                    found[place, name, platform] = use(form, platform, dtype)
    return found


def page(found: dict[tuple[str, str, str], WeightUse | None]) -> str:
    parts = [
        "# Implementations by form of weight\n\nWritten by `python docs/update_implementations.py`, from the functions "
        f"that choose. For a decode step of {DECODE_ROWS} rows: the implementation, how it computes, and, where it is "
        f"above {MOST_READ}, the bytes of the weight that it reads over those that it has in memory. A CPU computes in "
        "float32, with `jaxinfer[cpu]`; a TPU (v6e) and a GPU (H100) in bfloat16. Beyond 16 rows a GPU converts "
        "groups other than 64 and 128 integers to bfloat16 first.\n"
    ]
    for place in PLACES:
        parts.append(
            f"\n## {place[0].upper()}{place[1:]}\n\n| form in memory | CPU | TPU | GPU |\n| --- | --- | --- | --- |\n"
        )
        for name in FORMS:
            shown = (_shown(found[place, name, platform]) for platform, _, _ in PLATFORMS)
            parts.append(f"| {name} | {' | '.join(shown)} |\n")
    return "".join(parts)


def _shown(use: WeightUse | None) -> str:
    if use is None:
        return "-"
    return f"{use.form} ({use.read_bytes / use.stored_bytes:.1f}x)" if use.is_wasteful else use.form


if __name__ == "__main__":
    FILE.write_text(page(cells()))
