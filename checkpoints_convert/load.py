"""From a checkpoint's directory or hub id to a configuration and parameters on the device."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from checkpoints_convert.errors import CheckpointNotFoundError
from checkpoints_convert.files import CONFIG, NATIVE_CONFIG
from checkpoints_convert.formats import LayerKVScales
from checkpoints_convert.gguf.index import find_gguf
from checkpoints_convert.gguf.source import GGUFSource, check_requantize
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.source import HuggingFaceSource
from checkpoints_convert.placing import OnDefaultDevice, OnMesh
from checkpoints_convert.progress import Progress, ProgressCallback
from checkpoints_convert.read_ahead import read_ahead
from checkpoints_convert.source import ParamPath, Source, insert
from checkpoints_convert.store import NativeSource
from jaxinfer.models import ModelConfig, Params

_LOG = logging.getLogger(__name__)


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    revision: str | None = None,
    progress: bool | ProgressCallback | None = None,
    verify: bool = False,
    requantize: str | None = None,
    convert: Callable[[ParamPath, jax.Array], Any] | None = None,
) -> tuple[ModelConfig, Params]:
    """Reads a checkpoint, converted, Hugging Face or GGUF, several tensors at a time onto the device or a mesh.

    Weights that a checkpoint quantized become `QuantizedArray`s: GPTQ, AWQ, auto-round, bitsandbytes,
    compressed-tensors and FP8 checkpoints, module by module as their tensors say.

    Beside the parameters the host holds at most 256 MiB of buffers, or the one parameter that needs more, and a block
    for each thread. On CPU the parameters are the host buffers themselves.

    On a mesh each process reads what its devices hold: of dense parameters those bytes only, but for rows of a Hugging
    Face checkpoint whose pieces are too small to be read one by one, and chunks of a converted one that are not its own
    alone; a parameter that is quantized, or in a GGUF file, is read whole, and cut.

    Args:
      dtype: "auto" keeps the stored one; "float32", "bfloat16" or "float16" casts. It becomes config.dtype. Quantized
        weights keep their values and scales as stored.
      mesh: places the parameters on the devices of a mesh, as `jaxinfer.models.fit_to_mesh(mesh, config)` makes and
        cuts them; the configuration returned is the model's own. Without a mesh they go to the default device.
      revision: branch, tag or commit of a hub id.
      progress: True for a bar, or a callable taking (parameter, bytes done, bytes in all).
      verify: compares the SHA-256 of every file of a converted checkpoint with its manifest first. Hugging Face
        checkpoints have no checksums, so for them this raises.
      requantize: of a GGUF file: None keeps the weights it quantized as they are; "dense" makes them floating point; a
        recipe such as "int4-g128" rounds those of linear layers to it, but for Q8_0 and Q4_0, and logs the errors.
      convert: what each parameter becomes, such as a `jaxinfer.quantization.Selection`, so that a quantized model is
        never held whole in the stored dtype.

    Raises:
      CheckpointError: files that are missing, malformed or do not fit the configuration; NaN or infinite weights;
        values too large for `dtype`. It is a ValueError, as is what a mesh raises that cannot cut the model, before
        weights are read. CheckpointNotFoundError is also a FileNotFoundError.
    """
    params: Params = {}
    with open_source(
        resolve(path_or_hub_id, revision=revision), dtype=dtype, verify=verify, requantize=requantize
    ) as source:
        place = OnDefaultDevice(convert) if mesh is None else OnMesh(mesh, source.config, convert)
        with Progress(progress, source.num_bytes(), "loading") as bar:
            for path, leaf in read_ahead(source, place.parts, place):
                insert(params, path, leaf)
                bar.advance(".".join(path), source.param_bytes(path))
    if source.requantize_errors:
        _LOG.warning("%s: %s", source.directory, requantize_summary(source.requantize_errors, requantize or ""))
    return source.config, params


def kv_scales(path_or_hub_id: str | Path, *, revision: str | None = None) -> tuple[LayerKVScales, ...]:
    """Scales of an 8-bit key-value cache that a checkpoint holds, by layer; () where it has none.

    Raises CheckpointError as `load`.
    """
    # Scales are float32 in any case: of a checkpoint of several dtypes none has to be chosen.
    with open_source(resolve(path_or_hub_id, revision=revision), dtype="float32") as source:
        return source.kv_scales


def requantize_summary(errors: Mapping[str, float], how: str) -> str:
    """One sentence on weights that were rounded again."""
    name, worst = max(errors.items(), key=lambda item: item[1])
    mean = sum(errors.values()) / len(errors)
    return f"{len(errors)} weights rounded to {how}: relative error {mean:.3g} on average, {worst:.3g} in {name}"


def open_source(
    directory: Path,
    *,
    dtype: str = "auto",
    verify: bool = False,
    measure_casts: bool = False,
    requantize: str | None = None,
) -> Source:
    """Opens a checkpoint directory of any form, or a GGUF file; raises as `load` does."""
    check_requantize(requantize)
    if (file := find_gguf(directory)) is not None:
        if verify:
            raise ValueError(f"{file}: a GGUF file has no checksums to verify; convert it first")
        return GGUFSource(file, dtype=dtype, measure_casts=measure_casts, requantize=requantize)
    if requantize is not None:
        raise ValueError(f"requantize={requantize!r} is for GGUF files, and {directory} is not one")
    if (directory / NATIVE_CONFIG).is_file():
        return NativeSource(directory, dtype=dtype, verify=verify, measure_casts=measure_casts)
    if not (directory / CONFIG).is_file():
        raise CheckpointNotFoundError(directory, f"holds neither {CONFIG} nor {NATIVE_CONFIG}: not a checkpoint")
    if verify:
        raise ValueError(f"{directory}: a Hugging Face checkpoint has no checksums to verify; convert it first")
    return HuggingFaceSource(directory, dtype=dtype, measure_casts=measure_casts)
