"""The safetensors files of a checkpoint directory, read as one table of tensors."""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import WEIGHTS_INDEX, read_json
from checkpoints_convert.object_store import MIN_PIECE_BYTES as REMOTE_MIN_PIECE_BYTES
from checkpoints_convert.object_store import remote_of
from checkpoints_convert.safetensors_file import SafetensorsFile, TensorEntry

# What a tensor's header says: its safetensors dtype and its shape.
TensorHeader = tuple[str, tuple[int, ...]]

_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_NUM_OPENED = 8
# A page: a disk reads no less, so that below it reading a piece costs as much as reading what lies between.
MIN_PIECE_BYTES = 4096
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


class SafetensorsIndex:
    """Every tensor of a repository directory.

    The files are those `model.safetensors.index.json` names; without it `model.safetensors`; without that
    `model-*.safetensors`. Others (consolidated*, adapter_*, optimizer states) are not looked at.

    Raises CheckpointError for missing shards, tensors not where the index says, a tensor stored twice, and names
    that lead out of the directory.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._remote = remote_of(self.directory)
        self.where: str | Path = self._remote.url if self._remote else self.directory
        weight_map = _weight_map(self.directory)
        present = set(self._remote.files) if self._remote else _present(self.directory)
        names = sorted(set(weight_map.values())) if weight_map is not None else _shard_names(self.where, present)
        missing = [name for name in names if name not in present]
        if missing:
            raise CheckpointError(self.where, *(f"the shard {name} is missing" for name in missing))
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, str] = {}
        try:
            if remote := self._remote:
                with ThreadPoolExecutor(_NUM_OPENED) as executor:  # each takes a few round trips
                    opened = executor.map(SafetensorsFile, map(remote.open, names))
                    self._files = dict(zip(names, opened, strict=True))
            else:
                for path in _checked_paths(self.directory, names):
                    self._files[path.name] = SafetensorsFile(path)
            self._build_table(weight_map or {})
        except BaseException:
            self.close()
            raise

    @property
    def min_piece_bytes(self) -> int:
        """How small a piece of a row may be to be read by itself."""
        return REMOTE_MIN_PIECE_BYTES if self._remote else MIN_PIECE_BYTES

    @property
    def headers(self) -> dict[str, TensorHeader]:
        """Name to (dtype, shape) of every tensor."""
        return {name: (self.entry(name).dtype, self.entry(name).shape) for name in self._file_of}

    def entry(self, name: str) -> TensorEntry:
        return self._files[self._file_of[name]].tensors[name]

    def path_of(self, name: str) -> str | Path:
        """The file a tensor lies in; a URL where it is in an object store."""
        return self._files[self._file_of[name]].path

    def file_of(self, name: str) -> str:
        """The name of the file a tensor lies in."""
        return self._file_of[name]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the tensor's bytes from `offset` on. Safe to call from several threads."""
        self._files[self._file_of[name]].read_into(name, offset, buffer)

    def fingerprint(self) -> str:
        """Changes when a file is replaced, resized or touched; reads headers only."""
        digest = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            digest.update(f"{name} {file.version()}\n".encode() + file.header)
        return digest.hexdigest()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "SafetensorsIndex":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _build_table(self, weight_map: Mapping[str, str]) -> None:
        problems = []
        for file_name, file in self._files.items():
            for name in file.tensors:
                if name in self._file_of:
                    problems.append(f"tensor {name!r} is stored twice, in {self._file_of[name]} and {file_name}")
                self._file_of[name] = file_name
        for name, file_name in weight_map.items():
            if self._file_of.get(name) != file_name:
                found = f", it is in {self._file_of[name]}" if name in self._file_of else ""
                problems.append(f"tensor {name!r} is not in {file_name}, where {WEIGHTS_INDEX} puts it{found}")
        if problems:
            raise CheckpointError(self.where, *problems)


def weight_files(directory: Path) -> list[str] | None:
    """The shards `model.safetensors.index.json` names, or None without that file."""
    weight_map = _weight_map(directory)
    return None if weight_map is None else sorted(set(weight_map.values()))


def _weight_map(directory: Path) -> dict[str, str] | None:
    path = directory / WEIGHTS_INDEX
    if not path.exists():
        return None
    weight_map = read_json(path, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map of tensor names to files")
    problems = []
    for name in dict.fromkeys(map(str, weight_map.values())):
        if reason := _name_problem(name):
            problems.append(f"weight_map names the file {name!r}, {reason}")
    problems += [f"tensor {name!r} maps to {file!r}" for name, file in weight_map.items() if not isinstance(file, str)]
    if problems:
        raise CheckpointError(path, *problems)
    return weight_map


def _name_problem(name: str) -> str | None:
    """A shard is a plain file name: no directory, no drive, nothing a file system could read as a way out."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name) or PurePosixPath(name).name != name:
        return "which is not a plain file name"
    if not name.endswith(".safetensors"):
        return "which is not a .safetensors file"
    return None


def _present(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()} if directory.is_dir() else set()


def _shard_names(where: str | Path, present: set[str]) -> list[str]:
    if "model.safetensors" in present:
        return ["model.safetensors"]
    names = sorted(name for name in present if fnmatchcase(name, "model-*.safetensors"))
    if not names:
        raise CheckpointError(where, _nothing_to_open(sorted(present)))
    totals = {int(match[2]) for name in names if (match := _SHARD.fullmatch(name))}
    if len(totals) > 1:
        raise CheckpointError(where, f"shards of {' and of '.join(map(str, sorted(totals)))} files lie together")
    for total in totals:
        numbers = {int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
        width = len(next(match[1] for name in names if (match := _SHARD.fullmatch(name))))
        names += [
            f"model-{i:0{width}}-of-{total:0{width}}.safetensors" for i in range(1, total + 1) if i not in numbers
        ]
    return names


def _nothing_to_open(present: list[str]) -> str:
    pickled = [name for name in present if Path(name).suffix in _PICKLED]
    other = [name for name in present if name.endswith((".safetensors", ".gguf"))]
    if pickled:
        return (
            f"holds {pickled[0]} and no safetensors: pickled checkpoints can run code when opened, so they never are."
            " Convert it to safetensors with the library that wrote it, then open that."
        )
    if any(name.startswith("adapter_") for name in other):
        return "holds an adapter, not a whole model: merge it into its base model and open the result"
    if other:
        return f"holds {', '.join(other[:3])}, but no model.safetensors, model-*.safetensors or {WEIGHTS_INDEX}"
    return f"holds no model.safetensors, model-*.safetensors or {WEIGHTS_INDEX}"


def _checked_paths(directory: Path, names: list[str]) -> list[Path]:
    for name in names:
        if not _stays_inside(directory, directory / name):
            target = (directory / name).resolve()
            raise CheckpointError(
                directory / name, f"is a link to {target}, outside the checkpoint: put the file in the directory"
            )
    return [directory / name for name in names]


def _stays_inside(directory: Path, path: Path) -> bool:
    """Links may lead within the directory, or to the blobs of the hub cache the directory is a snapshot in."""
    root, target = directory.resolve(), path.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    return any(target.is_relative_to(allowed) for allowed in roots)
