"""A Hugging Face repository directory opened for reading."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.arrays import empty_aligned
from checkpoints_convert.files import CONFIG, read_json
from checkpoints_convert.formats import with_side_file
from checkpoints_convert.formats.kv_scales import LayerKVScales, read_kv_scales
from checkpoints_convert.huggingface.config import family_for
from checkpoints_convert.huggingface.families import family_of, is_wrapper
from checkpoints_convert.huggingface.names import embedding_name, head_names, renaming
from checkpoints_convert.huggingface.quantized import read_quantized, read_whole
from checkpoints_convert.parts import Bounds, shape_of, whole
from checkpoints_convert.pieces import regions_of, split_parts
from checkpoints_convert.plan import QuantizedPlan, TensorPlan, later_layer_tensors, plan
from checkpoints_convert.regions import Region, read_regions
from checkpoints_convert.safetensors_file import FLOAT_DTYPES
from checkpoints_convert.safetensors_index import SafetensorsIndex
from checkpoints_convert.source import Group, ParamPath, Source, cut_parts, digest, numpy_dtype
from jaxinfer.quantization import QuantizedArray

_LOG = logging.getLogger(__name__)
_COMPARED_BYTES = 4 * 2**20


class HuggingFaceSource(Source):
    """config.json with safetensors files. `plans` tells where every parameter comes from.

    Raises CheckpointError for files that are malformed or do not fit the configuration, before weights are read.
    """

    def __init__(self, directory: Path, *, dtype: str = "auto", measure_casts: bool = False):
        super().__init__(directory, measure_casts=measure_casts)
        hf_config = with_side_file(directory, read_json(directory / CONFIG))
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
        self._hf_config = hf_config
        self._plan_of = {tensor.target: tensor for tensor in self.plans}
        self._quantized = {tensor.target: tensor for tensor in self.plans if isinstance(tensor, QuantizedPlan)}
        self._said: set[str] = set()
        self._saying = threading.Lock()
        if later := later_layer_tensors(family_of(self.config), self.config, self._index.headers):
            _LOG.warning(
                "%s: %d tensors of layers beyond the %d of the model, for multi-token prediction, are not used",
                self._index.where,
                len(later),
                self.config.num_layers,
            )

    @cached_property
    def kv_scales(self) -> tuple[LayerKVScales, ...]:
        declared = (self._hf_config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
        kind = tuple(declared.get(name, default) for name, default in (("num_bits", 8), ("type", "float")))
        if kind != (8, "float") or not declared.get("symmetric", True):
            _LOG.warning(
                "%s: the kv_cache_scheme %r is not supported, its scales are not applied", self._index.where, declared
            )
            return ()
        return read_kv_scales(self._index.headers, self.config.num_layers, lambda name: read_whole(self._index, name))

    def read_group(
        self, group: Group, parts: Mapping[ParamPath, Sequence[Bounds]]
    ) -> Iterator[tuple[ParamPath, list[np.ndarray] | QuantizedArray]]:
        """Of dense parameters only the bytes of the parts are read, as far as pieces are not too small; the tensors of
        quantized ones are read whole, as their layouts pack values across parts."""
        for path in group:
            tensor = self._plan_of[path]
            if isinstance(tensor, TensorPlan):
                yield path, self._read(tensor, parts.get(path) or [whole(tensor.shape)])
                continue
            self._say(tensor.reader.notes)
            found = read_quantized(self._index, tensor, self.config.dtype)
            yield path, cut_parts(found, parts.get(path, ())) if isinstance(found, np.ndarray) else found

    def split(self, path: ParamPath, parts: Sequence[Bounds], limit: int) -> list[list[Bounds]]:
        tensor = self._plan_of[path]
        if not isinstance(tensor, TensorPlan):
            return [list(parts)]
        return split_parts(tensor, parts, numpy_dtype(tensor.dtype).itemsize, limit)

    def param_bytes(self, path: ParamPath) -> int:
        if path not in self._quantized:
            return super().param_bytes(path)
        entries = [self._index.entry(name) for name in self._quantized[path].tensors]
        return sum(entry.end - entry.begin for entry in entries)

    def quantized(self) -> dict[ParamPath, str]:
        return {target: next(iter(tensor.sources.values())) for target, tensor in self._quantized.items()}

    def fingerprint(self) -> str:
        return digest("huggingface", self._hf_config, self._index.fingerprint(), self.config.to_dict())

    def close(self) -> None:
        super().close()
        self._index.close()

    def _say(self, notes: tuple[str, ...]) -> None:
        """Warns of what is not read as declared, once for each kind."""
        with self._saying:  # tensors are read by several threads
            new = [note for note in notes if note not in self._said]
            self._said.update(new)
        for note in new:
            _LOG.warning("%s: %s", self._index.where, note)

    def _read(self, tensor: TensorPlan, parts: Sequence[Bounds]) -> list[np.ndarray]:
        dtype = numpy_dtype(tensor.dtype)
        arrays = [empty_aligned(shape_of(bounds), dtype) for bounds in parts]
        stored = {name: FLOAT_DTYPES[self._index.entry(name).dtype] for name in tensor.sources}
        regions = []
        for pieces in regions_of(tensor, parts):
            first = pieces[0][1]
            targets = tuple((piece.columns, piece.target(arrays[number], transpose=tensor.transpose))
                            for number, piece in pieces)  # fmt: skip
            read = partial(self._index.read_into, first.source)
            regions.append(Region(first.source, read, stored[first.source], first.row_length, first.rows, targets))
        seen = read_regions(
            regions,
            executor=self.executor,
            min_piece_bytes=self._index.min_piece_bytes,
            add=tensor.add,
            measure_cast=self._measure_casts,
        )
        for name, found in seen.items():
            where = self._index.path_of(name)
            self.check_seen(found, stored[name], dtype, param=".".join(tensor.target), name=name, where=where)
        return arrays


def _untied_if_heads_differ(hf_config: dict[str, Any], index: SafetensorsIndex) -> dict[str, Any]:
    """Tied embeddings make `lm_head.weight` a copy. If it is there and differs, it was trained on its own and
    config.json is wrong: like Transformers 5, use both."""
    headers = index.headers
    family, data = family_for(hf_config, index.directory)
    rename = renaming(family, headers)
    embed = rename(embedding_name(family))
    head = next((name for name in map(rename, head_names(family)) if name in headers), None)
    if data.get("tie_word_embeddings", family.is_tied) is not True:
        return hf_config
    untied = {**hf_config, "tie_word_embeddings": False}
    if is_wrapper(hf_config):
        untied["text_config"] = {**hf_config["text_config"], "tie_word_embeddings": False}
    modules = [rename(name).removesuffix(".weight") for name in head_names(family)]
    if any(f"{module}.{suffix}" in headers for module in modules for suffix in ("qweight", "weight_packed")):
        _LOG.warning(
            "%s: tie_word_embeddings is true, but the head is quantized by itself; using both", index.directory
        )
        return untied
    is_copy_stored = head is not None and embed in headers
    if head is None or not is_copy_stored or (headers[head] == headers[embed] and _same_bytes(index, head, embed)):
        return hf_config
    _LOG.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embedding; using both", index.directory, head
    )
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
