"""Mosaic GPU functions that differ between versions of JAX, or between a chip and the interpreter.

The GPU interpreter of JAX runs threads, barriers, TMA copies and shared memory on a CPU. It has no layouts, no wgmma
operands in registers or transposed, no loads with a layout and no dynamic slices (integer indices work). Inside
`interpreted()` the functions below replace them, so that one kernel body runs on both.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels.hbm_traffic import ESTIMATE

_is_interpreting = contextvars.ContextVar("mosaic_gpu_interpreted", default=False)


def is_interpreted() -> bool:
    """True if kernels are traced for the interpreter."""
    return _is_interpreting.get()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs kernels traced inside in the GPU interpreter, with uninitialized memory NaN and races detected."""
    token = _is_interpreting.set(True)
    try:
        yield
    finally:
        _is_interpreting.reset(token)


def kernel(
    body: Callable, *, out_type: Any, name: str, cost_estimate: pl.CostEstimate | None = None, **options: Any
) -> Callable:
    """`plgpu.kernel` with the Warpgroup lowering, for the chip or the interpreter."""
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        options["cost_estimate"] = cost_estimate
    interpret: Any = None
    if is_interpreted():
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret = InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")

    def named(*refs):
        body(*refs)

    named.__name__ = name
    called = plgpu.kernel(
        named,
        out_type=out_type,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **options,
    )
    return _with_estimate(called, cost_estimate)


def kernel_in_place(
    body: Callable, *, out_type: Any, scratch_types: tuple = (), name: str, cost_estimate: Any = None, **mesh: Any
) -> Callable:
    """As `kernel`, for operands that are `jax.new_ref(array, memory_space=plgpu.GMEM)`, updated without a copy.

    `plgpu.kernel` of JAX 0.10.2 does not accept such references; `pl.kernel` over the same mesh does. The body has to
    specify layouts (Lane lowering): Warpgroup lowering infers none for nested allocations of shared memory.
    """
    interpret: Any = False
    if is_interpreted():
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret = InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")

    def scoped(*refs):
        pl.run_scoped(partial(body, *refs), *scratch_types, collective_axes=mesh.get("thread_name") or ())

    called = pl.kernel(
        scoped,
        out_type=out_type,
        mesh=plgpu.Mesh(**mesh),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        cost_estimate=cost_estimate,
        name=name,
    )
    return _with_estimate(called, cost_estimate)


def _with_estimate(called: Callable, cost: pl.CostEstimate | None) -> Callable:
    """The kernel with its bytes in the compiled program's text (`hbm_traffic`), where no version of JAX writes them."""
    if cost is None or is_interpreted():
        return called

    def marked(*operands):
        with set_xla_metadata(**{ESTIMATE: cost.bytes_accessed}):
            return called(*operands)

    return marked


def fence_copies() -> None:
    """Makes this warpgroup's completed writes to GMEM visible to its next copies from GMEM."""
    if is_interpreted():
        return
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu()
    def fence(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async;", "", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue]


def cast_layout(array: jax.Array, layout: Any) -> jax.Array:
    """The array in another register layout."""
    return array if is_interpreted() else plgpu.layout_cast(array, layout)


def iota(shape: tuple[int, ...], dimension: int, layout: Any) -> jax.Array:
    """int32 indices along a dimension."""
    if is_interpreted():
        return lax.broadcasted_iota(jnp.int32, shape, dimension)
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def load(ref: Any, index: tuple, layout: Any) -> jax.Array:
    """`ref[index]` from GMEM or SMEM into registers of a layout."""
    if is_interpreted():
        return ref[index]
    if jax.__version_info__ >= (0, 11):
        return plgpu.load(ref.at[index], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
    return plgpu.load(ref, index, layout=layout, optimized=False)


def transpose(ref: Any) -> Any:
    """The transposed view of a matrix in SMEM."""
    if jax.__version_info__ >= (0, 11):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def wgmma(a: Any, b: Any, *, transpose_b: bool = False) -> jax.Array:
    """float32 a @ b (or a @ b.T) on the tensor cores of a warpgroup, complete on return.

    a is [M, K] in SMEM or in registers, b [K, N] (or [N, K]) in SMEM; M is a multiple of 64.
    """
    if is_interpreted():
        left, right = a[...], b[...]
        contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
        return lax.dot_general(left, right, contract, preferred_element_type=jnp.float32)
    right = transpose(b) if transpose_b else b

    def run(accumulator):
        plgpu.wgmma(accumulator, a, right)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], right.shape[1]), jnp.float32))  # pyright: ignore


def not_hopper() -> str | None:
    """The reason why the GPU that is traced for cannot run wgmma kernels, or None."""
    if is_interpreted():
        return None
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        kind = device.device_kind
        return (
            None if any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200")) else f"{kind} is no Hopper"
        )
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    return None if capability.startswith("9.") else f"wgmma needs compute capability 9, this GPU has {capability}"
