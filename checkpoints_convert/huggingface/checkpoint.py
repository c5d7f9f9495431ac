"""A Hugging Face repository opened for reading, and where parts of parameters lie in its tensors."""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.checkpoint import (
    Bounds,
    Checkpoint,
    HostParam,
    ParamPath,
    cut_parts,
    digest,
    full_bounds,
    numpy_dtype,
    shape_of,
    size_of,
)
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG, read_json
from checkpoints_convert.formats import quantization_name, with_side_file
from checkpoints_convert.formats.kv_scales import LayerKVScales, read_kv_scales
from checkpoints_convert.host_arrays import Region, empty_aligned, read_regions
from checkpoints_convert.huggingface.config import family_for, is_headless, mtp_config
from checkpoints_convert.huggingface.families import family_of, is_wrapper
from checkpoints_convert.huggingface.family import embedding_name, head_names, renaming
from checkpoints_convert.huggingface.quantized import read_quantized, read_whole
from checkpoints_convert.huggingface.rules import TensorPlacement
from checkpoints_convert.plan import QuantizedPlan, TensorPlan, VocabularyPlan, later_layer_tensors, plan, stored_dtype
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, SafetensorsIndex

_LOG = logging.getLogger(__name__)
_COMPARED_BYTES = 4 * 2**20


@dataclass(frozen=True)
class TensorPiece:
    """The share of a part in one stored tensor, viewed as a matrix [rows, columns] (leading axes are flattened).

    Attributes:
      source: the tensor's name. row_length: its number of columns.
      rows, columns: int64 indices into the tensor, in the part's order.
      place: index into the part of the block [rows, columns], or [columns, rows] if the plan transposes.
    """

    source: str
    row_length: int
    rows: np.ndarray
    columns: np.ndarray
    place: tuple[int, ...]

    def target(self, part: np.ndarray, *, transpose: bool) -> np.ndarray:
        """The view [rows, columns] of the part that the piece is written to."""
        block = part[self.place]
        return block.T if transpose and block.ndim == 2 else block.reshape(len(self.rows), len(self.columns))


def pieces_of(tensor: TensorPlan, bounds: Bounds) -> Iterator[TensorPiece]:
    """The pieces of stored tensors that a part of a dense parameter is read from."""
    if not tensor.is_stacked:
        yield from _pieces_of_one(tensor.placement, tensor.sources[0], bounds, ())
        return
    (first, last), *rest = bounds
    for number in range(first, last):
        yield from _pieces_of_one(tensor.placement, tensor.sources[number], tuple(rest), (number - first,))


def _pieces_of_one(
    placement: TensorPlacement, source: str, bounds: Bounds, place: tuple[int, ...]
) -> Iterator[TensorPiece]:
    """The pieces of one tensor, which fill `place` of the part."""
    stored = placement.view or placement.stored
    is_swapped = placement.transpose and len(stored) > 1
    if is_swapped:
        bounds = (*bounds[:-2], bounds[-1], bounds[-2])
    indices = [np.arange(start, stop) for start, stop in bounds]
    if placement.outputs is not None:
        axis = -2 if is_swapped else -1
        indices[axis] = placement.outputs.index[slice(*bounds[axis])]
    *leading, columns = indices or [np.zeros(1, np.int64)]
    *shape, row_length = list(stored) or [1]
    if is_swapped:  # matrix by matrix: a stack of transposed matrices is no matrix
        *leading, within = leading
        *shape, num_rows = shape
        for number, index in enumerate(_flat(leading, shape)):
            here = np.unravel_index(number, tuple(map(len, leading))) if leading else ()
            yield TensorPiece(source, row_length, index * num_rows + within, columns, (*place, *map(int, here)))
    else:
        yield TensorPiece(source, row_length, _flat(leading, shape), columns, place)


