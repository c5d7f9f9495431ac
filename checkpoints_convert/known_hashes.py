"""Checksums of files that carry none: those that the hub's cache, or a *.sha256 file beside them, know.

A file of the cache (`snapshots/COMMIT/NAME`, a link to `blobs/HASH`) is named by its SHA-256 if the hub keeps it in
large file storage, as all weights, and by its hash in Git otherwise. A folder that a repository was downloaded to
(`huggingface_hub` with `local_dir`) has them in `.cache/huggingface/download`.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import COMPANION_FILES, MANIFEST, QUANTIZATION_FILES, WEIGHTS_INDEX, sha256
from checkpoints_convert.gguf.index import find_gguf, parts_of
from checkpoints_convert.manifest import check_digests, read_manifest, verify_manifest
from checkpoints_convert.storage import remote_of
from jaxinfer.files import open_regular

_READ = (*COMPANION_FILES, *QUANTIZATION_FILES, WEIGHTS_INDEX, "*.safetensors")
_WEIGHTS = (".safetensors", ".gguf")
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_LINE = re.compile(r"\\?([0-9a-fA-F]{64})(?:[ \t]+[ *]?(.+))?")
_MAX_LIST_BYTES = 10_000_000
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class FilesReport:
    """Attributes:
    checked: files, relative to the checkpoint's directory, that were compared with a checksum.
    unknown: those of which no checksum is known. problems: a sentence for each one that is damaged.
    """

    checked: tuple[str, ...]
    unknown: tuple[str, ...]
    problems: tuple[str, ...]


def verify_files(path: str | Path) -> FilesReport:
    """Compares the files of a checkpoint of any form with the checksums that are known, reading all bytes.

    They are those of the manifest of a converted checkpoint, of the hub's cache, and of *.sha256 files (as sha256sum
    writes them) beside the files.

    Raises CheckpointNotFoundError if no checkpoint is there, CheckpointError for a checkpoint in an object store.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        problems = verify_manifest(path)
        return FilesReport(tuple(read_manifest(path).files), (), tuple(problems))
    if remote := remote_of(path):
        raise CheckpointError(remote.url, "lies in an object store, whose files are not compared with checksums")
    if (gguf := find_gguf(path)) is not None:
        directory, files = gguf.parent, parts_of(gguf)
    else:
        directory = path
        files = sorted({file for pattern in _READ for file in path.glob(pattern) if file.is_file()})
    if not files:
        raise CheckpointNotFoundError(path, "holds no files of a checkpoint")
    listed = _listed(directory)
    known = {file: digest for file in files if (digest := _known(file, listed)) is not None}
    return FilesReport(
        checked=_names(directory, known),
        unknown=_names(directory, (file for file in files if file not in known)),
        problems=tuple(check_digests(known, _problem)),
    )


def check_known(path: Path) -> None:
    """Raises CheckpointError for files that differ from a known checksum, and for weights without one."""
    report = verify_files(path)
    if report.problems:
        raise CheckpointError(path, *report.problems)
    if unknown := [name for name in report.unknown if name.endswith(_WEIGHTS)]:
        names = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        raise CheckpointError(
            path,
            f"no checksum is known of {names}: files from the hub's cache have one, others need a {unknown[0]}.sha256 "
            "beside them (sha256sum), or convert the checkpoint",
        )


def _names(directory: Path, files: Iterable[Path]) -> tuple[str, ...]:
    return tuple(file.relative_to(directory).as_posix() for file in files)


def _listed(directory: Path) -> dict[str, str]:
    """SHA-256 by file name, of the *.sha256 files and SHA256SUMS of a directory. Raises CheckpointError."""
    listed = {}
    for path in sorted([*directory.glob("*.sha256"), *directory.glob("SHA256SUMS*")]):
        try:
            with open_regular(path) as file:
                raw = file.read(_MAX_LIST_BYTES)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
        for line in raw.decode("utf-8", "replace").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            if (match := _LINE.fullmatch(line.strip())) is None:
                raise CheckpointError(path, f"is no list of SHA-256: {line[:80]!r}")
            name = match[2] or path.name.removesuffix(".sha256")
            listed[name.removeprefix("./")] = match[1].lower()
    return listed


def _known(file: Path, listed: dict[str, str]) -> str | None:
    """The hash of a file that is known: 64 digits of SHA-256, or 40 of its hash in Git."""
    if file.name in listed:
        return listed[file.name]
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs" and _is_hash(target.name):
        return target.name
    metadata = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        with open_regular(metadata) as opened:
            lines = opened.read(1000).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    return lines[1] if len(lines) > 1 and _is_hash(lines[1]) else None


def _is_hash(text: str) -> bool:
    return bool(_SHA256.fullmatch(text) or _GIT.fullmatch(text))


def _problem(file: Path, wanted: str) -> str | None:
    try:
        digest = content_hash(file, is_git=len(wanted) == 40)
    except OSError as error:
        return f"{file.name}: cannot be read: {error.strerror or error}"
    kind = "SHA-256" if len(wanted) == 64 else "the Git hash"
    return None if digest == wanted else f"{file.name}: is damaged: it has {kind} {digest}, not {wanted}"


def content_hash(file: Path, *, is_git: bool) -> str:
    """Hexadecimal SHA-256 of a file's bytes, or their hash in Git. Raises OSError."""
    if not is_git:
        return sha256(file)
    with open_regular(file) as opened:
        digest = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
