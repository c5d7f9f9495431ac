"""Pulled models: a manifest for each model, in a folder of our own; and the lock of a repository."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxinfer.files import naming, write_text_atomically
from jaxinfer.progress import Stage

MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = 1


class StoreError(ValueError):
    """A name, an alias or a manifest that cannot be used; the message says what to do."""


class UnknownModelError(StoreError, FileNotFoundError):
    """No model of that name is here."""


@dataclass(frozen=True)
class HubName:
    """`user/model`, of a revision (a branch, tag or commit), and of a GGUF variant such as "Q4_K_M"."""

    repository: str
    revision: str = MAIN
    variant: str | None = None

    def __str__(self) -> str:
        variant = f":{self.variant}" if self.variant is not None else ""
        return f"{self.repository}{variant}" + (f"@{self.revision}" if self.revision != MAIN else "")

    def at(self, commit: str) -> "HubName":
        """The name with a commit as its revision."""
        return replace(self, revision=commit)

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> str:
        """The name of the repository's folder in the hub's cache."""
        return "--".join(["models", *self.repository.split("/")])


@dataclass(frozen=True)
class PulledFile:
    """A file of a repository: its path there, its bytes, and its SHA-256, or its hash in Git if the hub has only that;
    None if it has neither."""

    name: str
    num_bytes: int
    digest: str | None


def has_adapter(files: Sequence[PulledFile]) -> bool:
    """True for the files of a LoRA adapter in PEFT's form, without a model."""
    names = {file.name for file in files}
    return "adapter_config.json" in names and "config.json" not in names


@dataclass(frozen=True)
class PulledModel:
    """A manifest. The model is complete: all files were there, with the checksums of the hub, when it was written.

    Attributes:
      repository, variant: as of `HubName`. revisions: those by which it was pulled. commit: what they were then.
      files: all of the model's files. pulled_at: seconds since 1970. license: as its page says.
    """

    repository: str
    revisions: tuple[str, ...]
    commit: str
    files: tuple[PulledFile, ...]
    pulled_at: float
    variant: str | None = None
    license: str | None = None

    @property
    def name(self) -> str:
        revision = MAIN if MAIN in self.revisions else self.revisions[0]
        return str(HubName(self.repository, revision, self.variant))

    @property
    def pinned_name(self) -> str:
        return str(HubName(self.repository, self.commit, self.variant))

    @property
    def snapshot(self) -> Path:
        return hub_cache() / HubName(self.repository).folder / "snapshots" / self.commit

    @property
    def path(self) -> Path:
        """The path to load: the snapshot's folder, or the first part of its GGUF file."""
        return self.snapshot if self.variant is None else self.snapshot / self.files[0].name

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def is_adapter(self) -> bool:
        """True for a LoRA adapter of another model."""
        return has_adapter(self.files)

    @property
    def pulled_on(self) -> str:
        return datetime.fromtimestamp(self.pulled_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def is_revision(self, revision: str) -> bool:
        """True if the commit is, or was when it was pulled, of that name."""
        return revision == self.commit or revision in self.revisions

    def is_variant(self, variant: str | None) -> bool:
        """True if users may call the variant so: by its quantization or its file, in upper or lower case."""
        if variant is None or self.variant is None:
            return variant is self.variant
        return gguf_name(variant) in (gguf_name(self.variant), gguf_name(self.files[0].name))

    def missing(self) -> list[str]:
        """Files that are not there, or that have another size."""
        return [file.name for file in self.files if _size(self.snapshot / file.name) != file.num_bytes]

    @property
    def manifest(self) -> Path:
        variant = "" if self.variant is None else f".{self.variant}"
        return manifests_of(self.repository) / f"{self.commit}{variant.replace('/', '--')}.json"


def gguf_name(name: str) -> str:
    """The name of a GGUF file, or of a variant, without the number of its part and in lower case."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", name.lower().removesuffix(".gguf"))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def home() -> Path:
    """Our own folder: JAXINFER_HOME, or `jaxinfer` in the platform's folder for data."""
    if setting := os.environ.get("JAXINFER_HOME"):
        return Path(setting).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "jaxinfer"
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "jaxinfer"


def hub_cache() -> Path:
    """The hub's cache, which HF_HUB_CACHE and HF_HOME set."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE is set, also in this process."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def offline(is_wanted: bool) -> Iterator[None]:
    """Sets HF_HUB_OFFLINE within the block if `is_wanted`, so that no request goes to the hub."""
    former = os.environ.get("HF_HUB_OFFLINE")
    if is_wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if is_wanted:
            os.environ.pop("HF_HUB_OFFLINE")
            os.environ.update({} if former is None else {"HF_HUB_OFFLINE": former})


def manifests_of(repository: str) -> Path:
    return home() / "manifests" / HubName(repository).folder


def write_manifest(model: PulledModel) -> None:
    """Makes a model one that is listed. Raises OSError."""
    path = model.manifest
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text_atomically(path, json.dumps({"version": _VERSION, **asdict(model)}, indent=1) + "\n")


def pulled_models(repository: str | None = None, *, is_complete: bool = True) -> list[PulledModel]:
    """All manifests, or those of a repository, the newest first. Models that lack a file are left out if `is_complete`.

    Raises StoreError for a manifest that cannot be read.
    """
    folder = home() / "manifests" if repository is None else manifests_of(repository)
    pattern = "*/*.json" if repository is None else "*.json"
    models = [model for path in sorted(folder.glob(pattern)) if (model := _read(path)) is not None]
    whole = [model for model in models if not (is_complete and model.missing())]
    return sorted(whole, key=lambda model: -model.pulled_at)


def _read(path: Path) -> PulledModel | None:
    try:
        with naming(path):
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("version") != _VERSION:
            raise ValueError(f"version is not {_VERSION}")
        files = tuple(PulledFile(**file) for file in data.pop("files"))
        revisions = tuple(data.pop("revisions"))
        if not (files and revisions):
            raise ValueError("no files or no revisions")
        return PulledModel(files=files, revisions=revisions, **data)
    except FileNotFoundError:  # it was removed after the folder was listed
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} is no manifest of a pulled model ({error}): remove it, and pull again") from None


def find_pulled(name: HubName, *, is_complete: bool = True) -> PulledModel | None:
    """The newest model of a name; a revision may also be the commit that another one was."""
    for model in pulled_models(name.repository, is_complete=is_complete):
        if model.is_variant(name.variant) and model.is_revision(name.revision):
            return model
    return None


def lock_repository(repository: str) -> AbstractContextManager[None]:
    """Held while the files of a repository are written or removed; waits for other processes."""
    return _lock(HubName(repository).folder, f"waiting for another process that pulls or removes {repository}")


def lock_aliases() -> AbstractContextManager[None]:
    """Held while an alias is written or removed."""
    return _lock("aliases", "waiting for another process that writes an alias")


@contextmanager
def _lock(name: str, stage: str) -> Iterator[None]:
    from huggingface_hub.utils import WeakFileLock

    path = home() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        with Stage(stage):
            stack.enter_context(WeakFileLock(path))
        yield
