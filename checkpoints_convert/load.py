"""Loading: from a checkpoint directory or hub id to a configuration and parameters on the devices."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from checkpoints_convert.checkpoint import (
    NUM_THREADS,
    Bounds,
    Checkpoint,
    HostParam,
    ParamPath,
    cut,
    insert,
    numpy_dtype,
    owned_parts,
    param_shapes,
    part_of,
    size_of,
)
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import ADAPTER_CONFIG, CONFIG, NATIVE_CONFIG
from checkpoints_convert.formats.kv_scales import LayerKVScales
from checkpoints_convert.gguf import tokenizer as gguf_tokenizer
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint, check_requantize
from checkpoints_convert.gguf.index import GGUFIndex, find_gguf
from checkpoints_convert.host_arrays import BLOCK_BYTES, aligned, bytes_to_read
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.checkpoint import HuggingFaceCheckpoint, regions_of, split_parts
from checkpoints_convert.known_hashes import check_known
from checkpoints_convert.plan import TensorPlan, plan
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, MIN_PIECE_BYTES, TensorHeader
from checkpoints_convert.store import NativeCheckpoint
from jaxinfer.models import ModelConfig, Params, fit_to_mesh, leaf_shardings, parameter_shardings
from jaxinfer.models.host_layers import HostStacks
from jaxinfer.models.sharding import leaves_by_path
from jaxinfer.progress import Stage
from jaxinfer.quantization import QuantizedArray

_LOG = logging.getLogger(__name__)

# Called with the name of the parameter that is done, the bytes done so far, and the bytes in all.
ProgressCallback = Callable[[str, int, int], None]
# Called with a name and the bytes that were done.
Advance = Callable[[str, int], None]
# Converts a parameter that is on its devices.
Convert = Callable[[ParamPath, Any], Any]


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    revision: str | None = None,
    progress: bool | ProgressCallback | None = None,
    verify: bool | None = None,
    requantize: str | None = None,
    convert: Convert | None = None,
) -> tuple[ModelConfig, Params]:
    """Loads a checkpoint (Hugging Face, GGUF or converted) onto the default device or a mesh.

    Quantized weights become `QuantizedArray`s: GPTQ, AWQ, auto-round, bitsandbytes, compressed-tensors and FP8
    checkpoints are recognised module by module from their tensors.

    Besides the parameters, the host holds at most 256 MiB of buffers, or the one parameter that needs more, and a block
    for each thread. On CPU the parameters are the host buffers themselves.

    On a mesh each process reads the parts that its devices hold. More than those bytes is read for rows of a Hugging
    Face checkpoint whose pieces are small, for chunks of a converted one that devices of several processes share, and
    for parameters that are quantized or in a GGUF file, which are read whole.

    Args:
      dtype: "auto" keeps the stored one; "float32", "bfloat16" or "float16" casts. It becomes config.dtype. Quantized
        weights keep their values and scales as stored.
      mesh: devices for the parameters, which are padded and sharded as by `jaxinfer.models.fit_to_mesh(mesh, config)`;
        the returned configuration is the model's own. Default: the default device.
      revision: branch, tag or commit of a hub id.
      progress: True to show it as `jaxinfer.progress` does, on a terminal, or a callable taking (parameter, bytes done,
        bytes in all).
      verify: which checksums are compared. None: those of a converted checkpoint, of its arrays while they are read.
        True: the SHA-256 of every file first, also of Hugging Face and GGUF files, for which the hub's cache or a
        *.sha256 file has to know it. False: none.
      requantize: for GGUF files. None keeps quantized weights as they are; "dense" dequantizes them; a recipe such as
        "int4-g128" rounds those of linear layers to it, except Q8_0 and Q4_0, and logs the errors.
      convert: applied to each parameter, such as a `jaxinfer.quantization.Selection`, so that a model that is quantized
        while it is loaded is never held whole in the stored dtype.

    Raises:
      CheckpointError: files that are missing, malformed or do not fit the configuration; NaN or infinite weights;
        values too large for `dtype`; damage that a checksum shows. A ValueError; CheckpointNotFoundError is also a
        FileNotFoundError.
      ValueError: a mesh that cannot shard the model, before weights are read.
    """
    with open_checkpoint(
        path_or_hub_id, dtype=dtype, revision=revision, verify=verify, requantize=requantize
    ) as checkpoint:
        return checkpoint.config, load_params(checkpoint, mesh=mesh, progress=progress, convert=convert)


def load_params(
    checkpoint: Checkpoint,
    *,
    mesh: Mesh | None = None,
    progress: bool | ProgressCallback | None = None,
    convert: Convert | None = None,
    host: HostStacks | None = None,
    convert_host: Convert | None = None,
    skips: Callable[[ParamPath], bool] = lambda path: False,
    limit: int | None = None,
) -> Params:
    """The parameters of an open checkpoint on the device or a mesh. Arguments, memory and errors as of `load`; what
    belongs to `host` goes there, without a mesh, converted by `convert_host`. Parameters for which `skips` is true are
    left out. `limit`: as of `read_ahead`."""
    params: Params = {}
    given: dict[str, Any] = {"host": host, "convert_host": convert_host, "skips": skips, "limit": limit}
    for path, leaf in each_param(checkpoint, mesh=mesh, progress=progress, convert=convert, **given):
        if host is not None and host.takes(path):
            host.add(path, leaf)
        else:
            insert(params, path, leaf)
    return params if host is None else host.finish(params)


def each_param(
    checkpoint: Checkpoint,
    *,
    mesh: Mesh | None = None,
    progress: bool | ProgressCallback | None = None,
    convert: Convert | None = None,
    host: HostStacks | None = None,
    convert_host: Convert | None = None,
    skips: Callable[[ParamPath], bool] = lambda path: False,
    limit: int | None = None,
) -> Iterator[tuple[ParamPath, Any]]:
    """The parameters that `load_params` returns, one after another."""
    place = OnDefaultDevice(convert, host, convert_host) if mesh is None else OnMesh(mesh, checkpoint.config, convert)
    paths = [path for unit in checkpoint.units().values() for path in unit if not skips(path)]
    with byte_progress(progress, sum(map(checkpoint.param_bytes, paths)), "loading") as advance:
        for path, leaf in read_ahead(checkpoint, place.parts, place, paths, limit=limit or IN_FLIGHT_BYTES):
            yield path, leaf
            advance(".".join(path), checkpoint.param_bytes(path))
    if errors := checkpoint.requantize_errors:
        _LOG.warning("%s: %s", checkpoint.directory, requantize_summary(errors, checkpoint.requantize or ""))


def kv_scales(path_or_hub_id: str | Path, *, revision: str | None = None) -> tuple[LayerKVScales, ...]:
    """Scales of an 8-bit key-value cache in a checkpoint, by layer; () if it has none.

    Raises CheckpointError as `load`.
    """
    # Scales are always float32; naming a dtype opens checkpoints of mixed dtypes too.
    with open_checkpoint(path_or_hub_id, revision=revision, dtype="float32") as checkpoint:
        return checkpoint.kv_scales


def tokenizer_files(path: str | Path) -> dict[str, str] | None:
    """`Checkpoint.tokenizer_files` of a path, without opening the weights."""
    if (file := find_gguf(Path(path))) is None:
        return None
    with GGUFIndex(file) as index:
        return gguf_tokenizer.tokenizer_files(index)


def requantize_summary(errors: Mapping[str, float], how: str) -> str:
    """A sentence with the errors of weights that were rounded again."""
    name, worst = max(errors.items(), key=lambda item: item[1])
    mean = sum(errors.values()) / len(errors)
    return f"{len(errors)} weights rounded to {how}: relative error {mean:.3g} on average, {worst:.3g} in {name}"


def open_checkpoint(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    verify: bool | None = None,
    measure_casts: bool = False,
    requantize: str | None = None,
    is_mtp: bool = False,
) -> Checkpoint:
    """Opens a checkpoint of any form and plans its parameters; no weights are read. To be closed, or used in `with`.

    Arguments and errors as of `load`. With `measure_casts`, reading measures the relative errors of casts
    (`Checkpoint.cast_errors`). `is_mtp`: the head for multi-token prediction in a model's files, which drafts for it.
    """
    check_requantize(requantize)
    directory = resolve(path_or_hub_id, revision=revision)
    if is_mtp and not (directory / CONFIG).exists():
        raise CheckpointError(directory, "only Hugging Face files have layers for multi-token prediction that are read")
    if (file := find_gguf(directory)) is not None:
        if verify:
            check_known(file)
        return GGUFCheckpoint(file, dtype=dtype, measure_casts=measure_casts, requantize=requantize)
    if requantize is not None:
        raise ValueError(f"requantize={requantize!r} is for GGUF files, and {directory} is not one")
    if (directory / NATIVE_CONFIG).exists():
        return NativeCheckpoint(directory, dtype=dtype, verify=verify, measure_casts=measure_casts)
    if not (directory / CONFIG).exists() and (directory / ADAPTER_CONFIG).exists():
        advice = f"jaxinfer convert MODEL DST --merge-lora {directory}"
        raise CheckpointError(directory, f"holds an adapter, not a whole model; merge it into its base: {advice}")
    if not (directory / CONFIG).exists():
        raise CheckpointNotFoundError(directory, f"holds neither {CONFIG} nor {NATIVE_CONFIG}: not a checkpoint")
    if verify:
        check_known(directory)
    return HuggingFaceCheckpoint(directory, dtype=dtype, measure_casts=measure_casts, is_mtp=is_mtp)


# Bytes of host buffers that are being read or transferred to a device; a parameter that needs more is read alone.
# Enough to keep a disk of several GB/s busy.
IN_FLIGHT_BYTES = 256 * 2**20
# Parameters read at once, so that small ones do not wait for one another; a large one is read by several threads.
_NUM_PARAMS = 8

Place = Callable[[ParamPath, HostParam], Any]


def read_ahead(
    source: Checkpoint,
    parts: Mapping[ParamPath, Sequence[Bounds]],
    place: Place,
    paths: Iterable[ParamPath] | None = None,
    *,
    limit: int = IN_FLIGHT_BYTES,
) -> Iterator[tuple[ParamPath, Any]]:
    """Reads parameters ahead of their transfer to devices, several at once: (path, what `place` returns) in order.

    Args:
      parts: the parts of dense parameters to read; parameters not named are read whole.
      place: called on the caller's thread. For a parameter whose parts are too large to be read at once it is called
        with one run of parts after another, and returns None until the last.
      paths: the parameters to read; None for all.
      limit: bytes of host buffers that are being read or transferred.
    """
    if paths is None:
        paths = [path for unit in source.units().values() for path in unit]
    tasks = deque(
        (source.host_bytes(path, run), path, run)
        for path in paths
        for run in (source.split(path, parts[path], limit) if parts.get(path) else [()])
    )
    pending: deque[tuple[int, ParamPath, Future]] = deque()
    transfers: deque[tuple[int, Any]] = deque()
    executor = ThreadPoolExecutor(_NUM_PARAMS, thread_name_prefix="checkpoint-param")
    try:
        while tasks or pending:
            while tasks:
                cost, path, wanted = tasks[0]
                held = cost + sum(size for size, _, _ in pending) + sum(size for size, _ in transfers)
                if held <= limit or not (pending or transfers):
                    pending.append((cost, path, executor.submit(source.read_param, path, wanted)))
                    tasks.popleft()
                elif transfers:
                    jax.block_until_ready(transfers.popleft()[1])
                else:
                    break
            cost, path, future = pending.popleft()
            leaf = place(path, future.result())
            del future
            transfers.append((cost, leaf))
            if leaf is not None:
                yield path, leaf
    finally:
        for _, _, future in pending:
            future.cancel()
        executor.shutdown()


class OnDefaultDevice:
    """Places whole parameters on the default device, but for those that `host` takes: they stay NumPy arrays."""

    parts: Mapping[ParamPath, Sequence[Bounds]] = {}

    def __init__(
        self,
        convert: Convert | None = None,
        host: HostStacks | None = None,
        convert_host: Convert | None = None,
    ):
        self._convert, self._host, self._convert_host = convert, host, convert_host

    def __call__(self, path: ParamPath, read: HostParam) -> Any:
        leaf: Any = read if isinstance(read, QuantizedArray) else read[0]
        is_host = self._host is not None and self._host.takes(path)
        convert = self._convert_host if is_host else self._convert
        if convert is None:
            return leaf if is_host else jax.device_put(leaf)
        # Weights that are packed on the host need not be on the device before.
        leaf = leaf if getattr(convert, "takes_host_arrays", False) else jax.device_put(leaf)
        return jax.device_put(convert(path, leaf))


class OnMesh:
    """Places parameters on a mesh by the rules of `jaxinfer.models.sharding`.

    Parameters that have to be repeated or padded first go whole to every device, one at a time.

    Attributes:
      parts: the distinct parts of every parameter on `devices`, which this process reads (if it is dense).

    Raises ValueError, as `jaxinfer.models.fit_to_mesh`, for a model that the mesh cannot run.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: ModelConfig,
        convert: Convert | None = None,
        *,
        devices: Iterable[Any] | None = None,
    ):
        """`devices` are those of this process unless given."""
        self._devices = list(mesh.local_devices if devices is None else devices)
        self._convert = convert
        self._begun: dict[ParamPath, list[list[jax.Array]]] = {}  # by parameter that is incomplete
        self._shapes = param_shapes(config)
        self._fit = fit_to_mesh(mesh, config)
        self.shardings = leaves_by_path(parameter_shardings(mesh, config, whole_if_uneven=True))
        self.parts = {path: list(self._owned(self.shardings[path], shape)) for path, shape in self._shapes.items()}

    def __call__(self, path: ParamPath, read: HostParam) -> Any:
        sharding = self.shardings[path]
        if isinstance(read, QuantizedArray):
            leaf: Any = jax.tree.map(self._whole, read, leaf_shardings(read, sharding))
        else:
            owned = self._owned(sharding, self._shapes[path])
            shards = self._begun.pop(path, [])
            shards += _on_devices(read, list(owned.values())[len(shards) :])
            if len(shards) < len(owned):
                self._begun[path] = jax.block_until_ready(shards)
                return None
            leaf = _assembled(shards, sharding, self._shapes[path])
        if self._convert is not None:
            leaf = self._convert(path, leaf)
        # The compiler chose where the result of a conversion lies.
        return self._fit.place_leaf(path, leaf)

    def _owned(self, sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Bounds, list]:
        assert isinstance(sharding.mesh, Mesh)
        return owned_parts(sharding.mesh, sharding.spec, shape, self._devices)

    def _whole(self, array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        owned = self._owned(sharding, array.shape)
        parts = [aligned(cut(np.asarray(array), bounds)) for bounds in owned]
        return _assembled(_on_devices(parts, list(owned.values())), sharding, array.shape)


def _on_devices(parts: Sequence[np.ndarray], devices: Sequence[Sequence[Any]]) -> list[list[jax.Array]]:
    """Each part on its devices."""
    return [[jax.device_put(part, device) for device in own] for part, own in zip(parts, devices, strict=False)]


def _assembled(shards: list[list[jax.Array]], sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard for own in shards for shard in own])


