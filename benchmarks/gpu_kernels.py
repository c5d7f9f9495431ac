"""Calls of the GPU kernels, by name: those whose resources are reported, and those whose descriptors are checked."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from pallas_kernels import ahead_of_time
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.pallas_gpu import HEAD_DIMS as FLASH_HEAD_DIMS
from pallas_kernels.norm import norm
from pallas_kernels.paged_attention import gpu_schedule, paged_attention
from pallas_kernels.paged_attention.pallas_gpu import HEAD_DIMS
from pallas_kernels.paged_attention.shapes import MODELS, PagedShape, decode_shape

CHIP, MODEL = "h100", "llama-3-8b"
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
# Smallest pages of the engine: scales of fewer tokens are no copy.
PAGE_SIZES = {"int8": 32, "int4": 32}
WIDTH = 4096


@dataclass(frozen=True)
class KernelCall:
    """A call of one kernel: a function and its abstract arguments. `name` is that of the kernel in its programs."""

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()

    def compile(self) -> ahead_of_time.Compilation:
        return ahead_of_time.compile_for(CHIP, self.function, *self.arguments, donate_argnums=self.donate_argnums)


def paged(shape: PagedShape, num_pages: int) -> KernelCall:
    arguments = shape.abstract("separate", num_pages)
    pages = arguments.pop("pages")

    def step(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="pallas_gpu")

    return KernelCall("paged_attention", step, (pages, arguments), (0,))


def decode(dtype: str, batch: int = 64, context: int = 4096) -> KernelCall:
    """Decoding with a cache of a dtype."""
    shape = decode_shape(MODEL, batch, context, cache_dtype=dtype, page_size=PAGE_SIZES.get(dtype, 16))
    return paged(shape, batch * shape.table_width)


def prefill(dtype: str, num_new: int = 512, context: int = 8192) -> KernelCall:
    """A chunk of a prompt, without the kernel for sequences with few new tokens."""
    shape = decode_shape(MODEL, 1, context, num_new=num_new, cache_dtype=dtype, page_size=PAGE_SIZES.get(dtype, 16))
    call, shapes = paged(shape, shape.table_width), gpu_schedule.split_plan_shapes

    def long(*arguments):
        with mock.patch.object(gpu_schedule, "split_plan_shapes", lambda spec: shapes(spec)[1:]):
            return call.function(*arguments)

    return replace(call, function=long)


def flash(length: int = 8192, head_dim: int = 128) -> KernelCall:
    num_q, num_kv, _ = MODELS[MODEL]
    q, kv = (jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16) for heads in (num_q, num_kv))
    attend = partial(flash_attention, implementation="pallas_gpu")
    return KernelCall("flash_attention", lambda q, kv: attend(q, kv, kv), (q, kv))


def quantized(how: str, rows: int) -> KernelCall:
    """A product with a weight as it lies in a GPU's memory."""
    from jaxinfer.quantization import quantize
    from jaxinfer.quantization.matmul import matmul
    from jaxinfer.quantization.on_device import OUTPUT_MAJOR

    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    weight = jax.eval_shape(partial(quantize, how=how), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16))
    with ahead_of_time.as_if_on(CHIP) as whole:
        place = Format(OUTPUT_MAJOR, whole)
        values = jax.ShapeDtypeStruct(weight.shape, weight.values.dtype, sharding=place)
    return KernelCall("quantized_matmul", matmul, (x, replace(weight, values=values)))


def normed(rows: int = 64) -> KernelCall:
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16)

    def add(x, weight, term):
        return norm(x, weight, None, term, kind="rms", eps=1e-5, implementation="pallas_gpu")

    return KernelCall("norm", add, (x, weight, x))


REPORTED: dict[str, Callable[[], KernelCall]] = {
    **{f"decode {dtype}": partial(decode, dtype) for dtype in CACHE_DTYPES},
    **{f"prefill {dtype}": partial(prefill, dtype) for dtype in ("bfloat16", "int8")},
    "flash bfloat16": flash,
    **{f"{how} {rows}": partial(quantized, how, rows) for how in ("int4-g128", "int8-g128") for rows in (1, 64)},
    "norm": normed,
}


def small(head_dim: int, dtype: str, page_size: int, num_new: int = 1, *, tree: bool = False) -> KernelCall:
    """A call of few sequences, whose descriptors have the windows and strides of larger ones."""
    lengths = ((num_new, 512),) * 4
    options = {"max_query_length": num_new, "tree": tree, "pages_per_sequence": -(-512 // page_size)}
    shape = PagedShape(lengths, page_size, (32, 8), head_dim, "bfloat16", dtype, **options)
    return paged(shape, 4096)


_WINDOWS = {
    # head_dim, cache, tokens of a page
    "decode": [
        *zip(HEAD_DIMS, ("bfloat16",) * 5, (8, 16, 32, 64, 128), strict=True),
        (64, "float8_e4m3fn", 256), (80, "float8_e5m2", 8), (96, "float8_e4m3fn", 16), (256, "float8_e5m2", 64),
        (64, "int8", 32), (80, "int8", 64), (96, "int8", 128), (128, "int8", 256),
        (128, "int4", 32), (256, "int4", 128),
    ],
    "prefill": [
        (80, "bfloat16", 8), (128, "bfloat16", 16), (256, "bfloat16", 64), (96, "float8_e4m3fn", 32),
        (128, "int8", 64), (128, "int4", 32),
    ],
    "tree": [(64, "bfloat16", 8), (128, "int8", 32), (256, "float8_e4m3fn", 64)],
}  # fmt: skip
_NEW_TOKENS = {"decode": 1, "prefill": 40, "tree": 8}
CHECKED: dict[str, Callable[[], KernelCall]] = {
    **{
        f"{program} {head_dim} {dtype} page {page}": partial(
            small, head_dim, dtype, page, _NEW_TOKENS[program], tree=program == "tree"
        )
        for program, windows in _WINDOWS.items()
        for head_dim, dtype, page in windows
    },
    **{f"flash {head_dim}": partial(flash, 1024, head_dim) for head_dim in FLASH_HEAD_DIMS},
    **{f"{how} {rows}": partial(quantized, how, rows) for how, rows in product(("int4-g128", "int8-g128"), (1, 64))},
    "int4-g64 512": partial(quantized, "int4-g64", 512),
    "int4-g128-asym 64": partial(quantized, "int4-g128-asym", 64),
    "norm": normed,
}
