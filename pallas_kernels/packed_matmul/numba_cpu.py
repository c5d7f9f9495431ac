"""Products with packed weights on a CPU, by kernels that Numba compiled."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cpu_kernels import kernels
from cpu_kernels.packed_matmul.forms import INT8_KERNELS, KERNELS, NUMBERS, STEP, PackedArrays, PackedForm
from pallas_kernels import cpu_calls

# Inputs whose products are summed in one chain, at most; with int8 activations those that are rounded together.
SEGMENT, INT8_SEGMENT = 128, 32


def segment_of(form: PackedForm) -> int:
    """Inputs whose products are summed in one chain: they share a scale."""
    most = INT8_SEGMENT if form.kernel in INT8_KERNELS else SEGMENT
    if form.group >= form.inputs:
        return min(most, form.padded_inputs)
    sizes = range(min(most, form.group), 0, -STEP)
    return next(size for size in sizes if form.group % size == 0 and (most != INT8_SEGMENT or most % size == 0))


def multiply(
    x: jax.Array, weights: Sequence[tuple[PackedForm, PackedArrays]], counts: jax.Array | None = None
) -> list[jax.Array]:
    """float32 [T, N] of x [T, K] for each weight; `counts` int32 [E]: of stacks of experts, by which x is sorted."""
    forms = [form for form, _ in weights]
    plan = np.array(
        [
            [
                KERNELS.index(form.kernel),
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
    # Of experts each may have any number of rows.
    row_counts = range(1, x.shape[0] + 1) if counts is not None else (x.shape[0],)
    counts = jnp.full(1, x.shape[0], jnp.int32) if counts is None else counts
    operands = [x.astype(jnp.float32), jnp.asarray(plan), counts, *(array for _, arrays in weights for array in arrays)]
    return list(cpu_calls.call(register(forms, row_counts), shapes, operands))


def register(forms: Sequence[PackedForm], row_counts: Collection[int]) -> str:
    """The registered name of the kernel, which can then multiply these numbers of rows by weights of these forms."""
    from cpu_kernels.packed_matmul import kernel, table

    for form in forms:
        table.register(form.kernel, (form.scales, form.offsets), row_counts)
    return kernels.register("jaxinfer_packed_matmul", kernel.packed_matmul)
