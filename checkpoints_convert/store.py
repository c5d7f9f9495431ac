"""The native form: an Orbax checkpoint per layer, read without casting or transposing, with checksums of all files.

    jaxinfer_config.json     ModelConfig, format version, where the checkpoint came from, the schemes of quantized
                             parameters and the scales of an 8-bit key-value cache
    manifest.json            size and SHA-256 of every other file, and the xxh3 of every chunk of every array
    params/embed/            one Orbax PyTree checkpoint per unit: {"embed": array}
    params/layers.0/         {"layers.0.attention.q_proj.weight": array, ...}; of a quantized parameter its arrays,
                             under "layers.0.attention.q_proj.weight.values", ".scales", ...
    params/final_norm/ ...
    config.json, tokenizer.json, ...   copied from the source

There is one checkpoint per layer, rather than one for the model, so that a conversion resumes at a layer. Keys are full
parameter names, so that a unit can be read by itself.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np

from checkpoints_convert.array_store import ArrayChecksums, ArraySpec, ArrayStore, checksums
from checkpoints_convert.checkpoint import (
    Bounds,
    Checkpoint,
    HostParam,
    ParamPath,
    check_dtype,
    digest,
    full_bounds,
    numpy_dtype,
    param_dtype,
    param_shapes,
    unit_of,
)
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import MANIFEST, NATIVE_CONFIG, PARAMS, read_json
from checkpoints_convert.formats.kv_scales import LayerKVScales
from checkpoints_convert.manifest import describing, file_problems, read_manifest, size_problems, verify_manifest
from jaxinfer.models import ModelConfig
from jaxinfer.quantization import NestedScales, QuantizedArray, Scheme, check

Description = dict[str, Any]
_PARTS = ("values", "scales", "zeros", "codebook", "permutation", "minima")
_NESTED = ("codes", "table", "outer", "offset")


def flatten(array: QuantizedArray) -> dict[str, np.ndarray]:
    """The arrays by part: values, scales (or scales.codes, ...), zeros, codebook, permutation, minima."""
    parts: dict[str, np.ndarray] = {}
    for part in _PARTS:
        value = getattr(array, part)
        if isinstance(value, NestedScales):
            parts |= {f"{part}.{name}": np.asarray(getattr(value, name)) for name in _NESTED}
        elif value is not None:
            parts[part] = np.asarray(value)
    return parts


def describe(array: QuantizedArray) -> Description:
    """A JSON-ready description, from which `rebuild` restores the array: scheme, and dtype and shape of every part."""
    return {
        "scheme": asdict(array.scheme),
        "inner": array.scales.inner if isinstance(array.scales, NestedScales) else None,
        "parts": {part: [value.dtype.name, list(value.shape)] for part, value in flatten(array).items()},
    }


def parts_of(description: Description) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by part. Raises ValueError, KeyError or TypeError for a malformed description."""
    parts = {str(part): (tuple(map(int, shape)), str(dtype)) for part, (dtype, shape) in description["parts"].items()}
    unknown = set(parts) - {*_PARTS, *(f"scales.{name}" for name in _NESTED)}
    if unknown or "values" not in parts or not {"scales", "scales.codes"} & set(parts):
        raise ValueError(f"parts {sorted(parts)} are not of a quantized array")
    _scheme(description)
    return parts


def rebuild(description: Description, parts: Mapping[str, np.ndarray]) -> QuantizedArray:
    """The array of a description and its parts: the inverse of `flatten`."""
    fields: dict[str, Any] = {part: parts[part] for part in _PARTS if part in parts}
    if description["inner"] is not None:
        nested: dict[str, Any] = {name: parts[f"scales.{name}"] for name in _NESTED}
        fields["scales"] = NestedScales(**nested, inner=int(description["inner"]))
    return QuantizedArray(**fields, scheme=_scheme(description))


def _scheme(description: Description) -> Scheme:
    fields = description["scheme"]
    return Scheme(fields["kind"], fields["bits"], tuple(fields["block"]), fields["activations"])


