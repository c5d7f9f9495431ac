"""The native form: a directory that opens without mapping, casting or transposing, and knows its own checksums.

    jaxinfer_config.json     ModelConfig, format version, where the checkpoint came from
    manifest.json            size and SHA-256 of every other file
    params/embed/            one Orbax PyTree checkpoint per unit: {"embed": array}
    params/layers.0/         {"layers.0.attention.q_proj.weight": array, ...}
    params/final_norm/ ...
    config.json, tokenizer.json, ...   copied from the source

One checkpoint per layer, rather than one for the model, so that a conversion resumes at a layer and reading holds one
layer beside what is already on the device. Keys are whole parameter names, so a unit is readable by itself.
"""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import NATIVE_CONFIG, read_json
from checkpoints_convert.manifest import read_manifest, size_problems, verify_manifest
from checkpoints_convert.source import ParamPath, Source, check_dtype, digest, numpy_dtype
from jaxinfer.models import ModelConfig

FORMAT_VERSION = 1
PARAMS = "params"
_CHUNK_BYTES = 16 * 2**20  # what is compressed at once; whole arrays would be held three times while they are written


def native_config(config: ModelConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of jaxinfer_config.json."""
    return {"format_version": FORMAT_VERSION, "model": config.to_dict(), "source": dict(source)}


def read_native_config(directory: Path) -> ModelConfig:
    """Raises CheckpointError for another format version or a configuration this version does not know."""
    path = directory / NATIVE_CONFIG
    data = read_json(path)
    if data.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            path, f"format_version {data.get('format_version')!r}, this version reads {FORMAT_VERSION}"
        )
    try:
        return ModelConfig.from_dict(data["model"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(path, f"holds no model configuration: {error!r}") from None


def write_unit(directory: Path, arrays: Mapping[ParamPath, np.ndarray]) -> None:
    """Writes one unit as an Orbax checkpoint; the directory appears when it is complete."""
    import orbax.checkpoint as ocp

    tree = {".".join(path): array for path, array in arrays.items()}
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    release_heap()


class NativeSource(Source):
    """A converted checkpoint opened for reading. File sizes are compared with the manifest at once.

    Raises CheckpointError for missing or resized files, and with `verify` for files whose SHA-256 differs.
    """

    def __init__(self, directory: Path, *, dtype: str = "auto", measure_casts: bool = False, verify: bool = False):
        super().__init__(directory, measure_casts=measure_casts)
        check_dtype(dtype)
        self._stored = read_native_config(directory)
        self.config = self._stored if dtype == "auto" else replace(self._stored, dtype=dtype)
        self._manifest = read_manifest(directory)
        problems = verify_manifest(directory) if verify else size_problems(directory, self._manifest)
        if problems:
            raise CheckpointError(directory, *problems)

    def read(self, unit: str) -> Iterator[tuple[ParamPath, np.ndarray]]:
        directory = self.directory / PARAMS / unit
        shapes = self.units()[unit]
        stored = _restore(directory, {".".join(path): shape for path, shape in shapes.items()}, self._stored.dtype)
        release_heap()
        for path, shape in shapes.items():
            name = ".".join(path)
            array = stored.pop(name)
            copy = partial(_copy_bytes, array)
            yield path, self.host_array(copy, shape, array.dtype, param=name, name=name, where=directory)
            del array, copy
        release_heap()

    def fingerprint(self) -> str:
        return digest("native", self._manifest, self.config.to_dict())


def release_heap() -> None:
    """Hands freed heap memory back to the system, where the C library can: TensorStore's threads each keep a heap,
    which grew by 20 MiB for every layer of a 1B model."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _restore(directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, np.ndarray]:
    """The arrays of a unit, exactly as stored: what Orbax would cast or reshape in silence is refused first."""
    import orbax.checkpoint as ocp

    wanted = {name: (shape, numpy_dtype(dtype)) for name, shape in shapes.items()}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(directory.absolute()).item_metadata.tree
            found = {name: (tuple(entry.shape), np.dtype(entry.dtype)) for name, entry in tree.items()}
            if found != wanted:
                raise CheckpointError(directory, *_differences(wanted, found))
            arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
            return checkpointer.restore(directory.absolute(), args=ocp.args.PyTreeRestore(restore_args=arguments))
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(directory, f"cannot be read, {type(error).__name__}: {reason}") from error


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    problems = [f"tensor {name!r} is missing" for name in wanted if name not in found]
    problems += [f"tensor {name!r} is not of this model" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if found[name] != wanted[name]:
            (shape, dtype), (other_shape, other_dtype) = wanted[name], found[name]
            problems.append(f"tensor {name!r} is {other_dtype}{list(other_shape)}, not {dtype}{list(shape)}")
    return problems


def _copy_bytes(array: np.ndarray, offset: int, buffer: memoryview) -> None:
    raw = array.reshape(-1).view(np.uint8)
    buffer[:] = raw[offset : offset + len(buffer)].data
