"""From a checkpoint's directory or hub id to a configuration and parameters on the device."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints_convert.errors import CheckpointNotFoundError
from checkpoints_convert.files import CONFIG, NATIVE_CONFIG
from checkpoints_convert.formats import LayerKVScales
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.source import HuggingFaceSource
from checkpoints_convert.progress import Progress, ProgressCallback
from checkpoints_convert.source import ParamPath, Source, insert
from checkpoints_convert.store import NativeSource
from jaxinfer.models import ModelConfig, Params

_IN_FLIGHT_BYTES = 256 * 2**20  # host buffers whose transfer to the device may still be running


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    revision: str | None = None,
    progress: bool | ProgressCallback | None = None,
    verify: bool = False,
    convert: Callable[[ParamPath, jax.Array], Any] | None = None,
) -> tuple[ModelConfig, Params]:
    """Reads a checkpoint, converted or Hugging Face, tensor by tensor onto the device.

    Weights that a checkpoint quantized become `QuantizedArray`s: GPTQ, AWQ, auto-round, bitsandbytes,
    compressed-tensors and FP8 checkpoints, module by module as their tensors say.

    Beside the parameters the host holds about one tensor of a Hugging Face checkpoint, one layer of a converted one.
    On CPU the parameters are the host buffers themselves.

    Args:
      dtype: "auto" keeps the stored one; "float32", "bfloat16" or "float16" casts. It becomes config.dtype. Quantized
        weights keep their values and scales as stored.
      mesh: replicates the parameters over the devices of a mesh; without it they go to the default device.
      revision: branch, tag or commit of a hub id.
      progress: True for a bar, or a callable taking (parameter, bytes done, bytes in all).
      verify: compares the SHA-256 of every file of a converted checkpoint with its manifest first. Hugging Face
        checkpoints have no checksums, so for them this raises.
      convert: what each parameter becomes, such as a `jaxinfer.quantization.Selection`, so that a quantized model is
        never held whole in the stored dtype.

    Raises:
      CheckpointError: files that are missing, malformed or do not fit the configuration; NaN or infinite weights;
        values too large for `dtype`. It is a ValueError. CheckpointNotFoundError is also a FileNotFoundError.
    """
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    params: Params = {}
    in_flight: deque[jax.Array] = deque()
    with (
        open_source(resolve(path_or_hub_id, revision=revision), dtype=dtype, verify=verify) as source,
        Progress(progress, source.num_bytes(), "loading") as bar,
    ):
        for unit in source.units():
            for path, array in source.read(unit):
                leaf = jax.device_put(array, sharding)
                insert(params, path, leaf if convert is None else convert(path, leaf))
                in_flight.extend(jax.tree.leaves(leaf))
                while sum(leaf.nbytes for leaf in in_flight) > _IN_FLIGHT_BYTES:
                    in_flight.popleft().block_until_ready()
                bar.advance(".".join(path), source.param_bytes(path))
    return source.config, params


def kv_scales(path_or_hub_id: str | Path, *, revision: str | None = None) -> tuple[LayerKVScales, ...]:
    """Scales of an 8-bit key-value cache that a checkpoint holds, by layer; () where it has none.

    Raises CheckpointError as `load`.
    """
    # Scales are float32 in any case: of a checkpoint of several dtypes none has to be chosen.
    with open_source(resolve(path_or_hub_id, revision=revision), dtype="float32") as source:
        return source.kv_scales


def open_source(directory: Path, *, dtype: str = "auto", verify: bool = False, measure_casts: bool = False) -> Source:
    """Opens a checkpoint directory of either form; raises as `load` does."""
    if (directory / NATIVE_CONFIG).is_file():
        return NativeSource(directory, dtype=dtype, verify=verify, measure_casts=measure_casts)
    if not (directory / CONFIG).is_file():
        raise CheckpointNotFoundError(directory, f"holds neither {CONFIG} nor {NATIVE_CONFIG}: not a checkpoint")
    if verify:
        raise ValueError(f"{directory}: a Hugging Face checkpoint has no checksums to verify; convert it first")
    return HuggingFaceSource(directory, dtype=dtype, measure_casts=measure_casts)
