"""Converting checkpoints on disk, between the Hugging Face and the native form, or to another dtype."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from checkpoints_convert.companions import Companions, with_tokenizer_of
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import (
    CONFIG,
    MANIFEST,
    NATIVE_CONFIG,
    files_below,
    read_json,
    write_companions,
    write_json,
)
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.config import huggingface_config
from checkpoints_convert.huggingface.save import write_shards
from checkpoints_convert.journal import ConversionJournal, FinishedUnit
from checkpoints_convert.load import open_source
from checkpoints_convert.manifest import array_digest, measure, write_manifest
from checkpoints_convert.native_arrays import describe, flatten
from checkpoints_convert.progress import Progress, ProgressCallback
from checkpoints_convert.source import ParamPath, Source
from checkpoints_convert.staging import check_destination, check_free_space, partial_path, publish, staged
from checkpoints_convert.store import PARAMS, native_config, write_unit
from jaxinfer.files import sync
from jaxinfer.models import ModelConfig
from jaxinfer.quantization import QuantizedArray

Form = Literal["native", "huggingface"]
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
      num_bytes: of the parameters, before compression. num_units, num_resumed_units: layers and single parameters,
        and how many of them an interrupted run had already written.
      cast_errors: largest relative error by parameter, when the dtype was changed.
      requantize_errors: relative error by parameter of the weights that were rounded again, by `requantize`.
    """

    source: Path
    destination: Path
    config: ModelConfig
    num_bytes: int
    num_units: int
    num_resumed_units: int
    seconds: float
    cast_errors: dict[str, float] = field(default_factory=dict)
    requantize_errors: dict[str, float] = field(default_factory=dict)
    requantize: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        paths = {"source": str(self.source), "destination": str(self.destination)}
        return {**self.__dict__, **paths, "config": self.config.to_dict()}


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "auto",
    to: Form = "native",
    progress: bool | ProgressCallback | None = True,
    overwrite: bool = False,
    revision: str | None = None,
    requantize: str | None = None,
    tokenizer: str | Path | None = None,
) -> ConvertReport:
    """Writes the checkpoint `src`, a directory of any form, a GGUF file or a hub id, to the directory `dst`.

    `dst` appears when it is whole; until then the work is in `dst`.partial. A conversion to the native form that was
    killed, or ran out of disk, goes on after the last whole layer when it is run again with the same arguments; one
    to the Hugging Face form starts over. Host memory holds a layer at a time (native) or a shard (Hugging Face).

    Args:
      dtype: "auto" keeps the stored one; another casts, and the report has the largest errors. Quantized weights are
        never cast.
      to: "native" or "huggingface", where quantized weights are written as compressed-tensors.
      overwrite: replaces a checkpoint at `dst`; the old one stays until the new one is whole.
      progress: as for `load`.
      revision: as for `load`.
      requantize: as for `load`.
      tokenizer: a directory whose tokenizer files are written instead of the checkpoint's own.

    Raises:
      CheckpointError: as `load`; a destination that is taken or has too little room, with needed and available bytes.
      OSError: the disk filled up or failed on the way.
    """
    if to not in ("native", "huggingface"):
        raise ValueError(f"to={to!r} is not 'native' or 'huggingface'")
    start = time.monotonic()
    directory, destination = resolve(src, revision=revision), Path(dst)
    check_destination(destination, overwrite=overwrite, source=directory)
    with (
        open_source(directory, dtype=dtype, measure_casts=True, requantize=requantize) as source,
        Progress(progress, source.num_bytes(), "converting") as bar,
    ):
        companions: Companions = source.companions(with_tokenizer=tokenizer is None)
        if tokenizer is not None:
            companions = with_tokenizer_of(companions, tokenizer)
        num_resumed, cast_errors, requantize_errors = 0, source.cast_errors, source.requantize_errors
        if to == "native":
            origin = {"checkpoint": str(src), "revision": revision}
            finished, num_resumed = _to_native(source, destination, bar, origin, companions)
            cast_errors = {name: error for unit in finished for name, error in unit.cast_errors.items()}
            requantize_errors = {name: error for unit in finished for name, error in unit.requantize_errors.items()}
        else:
            _to_huggingface(source, destination, bar, companions, overwrite)
        return ConvertReport(
            source=directory,
            destination=destination,
            config=source.config,
            num_bytes=source.num_bytes(),
            num_units=len(source.units()),
            num_resumed_units=num_resumed,
            seconds=time.monotonic() - start,
            cast_errors=cast_errors,
            requantize_errors=requantize_errors,
            requantize=requantize,
        )


