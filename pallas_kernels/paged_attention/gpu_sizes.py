"""Static sizes of the GPU kernel: the form of its products, its shared memory, and the shapes of its results."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_schedule import BLOCK_KEYS, MAX_COLUMNS, TILE_ROWS, SplitPlanShape
from pallas_kernels.paged_attention.specs import PagedSpec

# Shared memory of a thread block; with the smaller figure two share a multiprocessor.
MAX_SHARED_BYTES = 227 * 1024
PAIR_SHARED_BYTES = 113 * 1024
# Columns of the values in one product if a row does not fit in registers.
MAX_ROW, CHUNK = 128, 64
# Every thread of the warpgroup signals a copy's barrier for an equal number of bytes.
COPY_BYTES = 128


@dataclass(frozen=True)
class KernelSizes:
    """Static sizes of the kernel.

    is_transposed: queries are the columns of the products (`gpu_blocks`). rows: queries of a tile, with padding.
    dtype: of the products. chunk_starts: first columns of the parts of a value that are products of their own; of 80
    and 96 columns, which are no multiple of 64, two parts overlap. weighted_shape: of their weighted values, (parts, M,
    N). shared_bytes: at least its shared memory; `stages` is 0 if that does not fit.
    """

    is_transposed: bool
    is_converted: bool
    rows: int
    dtype: str
    chunk_starts: tuple[int, ...]
    weighted_shape: tuple[int, int, int]
    stages: int
    new_tokens: int
    shared_bytes: int

    @property
    def aux_rows(self) -> int:
        """Columns of the facts of ancestors, so that both rows of them are whole copies."""
        return -(-self.rows * 8 // COPY_BYTES) * COPY_BYTES // 8


def compute_dtype(spec: PagedSpec) -> str:
    """Dtype of the products. fp8 is converted to float16, which is exact and takes one instruction."""
    return "float16" if spec.page.dtype.startswith("float8") else spec.q_dtype


def stored_row(spec: PagedSpec) -> tuple[int, Any]:
    """Elements of a stored key or value, and their dtype; int4 has two numbers in a byte."""
    width = spec.head_dim // 2 if spec.page.dtype == "int4" else spec.head_dim
    return width, jnp.dtype(spec.page.element_dtype)


def row_bytes(spec: PagedSpec) -> int:
    """Bytes of a stored key or value."""
    width, dtype = stored_row(spec)
    return width * dtype.itemsize


def padded_new_tokens(spec: PagedSpec) -> int:
    """Number of new tokens that one copy loads for a sequence."""
    row = row_bytes(spec)
    return next(n for n in range(spec.max_query_length, 2 * COPY_BYTES + 1) if n * row % COPY_BYTES == 0)


def swizzle(head_dim: int, dtype) -> int:
    """Bytes of the widest swizzle that divides a row of `head_dim` values; 0 if there is none."""
    row = head_dim * jnp.dtype(dtype).itemsize
    return next((width for width in (128, 64, 32) if row % width == 0), 0)


def transforms(head_dim: int, dtype) -> tuple:
    """Tiles of a matrix in shared memory with rows of `head_dim` values."""
    width = swizzle(head_dim, dtype)
    if not width:
        return ()
    return (plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width))


def kernel_sizes(spec: PagedSpec, shape: SplitPlanShape, has_append: bool) -> KernelSizes:
    """The sizes of one program."""
    is_transposed = shape.out_rows <= MAX_COLUMNS
    rows = shape.rows
    head_dim = spec.head_dim
    if is_transposed:
        starts = (0,) if head_dim % 64 == 0 else (0, head_dim - 64)
        weighted = (len(starts), head_dim if len(starts) == 1 else 64, rows)
    else:
        chunk = head_dim if head_dim <= MAX_ROW else CHUNK
        starts = tuple(range(0, head_dim, chunk))
        weighted = (len(starts), TILE_ROWS, chunk)
    is_converted = spec.page.dtype != compute_dtype(spec)
    new_tokens = padded_new_tokens(spec) if has_append else 0

    row, compute = row_bytes(spec), jnp.dtype(spec.q_dtype).itemsize
    stage = 2 * BLOCK_KEYS * row + (16 * BLOCK_KEYS if spec.page.has_scales else 0)
    fixed = rows * head_dim * compute + 2 * new_tokens * row + 6144 + 2 * rows * 4
    converted = 2 * BLOCK_KEYS * head_dim * compute if is_converted else 0
    converted += BLOCK_KEYS * rows * compute if is_transposed else 0
    result = rows * head_dim * compute

    def total(stages: int) -> int:
        return fixed + max(stages * stage + converted, result)

    fitting = [n for n in range(2, max(shape.max_stages, 2) + 1) if total(n) <= PAIR_SHARED_BYTES]
    fitting = fitting or [n for n in range(2, max(shape.max_stages, 2) + 1) if total(n) <= MAX_SHARED_BYTES]
    stages = max(fitting, default=0)
    return KernelSizes(
        is_transposed=is_transposed,
        is_converted=is_converted,
        rows=rows,
        dtype=compute_dtype(spec),
        chunk_starts=starts,
        weighted_shape=weighted,
        stages=stages,
        new_tokens=new_tokens,
        shared_bytes=total(max(stages, 2)),
    )