FORMAT_VERSION = 2
_CHUNK_BYTES = 16 * 2**20  # compressed at once; without chunks an array is held three times while it is written


@dataclass(frozen=True)
class NativeConfig:
    """The contents of jaxinfer_config.json. quantized: descriptions (`describe`) by parameter name."""

    model: ModelConfig
    quantized: Mapping[str, Description]
    kv_scales: tuple[LayerKVScales, ...]


def native_config(
    config: ModelConfig,
    source: Mapping[str, Any],
    quantized: Mapping[str, Description],
    kv_scales: tuple[LayerKVScales, ...],
) -> dict[str, Any]:
    """The contents of jaxinfer_config.json."""
    return {
        "format_version": FORMAT_VERSION,
        "model": config.to_dict(),
        "source": dict(source),
        "quantized": dict(quantized),
        "kv_scales": [asdict(layer) for layer in kv_scales],
    }


def read_native_config(directory: Path) -> NativeConfig:
    """Raises CheckpointError for another format version or a configuration this version does not know."""
    path = directory / NATIVE_CONFIG
    data = read_json(path)
    if (version := data.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(path, f"format_version {version!r}, this version reads {FORMAT_VERSION}")
    try:
        model = ModelConfig.from_dict(data["model"])
        shapes = {".".join(target): shape for target, shape in param_shapes(model).items()}
        quantized = dict(data["quantized"])
        for name, description in quantized.items():
            if parts_of(description)["values"][0] != shapes[name]:
                raise ValueError(f"{name} is quantized in another shape than {shapes[name]}")
        scales = tuple(LayerKVScales(tuple(layer["k"]), tuple(layer["v"])) for layer in data["kv_scales"])
        return NativeConfig(model, quantized, scales)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(path, f"holds no model configuration: {error!r}") from None


def write_unit(directory: Path, arrays: Mapping[ParamPath, np.ndarray | QuantizedArray]) -> None:
    """Writes one unit as an Orbax checkpoint; the directory appears when it is complete."""
    import orbax.checkpoint as ocp

    tree = _by_name(arrays)
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    release_heap()


def checksums_of_unit(root: Path, unit: str, arrays: Mapping[ParamPath, np.ndarray | QuantizedArray]) -> dict[str, Any]:
    """`ArrayChecksums.to_json` of the arrays of a unit that `write_unit` wrote, by name."""
    tree = _by_name(arrays)
    written = ArrayStore(root, f"{PARAMS}/{unit}", {name: ArraySpec(a.shape, a.dtype) for name, a in tree.items()}, {})
    return {name: checksums(array, written.chunk_shape(name)).to_json() for name, array in tree.items()}


def _by_name(arrays: Mapping[ParamPath, np.ndarray | QuantizedArray]) -> dict[str, np.ndarray]:
    tree = {}
    for path, array in arrays.items():
        name = ".".join(path)
        if isinstance(array, QuantizedArray):
            tree |= {f"{name}.{part}": value for part, value in flatten(array).items()}
        else:
            tree[name] = array
    return tree


class NativeCheckpoint(Checkpoint):
    """A converted checkpoint opened for reading.

    Args:
      verify: None compares the sizes of all files, the SHA-256 of configuration and tokenizer, and the xxh3 of arrays
        as they are read; True also the SHA-256 of every file, when it is opened; False only sizes.

    Raises CheckpointError for files that are missing, or have another size or checksum.
    """

    def __init__(
        self, directory: Path, *, dtype: str = "auto", measure_casts: bool = False, verify: bool | None = None
    ):
        super().__init__(directory, measure_casts=measure_casts)
        check_dtype(dtype)
        self._manifest = read_manifest(directory)
        self._check_files(verify)
        native = read_native_config(directory)
        self._stored, self.kv_scales = native.model, native.kv_scales
        self._quantized = {tuple(name.split(".")): description for name, description in native.quantized.items()}
        self.config = self._stored if dtype == "auto" else replace(self._stored, dtype=dtype)
        self._compares_checksums = verify is not False
        self._opened: dict[str, ArrayStore] = {}
        self._lock = Lock()

    def _check_files(self, verify: bool | None) -> None:
        files = self._manifest.files
        if verify:
            problems = verify_manifest(self.directory)
        else:
            problems = size_problems(self.directory, files)
            if verify is None and not problems:
                problems = file_problems(self.directory, describing(files))
        if problems:
            raise CheckpointError(self.directory, *problems)

    def read_param(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> HostParam:
        """Reads the chunks (16 MiB at most) of a dense parameter that overlap the parts."""
        unit = self._unit(unit_of(path))
        if path in self._quantized:
            return self._rebuilt(path, unit)
        shape = param_shapes(self.config)[path]
        return [self._part(unit, path, bounds) for bounds in parts or [full_bounds(shape)]]

    def _unit(self, name: str) -> ArrayStore:
        with self._lock:
            if name not in self._opened:
                specs = self._specs(self.units()[name])
                folder = f"{PARAMS}/{name}"
                files = {file: entry for file, entry in self._manifest.files.items() if file.startswith(f"{folder}/")}
                self._opened[name] = ArrayStore(self.directory, folder, specs, files, self.executor)
            return self._opened[name]

    def _part(self, unit: ArrayStore, path: ParamPath, bounds: Bounds) -> np.ndarray:
        name = ".".join(path)
        wanted = numpy_dtype(self.dense_dtype(path))
        array, stats = unit.read(name, bounds, dtype=wanted, measure_cast=self._measure_casts)
        self.check_stats(stats, unit.specs[name].dtype, wanted, param=name, name=name, where=unit.directory)
        return array

    def param_bytes(self, path: ParamPath) -> int:
        if path not in self._quantized:
            return super().param_bytes(path)
        bits_of = jax.dtypes.itemsize_bits  # 4 for 4-bit types
        parts = parts_of(self._quantized[path]).values()
        return sum(math.prod(shape) * bits_of(numpy_dtype(dtype)) // 8 for shape, dtype in parts)

    def _specs(self, shapes: Mapping[ParamPath, tuple[int, ...]]) -> dict[str, ArraySpec]:
        """The arrays of a unit, by name."""
        specs = {}
        for path, shape in shapes.items():
            name = ".".join(path)
            if path in self._quantized:
                for part, (part_shape, dtype) in parts_of(self._quantized[path]).items():
                    specs[f"{name}.{part}"] = self._spec(f"{name}.{part}", part_shape, dtype)
            else:
                specs[name] = self._spec(name, shape, param_dtype(self._stored, path))
        return specs

    def _spec(self, name: str, shape: tuple[int, ...], dtype: str) -> ArraySpec:
        known = None
        if self._compares_checksums:
            try:
                known = ArrayChecksums.from_json(self._manifest.arrays.get(name), shape)
            except ValueError as error:
                raise CheckpointError(self.directory / MANIFEST, f"array {name!r} {error}") from None
        return ArraySpec(shape, numpy_dtype(dtype), known)

    def _rebuilt(self, path: ParamPath, unit: ArrayStore) -> QuantizedArray:
        name, description = ".".join(path), self._quantized[path]
        array = rebuild(description, {part: unit.read(f"{name}.{part}")[0] for part in description["parts"]})
        try:
            check(array, f"parameter {name!r}")
        except ValueError as error:
            raise CheckpointError(unit.directory, str(error)) from None
        return array

    def stored_dtype(self, path: ParamPath) -> str | None:
        return param_dtype(self._stored, path)

    def quantized(self) -> dict[ParamPath, str]:
        return {path: ".".join(path) for path in self._quantized}

    def fingerprint(self) -> str:
        return digest("native", self._manifest.files, self.config.to_dict())


def release_heap() -> None:
    """Returns freed heap memory to the system (glibc's malloc_trim). Each thread of TensorStore keeps a heap, which
    grew by 20 MiB for every layer of a 1B model."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
