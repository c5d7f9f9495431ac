"""A disk tier behind host memory: prompts' pages in files, found again by other processes and after a restart.

When a prompt is computed, its pages are copied to the host and written. When a prompt comes of which more is on the
disk than in memory, the missing pages are read into host pages, from where the scheduler brings them back like any
other.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer import __version__
from jaxinfer.engine.model_runner import ModelRunner
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.tiers.page_files import PageFiles, PageWriter, chain
from jaxinfer.engine.weights import WeightsView
from jaxinfer.models import Params, host_layers
from pallas_kernels.paged_attention import rotation


class PrefixStore:
    """Writes prompts' pages of one engine to a folder, and reads those that it lacks. `weights`: of the model, without
    adapters, whose hashes are in the salts.

    Raises ValueError for models whose pages alone do not hold a prompt, and as `PageFiles`.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, weights: WeightsView[Params]):
        spec = runner.spec
        check_store(spec)
        self._runner, self._scheduler, self._page_size = runner, scheduler, spec.page_size
        self._num_bytes = runner.host_pages.sizes[0].page_bytes
        self.fingerprint = weights.view(partial(fingerprint, runner))
        folder = Path(str(spec.options.prefix_store)).expanduser()
        self.files = PageFiles(folder, int(spec.options.prefix_store_gib * 2**30))
        self._writer = PageWriter(self.files)
        self._in_transit: deque[tuple[list[str], tuple[jax.Array, ...]]] = deque()

    def load(self, sequence: SequenceState) -> None:
        """Reads pages of a sequence that is about to wait, as far as they are on the disk and not in memory."""
        scheduler = self._scheduler
        if not scheduler.can_reuse(sequence) or sequence.leader is not None or self.fingerprint.value is None:
            return
        keys = sequence.keys(self._page_size, len(sequence.tokens) - 1)
        start = scheduler.prefixes.num_stored(keys, sequence.salt)
        names = chain(self.fingerprint.value, sequence.salt, keys)
        room, contents = scheduler.tier.pools[0].num_pages - start, []
        for name in names[start : start + max(room, 0)]:
            content = self.files.read(name, self._num_bytes)
            if content is None:
                break
            contents.append(content)
        if not contents:
            return
        hosts = scheduler.prefixes.add_host_pages(keys[: start + len(contents)], start, sequence.salt)
        self._runner.host_pages.write(hosts, contents[: len(hosts)])
        scheduler.counters.disk_read_tokens += len(hosts) * self._page_size
        self.files.touch(names[: start + len(hosts)])

    def save(self, sequence: SequenceState) -> None:
        """Begins to copy the pages of a prompt that was just computed, as far as they are not on the disk. Pages of
        weights before are not found by the weights that are there, and are left out."""
        if not self._scheduler.can_reuse(sequence) or sequence.slot is None or sequence.is_retained:
            return
        keys = sequence.keys(self._page_size, min(sequence.num_prompt, sequence.num_confirmed))
        names = chain(self.fingerprint.value, sequence.salt, keys)
        missing = [number for number, name in enumerate(names) if not self.files.has(name, self._num_bytes)]
        pages = [sequence.pages[number] for number in missing]
        for start, count, arrays in self._runner.host_pages.read(self._runner.caches, pages):
            self._in_transit.append(([names[number] for number in missing[start : start + count]], arrays))

    def collect(self) -> None:
        """Hands what has arrived on the host to the thread that writes."""
        while self._in_transit:
            names, arrays = self._in_transit.popleft()
            rows = jax.device_get(arrays)
            for number, name in enumerate(names):
                if not self._writer.put(name, b"".join(row[number].tobytes() for row in rows)):
                    self._in_transit.clear()  # what comes after a missing page is of no use
                    return

    def close(self) -> None:
        """Returns when everything is written."""
        self.collect()
        self._writer.close()


def check_store(spec: EngineSpec) -> None:
    """Raises ValueError, with the option's name, for what `prefix_store` cannot be combined with."""
    name = f"prefix_store={spec.options.prefix_store!r}"
    if spec.options.kv_policy is not None:
        raise ValueError(f"{name} holds whole prompts: it cannot be combined with kv_policy={spec.options.kv_policy!r}")
    if spec.windows != (None,):
        windows = ", ".join(str(window) for window in spec.windows if window is not None)
        raise ValueError(f"{name} holds whole prompts: {spec.config.architecture} has layers with windows of {windows}")
    if spec.has_states:
        raise ValueError(f"{name} holds pages: {spec.config.architecture} has layers that keep a state")
    if spec.draft.own:
        raise ValueError(f"{name} holds pages of one model: it cannot be combined with a draft model")


def fingerprint(runner: ModelRunner, params: Params) -> bytes:
    """A hash of everything that a page's bytes depend on beside its tokens: the weights' bits (a checksum of 64 bits
    for each array, computed on the device), the model, types, layout, page size, mesh, platform and versions."""
    spec, digest = runner.spec, hashlib.sha256()
    facts = {
        "version": __version__,
        "jax": jax.__version__,
        "device": (spec.platform, runner.device.device_kind),
        "mesh": None if spec.mesh is None else tuple(spec.mesh.shape.items()),
        "config": spec.base_config,
        "stored": (spec.kv_dtype, spec.page_size, spec.layout_of(spec.config, spec.kv_dtype)),
        "levels": (rotation.LEVELS, rotation.LEVEL_STEP),
        "deterministic": spec.determinism.rows,
        "weights": str(jax.tree.structure(params)),
        "rows": [(row.shape, row.dtype.name) for row in runner.host_pages.rows_of(0)],
    }
    digest.update(repr(facts).encode())
    for leaf in jax.tree.leaves((params, runner.kv_scales)):
        digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        for part in _on_device(leaf):
            digest.update(np.asarray(jax.device_get(_checksum(part))).tobytes())
    return digest.digest()


def _on_device(leaf: jax.Array) -> Iterator[jax.Array]:
    """An array, or one that lies in the host's memory row by row."""
    if leaf.sharding.memory_kind not in host_layers.HOST_KINDS or leaf.sharding.memory_kind == _device_kind(leaf):
        yield leaf
        return
    for row in np.asarray(leaf):
        yield jnp.asarray(row)


def _device_kind(leaf: jax.Array) -> str:
    return next(iter(leaf.sharding.device_set)).default_memory().kind


@jax.jit
def _checksum(leaf: Any) -> jax.Array:
    """uint32 [2]: sums of the mixed bits of all numbers, each with its place."""
    if not _has_whole_bytes(leaf.dtype):
        leaf = leaf.astype(jnp.int8)
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(leaf.ndim)):
        place = place + lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    mixed = (bits ^ (place * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(3266489917)
    other = (mixed ^ (mixed >> 13)) * jnp.uint32(668265263) + place
    return jnp.stack([mixed.sum(dtype=jnp.uint32), (other ^ (other >> 16)).sum(dtype=jnp.uint32)])


def _has_whole_bytes(dtype: Any) -> bool:
    return jnp.dtype(dtype).name not in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
