"""Layers whose weights lie in the host's memory, and are copied to the device while earlier layers compute.

The parameters then have one more entry: `host_layers`, with the weights of layers of equal structure stacked, as
`{"4,5,7": {"attention": {...}, "mlp": {...}}}`: row 1 of each array is layer 5's. Vectors, such as norms, stay with
`layers`, and so does all but the experts of a layer that has some. A row that is of no layer has "-" in place of a
number.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxinfer.models.disk_layers import DISK_LAYERS, DiskLayers
from jaxinfer.quantization.tree import num_bytes

HOST_LAYERS = "host_layers"
EXPERTS = "experts"  # in the names of the weights of all experts
HOST_KINDS = ("pinned_host", "unpinned_host")  # of memory; the first can be read by copies that run beside products
NUM_BUFFERS = 2  # layers from the host that are on the device at once: the one that computes, and the one that arrives
_NO_LAYER = "-"
Params = dict[str, Any]


def host_sharding(device: Any) -> SingleDeviceSharding:
    """A device's place in the host's memory. Raises ValueError for a device without one."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    kind = next((kind for kind in HOST_KINDS if kind in kinds), None)
    if kind is None:
        raise ValueError(f"offload: {device.device_kind} has no memory of the host, only {', '.join(kinds)}")
    return SingleDeviceSharding(device, memory_kind=kind)


def move_layers_to_host(params: Params, layers: Sequence[int], platform: str) -> Params:
    """The parameters with the weights of these layers stacked in the host's memory, in the layouts of a platform; the
    arrays of the others are shared, not copied. Abstract arrays (`jax.ShapeDtypeStruct`) are marked as lying there.

    Raises ValueError for a layer that the model lacks, and as `host_sharding`.
    """
    if not layers:
        return params
    if missing := sorted(set(map(str, layers)) - set(params["layers"])):
        raise ValueError(f"offload: the model has {len(params['layers'])} layers, and no layer {', '.join(missing)}")
    leaf = jax.tree.leaves(params)[0]
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    device = jax.devices()[0] if is_abstract else next(iter(leaf.sharding.device_set))
    of_layers, stacks = dict(params["layers"]), {}
    for group in groups_of(params, layers):
        parts = [split(params["layers"][str(layer)]) for layer in group]
        of_layers |= {str(layer): kept for layer, (kept, _) in zip(group, parts, strict=True)}
        rows = [moved for _, moved in parts]
        place = HostPlace(device, platform)
        stacks[_key(group)] = jax.tree.map(lambda *leaves, place=place: place.stack(leaves), *rows)
    return {**params, "layers": of_layers, HOST_LAYERS: stacks}


def groups_of(params: Params, layers: Sequence[int]) -> list[list[int]]:
    """The layers by the structure, shapes and dtypes of the weights that would move, in their order."""
    groups: dict[Any, list[int]] = {}
    for layer in sorted(layers):
        leaves, structure = jax.tree.flatten(split(params["layers"][str(layer)])[1])
        groups.setdefault((structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)), []).append(layer)
    return list(groups.values())


def split(layer: Params) -> tuple[Params, Params]:
    """A layer's parameters that stay on the device, and those that move: arrays of two dimensions or more, of a layer
    with experts only theirs. Those are most of its bytes, so that attention and what all tokens pass stay."""
    return _split(layer, (), has_experts=any(EXPERTS in names for names in _paths(layer)))


def moved_layers(params: Params) -> dict[int, Params]:
    """The parameters of each layer that move."""
    return {int(name): split(layer)[1] for name, layer in params["layers"].items()}


def _paths(tree: Params, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, name))
        else:
            yield (*prefix, name)


def _split(layer: Params, path: tuple[str, ...], *, has_experts: bool) -> tuple[Params, Params]:
    kept, moved = {}, {}
    for name, value in layer.items():
        if isinstance(value, dict):
            inner = _split(value, (*path, name), has_experts=has_experts)
            kept |= {name: inner[0]} if inner[0] or not inner[1] else {}
            moved |= {name: inner[1]} if inner[1] else {}
        else:
            moves = EXPERTS in path and value.ndim > 2 if has_experts else value.ndim > 1
            (moved if moves else kept)[name] = value
    return kept, moved


