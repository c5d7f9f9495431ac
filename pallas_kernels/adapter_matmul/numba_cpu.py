"""float32 adapters on a CPU, by a kernel that reads those of the rows alone, up to their ranks."""

from collections.abc import Sequence

import jax

from cpu_kernels import kernels
from pallas_kernels import cpu_calls
from pallas_kernels.adapter_matmul.api import AdapterSpec


def unsupported(spec: AdapterSpec, platform: str) -> str | None:
    if (reason := cpu_calls.unsupported(platform)) is not None:
        return reason
    names = dict.fromkeys((spec.dtypes[0], *spec.dtypes[1]))
    return None if list(names) == ["float32"] else f"it multiplies float32, not {' and '.join(names)}"


def add(
    x: jax.Array,
    products: Sequence[jax.Array],
    stacks: Sequence[tuple[jax.Array, jax.Array]],
    ids: jax.Array,
    ranks: jax.Array,
    spec: AdapterSpec,
) -> list[jax.Array]:
    """Products are added to in place where nothing else uses them."""
    shapes = tuple(jax.ShapeDtypeStruct(product.shape, product.dtype) for product in products)
    operands = [x, ids, ranks]
    for product, pair in zip(products, stacks, strict=True):
        operands += [product, *pair]
    in_place = {3 + 3 * index: index for index in range(len(products))}
    return list(cpu_calls.call(register(), shapes, operands, in_place=in_place))


def register() -> str:
    """The registered name of the kernel."""
    from cpu_kernels.adapter_matmul import adapter_matmul

    return kernels.register("jaxinfer_adapter_matmul", adapter_matmul)
