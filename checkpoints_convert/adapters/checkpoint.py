"""An open checkpoint with an adapter merged, which is read, converted and compared as any other."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.adapters.merge import Merge, rounded
from checkpoints_convert.adapters.read import read_adapter
from checkpoints_convert.checkpoint import Bounds, Checkpoint, HostParam, ParamPath, cut_parts, digest, numpy_dtype
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import is_of_tokenizer, read_json, tokenizer_files_of
from checkpoints_convert.load import open_checkpoint
from checkpoints_convert.safetensors_files import check_inside
from jaxinfer.models.adapter import Adapter
from jaxinfer.quantization import QuantizedArray

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/")


def open_merged(
    path: str | Path, adapter: str | Path, *, base_model: str | None = None, dtype: str = "auto"
) -> "MergedCheckpoint":
    """Opens a checkpoint of any form with a PEFT adapter merged; no weights of the base are read. To be closed.

    Args:
      adapter: its folder. base_model: as of `read_adapter`.
      dtype: of all weights, which are merged in float32 and rounded once; "auto" is the stored one.

    Raises CheckpointError as `load` and `read_adapter`, and for an adapter that cannot be merged.
    """
    # What is cast before the sum would be rounded twice.
    source = open_checkpoint(path, dtype=dtype if dtype == "auto" else "float32")
    try:
        read = read_adapter(adapter, source.config, base_model=base_model)
        return MergedCheckpoint(source, read, Path(adapter), dtype=dtype)
    except BaseException:
        source.close()
        raise


class MergedCheckpoint(Checkpoint):
    """A base and an adapter, as a checkpoint whose weights are all dense.

    Attributes:
      source: the base, which is closed with this. adapter: what is merged, of `folder`.
      num_changed: number of parameters that the adapter changes.
    """

    def __init__(self, source: Checkpoint, adapter: Adapter, folder: Path, *, dtype: str = "auto"):
        """Raises CheckpointError for an adapter that cannot be merged."""
        super().__init__(source.directory)
        self.source, self.adapter, self.folder = source, adapter, folder
        self._merge = Merge(source.config, adapter, self._dense)
        config = self._merge.config
        self.config = config if dtype == "auto" else replace(config, dtype=dtype)
        self.num_changed = self._merge.num_changed
        self.kv_scales, self.is_headless = source.kv_scales, source.is_headless
        self._quantized = {}

    def read_param(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> HostParam:
        array = rounded(self._merge.read(path), numpy_dtype(self.dense_dtype(path)), path)
        return cut_parts(np.ascontiguousarray(array), parts)

    def _dense(self, path: ParamPath) -> np.ndarray:
        leaf = self.source.read_leaf(path)
        return np.asarray(leaf.dequantize()) if isinstance(leaf, QuantizedArray) else leaf

    def quantized(self) -> dict[ParamPath, str]:
        return self.source.quantized()

    @property
    def is_dequantized(self) -> bool:
        return True

    def fingerprint(self) -> str:
        return digest("merged", self.source.fingerprint(), self.adapter.fingerprint, self.config.to_dict())

    def companions(self, *, with_tokenizer: bool = True) -> dict[str, Path | str]:
        """The base's files, but for those of tokenizer and chat template that the adapter's folder has.

        Raises CheckpointError for a tokenizer with added tokens that the merged model has no embedding of.
        """
        own: dict[str, Path | str] = dict(tokenizer_files_of(self.folder)) if with_tokenizer else {}
        check_inside(self.folder, own)
        files = self.source.companions(with_tokenizer=with_tokenizer)
        if _TOKENIZER in own:
            self._check_tokens(own, files)
            # Vocabulary, added and special tokens are one set of files.
            files = {name: file for name, file in files.items() if not is_of_tokenizer(name) or _is_template(name)}
        if _has_template(own):
            files = {name: file for name, file in files.items() if not _is_template(name)}
        return files | own

    def _check_tokens(self, own: Mapping[str, Path | str], files: Mapping[str, Path | str]) -> None:
        known = _added_tokens(files.get(_TOKENIZER))  # some models have tokens of images that no embedding has
        size = self.config.vocab_size
        for token, number in _added_tokens(own[_TOKENIZER]).items():
            if number >= size and token not in known:
                raise CheckpointError(
                    self.folder,
                    f"its tokenizer has the token {token!r} with the id {number}, and the merged model has {size} "
                    "tokens: the adapter was saved without its larger embedding",
                )

    def close(self) -> None:
        super().close()
        self.source.close()


def _is_template(name: str) -> bool:
    return name.startswith(_TEMPLATES)


def _has_template(files: Mapping[str, Path | str]) -> bool:
    """True if tokenizer files have a chat template, in a file of its own or not."""
    config = files.get(_TOKENIZER_CONFIG)
    return any(map(_is_template, files)) or bool(config is not None and _contents(config).get("chat_template"))


def _added_tokens(tokenizer: Path | str | None) -> dict[str, int]:
    """The added tokens of a tokenizer.json, with their ids."""
    entries = _contents(tokenizer).get("added_tokens") if tokenizer is not None else None
    valid = (entry for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else ()
    return {str(entry.get("content")): number for entry in valid if type(number := entry.get("id")) is int}


def _contents(file: Path | str) -> dict[str, Any]:
    """A JSON object, of a file or a text."""
    return read_json(file) if isinstance(file, Path) else json.loads(file)
