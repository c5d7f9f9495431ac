"""Rules of TMA descriptors, and the descriptors of GPU kernels, read while they are lowered.

A kernel's tensor copies have descriptors, which the host encodes by `cuTensorMapEncodeTiled` before the first launch
on a chip: a broken rule stops it there, and no compiler checks them. The rules are those of the CUDA driver API, and of
the PTX manual for addresses in shared memory. Nothing is compiled: lowering a kernel takes a second or two.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax

from benchmarks.gpu_kernels import CHIP, KernelCall
from pallas_kernels import ahead_of_time

MOST_DIMENSIONS, LONGEST_SIDE = 5, 256
ALIGNMENT = 16  # bytes, of addresses, strides and the rows of a window
SHARED_ALIGNMENT = 128
LARGEST_SIZE, LARGEST_STRIDE = 2**32, 2**40
SWIZZLES = (0, 32, 64, 128)
SWIZZLED_ROWS = 8
# Bases of what addresses are counted from: Mosaic places shared memory so, XLA its buffers.
BASE_OF_SHARED, BASE_OF_BUFFERS = 1024, 256


@dataclass
class TmaDescriptor:
    """A tensor in global memory and the window that copies take of it.

    Attributes:
      bits: of an element. shape, strides: of the tensor, strides in elements, the last dimension's is 1.
      box: sides of the window, in elements. swizzle: bytes, 0 for none.
      address: the largest power of two that surely divides the tensor's address, in bytes.
      shared: the same for each address in shared memory that a copy reads or writes.
    """

    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    address: int = BASE_OF_BUFFERS
    shared: list[int] = field(default_factory=list)


def broken_rules(one: TmaDescriptor) -> list[str]:
    """A sentence for each rule that the descriptor breaks. Elements of less than a byte are copied as bytes."""
    broken = []
    if not 1 <= len(one.box) <= MOST_DIMENSIONS:
        broken.append(f"{len(one.box)} dimensions, of at most {MOST_DIMENSIONS}")
    if not len(one.shape) == len(one.strides) == len(one.box):
        broken.append(f"{len(one.shape)} sizes, {len(one.strides)} strides and {len(one.box)} sides")
    per_byte = 8 // one.bits if one.bits < 8 else 1
    if any(sizes[-1] % per_byte for sizes in (one.shape, one.box)):
        broken.append(f"a row of half a byte: {one.shape[-1]} elements, {one.box[-1]} of the window")
    sides = (*one.box[:-1], one.box[-1] // per_byte)
    if not all(1 <= side <= LONGEST_SIDE for side in sides):
        broken.append(f"window {sides}: a side is not 1 to {LONGEST_SIDE}")
    if not all(1 <= size <= LARGEST_SIZE for size in one.shape):
        broken.append(f"tensor {one.shape}: a size is not 1 to 2^32")
    if one.strides[-1] != 1:
        broken.append(f"elements {one.strides[-1]} apart in a row")
    strides = [stride * one.bits / 8 for stride in one.strides[:-1]]
    if any(stride % ALIGNMENT for stride in strides):
        broken.append(f"strides {strides}: one is no multiple of {ALIGNMENT} bytes")
    if any(stride >= LARGEST_STRIDE for stride in strides):
        broken.append(f"strides {strides}: one is 2^40 bytes or more")
    row = one.box[-1] * one.bits / 8
    if row % ALIGNMENT:
        broken.append(f"rows of the window of {row} bytes, no multiple of {ALIGNMENT}")
    if one.swizzle not in SWIZZLES:
        broken.append(f"swizzle of {one.swizzle} bytes")
    if one.swizzle and row > one.swizzle:
        broken.append(f"rows of the window of {row} bytes, swizzle of {one.swizzle}")
    if one.address % ALIGNMENT:
        broken.append(f"global address at a multiple of {one.address} bytes")
    # A pattern of swizzled rows begins at a multiple of its length.
    needed = max(SHARED_ALIGNMENT, SWIZZLED_ROWS * one.swizzle)
    broken += [f"shared address at a multiple of {at} bytes, not {needed}" for at in one.shared if at % needed]
    return broken


def descriptors_of(call: KernelCall) -> list[TmaDescriptor]:
    """The descriptors of a call's kernels, which are lowered for it.

    Raises ValueError if an address in shared memory cannot be followed, and what lowering raises.
    """
    with ahead_of_time.as_if_on(CHIP) as whole, _recorded() as made:

        def abstract(leaf):
            place = getattr(leaf, "format", None)
            is_placed = getattr(place, "layout", None) is not None
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place if is_placed else whole)

        # A function of its own: JAX keeps what it lowered of others.
        again = jax.jit(lambda *arguments: call.function(*arguments), donate_argnums=call.donate_argnums)
        again.lower(*jax.tree.map(abstract, call.arguments))
    return list(made.values())


@contextlib.contextmanager
def _recorded() -> Iterator[dict[Any, TmaDescriptor]]:
    """Descriptors by the value that the kernel has of them, of kernels that are lowered meanwhile."""
    from jax.experimental.mosaic.gpu import launch_context, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, nvvm

    made: dict[Any, TmaDescriptor] = {}
    make, load, store = (
        launch_context.LaunchContext._get_tma_desc,
        nvvm.cp_async_bulk_tensor_shared_cluster_global,
        nvvm.cp_async_bulk_tensor_global_shared_cta,
    )

    def recorded_make(context, ref, transform, peer, box, swizzle, *rest):
        value = make(context, ref, transform, peer, box, swizzle, *rest)
        if value not in made:
            ref = launch_context._find_kernel_argument_for_gmem_ref(ref)
            for one in transform:
                ref = one.apply(ref)
            kind = ir.MemRefType(ref.type)
            strides, offset = kind.get_strides_and_offset()
            bits = utils.bitwidth(kind.element_type)
            address = math.gcd(BASE_OF_BUFFERS, offset * bits // 8)
            shape, none = tuple(kind.shape), int(launch_context.mgpu_dialect.SwizzlingMode.kNoSwizzle)
            swizzle = 0 if int(swizzle or none) == none else int(swizzle)
            made[value] = TmaDescriptor(bits, shape, tuple(strides), tuple(box), swizzle, address)
        return value

    def recorded_load(shared, value, *rest, **options):
        made[value].shared.append(_shared_alignment(shared))
        return load(shared, value, *rest, **options)

    def recorded_store(value, shared, *rest, **options):
        made[value].shared.append(_shared_alignment(shared))
        return store(value, shared, *rest, **options)

    assemble = llvm.inline_asm

    def recorded_assembly(result, operands, text, *rest, **options):
        if "cp.async.bulk.tensor" in text and ".global.mbarrier" in text:  # loads, since JAX 0.12
            made[operands[2]].shared.append(_shared_alignment(operands[1]))
        return assemble(result, operands, text, *rest, **options)

    with (
        mock.patch.object(launch_context.LaunchContext, "_get_tma_desc", recorded_make),
        mock.patch.object(llvm, assemble.__name__, recorded_assembly),
        mock.patch.object(nvvm, load.__name__, recorded_load),
        mock.patch.object(nvvm, store.__name__, recorded_store),
    ):
        yield made


def _shared_alignment(pointer: Any) -> int:
    """The largest power of two that surely divides an address that Mosaic made of a reference (`utils.memref_ptr`)."""
    value = pointer
    for name in (
        "llvm.inttoptr",
        "llvm.add",
        "llvm.ptrtoint",
        "llvm.extractvalue",
        "builtin.unrealized_conversion_cast",
    ):
        if _name(value) != name:
            raise ValueError(f"a shared address by {_name(value)} instead of {name}")
        value = value.owner.operands[0]
    return _reference_alignment(value)


def _reference_alignment(value: Any) -> int:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    name, operation = _name(value), value.owner.operation
    if name == "gpu.dynamic_shared_memory":
        return BASE_OF_SHARED
    source, *others = operation.operands
    if name == "memref.view":
        return math.gcd(_reference_alignment(source), _factor(others[0]))
    if name == "memref.subview":
        kind = ir.MemRefType(source.type)
        strides, _ = kind.get_strides_and_offset()
        dynamic, unknown = iter(others), ir.ShapedType.get_dynamic_stride_or_offset()
        offsets = [
            _factor(next(dynamic)) if offset == unknown else offset for offset in operation.attributes["static_offsets"]
        ]
        bits = utils.bitwidth(kind.element_type)
        steps = (offset * stride * bits // 8 for offset, stride in zip(offsets, strides, strict=True))
        return math.gcd(_reference_alignment(source), *steps)
    if name in ("memref.reinterpret_cast", "memref.collapse_shape", "memref.expand_shape", "memref.transpose"):
        return _reference_alignment(source)  # whose beginning they keep
    raise ValueError(f"a shared address by {name}")


def _factor(value: Any) -> int:
    """An integer that surely divides an index."""
    from jaxlib.mlir import ir

    name = _name(value)
    if name == "arith.constant":
        return ir.IntegerAttr(value.owner.operation.attributes["value"]).value
    if name not in ("arith.muli", "arith.addi", "arith.index_cast"):
        return 1
    factors = [_factor(operand) for operand in value.owner.operands]
    return math.prod(factors) if name == "arith.muli" else math.gcd(*factors)


def _name(value: Any) -> str:
    """The name of the operation that makes a value; "" of an argument."""
    return getattr(getattr(value.owner, "operation", None), "name", "")