def _flat(indices: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """Row numbers of all combinations of the indices of the leading axes."""
    if not indices:
        return np.zeros(1, np.int64)
    return np.ravel_multi_index(np.ix_(*indices), tuple(shape)).reshape(-1)


def regions_of(tensor: TensorPlan, parts: Sequence[Bounds]) -> list[list[tuple[int, TensorPiece]]]:
    """The pieces of all parts, each with its part's number, grouped by tensor and rows: a group is read at once."""
    regions: dict[tuple, list[tuple[int, TensorPiece]]] = {}
    for number, bounds in enumerate(parts):
        for piece in pieces_of(tensor, bounds):
            if len(piece.rows) and len(piece.columns):
                # Rows of parts are runs of the same list, so that its start and length tell them.
                key = (piece.source, int(piece.rows[0]), len(piece.rows))
                regions.setdefault(key, []).append((number, piece))
    return list(regions.values())


def split_parts(tensor: TensorPlan, parts: Sequence[Bounds], itemsize: int, limit: int) -> list[list[Bounds]]:
    """The parts in runs of at most `limit` bytes; in one run if they share rows, which are then read once."""
    sizes = [size_of(bounds) * itemsize for bounds in parts]
    if sum(sizes) <= limit or any(len({number for number, _ in region}) > 1 for region in regions_of(tensor, parts)):
        return [list(parts)]
    runs: list[list[Bounds]] = []
    room = -1
    for bounds, size in zip(parts, sizes, strict=True):
        if size > room:
            runs.append([])
            room = limit
        runs[-1].append(bounds)
        room -= size
    return runs


class HuggingFaceCheckpoint(Checkpoint):
    """config.json with safetensors files. `plans` has the source tensors of every parameter. `is_mtp`: the head for
    multi-token prediction in them, instead of the model.

    Raises CheckpointError for files that are malformed or do not fit the configuration, before weights are read.
    """

    def __init__(self, directory: Path, *, dtype: str = "auto", measure_casts: bool = False, is_mtp: bool = False):
        super().__init__(directory, measure_casts=measure_casts)
        hf_config = with_side_file(directory, read_json(directory / CONFIG))
        hf_config = mtp_config(hf_config, directory / CONFIG) if is_mtp else hf_config
        self._index = SafetensorsIndex(directory)
        try:
            hf_config = _untied_if_heads_differ(hf_config, self._index)
            self.config, self.plans = plan(
                hf_config,
                self._index.headers,
                dtype=dtype,
                where=self._index.where,
                file_of=self._index.file_of,
            )
        except BaseException:
            self._index.close()
            raise
        self._hf_config, self.quantization = hf_config, quantization_name(hf_config)
        self.is_headless = is_headless(hf_config)
        self._plan_of = {tensor.target: tensor for tensor in self.plans}
        self._quantized = {tensor.target: tensor for tensor in self.plans if isinstance(tensor, QuantizedPlan)}
        self._warned: set[str] = set()
        self._warning_lock = threading.Lock()
        if later := later_layer_tensors(family_of(self.config), self.config, self._index.headers):
            _LOG.warning(
                "%s: %d tensors of layers beyond the %d of the model, for multi-token prediction, are not used without "
                "a draft",
                self._index.where,
                len(later),
                self.config.num_layers,
            )

    @cached_property
    def kv_scales(self) -> tuple[LayerKVScales, ...]:
        declared = (self._hf_config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
        if not isinstance(declared, dict):
            raise CheckpointError(
                self.directory / CONFIG, f"quantization_config.kv_cache_scheme is {declared!r}, not an object or null"
            )
        kind = tuple(declared.get(name, default) for name, default in (("num_bits", 8), ("type", "float")))
        if kind != (8, "float") or not declared.get("symmetric", True):
            _LOG.warning(
                "%s: the kv_cache_scheme %r is not supported, its scales are not applied", self._index.where, declared
            )
            return ()
        config = self.config
        return read_kv_scales(
            self._index.headers, config.num_layers, lambda name: read_whole(self._index, name), config.attention_layers
        )

    def read_param(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> HostParam:
        """Reads only the bytes of the parts of dense parameters, and whole rows where their pieces would be too small.
        Tensors of quantized parameters are read whole, since their layouts pack values across parts."""
        tensor = self._plan_of[path]
        if isinstance(tensor, VocabularyPlan):
            return cut_parts(self._draft_index(tensor), parts)
        if isinstance(tensor, TensorPlan):
            return self._read(tensor, parts or [full_bounds(tensor.shape)])
        self._warn_once(tensor.reader.notes)
        weight = read_quantized(self._index, tensor, self.config.dtype)
        return cut_parts(weight, parts) if isinstance(weight, np.ndarray) else weight

    def split(self, path: ParamPath, parts: Sequence[Bounds], limit: int) -> list[list[Bounds]]:
        tensor = self._plan_of[path]
        if not isinstance(tensor, TensorPlan):
            return [list(parts)]
        return split_parts(tensor, parts, numpy_dtype(self.dense_dtype(path)).itemsize, limit)

    def stored_dtype(self, path: ParamPath) -> str | None:
        tensor = self._plan_of[path]
        return stored_dtype(tensor, self._index.headers) if isinstance(tensor, TensorPlan) else None

    def param_bytes(self, path: ParamPath) -> int:
        if path not in self._quantized:
            return super().param_bytes(path)
        entries = [self._index.entry(name) for name in self._quantized[path].tensors]
        return sum(entry.end - entry.begin for entry in entries)

    def quantized(self) -> dict[ParamPath, str]:
        return {target: tensor.tensors[0] for target, tensor in self._quantized.items()}

    def fingerprint(self) -> str:
        return digest("huggingface", self._hf_config, self._index.fingerprint(), self.config.to_dict())

    def close(self) -> None:
        super().close()
        self._index.close()

    def _draft_index(self, tensor: VocabularyPlan) -> np.ndarray:
        """int32 [V], the place of each of the target's tokens in the head's vocabulary; for those that it does not
        have, that vocabulary's size."""
        offsets = read_whole(self._index, tensor.source).astype(np.int64)
        count, (size,) = len(offsets), tensor.shape
        tokens = np.arange(count) + offsets
        if count and (tokens.min() < 0 or tokens.max() >= size or len(np.unique(tokens)) < count):
            raise CheckpointError(
                self._index.path_of(tensor.source),
                f"tensor {tensor.source!r} gives tokens {tokens.min()} to {tokens.max()}, {len(np.unique(tokens))} of "
                f"them, and the target has {size}: {count} different ones of these are needed",
            )
        index = np.full(size, count, np.int32)
        index[tokens] = np.arange(count, dtype=np.int32)
        return index

    def _warn_once(self, notes: tuple[str, ...]) -> None:
        """Logs what is not read as declared, once for each kind."""
        with self._warning_lock:  # tensors are read by several threads
            new = [note for note in notes if note not in self._warned]
            self._warned.update(new)
        for note in new:
            _LOG.warning("%s: %s", self._index.where, note)

    def _read(self, tensor: TensorPlan, parts: Sequence[Bounds]) -> list[np.ndarray]:
        dtype = numpy_dtype(self.dense_dtype(tensor.target))
        arrays = [empty_aligned(shape_of(bounds), dtype) for bounds in parts]
        stored = {name: FLOAT_DTYPES[self._index.entry(name).dtype] for name in tensor.sources}
        regions = []
        for pieces in regions_of(tensor, parts):
            first = pieces[0][1]
            targets = tuple((piece.columns, piece.target(arrays[number], transpose=tensor.placement.transpose))
                            for number, piece in pieces)  # fmt: skip
            read = partial(self._index.read_into, first.source)
            regions.append(Region(first.source, read, stored[first.source], first.row_length, first.rows, targets))
        stats_of = read_regions(
            regions,
            executor=self.executor,
            min_piece_bytes=self._index.min_piece_bytes,
            measure_cast=self._measure_casts,
        )
        for name, stats in stats_of.items():
            where = self._index.path_of(name)
            self.check_stats(stats, stored[name], dtype, param=".".join(tensor.target), name=name, where=where)
        return arrays


def _untied_if_heads_differ(hf_config: dict[str, Any], index: SafetensorsIndex) -> dict[str, Any]:
    """config.json with `tie_word_embeddings` false if the stored head differs from the embedding, as in Transformers 5:
    it was then trained separately."""
    headers = index.headers
    family, data = family_for(hf_config, f"{index.where}/{CONFIG}")
    if data.get("tie_word_embeddings", family.is_tied) is not True:
        return hf_config
    rename = renaming(family, headers)
    embed, heads = rename(embedding_name(family)), [rename(name) for name in head_names(family)]
    head = next((name for name in heads if name in headers), None)
    modules = [name.removesuffix(".weight") for name in heads]
    if any(f"{module}.{suffix}" in headers for module in modules for suffix in ("qweight", "weight_packed")):
        reason = "the head is quantized by itself"
    else:
        is_copy_stored = head is not None and embed in headers
        if head is None or not is_copy_stored or (headers[head] == headers[embed] and _same_bytes(index, head, embed)):
            return hf_config
        reason = f"{head} differs from the embedding"
    _LOG.warning("%s: tie_word_embeddings is true, but %s; using both", index.directory, reason)
    untied = {**hf_config, "tie_word_embeddings": False}
    if is_wrapper(hf_config):
        untied["text_config"] = {**hf_config["text_config"], "tie_word_embeddings": False}
    return untied


def _same_bytes(index: SafetensorsIndex, first: str, second: str) -> bool:
    size = index.entry(first).end - index.entry(first).begin
    for offset in range(0, size, _COMPARED_BYTES):
        length = min(_COMPARED_BYTES, size - offset)
        blocks = [bytearray(length), bytearray(length)]
        for name, block in zip((first, second), blocks, strict=True):
            index.read_into(name, offset, memoryview(block))
        if blocks[0] != blocks[1]:
            return False
    return True
