"""The bytes that each host reads and holds when a checkpoint is loaded onto a mesh, computed from headers alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from checkpoints_convert.checkpoint import NUM_THREADS, Bounds, ParamPath, full_bounds, numpy_dtype, part_of, size_of
from checkpoints_convert.host_arrays import BLOCK_BYTES, bytes_to_read
from checkpoints_convert.huggingface.checkpoint import regions_of, split_parts
from checkpoints_convert.load import IN_FLIGHT_BYTES
from checkpoints_convert.plan import TensorPlan, plan
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, MIN_PIECE_BYTES, TensorHeader
from jaxinfer.models import MeshFit, ModelConfig, fit_to_mesh, parameter_shardings
from jaxinfer.models.sharding import leaves_by_path


@dataclass(frozen=True)
class HostPlan:
    """What one host reads and holds.

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
    """Plans `load(mesh=)` of a Hugging Face checkpoint.

    Args:
      hf_config: as for `plan`.
      headers: as for `plan`.
      dtype: as for `plan`.
      axes: sizes of the mesh's axes, in order, such as {"model": 16}. Each host has an equal run of the devices, in the
        mesh's order.
      min_piece_bytes: as of `SafetensorsIndex.min_piece_bytes`; default: that of a local disk.

    Raises:
      CheckpointError: as `plan`. ValueError: a mesh that cannot shard the model, with the numbers; devices that the
        hosts cannot share equally; a quantized parameter, whose parts are not known from headers.
    """
    num_devices = math.prod(axes.values())
    if num_hosts < 1 or num_devices % num_hosts:
        raise ValueError(f"{num_devices} devices of the mesh {dict(axes)} cannot be shared by {num_hosts} hosts")
    config, tensors = plan(hf_config, headers, dtype=dtype)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    specs = {
        path: sharding.spec
        for path, sharding in leaves_by_path(parameter_shardings(mesh, config, whole_if_uneven=True)).items()
    }
    dense = [tensor for tensor in tensors if isinstance(tensor, TensorPlan)]
    if len(dense) < len(tensors):
        name = next(".".join(tensor.target) for tensor in tensors if not isinstance(tensor, TensorPlan))
        raise ValueError(f"load_plan is for floating-point checkpoints, and {name} is quantized")
    places = np.array(list(np.ndindex(*axes.values()))).reshape(num_hosts, -1, len(axes))
    held = {tensor.target: _held(tensor, specs[tensor.target], axes) for tensor in dense}
    fitted = fit_to_mesh(mesh, config)
    bytes_placed = sum(_bytes_placed(tensor, fitted) for tensor in dense)
    hosts = tuple(
        _host_plan(dense, held, [tuple(map(int, place)) for place in own], min_piece_bytes, bytes_placed)
        for own in places
    )
    num_bytes = sum(size_of(full_bounds(tensor.shape)) * numpy_dtype(tensor.dtype).itemsize for tensor in dense)
    return LoadPlan(config, dict(axes), hosts, num_bytes)


def _bytes_placed(tensor: TensorPlan, fitted: MeshFit) -> int:
    """Bytes of a parameter on each device."""
    return math.prod(fitted.part_shape(tensor.target, tensor.shape)) * numpy_dtype(tensor.dtype).itemsize


def _held(tensor: TensorPlan, spec: Any, axes: Mapping[str, int]) -> dict[tuple[int, ...], Bounds]:
    """The part of a parameter at each place of the mesh."""
    return {place: part_of(spec, axes, tensor.shape, place) for place in np.ndindex(*axes.values())}


def _host_plan(
    tensors: list[TensorPlan],
    held: Mapping[ParamPath, Mapping[tuple[int, ...], Bounds]],
    places: list[tuple[int, ...]],
    min_piece_bytes: int,
    bytes_placed: int,
) -> HostPlan:
    parts, bytes_read, bytes_held, largest = {}, 0, 0, 0
    known: dict[tuple, int] = {}
    for tensor in tensors:
        of_place = [held[tensor.target][place] for place in places]
        own = tuple(sorted(set(of_place)))
        parts[tensor.target] = own
        itemsize = numpy_dtype(tensor.dtype).itemsize
        stored = FLOAT_DTYPES[tensor.source_dtype].itemsize
        bytes_held += sum(map(size_of, own)) * itemsize
        runs = split_parts(tensor, own, itemsize, IN_FLIGHT_BYTES)
        largest = max(largest, *(sum(map(size_of, run)) * itemsize for run in runs))
        # Layers are alike.
        key = (tensor.source_shape, tensor.view, tensor.transpose, tensor.outputs, len(tensor.stacked), stored, own)
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
    return HostPlan(parts, bytes_read, bytes_held, (bytes_placed,) * len(places), peak)
