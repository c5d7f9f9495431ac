"""Products with packed weights on a CPU, by kernels that Numba compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.numba_cpu import calls
from pallas_kernels.packed_matmul.specs import CODE_NAMES, NUMBERS, STEP, PackedArrays, PackedForm

SEGMENT = 128  # inputs whose products are summed in one chain, at most


def segment_of(form: PackedForm) -> int:
    """Inputs whose products are summed in one chain: they share a scale."""
    if form.group >= form.inputs:
        return min(SEGMENT, form.padded_inputs)
    return next(size for size in range(min(SEGMENT, form.group), 0, -STEP) if form.group % size == 0)


def multiply(x: jax.Array, weights: Sequence[tuple[PackedForm, PackedArrays]]) -> list[jax.Array]:
    """float32 [T, N] of x [T, K] for each weight."""
    forms = [form for form, _ in weights]
    plan = np.array(
        [
            [
                CODE_NAMES.index(form.codes),
                form.inputs,
                form.padded_inputs // STEP,
                form.outputs,
                form.group,
                segment_of(form),
                NUMBERS.index(form.scales),
                NUMBERS.index(form.offsets),
                form.unit,
            ]
            for form in forms
        ],
        np.int32,
    )
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], form.outputs), jnp.float32) for form in forms)
    operands = [x.astype(jnp.float32), jnp.asarray(plan), *(array for _, arrays in weights for array in arrays)]
    return list(calls.call(register(frozenset(form.codes for form in forms)), shapes, operands))


def register(kinds: frozenset[str]) -> str:
    """The registered name of the kernel, which can then multiply codes of these kinds."""
    from pallas_kernels.numba_cpu.frames import register
    from pallas_kernels.packed_matmul import numba_kernel

    numba_kernel.register_kinds(kinds)
    return register("jaxinfer_packed_matmul", numba_kernel.packed_matmul)
