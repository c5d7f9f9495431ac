"""Removing aliases, and pulled models with the files that nothing else needs."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.store.aliases import aliases, is_alias, remove_alias
from jaxinfer.store.names import UnknownModelError, parse_hub_name
from jaxinfer.store.pulled import (
    MAIN,
    HubName,
    PulledModel,
    StoreError,
    find_pulled,
    hub_cache,
    lock_repository,
    manifests_of,
    pulled_models,
)

_OTHER_PARTS = ("trees", ".no_exist")  # what `huggingface_hub` notes of a repository beside its files


@dataclass(frozen=True)
class Removed:
    """Attributes:
    removed: names that are no longer there. freed_bytes: of the disk.
    kept_bytes: of files of the removed models that stay, since `kept_by` have them too: aliases, other models of the
      repository, and snapshots that other tools downloaded.
    """

    removed: tuple[str, ...]
    freed_bytes: int = 0
    kept_bytes: int = 0
    kept_by: tuple[str, ...] = ()


def remove(name: str) -> Removed:
    """Removes an alias, whose model stays; or a pulled model, at the commit of the name, or all that no alias uses.

    A repository in the hub's cache of which nothing was pulled is removed whole. Waits for processes that download
    files of it. A process that has opened the files can go on reading them.

    Raises UnknownModelError for a name that is not here, StoreError where aliases use all of it.
    """
    if remove_alias(name):
        return Removed((name,))
    hub = parse_hub_name(name)
    if hub is None or not ((hub_cache() / hub.folder).exists() or manifests_of(hub.repository).exists()):
        raise UnknownModelError(f"{name} is not here: jaxinfer list shows what is")
    with lock_repository(hub.repository):
        return _remove_pulled(hub)


def _remove_pulled(hub: HubName) -> Removed:
    every = pulled_models(hub.repository, is_complete=False)
    is_whole = hub.revision == MAIN
    models = [
        model for model in every if model.is_variant(hub.variant) and (is_whole or model.is_revision(hub.revision))
    ]
    folder = hub_cache() / hub.folder
    if not models and (every or not is_whole or hub.variant is not None or not folder.exists()):
        names = ", ".join(model.pinned_name for model in every)
        raise UnknownModelError(f"{hub} is not here; of {hub.repository} there are {names or 'no pulled models'}")
    users = {model: users_of(model) for model in models}
    gone = [model for model in models if not users[model]]
    used = {name for names in users.values() for name in names}
    if not models:  # nothing of it was pulled
        used = {name for name, named in _names_in_aliases() if named.repository == hub.repository}
    if not gone and used:
        names = sorted(used)
        raise StoreError(f"{hub} is used by the aliases {', '.join(names)}: remove these first, jaxinfer rm {names[0]}")
    for model in gone:  # first: what has lost a file is not listed
        model.manifest.unlink(missing_ok=True)
    kept = [model for model in every if model not in gone]
    before = {path: path.stat().st_size for path in _blobs(gone) if path.exists()}
    total = folder_bytes(folder)
    if models:
        _unlink_models(folder, gone, kept)
    else:
        _unlink_all(folder, "refs", "snapshots")
    _remove_unlinked(folder)
    _remove_empty(folder, [model.commit for model in gone] if models else None)
    freed = total - folder_bytes(folder)
    kept_bytes = sum(size for path, size in before.items() if path.exists())
    kept_by = used | (_others(kept, before) if kept_bytes else set())
    names = tuple(model.pinned_name for model in gone) or (hub.repository,)
    return Removed(names, freed, kept_bytes, tuple(sorted(kept_by)))


def users_of(model: PulledModel) -> list[str]:
    """Names of the aliases that use this model, as their model or their draft."""
    users = set()
    for name, hub in _names_in_aliases():
        if hub.repository == model.repository and model.is_variant(hub.variant):
            named = find_pulled(hub) or find_pulled(hub, is_complete=False)
            if named is not None and named.manifest == model.manifest:
                users.add(name)
    return sorted(users)


def _names_in_aliases() -> Iterator[tuple[str, HubName]]:
    """Names of aliases, with the repositories that they name as a model or a draft."""
    for alias in aliases():
        for name, revision in ((alias.model, alias.revision), (alias.draft or "", None)):
            try:
                hub = None if not name or is_alias(name) else parse_hub_name(name, revision)
            except StoreError:  # two revisions, or a tag that a short name does not have
                continue
            if hub is not None:
                yield alias.name, hub


def _blobs(models: list[PulledModel]) -> set[Path]:
    return {(model.snapshot / file.name).resolve() for model in models for file in model.files}


def _others(kept: list[PulledModel], before: dict[Path, int]) -> set[str]:
    """Names of the models that have any of the files; snapshots of other tools, if there are none."""
    names = {model.pinned_name for model in kept if not _blobs([model]).isdisjoint(before)}
    return names or {"snapshots in the hub's cache that were not pulled"}


def _unlink_models(folder: Path, gone: list[PulledModel], kept: list[PulledModel]) -> None:
    """Removes the files of models from their snapshots, but not those that kept models or other tools have there."""
    for model in gone:
        beside = {file.name for kept_model in kept if kept_model.commit == model.commit for file in kept_model.files}
        own = {model.snapshot / file.name for file in model.files if file.name not in beside}
        if own.issuperset(_files(model.snapshot)):
            _remove_references(folder, model.commit)  # first: a branch names a whole snapshot
        for path in own:
            path.unlink(missing_ok=True)


def _unlink_all(folder: Path, *parts: str) -> None:
    for part in parts:
        for path in _files(folder / part):
            path.unlink(missing_ok=True)


def _remove_references(folder: Path, commit: str) -> None:
    for path in _files(folder / "refs"):
        with suppress(OSError):
            if path.read_text() == commit:
                path.unlink()
    (folder / "trees" / f"{commit}.json").unlink(missing_ok=True)


def _remove_unlinked(folder: Path) -> None:
    """Removes files that no snapshot links to, and unfinished downloads.

    Each under the lock that `huggingface_hub` holds while it downloads and links the file.
    """
    from huggingface_hub.utils import WeakFileLock

    for blob in sorted(_files(folder / "blobs")):
        digest = blob.name.partition(".")[0]
        lock = hub_cache() / ".locks" / folder.name / f"{digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.name not in _linked(folder):
                blob.unlink(missing_ok=True)  # an unfinished download was finished while this waited


def _linked(folder: Path) -> set[str]:
    """Names of the blobs that snapshots link to."""
    blobs = set()
    for path in _files(folder / "snapshots"):
        with suppress(OSError):
            blobs.add(path.readlink().name)
    return blobs


def _remove_empty(folder: Path, commits: Iterable[str] | None) -> None:
    """Removes empty folders of these snapshots, None: of all; and the repository's, if it has neither blobs nor
    snapshots. A folder in which another process has put a file meanwhile stays."""
    snapshots = folder / "snapshots"
    for part in [snapshots] if commits is None else [snapshots / commit for commit in commits]:
        _remove_empty_folders(part)
    for name in ("snapshots", "blobs"):
        with suppress(OSError):
            (folder / name).rmdir()
    if not ((folder / "snapshots").exists() or (folder / "blobs").exists()):
        _unlink_all(folder, "refs", *_OTHER_PARTS)
        _remove_empty_folders(folder)


def _remove_empty_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def _files(folder: Path) -> list[Path]:
    """Files and links below a folder. Folders that are removed meanwhile have none."""
    return [Path(path, name) for path, _, names in os.walk(folder) for name in names]


def folder_bytes(folder: Path, ending: str = "") -> int:
    """Bytes of the files below a folder, with that ending; of links nothing."""
    total = 0
    for path in _files(folder):
        if not path.name.endswith(ending):
            continue
        with suppress(OSError):
            total += 0 if path.is_symlink() else path.lstat().st_size
    return total
