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
    specify layouts (Lane lowering): Warpgroup lowering infers none for nested allocations of shared memory. It also has
    the barriers between its threads: none are inserted around stores and copies.
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
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
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


def one_warp(start: Callable[[], None]) -> None:
    """Runs `start`, which starts copies to SMEM, in one warp of a warpgroup: the others have no instructions of it."""
    if is_interpreted():
        start()
        return

    def first():
        pl.when(lax.axis_index("warp") == 0)(start)

    mesh = plgpu.WarpMesh(axis_name="warp")
    if jax.__version_info__ >= (0, 11):
        pl.kernel(first, out_type=(), mesh=mesh)()  # pyright: ignore[reportCallIssue]
    else:
        pl.core_map(mesh)(first)


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


def store(ref: Any, index: tuple, value: jax.Array) -> None:
    """`ref[index] = value` of registers of any layout, to GMEM or SMEM."""
    if is_interpreted() or not hasattr(plgpu, "store"):
        ref[index] = value
    else:  # JAX 0.12 refuses what is not whole lines, or has bank conflicts, unless told otherwise
        plgpu.store(ref.at[index], value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]


def transpose(ref: Any) -> Any:
    """The transposed view of a matrix in SMEM."""
    if jax.__version_info__ >= (0, 11):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def wgmma(
    a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, accumulator: jax.Array | None = None
) -> jax.Array:
    """float32 a @ b on the tensor cores of a warpgroup, added to the accumulator; complete on return.

    a is [M, K] in SMEM or in registers, b [K, N] in SMEM; M is a multiple of 64. Operands in SMEM may be transposed.
    """
    if is_interpreted():
        left, right = a[...], b[...]
        # Tensor cores read through the asynchronous proxy, as copies write. These reads are generic ones, which JAX
        # 0.12 wants to be fenced before the next copy.
        plgpu.commit_smem()
        contract = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))
        product = lax.dot_general(left, right, contract, preferred_element_type=jnp.float32)
        return product if accumulator is None else accumulator + product
    left = transpose(a) if transpose_a else a
    right = transpose(b) if transpose_b else b
    if accumulator is not None:
        initial = plgpu.ACC.init(accumulator)  # pyright: ignore
        return pl.run_state(lambda total: plgpu.wgmma(total, left, right))(initial)  # pyright: ignore

    def run(product):
        plgpu.wgmma(product, left, right)
        return product[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))  # pyright: ignore


def count_arrival(counter: Any, flag: Any, num_arrivals: Any) -> jax.Array:
    """True for the last of `num_arrivals` thread blocks that call this with a counter, int32 [1] in GMEM, which is 0
    before and after. It sees what the others wrote to GMEM before. flag: int32 [1] in SMEM."""
    if is_interpreted():
        before = counter[0]
        counter[0] = jnp.where(before == num_arrivals - 1, 0, before + 1)
        return before == num_arrivals - 1
    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), splat),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat),
    )
    def count(_, counter, flag, limit):
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        addresses = [utils.memref_ptr(counter), utils.memref_ptr(flag)]
        fence = partial(llvm.inline_asm, void, [], "fence.acq_rel.gpu;", "", has_side_effects=True)
        first = (
            "{ .reg .pred first; .reg .b32 before; setp.eq.u32 first, $3, 0; "
            "@first atom.acq_rel.gpu.global.inc.u32 before, [$0], $2; @first st.shared.u32 [$1], before; }"
        )
        fence()
        utils.warpgroup_barrier()
        operands = [*addresses, limit.registers.item(), utils.thread_idx()]
        llvm.inline_asm(void, operands, first, "l,r,r,r", has_side_effects=True)
        utils.warpgroup_barrier()
        before = llvm.inline_asm(i32, [addresses[1]], "ld.shared.u32 $0, [$1];", "=r,r", has_side_effects=True)
        fence()
        return FragmentedArray.splat(before, (), splat.to_mgpu(), is_signed=True)  # pyright: ignore[reportArgumentType]

    # `inc` sets a counter at the limit back to 0.
    return count(counter, flag, num_arrivals - 1) == num_arrivals - 1  # pyright: ignore[reportCallIssue]


def has_ordered_blocks() -> bool:
    """True if `count_arrival` orders thread blocks: not in the interpreter of JAX 0.11, where each has its own clock
    and no operation synchronises them. That of JAX 0.10 runs them one after another, as one thread."""
    return not is_interpreted() or jax.__version_info__ < (0, 11)


def num_multiprocessors() -> int:
    """Multiprocessors of the GPU that is traced for; those of an H100 SXM if there is none."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and jax.default_backend() == "gpu":
        return getattr(jax.devices()[0], "core_count", None) or 132
    if device is None or device.platform != "gpu":
        return 132
    return device.num_cores or 132


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
