"""Pages in host memory: NumPy arrays, which behave alike on every platform, and the transfers to and from them."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache import PagedCache, StateCache
from jaxinfer.checks import format_bytes
from jaxinfer.engine.memory import system_memory
from jaxinfer.engine.programs.tiers import abstract_rows, gather_pages, row_specs, scatter_pages
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.tiers.host_tier import BATCH_BYTES, BATCH_PAGES, MAX_IN_TRANSIT, HostPoolSize, PageMove

AUTO_FACTOR = 16  # host memory by host_cache_gib="auto", at most so many times the caches on the device


class Caches(NamedTuple):
    """The arrays that hold pages and saved states."""

    cache: PagedCache
    draft: PagedCache | None
    saved: StateCache | None

    def parts(self, group: int, num_groups: int) -> Any:
        """The layers that share page ids: of a group, or the saved states, which come after all groups."""
        if group == num_groups:
            return () if self.saved is None else self.saved.layers
        own = tuple(self.cache.layers[layer] for layer in self.cache.of_group(group))
        return own, () if self.draft is None or group > 0 else self.draft.layers

    def with_parts(self, group: int, num_groups: int, parts: Any) -> "Caches":
        """These caches with other layers in place of `parts(group, num_groups)`."""
        if group == num_groups:
            return self._replace(saved=self.saved and replace(self.saved, layers=parts))
        layers = list(self.cache.layers)
        for layer, pages in zip(self.cache.of_group(group), parts[0], strict=True):
            layers[layer] = pages
        draft = self.draft if self.draft is None or group > 0 else replace(self.draft, layers=parts[1])
        return self._replace(cache=replace(self.cache, layers=tuple(layers)), draft=draft)


def abstract_caches(spec: EngineSpec) -> Caches:
    """The caches of an engine, of abstract arrays."""
    return Caches(spec.cache, spec.draft_cache, spec.saved_states)


def host_pools(spec: EngineSpec) -> tuple[HostPoolSize, ...]:
    """Host pages of each group, and of saved states: each has the share of `host_cache_gib` that it has of the caches
    on the device. () without a tier.

    "auto" is a replica's share, by devices, of half of the memory that the host has left, and at most `AUTO_FACTOR`
    times the caches on the device.

    Raises ValueError as `check_host_cache`, for room for less than one page, and for more memory than the host has.
    """
    gib = spec.options.host_cache_gib
    if not gib:
        return ()
    check_host_cache(spec)
    available = system_memory()
    caches, num_groups, counts = abstract_caches(spec), len(spec.groups), [group.num_pages for group in spec.groups]
    counts += [spec.num_saved_states] if spec.num_saved_states else []
    sizes = [page_bytes(None, caches.parts(group, num_groups)) for group in range(len(counts))]
    whole = sum(count * size for count, size in zip(counts, sizes, strict=True))
    if gib == "auto":
        if available is None:
            raise ValueError(
                "host_cache_gib='auto': how much memory the host has left is unknown; give a number of GiB"
            )
        share = spec.num_devices / max(jax.local_device_count(spec.platform), spec.num_devices)
        wanted = min(int(available / 2 * share), AUTO_FACTOR * whole)
    else:
        wanted = int(gib * 2**30)
        if available is not None and wanted > available:
            raise ValueError(f"host_cache_gib={gib}: the host has {format_bytes(available)} left")
    pools = tuple(HostPoolSize(wanted * count // whole, size) for count, size in zip(counts, sizes, strict=True))
    if any(pool.num_pages < 1 for pool in pools):
        raise ValueError(
            f"host_cache_gib={gib!r} has no room for a page of each kind: they take {format_bytes(max(sizes))} in a "
            f"cache of {format_bytes(whole)}"
        )
    return pools


def check_host_cache(spec: EngineSpec) -> None:
    """Raises ValueError for `host_cache_gib` with several processes, or of a model that reuses no prefixes."""
    gib = spec.options.host_cache_gib
    if gib and jax.process_count() > 1:
        raise ValueError(f"host_cache_gib={gib!r} needs a single process, not {jax.process_count()}")
    if gib and not spec.reuses_prefixes:
        raise ValueError(f"host_cache_gib={gib!r}: {spec.config.architecture} reuses no prefixes with these options")


def page_bytes(mesh: Mesh | None, parts: Any) -> int:
    """Bytes of a page in host memory: those of all devices."""
    return sum(math.prod(row.shape) * row.dtype.itemsize for row in abstract_rows(mesh, parts))


class HostPages:
    """Host memory of an engine's pages, and what is on its way there.

    A page that leaves is gathered by a program that runs before whatever overwrites it, and copied while the device
    goes on; it is waited for when it is wanted back, or when too much is under way.

    Args:
      sizes: of the groups, as `host_pools`. mesh: of the engine's caches.
    """

    def __init__(self, spec: EngineSpec, sizes: Sequence[HostPoolSize], mesh: Mesh | None):
        self.sizes, self._mesh, self._num_groups = tuple(sizes), mesh, len(spec.groups)
        self._in_transit: deque[tuple[int, np.ndarray, tuple[jax.Array, ...]]] = deque()
        caches = abstract_caches(spec)
        rows = [abstract_rows(mesh, caches.parts(group, self._num_groups)) for group in range(len(self.sizes))]
        # Pages that are never used take no memory: the system provides it when it is written.
        self._stores = [
            [np.zeros((size.num_pages, *row.shape), row.dtype) for row in kinds]
            for size, kinds in zip(self.sizes, rows, strict=True)
        ]

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def move(self, caches: Caches, leaving: Sequence[PageMove], coming: Sequence[PageMove]) -> Caches:
        """Copies pages to host pages, then others back; the caches are donated."""
        for group, moves in _by_group(leaving):
            parts = caches.parts(group, self._num_groups)
            for batch, size in self._batches(group, moves):
                self._leave(parts, group, batch, size)
        if coming:
            self.wait()
        for group, moves in _by_group(coming):
            for batch, size in self._batches(group, moves):
                caches = self._come_back(caches, group, batch, size)
        return caches

    def wait(self, num_left: int = 0) -> None:
        """Returns when all batches but `num_left` have arrived."""
        while len(self._in_transit) > num_left:
            group, hosts, arrays = self._in_transit.popleft()
            for store, rows in zip(self._stores[group], jax.device_get(arrays), strict=True):
                store[hosts] = rows[: len(hosts)]

    def rows_of(self, group: int) -> list[jax.ShapeDtypeStruct]:
        """The arrays of which a host page of a group consists."""
        return [jax.ShapeDtypeStruct(store.shape[1:], store.dtype) for store in self._stores[group]]

    def write(self, hosts: Sequence[int], contents: Sequence[bytes]) -> None:
        """Fills host pages of the first group with bytes as `read` gives them."""
        self.wait()  # what is on its way may have been meant for the same pages
        for host, content in zip(hosts, contents, strict=True):
            start = 0
            for store in self._stores[0]:
                row = np.frombuffer(content, store.dtype, math.prod(store.shape[1:]), start)
                store[host - 1] = row.reshape(store.shape[1:])
                start += row.nbytes

    def read(self, caches: Caches, pages: Sequence[int]) -> Iterator[tuple[int, int, tuple[jax.Array, ...]]]:
        """Begins to copy pages of the first group: where each batch begins, how many pages it has, and arrays of which
        row i, of all arrays one after the other, is a page."""
        parts, start = caches.parts(0, self._num_groups), 0
        for batch, size in self._batches(0, [PageMove(0, page, 0) for page in pages]):
            yield start, len(batch), self._gather(parts, batch, size)
            start += len(batch)

    def warm_up(self, caches: Caches) -> tuple[Caches, int]:
        """Compiles all programs, with nothing to do; returns how many. The caches are donated."""
        count = 0
        for group in range(len(self.sizes)):
            for size in self._batch_sizes(group):
                self._leave(caches.parts(group, self._num_groups), group, [], size)
                caches = self._come_back(caches, group, [], size)
                count += 2
        self.wait()
        return caches, count

    def _leave(self, parts: Any, group: int, moves: Sequence[PageMove], size: int) -> None:
        self.wait(MAX_IN_TRANSIT - 1)
        arrays = self._gather(parts, moves, size)
        self._in_transit.append((group, np.array([move.host - 1 for move in moves], np.int64), arrays))

    def _gather(self, parts: Any, moves: Sequence[PageMove], size: int) -> tuple[jax.Array, ...]:
        ids = np.zeros(size, np.int32)
        ids[: len(moves)] = [self._row(move) for move in moves]
        arrays = gather_pages(self._mesh, parts, self._put(ids))
        for array in arrays:
            array.copy_to_host_async()
        return arrays

    def _come_back(self, caches: Caches, group: int, moves: Sequence[PageMove], size: int) -> Caches:
        parts = caches.parts(group, self._num_groups)
        ids = np.full(size, jax.tree.leaves(parts)[0].shape[0], np.int32)  # nothing is written there
        ids[: len(moves)] = [self._row(move) for move in moves]
        hosts = [move.host - 1 for move in moves] + [0] * (size - len(moves))
        # Copies: the device may read the host's memory for as long as it computes.
        rows = tuple(store[hosts] for store in self._stores[group])
        if self._mesh is not None:
            mesh = self._mesh
            rows = jax.device_put(rows, tuple(NamedSharding(mesh, spec) for spec in row_specs(mesh, parts)))
        else:
            rows = jax.device_put(rows)
        parts = scatter_pages(self._mesh, parts, rows, self._put(ids))
        return caches.with_parts(group, self._num_groups, parts)

    def _put(self, ids: np.ndarray) -> jax.Array:
        return jax.device_put(ids, None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec()))

    def _row(self, move: PageMove) -> int:
        """Saved states have no null page: place p is row p - 1."""
        return move.page - 1 if move.group == self._num_groups else move.page

    def _batch_sizes(self, group: int) -> list[int]:
        fitting = max(BATCH_BYTES // max(self.sizes[group].page_bytes, 1), 1)
        return [size for size in BATCH_PAGES if size <= fitting]

    def _batches(self, group: int, moves: Sequence[PageMove]) -> Iterator[tuple[Sequence[PageMove], int]]:
        """The moves in pieces, and the size of the program of each: at most half of it is padding, or it is small."""
        sizes = self._batch_sizes(group)
        while moves:
            count = len(moves)
            size = next((size for size in sizes if size <= count), sizes[-1])
            size = next((other for other in reversed(sizes) if count <= other <= 2 * count), size)
            yield moves[:size], size
            moves = moves[size:]


def _by_group(moves: Sequence[PageMove]) -> Iterator[tuple[int, list[PageMove]]]:
    for group in sorted({move.group for move in moves}):
        yield group, [move for move in moves if move.group == group]
