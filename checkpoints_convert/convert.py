"""Converting checkpoints between the Hugging Face and the native form, or to another dtype."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from checkpoints_convert.checkpoint import Checkpoint, ParamPath
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError, UnwritableSchemeError
from checkpoints_convert.files import (
    CONFIG,
    MANIFEST,
    NATIVE_CONFIG,
    files_below,
    is_of_tokenizer,
    read_json,
    special_token,
    tokenizer_files_of,
    write_companions,
    write_json,
)
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.config import huggingface_config
from checkpoints_convert.huggingface.save import check_schemes, write_shards
from checkpoints_convert.load import Advance, ProgressCallback, byte_progress, open_checkpoint
from checkpoints_convert.manifest import array_digest, measure, size_problems, write_manifest
from checkpoints_convert.staging import (
    ConversionJournal,
    FinishedUnit,
    check_destination,
    check_free_space,
    partial_path,
    publish,
    staged,
)
from checkpoints_convert.storage import is_url
from checkpoints_convert.store import PARAMS, checksums_of_unit, describe, flatten, native_config, write_unit
from jaxinfer.files import naming, sync
from jaxinfer.models import ModelConfig
from jaxinfer.quantization import QuantizedArray

Form = Literal["native", "huggingface"]
# Files to copy, or texts to write, by name relative to a checkpoint's directory.
Companions = Mapping[str, Path | str]
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ConvertReport:
    """Result of a conversion.

    Attributes:
      num_bytes: of the parameters, before compression. num_units: layers and single parameters.
      num_resumed_units: units that an interrupted run had already written.
      cast_errors: largest relative error by parameter, if the dtype was changed.
      requantize_errors: relative error by parameter of weights that `requantize` rounded again.
      adapter: folder of the adapter that was merged; casts of a merged model are not measured.
      num_changed: parameters that it changed. num_dequantized: quantized parameters of its base, which became dense.
    """

    source: Path
    destination: Path
    config: ModelConfig
    num_bytes: int
    num_units: int
    seconds: float
    num_resumed_units: int = 0
    cast_errors: dict[str, float] = field(default_factory=dict)
    requantize_errors: dict[str, float] = field(default_factory=dict)
    requantize: str | None = None
    adapter: Path | None = None
    num_changed: int = 0
    num_dequantized: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in self.__dict__.items()}
        return {**values, "config": self.config.to_dict()}


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
    adapter: str | Path | None = None,
    base_model: str | None = None,
) -> ConvertReport:
    """Writes the checkpoint `src` (a directory of any form, a GGUF file or a hub id) to the directory `dst`.

    `dst` appears when it is complete; until then files are in `dst`.partial. A conversion to the native form that was
    killed, or ran out of disk, resumes after the last complete layer when it is repeated with the same arguments; one
    to the Hugging Face form starts over. Host memory holds a layer at a time (native) or a shard (Hugging Face).

    Args:
      dtype: "auto" keeps the stored one; any other casts, and the report has the largest errors. Quantized weights are
        not cast.
      to: "native" or "huggingface"; the latter has quantized weights as compressed-tensors.
      overwrite: replaces a checkpoint at `dst`, which stays until the new one is complete.
      progress: as for `load`.
      revision: as for `load`.
      requantize: as for `load`.
      tokenizer: a directory whose tokenizer files are written instead of the checkpoint's own, and of the adapter's.
      adapter: folder of a PEFT LoRA adapter to merge, in float32; the result is dense. Tokenizer files and chat
        templates in it are written in place of the checkpoint's.
      base_model: name of `src` that the adapter's base_model_name_or_path must have, where its folder has another.

    Raises:
      CheckpointError: as `load`; a destination that exists or has too little space, with needed and available bytes; an
        adapter that `read_adapter` refuses, that is of another base, or that cannot be merged, before anything is
        written.
      ValueError: `adapter` with a `requantize` other than "dense", `base_model` without `adapter`.
      OSError: the disk is full or failed.
    """
    if to not in ("native", "huggingface"):
        raise ValueError(f"to={to!r} is not 'native' or 'huggingface'")
    # Not at the top: it takes 40 ms, for which loading need not wait.
    from checkpoints_convert.adapters.checkpoint import MergedCheckpoint, open_merged

    if adapter is None and base_model is not None:
        raise ValueError(f"base_model={base_model!r} (--base-model) is for a merge: no adapter is given")
    if adapter is not None and requantize not in (None, "dense"):
        raise ValueError(f"requantize={requantize!r} (--requantize) is not for a merge, whose result is dense")
    start = time.monotonic()
    directory, destination = resolve(src, revision=revision), Path(dst)
    check_destination(destination, overwrite=overwrite, source=directory)

    def opened() -> Checkpoint:
        if adapter is not None:
            own_name = str(src) if is_url(str(src)) else os.path.abspath(directory)  # "." has no name
            return open_merged(directory, adapter, base_model=base_model or own_name, dtype=dtype)
        return open_checkpoint(directory, dtype=dtype, measure_casts=True, requantize=requantize)

    with (
        opened() as source,
        byte_progress(progress, source.num_bytes(), "converting") as advance,
    ):
        source.check_head()
        companions: Companions = source.companions(with_tokenizer=tokenizer is None)
        if tokenizer is not None:
            companions = with_tokenizer_of(companions, tokenizer)
        if to == "native":
            origin = {"checkpoint": str(src), "revision": revision}
            if adapter is not None:
                origin["adapter"] = str(adapter)
            written = _to_native(source, destination, advance, origin, companions)
        else:
            written = _to_huggingface(source, destination, advance, companions, overwrite)
        merged: dict[str, Any] = {}
        if isinstance(source, MergedCheckpoint):
            merged = {"adapter": source.folder, "num_changed": source.num_changed}
            merged["num_dequantized"] = len(source.quantized())
        return ConvertReport(
            source=directory,
            destination=destination,
            config=source.config,
            num_bytes=source.num_bytes(),
            num_units=len(source.units()),
            seconds=time.monotonic() - start,
            requantize=requantize,
            **merged,
            **written,
        )


def _to_native(
    source: Checkpoint, destination: Path, advance: Advance, origin: dict[str, Any], companions: Companions
) -> dict[str, Any]:
    """Returns fields of the report."""
    partial = partial_path(destination)
    if not partial.exists():
        check_free_space(destination, source.num_bytes())
    with ConversionJournal(partial, source.fingerprint()) as journal:
        num_resumed = len(journal.finished)
        todo = [unit for unit in source.units() if unit not in journal.finished]
        check_free_space(destination, sum(source.num_bytes(unit) for unit in todo))
        for unit in journal.finished:
            advance(unit, source.num_bytes(unit))
        for unit in todo:
            journal.finish(_write_native_unit(source, unit, partial, advance))
        _finish_native(source, partial, journal, origin, companions)
        publish(partial, destination)
    errors = {name: journal.merged(name) for name in ("cast_errors", "requantize_errors")}
    return {"num_resumed_units": num_resumed, **errors}


def _write_native_unit(source: Checkpoint, unit: str, partial: Path, advance: Advance) -> FinishedUnit:
    arrays = {}
    for path, array in source.read(unit):
        arrays[path] = array
        advance(".".join(path), source.param_bytes(path))
    directory = partial / PARAMS / unit
    try:
        with naming(directory):
            write_unit(directory, arrays)
    except ValueError as error:  # from TensorStore, for a full disk
        raise CheckpointError(directory, f"could not be written: {str(error).splitlines()[0]}") from None
    names = [f"{PARAMS}/{unit}/{name}" for name in files_below(directory)]
    cast_errors, requantize_errors = (
        {name: errors[name] for name in map(".".join, arrays) if name in errors}
        for errors in (source.cast_errors, source.requantize_errors)
    )
    digests = source.executor.map(array_digest, map(_parts, arrays.values()))
    return FinishedUnit(
        unit,
        files=measure(partial, names),
        parameters=dict(zip(map(".".join, arrays), digests, strict=True)),
        cast_errors=cast_errors,
        quantized={".".join(path): describe(leaf) for path, leaf in arrays.items() if isinstance(leaf, QuantizedArray)},
        requantize_errors=requantize_errors,
        arrays=checksums_of_unit(partial, unit, arrays),
    )


def _parts(array: np.ndarray | QuantizedArray) -> dict[str, np.ndarray]:
    parts = flatten(array) if isinstance(array, QuantizedArray) else {"": array}
    return {name: np.asarray(part) for name, part in parts.items()}


def _finish_native(
    source: Checkpoint, partial: Path, journal: ConversionJournal, origin: dict[str, Any], companions: Companions
) -> None:
    carried = write_companions(companions, partial)
    config = native_config(source.config, origin, journal.merged("quantized"), source.kv_scales)
    write_json(partial / NATIVE_CONFIG, config)
    entries = journal.merged("files") | measure(partial, [*carried, NATIVE_CONFIG])
    if problems := size_problems(partial, entries):  # files of finished units were removed
        raise CheckpointError(partial, *problems)
    write_manifest(partial, entries, journal.merged("parameters"), journal.merged("arrays"))
    for name in [*carried, MANIFEST]:
        sync(partial / name)
    journal.remove()


def _to_huggingface(
    source: Checkpoint, destination: Path, advance: Advance, companions: Companions, overwrite: bool
) -> dict[str, Any]:
    """Returns fields of the report."""
    try:
        if isinstance(source, GGUFCheckpoint):
            check_schemes(source.config, source.abstract_param, source.directory)
        _write_huggingface(source, destination, advance, companions, overwrite)
    except UnwritableSchemeError as error:
        if not isinstance(source, GGUFCheckpoint):
            raise
        advice = "requantize='dense' (--requantize dense) writes floating-point weights"
        raise CheckpointError(source.directory, f"{error.problems[0]}; {advice}") from None
    return {"cast_errors": source.cast_errors, "requantize_errors": source.requantize_errors}


def _write_huggingface(
    source: Checkpoint, destination: Path, advance: Advance, companions: Companions, overwrite: bool
) -> None:
    with staged(destination, source.num_bytes(), overwrite=overwrite, source=source.directory) as partial:
        write_companions(companions, partial)
        data = huggingface_config(source.config)
        copied = partial / CONFIG
        original = read_json(copied) if copied.exists() else {}

        def read(path: ParamPath) -> np.ndarray | QuantizedArray:
            leaf = source.read_leaf(path)
            advance(".".join(path), source.param_bytes(path))
            return leaf

        quantization = write_shards(source.config, partial, read, source.param_bytes, kv_scales=source.kv_scales)
        write_json(copied, data | {name: special_token(original, name) for name in _SPECIAL_TOKENS} | quantization)


def with_tokenizer_of(companions: Companions, directory: str | Path) -> Companions:
    """The companions, with the tokenizer files of a directory. Raises CheckpointNotFoundError if it has none."""
    directory = Path(directory)
    tokenizer = tokenizer_files_of(directory)
    if "tokenizer.json" not in tokenizer:
        raise CheckpointNotFoundError(directory, "holds no tokenizer.json")
    return {**{name: value for name, value in companions.items() if not is_of_tokenizer(name)}, **tokenizer}