@contextmanager
def byte_progress(report: bool | ProgressCallback | None, total: int, description: str) -> Iterator[Advance]:
    """Progress in bytes. `report`: as `progress` of `load`."""
    done = 0

    def advance(name: str, num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        stage.update(num_bytes)
        stage.describe(name)
        if callable(report):
            report(name, done, total)

    with Stage(description, total, "B", show=None if report is True else False) as stage:
        yield advance


@dataclass(frozen=True)
class HostPlan:
    """Reads and memory of one host.

    Attributes:
      parts: the distinct parts of every parameter on its devices, each read once.
      bytes_read: from the files, including rows that are read whole for their pieces.
      bytes_held: bytes of the parts, in the parameters' dtype.
      device_bytes: bytes on each of its devices.
      peak_bytes: bound on host memory while parameters are transferred to devices with their own memory.
    """

    parts: Mapping[ParamPath, tuple[Bounds, ...]]
    bytes_read: int
    bytes_held: int
    device_bytes: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True)
class LoadPlan:
    """Attributes:
    axes: the mesh. hosts: in the mesh's order. num_bytes: of the parameters, each counted once.
    """

    config: ModelConfig
    axes: Mapping[str, int]
    hosts: tuple[HostPlan, ...]
    num_bytes: int


def load_plan(
    hf_config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    axes: Mapping[str, int],
    *,
    num_hosts: int = 1,
    dtype: str = "auto",
    min_piece_bytes: int = MIN_PIECE_BYTES,
) -> LoadPlan:
    """Plans `load(mesh=)` of a Hugging Face checkpoint from its headers: the bytes that each host reads and holds.

    Args:
      axes: sizes of the mesh's axes, in order, such as {"model": 16}. Each host has an equal run of the devices, in the
        mesh's order.
      min_piece_bytes: as of `SafetensorsIndex.min_piece_bytes`; default: that of a local disk. Others as for `plan`.

    Raises:
      CheckpointError: as `plan`. ValueError: a mesh that cannot shard the model, with the numbers; devices that the
        hosts cannot share equally; a quantized parameter, whose parts are not known from headers.
    """
    num_devices = math.prod(axes.values())
    if num_hosts < 1 or num_devices % num_hosts:
        raise ValueError(f"{num_devices} devices of the mesh {dict(axes)} cannot be shared by {num_hosts} hosts")
    config, tensors = plan(hf_config, headers, dtype=dtype)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    shardings = leaves_by_path(parameter_shardings(mesh, config, whole_if_uneven=True))
    dense = [tensor for tensor in tensors if isinstance(tensor, TensorPlan)]
    if len(dense) < len(tensors):
        name = next(".".join(tensor.target) for tensor in tensors if not isinstance(tensor, TensorPlan))
        raise ValueError(f"load_plan is for floating-point checkpoints, and {name} is quantized")
    places, each = list(np.ndindex(*axes.values())), num_devices // num_hosts
    shape_on_device, hosts = fit_to_mesh(mesh, config).part_shape, []
    device_bytes = sum(
        math.prod(shape_on_device(tensor.target, tensor.shape)) * numpy_dtype(tensor.dtype).itemsize for tensor in dense
    )
    for first in range(0, num_devices, each):
        parts = {}
        for tensor in dense:
            of_place = partial(part_of, shardings[tensor.target].spec, axes, tensor.shape)
            parts[tensor.target] = tuple(sorted(set(map(of_place, places[first : first + each]))))
        hosts.append(_host_plan(dense, parts, (device_bytes,) * each, min_piece_bytes))
    num_bytes = sum(math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize for tensor in dense)
    return LoadPlan(config, dict(axes), tuple(hosts), num_bytes)