def _to_native(
    source: Source, destination: Path, bar: Progress, origin: dict[str, Any], companions: Companions
) -> tuple[list[FinishedUnit], int]:
    partial = partial_path(destination)
    if not partial.exists():
        check_free_space(destination, source.num_bytes())
    with ConversionJournal(partial, source.fingerprint()) as journal:
        num_resumed = len(journal.finished)
        todo = [unit for unit in source.units() if unit not in journal.finished]
        check_free_space(destination, sum(source.num_bytes(unit) for unit in todo))
        for unit in journal.finished:
            bar.advance(unit, source.num_bytes(unit))
        for unit in todo:
            _write_native_unit(source, unit, partial, journal, bar)
        _finish_native(source, partial, journal, origin, companions)
        publish(partial, destination)
    return list(journal.finished.values()), num_resumed


def _write_native_unit(source: Source, unit: str, partial: Path, journal: ConversionJournal, bar: Progress) -> None:
    arrays = {}
    for path, array in source.read(unit):
        arrays[path] = array
        bar.advance(".".join(path), source.param_bytes(path))
    directory = partial / PARAMS / unit
    try:
        write_unit(directory, arrays)
    except ValueError as error:  # how TensorStore reports a full disk
        raise CheckpointError(directory, f"could not be written: {str(error).splitlines()[0]}") from None
    names = [f"{PARAMS}/{unit}/{name}" for name in files_below(directory)]
    cast_errors, requantize_errors = (
        {name: errors[name] for name in map(".".join, arrays) if name in errors}
        for errors in (source.cast_errors, source.requantize_errors)
    )
    quantized = {".".join(path): describe(array) for path, array in arrays.items() if isinstance(array, QuantizedArray)}
    digests = source.executor.map(array_digest, map(_parts, arrays.values()))
    parameters = dict(zip(map(".".join, arrays), digests, strict=True))
    journal.finish(unit, FinishedUnit(measure(partial, names), parameters, cast_errors, quantized, requantize_errors))


def _parts(array: np.ndarray | QuantizedArray) -> dict[str, np.ndarray]:
    parts = flatten(array) if isinstance(array, QuantizedArray) else {"": array}
    return {name: np.asarray(part) for name, part in parts.items()}


def _finish_native(
    source: Source, partial: Path, journal: ConversionJournal, origin: dict[str, Any], companions: Companions
) -> None:
    carried = write_companions(companions, partial)
    quantized = {name: entry for unit in journal.finished.values() for name, entry in unit.quantized.items()}
    write_json(partial / NATIVE_CONFIG, native_config(source.config, origin, quantized, source.kv_scales))
    entries = {name: entry for unit in journal.finished.values() for name, entry in unit.files.items()}
    entries |= measure(partial, [*carried, NATIVE_CONFIG])
    parameters = {name: found for unit in journal.finished.values() for name, found in unit.parameters.items()}
    write_manifest(partial, entries, parameters)
    for name in [*carried, MANIFEST]:
        sync(partial / name)
    journal.remove()


def _to_huggingface(source: Source, destination: Path, bar: Progress, companions: Companions, overwrite: bool) -> None:
    with staged(destination, source.num_bytes(), overwrite=overwrite, source=source.directory) as partial:
        write_companions(companions, partial)
        data = huggingface_config(source.config)
        copied = partial / CONFIG
        original = read_json(copied) if copied.exists() else {}
        tensors = _in_order(source, bar)

        def read(path: ParamPath) -> np.ndarray | QuantizedArray:
            found, array = next(tensors)
            assert found == path
            return array

        quantization = write_shards(source.config, partial, read, source.param_bytes, kv_scales=source.kv_scales)
        write_json(copied, data | {name: original.get(name) for name in _SPECIAL_TOKENS} | quantization)


def _in_order(source: Source, bar: Progress) -> Iterator[tuple[ParamPath, np.ndarray | QuantizedArray]]:
    for unit in source.units():
        for path, array in source.read(unit):
            yield path, array
            bar.advance(".".join(path), source.param_bytes(path))
