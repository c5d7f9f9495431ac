"""A Hugging Face repository directory opened for reading."""

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.files import CONFIG, read_json
from checkpoints_convert.formats import with_side_file
from checkpoints_convert.formats.kv_scales import LayerKVScales, read_kv_scales
from checkpoints_convert.huggingface.quantized import read_quantized, read_whole
from checkpoints_convert.plan import QuantizedPlan, TensorPlan, plan
from checkpoints_convert.safetensors_file import FLOAT_DTYPES
from checkpoints_convert.safetensors_index import SafetensorsIndex
from checkpoints_convert.source import ParamPath, Source, digest, unit_of
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
                where=directory,
                file_of=lambda name: self._index.path_of(name).name,
            )
        except BaseException:
            self._index.close()
            raise
        self._hf_config = hf_config
        self._by_unit: dict[str, list[TensorPlan | QuantizedPlan]] = {}
        for tensor in self.plans:
            self._by_unit.setdefault(unit_of(tensor.target), []).append(tensor)
        self._quantized = {tensor.target: tensor for tensor in self.plans if isinstance(tensor, QuantizedPlan)}
        self._said: set[str] = set()

    @cached_property
    def kv_scales(self) -> tuple[LayerKVScales, ...]:
        declared = (self._hf_config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
        kind = tuple(declared.get(name, default) for name, default in (("num_bits", 8), ("type", "float")))
        if kind != (8, "float") or not declared.get("symmetric", True):
            _LOG.warning(
                "%s: the kv_cache_scheme %r is not supported, its scales are not applied", self.directory, declared
            )
            return ()
        return read_kv_scales(self._index.headers, self.config.num_layers, lambda name: read_whole(self._index, name))

    def read(self, unit: str) -> Iterator[tuple[ParamPath, np.ndarray | QuantizedArray]]:
        for tensor in self._by_unit[unit]:
            if isinstance(tensor, QuantizedPlan):
                self._say(tensor.reader.notes)
                yield tensor.target, read_quantized(self._index, tensor, self.config.dtype)
            else:
                yield tensor.target, self._read(tensor)

    def param_bytes(self, path: ParamPath) -> int:
        if path not in self._quantized:
            return super().param_bytes(path)
        entries = [self._index.entry(name) for name in self._quantized[path].sources.values()]
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
        for note in notes:
            if note not in self._said:
                _LOG.warning("%s: %s", self.directory, note)
                self._said.add(note)

    def _read(self, tensor: TensorPlan) -> np.ndarray:
        return self.host_array(
            lambda offset, buffer: self._index.read_into(tensor.source, offset, buffer),
            tensor.source_shape,
            FLOAT_DTYPES[tensor.source_dtype],
            param=".".join(tensor.target),
            name=tensor.source,
            where=self._index.path_of(tensor.source),
            transpose=tensor.transpose,
        )


def _untied_if_heads_differ(hf_config: dict[str, Any], index: SafetensorsIndex) -> dict[str, Any]:
    """Tied embeddings make `lm_head.weight` a copy. If it is there and differs, it was trained on its own and
    config.json is wrong: like Transformers 5, use both."""
    headers = index.headers
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    embed = embed if embed in headers else embed.removeprefix("model.")
    is_tied = hf_config.get("tie_word_embeddings") is True
    if is_tied and any(name in headers for name in ("lm_head.qweight", "lm_head.weight_packed")):
        _LOG.warning(
            "%s: tie_word_embeddings is true, but the head is quantized by itself; using both", index.directory
        )
        return {**hf_config, "tie_word_embeddings": False}
    is_copy_stored = is_tied and {head, embed} <= set(headers)
    if not is_copy_stored or (headers[head] == headers[embed] and _same_bytes(index, head, embed)):
        return hf_config
    _LOG.warning(
        "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding; using both", index.directory
    )
    return {**hf_config, "tie_word_embeddings": False}


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
