"""Slots, parameters, and what programs take of each dispatch, as shapes: to compile without weights or a chip."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache import PageTables
from jaxinfer.engine.programs.paged import empty_work, init_slots, slot_axes, step_work
from jaxinfer.engine.programs.speculative import SpeculativeWork, empty_rounds
from jaxinfer.engine.programs.work import DecodeWork, Slots, StepWork
from jaxinfer.models import ModelConfig, Params, host_layers, parameter_shardings
from jaxinfer.models.host_layers import is_on_host
from jaxinfer.quantization.on_device import laid_out, layouts
from jaxinfer.quantization.side_by_side import join, separate
from jaxinfer.quantization.tree import is_quantized
from jaxinfer.request_arrays import RequestArrays
from jaxinfer.sampling import BoundProcessors, SamplingBatch


def abstract_slots(
    num_slots: int,
    vocab_size: int,
    mesh: Mesh | None = None,
    draft_length: int | None = None,
    has_adapters: bool = False,
    processors: BoundProcessors | None = None,
    steering: RequestArrays | None = None,
) -> tuple[Slots, SamplingBatch]:
    """Slots and sampling parameters; the other arguments are as of `init_slots`."""
    rows = jax.eval_shape(lambda: init_slots(num_slots, vocab_size, draft_length, has_adapters, processors, steering))
    return rows if mesh is None else placed(rows, parallel.array_shardings(mesh, rows, slot_axes(*rows)))


def abstract_step_work(
    num_tokens: int,
    num_slots: int,
    pages_per_sequence: int,
    num_groups: int = 1,
    is_compacted: bool = False,
    *,
    has_prompt_lengths: bool = False,
) -> StepWork:
    """The work of a step of so many tokens; `has_prompt_lengths` as `empty_work`."""
    tables = abstract_tables(num_slots, pages_per_sequence, num_groups, is_compacted)
    return step_work(_abstract(empty_work(num_tokens, num_slots, has_prompt_lengths)), tables)


def abstract_decode_work(
    num_slots: int, pages_per_sequence: int, num_groups: int = 1, is_compacted: bool = False
) -> DecodeWork:
    """The work of decoding."""
    return DecodeWork(
        is_scheduled=abstract_array(jnp.bool_, num_slots),
        page_tables=abstract_tables(num_slots, pages_per_sequence, num_groups, is_compacted),
        num_steps=abstract_array(jnp.int32),
    )


def abstract_rounds(
    num_slots: int, pages_per_sequence: int, num_groups: int = 1, is_compacted: bool = False
) -> SpeculativeWork:
    """The work of speculative rounds."""
    tables = abstract_tables(num_slots, pages_per_sequence, num_groups, is_compacted)
    return SpeculativeWork(**_abstract(empty_rounds(num_slots)), page_tables=tables)


def _abstract(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: abstract_array(array.dtype, *array.shape) for name, array in arrays.items()}


def abstract_array(dtype: Any, *shape: int) -> Any:
    """An array that every device has all of."""
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_tables(num_slots: int, pages_per_sequence: int, num_groups: int, is_compacted: bool = False) -> PageTables:
    """The page tables of the groups of layers, and with `is_compacted` the pages that each prompt has lost."""
    tables = (abstract_array(jnp.int32, num_slots, pages_per_sequence),) * num_groups
    return (*tables, abstract_array(jnp.int32, num_slots, num_groups)) if is_compacted else tables


def placed(arrays: Any, shardings: Any) -> Any:
    """Abstract arrays with a sharding each."""
    return jax.tree.map(lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arrays, shardings)


def placed_params(
    config: ModelConfig, params: Params, mesh: Mesh | None, platform: str = "cpu", laid_out_on: Any = None
) -> Params:
    """Abstract parameters, of which some may be quantized, as the platform multiplies them: with their shardings, side
    by side on a GPU, and in layouts on the only device of `laid_out_on`. Raises ValueError as `models.check_divides`.
    """
    abstract = separate(params)
    if mesh is not None:
        abstract = placed(abstract, parameter_shardings(mesh, config, abstract))
    if platform == "gpu":
        abstract = join(abstract)
    if not isinstance(laid_out_on, Mesh):
        return abstract
    return in_layouts(abstract, platform, NamedSharding(laid_out_on, PartitionSpec()))


def shapes_of(params: Any) -> Any:
    """Arrays as `jax.ShapeDtypeStruct`s, with the shardings of a mesh, the layouts of the device's products, and
    what lies in the host's memory marked."""

    def shape(array: jax.Array, place: Any = None) -> jax.ShapeDtypeStruct:
        is_cut = len(array.sharding.device_set) > 1
        if is_on_host(array):
            place = getattr(array, "format")  # noqa: B009 (JAX's stubs do not know it)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place or (array.sharding if is_cut else None))

    def of_leaf(leaf: Any) -> Any:
        abstract = jax.tree.map(shape, leaf)
        if not is_quantized(leaf):
            return abstract
        arrays = {name: getattr(leaf, name) for name in layouts(leaf, jax.default_backend())}
        placed = {name: shape(array, Format(array.format.layout, array.sharding)) for name, array in arrays.items()}
        return replace(abstract, **placed)

    return jax.tree.map(of_leaf, params, is_leaf=is_quantized)


def in_layouts(params: Params, platform: str, sharding: NamedSharding) -> Params:
    """As `quantization.on_device.in_layouts`, of abstract arrays."""

    def placed(array: Any, layout: Layout) -> jax.ShapeDtypeStruct:
        place: Any = Format(layout, getattr(array, "sharding", None) or sharding)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    return jax.tree.map(lambda leaf: laid_out(leaf, platform, placed), params, is_leaf=is_quantized)


def take_layers(config: ModelConfig, params: Params, layers: Sequence[int]) -> tuple[ModelConfig, Params]:
    """The model of these layers, in this order."""
    return config.with_layers(layers), host_layers.take_layers(params, layers)


def layer_kinds(config: ModelConfig, params: Params) -> dict[Any, list[int]]:
    """The layers by kind, in the order in which kinds first appear: those of one kind make the same computation, of
    weights of the same shapes and formats."""
    kinds: dict[Any, list[int]] = {}
    on_host = host_layers.host_rows(params)
    for layer, first in enumerate(config.kinds):
        leaves, structure = jax.tree.flatten(host_layers.layer_of(params, layer))
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
        kinds.setdefault((first, structure, shapes, layer in on_host), []).append(layer)
    return kinds


def buckets(sizes: Iterable[int], largest: int) -> tuple[int, ...]:
    """The sizes below the largest one, and that."""
    return (*(size for size in sizes if size < largest), largest)
