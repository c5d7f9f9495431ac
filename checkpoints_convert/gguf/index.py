"""A GGUF checkpoint of one or several files, as one table of tensors and one set of metadata, read by type.

Every problem is noted, so that a user sees all of them at once. A key below `{architecture}.` that is not known here
and was not read is an error, since it may change what the model computes. The names are those of gguf-py's
constants.py and of llama.cpp's loader.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import NATIVE_CONFIG, WEIGHTS_INDEX
from checkpoints_convert.gguf.file import GGUFFile


class GGUFIndex(GGUFFile):
    """The tensors of a file, or of all parts of a split one, and the metadata of the first part.

    Raises CheckpointError for parts that are missing or do not belong together, a tensor stored twice, and as
    `GGUFFile`.
    """

    def __init__(self, path: str | Path):
        self._others: list[GGUFFile] = []
        first, *others = parts_of(Path(path))
        super().__init__(first)
        try:
            self._others += map(GGUFFile, others)
            self._files: list[GGUFFile] = [self, *self._others]
            self._check_parts()
            self._build_table()
        except BaseException:
            self.close()
            raise

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        return self._file_of[name].path

    def read(self, name: str) -> np.ndarray:
        """A tensor as stored: uint8 [rows, bytes], with the leading axes flattened."""
        return self.read_rows(name, 0, math.prod(self.tensors[name].shape[:-1]))

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows [first, last) of `read`: uint8 [last - first, bytes]."""
        entry = self.tensors[name]
        row_bytes = entry.shape[-1] // entry.kind.block_size * entry.kind.block_bytes
        raw = np.empty((last - first) * row_bytes, np.uint8)
        self._file_of[name].read_into(name, first * row_bytes, raw.data)
        return raw.reshape(last - first, row_bytes)

    def fingerprint(self) -> str:
        """A digest that changes when a file is replaced, resized or touched."""
        digest = hashlib.sha256()
        for file in self._files:
            status = os.stat(file.path)
            digest.update(f"{file.path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def close(self) -> None:
        super().close()
        for file in self._others:
            file.close()

    def _check_parts(self) -> None:
        for number, file in enumerate(self._files):
            count = file.scalar("split.count")
            if len(self._files) == 1:
                if count not in (None, 0, 1):
                    raise CheckpointError(
                        file.path,
                        f"is part of {count}, whose names must end in -00001-of-{int(count):05}{SUFFIX} and so on",
                    )
                continue
            declared = (file.scalar("split.no"), count)
            if declared != (number, len(self._files)):
                raise CheckpointError(
                    file.path,
                    f"split.no and split.count are {declared[0]} and {declared[1]}, its name says {number} of"
                    f" {len(self._files)}",
                )

    def _build_table(self) -> None:
        self._file_of: dict[str, GGUFFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in self._file_of:
                    other = self._file_of[name].path.name
                    raise CheckpointError(file.path, f"tensor {name!r} is stored in {other} too")
                self._file_of[name] = file
        declared = self.scalar("split.tensors.count")
        if self._others and declared is not None and declared != len(self._file_of):
            raise CheckpointError(
                self.path, f"split.tensors.count is {declared}, the {len(self._files)} parts have {len(self._file_of)}"
            )
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}


REQUIRED: Any = object()
_MAX_LISTED = 2**16  # entries of an array with a value per layer


class Metadata:
    """Typed reading of keys with `prefix`. An invalid value is appended to `problems` and replaced by a valid one.

    `seen` has the names that were read. `widest` is the largest dimension of any tensor: a larger count or width is
    reported before anything of that size is made.
    """

    def __init__(self, index: GGUFIndex, prefix: str, problems: list[str]):
        self.index, self.prefix, self.problems = index, prefix, problems
        self.seen: set[str] = set()
        self.widest = max((max(entry.shape) for entry in index.tensors.values()), default=0)

    def has(self, name: str) -> bool:
        return self._key(name) in self.index.keys

    def is_zero(self, name: str) -> bool:
        """True if the key is present and 0, which for many keys means off."""
        value = self.index.scalar(self._key(name))
        if value != 0 or isinstance(value, bool):
            return False
        self.seen.add(name)
        return True

    def expect(self, name: str, *known: bool | int | float) -> None:
        """Reports a key that is present with a value other than `known`."""
        self.seen.add(name)
        value = self.index.scalar(self._key(name))
        if self.has(name) and not any(value is not None and math.isclose(value, x, rel_tol=1e-5) for x in known):
            wanted = " or ".join(f"{x:.6g}" if type(x) is float else str(x) for x in known)
            self.problem(name, f"is {self.index.describe(self._key(name))}, only {wanted} is read")

    def integer(self, name: str, default: Any = REQUIRED, *, is_width: bool = True) -> Any:
        """A positive int; for an array with a value per layer, their common value."""
        value = self._scalar(name, default)
        if value is default or value is REQUIRED:
            return 1 if value is REQUIRED else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return self._wrong(name, f"must be a positive integer, it is {self.index.describe(self._key(name))}", 1)
        if is_width and value > self.widest:
            return self._wrong(name, f"is {value}, but no tensor has a dimension above {self.widest}", 1)
        return value

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive finite number."""
        value = self._scalar(name, default)
        if value is default or value is REQUIRED:
            return 1.0 if value is REQUIRED else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            return self._wrong(name, f"must be a positive number, it is {self.index.describe(self._key(name))}", 1.0)
        single = np.float32(value)
        # Most are stored in single precision; the shortest decimal is the original value.
        return float(str(single)) if float(single) == value else float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._scalar(name, default)
        if isinstance(value, bool):
            return value
        return self._wrong(name, f"must be true or false, it is {self.index.describe(self._key(name))}", default)

    def text(self, name: str, default: str) -> str:
        self.seen.add(name)
        key = self._key(name)
        if key not in self.index.keys:
            return default
        value = self.index.text(key)
        return value if value is not None else self._wrong(name, "must be a string", default)

    def flags(self, name: str, length: int) -> list[bool] | None:
        """An array of booleans, one per layer; None where the key is missing."""
        self.seen.add(name)
        key = self._key(name)
        if key not in self.index.keys:
            return None
        flags = self.index.numbers(key)
        if flags is None or len(flags) != length or not set(flags.tolist()) <= {0, 1}:
            return self._wrong(name, f"must be {length} booleans, it is {self.index.describe(key)}", None)
        return list(map(bool, flags))

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self._key(name)} {text}")

    def _scalar(self, name: str, default: Any) -> Any:
        self.seen.add(name)
        key = self._key(name)
        if key not in self.index.keys:
            if default is REQUIRED:
                self.problem(name, "is missing")
            return default
        count = self.index.count(key)
        if count is None:
            return self.index.scalar(key)
        values = self.index.numbers(key) if 0 < count <= _MAX_LISTED else None
        distinct = set() if values is None else set(values.tolist())
        if len(distinct) != 1:
            differing = "" if not distinct else f", with values from {min(distinct)} to {max(distinct)}"
            self.problem(name, f"is {self.index.describe(key)}{differing}: layers that differ in it are not supported")
            return default
        return distinct.pop()

    def _wrong(self, name: str, text: str, harmless: Any) -> Any:
        self.problem(name, text)
        return harmless

    def _key(self, name: str) -> str:
        return f"{self.prefix}{name}"


# Keys that are ignored: the tensors' shapes have the same information, or they describe the file.
_NOTES = (
    "vocab_size",  # the embedding's rows
    "tensor_data_layout",
    "features_length",
    "expert_used_count",  # read wherever there are experts
    "expert_feed_forward_length",  # the experts' shapes
    "expert_shared_feed_forward_length",
    "attention.layer_norm_epsilon",  # of the sort of norm that the architecture does not have
    "attention.layer_norm_rms_epsilon",
    "rope.scaling.finetuned",  # whether the model was trained with its scaling
    "rope.scaling.yarn_beta_fast",  # read wherever there is yarn
    "rope.scaling.yarn_beta_slow",
    "decoder_start_token_id",  # of models with an encoder
)
# Keys, and the values with which they have no effect.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),  # and what is computed anyway, see `refuse_unread`
    "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (False,),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swin_norm": (False,),
    "rescale_every_n_layers": (0,),
}


def refuse_unread(metadata: Metadata, values: Mapping[str, Any]) -> None:
    """Reports every key that was not read and may have an effect.

    Args:
      values: the config.json that was made of the metadata.
    """
    computed = {}
    if "kv_lora_rank" not in values:
        computed["attention.scale"] = values["head_dim"] ** -0.5
    if values["architectures"][0].startswith("Gemma"):
        computed["embedding_scale"] = values["hidden_size"] ** 0.5
    for key in metadata.index.keys:
        name = key.removeprefix(metadata.prefix)
        if name == key or name in metadata.seen or name in _NOTES or _is_neutral(metadata, key, name):
            continue
        value = metadata.index.scalar(key)
        if name in computed and value is not None and math.isclose(value, computed[name], rel_tol=1e-5):
            continue
        known = _NEUTRAL.get(name)
        only = f", only {' or '.join(map(repr, known))} is read" if known else ""
        metadata.problem(name, f"is {metadata.index.describe(key)}, which is not supported here{only}")


def _is_neutral(metadata: Metadata, key: str, name: str) -> bool:
    if name not in _NEUTRAL:
        return False
    value = metadata.index.text(key)
    return (metadata.index.scalar(key) if value is None else value) in _NEUTRAL[name]


SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
MAX_PARTS = 1000


def parts_of(path: Path) -> list[Path]:
    """The files of the checkpoint that `path` is one of. Raises CheckpointError for missing ones."""
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    total = int(match["total"])
    if not 1 <= total <= MAX_PARTS:
        raise CheckpointError(path, f"its name says {total} parts, not 1 to {MAX_PARTS}")
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{total:05}{SUFFIX}") for number in range(1, total + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(path.parent, *(f"the part {name} is missing" for name in missing))
    return parts


def find_gguf(path: Path) -> Path | None:
    """The path itself if it is a GGUF file, or the GGUF checkpoint of a directory without any other; else None.

    Raises CheckpointError if a directory has several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if (path / NATIVE_CONFIG).exists() or (path / WEIGHTS_INDEX).exists() or any(path.glob("*.safetensors")):
        return None
    first = {}
    for file in sorted(path.glob(f"*{SUFFIX}")):
        match = _PART.fullmatch(file.name)
        first.setdefault((match["stem"], match["total"]) if match else file.name, file)
    if len(first) > 1:
        names = ", ".join(file.name for file in list(first.values())[:5])
        raise CheckpointNotFoundError(
            path, f"holds {len(first)} GGUF checkpoints, {names}: pass the path of one of them"
        )
    return next(iter(first.values()), None)