def _host_plan(
    tensors: list[TensorPlan],
    parts: Mapping[ParamPath, tuple[Bounds, ...]],
    device_bytes: tuple[int, ...],
    min_piece_bytes: int,
) -> HostPlan:
    bytes_read, bytes_held, largest = 0, 0, 0
    known: dict[tuple, int] = {}
    for tensor in tensors:
        own = parts[tensor.target]
        itemsize = numpy_dtype(tensor.dtype).itemsize
        stored = FLOAT_DTYPES[tensor.source_dtype].itemsize
        bytes_held += sum(map(size_of, own)) * itemsize
        runs = split_parts(tensor, own, itemsize, IN_FLIGHT_BYTES)
        largest = max(largest, *(sum(map(size_of, run)) * itemsize for run in runs))
        # Layers are alike.
        place = tensor.placement
        key = (place.stored, place.view, place.transpose, place.outputs, len(tensor.sources), stored, own)
        if key not in known:
            known[key] = sum(
                bytes_to_read(
                    region[0][1].rows,
                    [piece.columns for _, piece in region],
                    region[0][1].row_length,
                    stored,
                    min_piece_bytes,
                )
                for region in regions_of(tensor, own)
            )
        bytes_read += known[key]
    # A block is held three times: as read, cast, and padded for its transposition.
    peak = max(IN_FLIGHT_BYTES, largest) + 3 * NUM_THREADS * BLOCK_BYTES
    return HostPlan(parts, bytes_read, bytes_held, device_bytes, peak)