class HostPlace:
    """The host's memory of a device, and the layouts that its programs take there."""

    def __init__(self, device: Any, platform: str):
        self._sharding, self._platform = host_sharding(device), platform

    def stack(self, rows: Sequence[Any]) -> Any:
        """Arrays of equal shape as one, with a first axis more."""
        if isinstance(rows[0], jax.ShapeDtypeStruct):
            shape = (len(rows), *rows[0].shape)
            return jax.ShapeDtypeStruct(shape, rows[0].dtype, sharding=self._place(shape, rows[0].dtype))
        return self.put(np.stack([np.asarray(row) for row in rows]))

    def put(self, stack: np.ndarray) -> jax.Array:
        """A stack in the host's memory."""
        return jax.device_put(stack, self._place(stack.shape, stack.dtype))

    def _place(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The memory in which a stack lies. Vectors that belong to a weight, such as codebooks, stay on the device:
        they are small, and a TPU copies no single rows of two axes. Its programs read rows of numbers in order, and of
        small integers in this tiling only: from other layouts the compiler refuses to copy, or copies the stack to
        another first."""
        if not _is_copied(shape):
            return self._sharding.with_memory_kind(next(iter(self._sharding.device_set)).default_memory().kind)
        if self._platform != "tpu":
            return self._sharding
        order, bits = tuple(range(len(shape))), dtype_bits(dtype)
        if bits > 8:
            return Format(Layout(order), self._sharding)
        tiling = ((8, 128), (32 // bits, 1))
        return Format(Layout(order, tiling, bits if bits < 8 else 0), self._sharding)


def _is_copied(shape: tuple[int, ...]) -> bool:
    """True if a stack lies on the host: its rows are no vectors."""
    return len(shape) > 2


def dtype_bits(dtype: Any) -> int:
    """Bits of a number."""
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def host_rows(params: Params) -> dict[int, tuple[str, int]]:
    """The key and row in `host_layers` of each layer that lies there."""
    return {
        int(name): (key, row)
        for key in params.get(HOST_LAYERS, ())
        for row, name in enumerate(key.split(","))
        if name != _NO_LAYER
    }


def all_layers(params: Params) -> Params:
    """The parameters as if no layer lay on the host: of abstract arrays shapes, of others NumPy arrays; and none on the
    disk: of those shapes."""
    if HOST_LAYERS not in params and DISK_LAYERS not in params:
        return params
    rest = on_device(params)
    return {**rest, "layers": {name: layer_of(params, int(name)) for name in params["layers"]}}


def merged_names(params: Params) -> Params:
    """As `all_layers`, with stacks in place of their rows; also while tracing."""
    if HOST_LAYERS not in params and DISK_LAYERS not in params:
        return params
    rest = on_device(params)
    stacks = {str(layer): params[HOST_LAYERS][key] for layer, (key, _) in host_rows(params).items()}
    stacks |= {str(layer): shapes for layer, shapes in _disk_shapes(params).items()}
    layers = {name: _merged(kept, stacks.get(name, {})) for name, kept in params["layers"].items()}
    return {**rest, "layers": layers}


def layer_of(params: Params, layer: int) -> Params:
    """One layer's parameters, as `all_layers`."""
    kept, location = params["layers"][str(layer)], host_rows(params).get(layer)
    if location is None:
        return _merged(kept, _disk_shapes(params).get(layer, {}))
    key, row = location
    return _merged(kept, jax.tree.map(lambda stack: _row(stack, row), params[HOST_LAYERS][key]))


def take_layers(params: Params, layers: Sequence[int]) -> Params:
    """The parameters of these layers only, numbered from 0. Stacks stay whole, but for abstract ones."""
    kept = {str(new): params["layers"][str(old)] for new, old in enumerate(layers)}
    if DISK_LAYERS in params:
        return {**params, "layers": kept, DISK_LAYERS: params[DISK_LAYERS].take(layers)}
    if HOST_LAYERS not in params:
        return {**params, "layers": kept}
    numbers = {old: new for new, old in enumerate(layers)}
    stacks = dict(_taken(params[HOST_LAYERS], numbers))
    rest = {name: value for name, value in params.items() if name != HOST_LAYERS}
    return {**rest, "layers": kept, **({HOST_LAYERS: stacks} if stacks else {})}


def _taken(stacks: Mapping[str, Any], numbers: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    for key, stack in stacks.items():
        names = [None if name == _NO_LAYER else numbers.get(int(name)) for name in key.split(",")]
        taken = [name for name in names if name is not None]
        if not taken:
            continue
        if isinstance(jax.tree.leaves(stack)[0], jax.ShapeDtypeStruct):
            yield _key(taken), jax.tree.map(partial(_cut, len(taken)), stack)
        else:
            yield ",".join(_NO_LAYER if name is None else str(name) for name in names), stack


def _cut(count: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    place: Any = leaf.sharding if layout is None else leaf.format
    return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype, sharding=place)


def is_on_host(array: Any) -> bool:
    """True if an array lies in the host's memory, and not in what its device computes on."""
    kind = getattr(array.sharding, "memory_kind", None)
    return kind is not None and kind != next(iter(array.sharding.device_set)).default_memory().kind


def host_bytes(params: Params) -> int:
    """Bytes of the weights in the host's memory."""
    return num_bytes(_copied(params.get(HOST_LAYERS, {})))


def row_bytes(params: Params) -> dict[int, int]:
    """Bytes of each layer on the host, by its number: what is copied to the device for it in each pass."""
    stacks = params.get(HOST_LAYERS, {})
    sizes = {key: num_bytes(_copied(stack)) // len(key.split(",")) for key, stack in stacks.items()}
    return {layer: sizes[key] for layer, (key, _) in host_rows(params).items()}


def _copied(stacks: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(stacks) if _is_copied(leaf.shape)]


def buffer_bytes(params: Params) -> int:
    """Bytes of the device memory that layers from the host, or the disk, take while a program runs."""
    if (disk := disk_layers(params)) is not None:
        return disk.buffer_bytes
    return sum(sorted(row_bytes(params).values())[-NUM_BUFFERS:])


def check_devices(params: Params, num_devices: int) -> None:
    """Raises ValueError for layers on the host of several devices."""
    if num_devices > 1 and HOST_LAYERS in params:
        raise ValueError(f"offload is for one device, and the mesh has {num_devices}")


def on_device(params: Params) -> Params:
    """The parameters without those on the host or the disk."""
    return {name: value for name, value in params.items() if name not in (HOST_LAYERS, DISK_LAYERS)}


def disk_layers(params: Params) -> DiskLayers | None:
    """The layers that programs read from files; None without any."""
    return params.get(DISK_LAYERS)


def _disk_shapes(params: Params) -> dict[int, Params]:
    disk = disk_layers(params)
    return {} if disk is None else disk.shapes


class HostStacks:
    """Stacks that are filled while a checkpoint is read, so that no layer of them passes through the device.

    Args:
      shapes: of all parameters, none on the host. layers: those that will lie there. device, platform: of the programs.
    """

    def __init__(self, shapes: Params, layers: Sequence[int], device: Any, platform: str):
        self._place = HostPlace(device, platform)
        groups = groups_of(shapes, layers)
        self._rows = {str(layer): (_key(group), row) for group in groups for row, layer in enumerate(group)}
        self._moved = {(name, *path) for name in self._rows for path in _paths(split(shapes["layers"][name])[1])}
        self._counts = {_key(group): len(group) for group in groups}
        self._begun: dict[tuple[str, ...], tuple[list[np.ndarray], set[int]]] = {}
        self._stacks: Params = {}

    def takes(self, path: Sequence[str]) -> bool:
        """True if a parameter lies on the host."""
        return path[0] == "layers" and tuple(path[1:]) in self._moved

    def add(self, path: Sequence[str], leaf: Any) -> None:
        """Keeps a parameter that lies on the host; the last one of a stack completes it."""
        key, row = self._rows[path[1]]
        name = (key, *path[2:])
        leaves, structure = jax.tree.flatten(leaf)
        if name not in self._begun:
            count = self._counts[key]
            self._begun[name] = [np.empty((count, *array.shape), array.dtype) for array in leaves], set()
        buffers, done = self._begun[name]
        for buffer, array in zip(buffers, leaves, strict=True):
            buffer[row] = np.asarray(array)
        done.add(row)
        if len(done) == self._counts[key]:
            del self._begun[name]
            stacks = [self._place.put(buffer) for buffer in buffers]
            inner = self._stacks
            for part in name[:-1]:
                inner = inner.setdefault(part, {})
            inner[name[-1]] = jax.tree.unflatten(structure, stacks)

    def finish(self, params: Params) -> Params:
        """The parameters with the stacks. Raises RuntimeError where rows are missing."""
        if self._begun:
            raise RuntimeError(f"offload: {len(self._begun)} stacks lack layers: {', '.join(next(iter(self._begun)))}")
        return {**params, HOST_LAYERS: self._stacks} if self._stacks else params


class HostLayers:
    """The layers' parameters as a program takes them, which copies those on the host, or reads those on the disk; used
    while tracing.

    The copies of a layer start with the layers from the one on the host before it on, an equal share of the bytes with
    each, so that at most `NUM_BUFFERS` layers are on the device; those of the first start with the pass.
    """

    def __init__(self, params: Params):
        self._layers, self._stacks = params["layers"], params.get(HOST_LAYERS, {})
        self._disk, self._of_disk = disk_layers(params), _disk_shapes(params)
        self._rows = host_rows(params)
        self._waiting = sorted(self._rows)
        self._next: _ArrivingLayer | None = None

    def take(self, layer: int, x: jax.Array) -> Params:
        """A layer's parameters on the device, before it runs on the hidden states x; layers come in their order."""
        if self._disk is not None and layer in self._of_disk:
            return _merged(self._layers[str(layer)], self._disk.arriving(layer, _bits(x)))
        params = self._layers[str(layer)]
        if self._next is None:
            self._next = self._following(layer)
        if layer in self._rows and self._next is not None:
            params = _merged(params, self._next.all(x))
            self._next = self._following(layer)
        if self._next is not None:
            self._next.start(x)
        return params

    def _following(self, layer: int) -> "_ArrivingLayer | None":
        """The next layer on the host, whose copies start with `layer` and those between."""
        if not self._waiting:
            return None
        number = self._waiting.pop(0)
        key, row = self._rows[number]
        return _ArrivingLayer(number, self._stacks[key], row, max(number - layer, 1))


class _ArrivingLayer:
    """The copies of a layer on the host, in shares of nearly equal bytes, the smallest arrays first.

    A GPU's compiler lets two copies run at once, and has the others wait for the last but one before them, beside no
    product: of the few of a share, most bytes are those of the last two.
    """

    def __init__(self, number: int, stacks: Params, row: int, num_shares: int):
        self._number, self._row = number, row
        self._stacks, self._structure = jax.tree.flatten(stacks)
        self._copied: dict[int, jax.Array] = {}
        sizes = [stack.size * dtype_bits(stack.dtype) for stack in self._stacks]
        self._shares: list[list[int]] = [[] for _ in range(num_shares)]
        before, total = 0, max(sum(sizes), 1)
        for place in sorted(range(len(sizes)), key=sizes.__getitem__):
            share = (2 * before + sizes[place]) * num_shares // (2 * total)
            self._shares[min(share, num_shares - 1)].append(place)
            before += sizes[place]

    def start(self, x: jax.Array) -> None:
        """Starts a share, not before x is there.

        The number of the row depends on x, as far as the compiler knows: otherwise all copies could start with the
        program, and all layers would be on the device at once.
        """
        zero = lax.optimization_barrier(jnp.uint32(0))
        index = jnp.uint32(self._row) + zero * _bits(x)
        with jax.named_scope(f"from_host.{self._number}"):
            self._copied |= {place: _copied_row(self._stacks[place], index) for place in self._shares.pop(0)}

    def all(self, x: jax.Array) -> Params:
        """The layer's weights; x is for shares that have not started."""
        while self._shares:
            self.start(x)
        return jax.tree.unflatten(self._structure, [self._copied[place] for place in range(len(self._stacks))])


def _bits(x: jax.Array) -> jax.Array:
    """uint32 [], the bits of a number of x."""
    one = x[(0,) * x.ndim]
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[one.dtype.itemsize]
    return lax.bitcast_convert_type(one, unsigned).astype(jnp.uint32)


def _copied_row(stack: jax.Array, index: jax.Array) -> jax.Array:
    row = lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
    return jax.device_put(row, jax.memory.Space.Device)


def _row(stack: Any, row: int) -> Any:
    if isinstance(stack, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    return np.asarray(stack)[row]


def _merged(kept: Params, moved: Params) -> Params:
    """Both parts of a layer's parameters."""
    both = dict(kept)
    for name, value in moved.items():
        both[name] = _merged(kept.get(name, {}), value) if isinstance(value, dict) else value
    return both


def _key(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
