"""Removing aliases, and pulled models with the files that nothing else needs."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.store.aliases import alias_path, aliases, read_alias
from jaxinfer.store.names import UnknownModelError, parse_hub_name
from jaxinfer.store.pulled import (
    MAIN,
    HubName,
    PulledModel,
    StoreError,
    find_pulled,
    hub_cache,
    lock_repository,
    pulled_models,
)


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

    A repository in the hub's cache that was not pulled, or not to its end, is removed whole. Waits for a process that
    pulls it. A process that has opened the files can go on reading them.

    Raises UnknownModelError for a name that is not here, StoreError where aliases use all of it.
    """
    if read_alias(name) is not None:
        alias_path(name).unlink(missing_ok=True)
        return Removed((name,))
    hub = parse_hub_name(name)
    if hub is None or not (hub_cache() / hub.folder).exists():
        raise UnknownModelError(f"{name} is not here: jaxinfer list shows what is")
    with lock_repository(hub.repository):
        return _remove_pulled(hub)


def _remove_pulled(hub: HubName) -> Removed:
    every = pulled_models(hub.repository)
    is_whole = hub.revision == MAIN
    models = [
        one for one in every if one.variant == hub.variant and (is_whole or hub.revision in (one.revision, one.commit))
    ]
    users = {one: users_of(one) for one in models}
    gone = [one for one in models if not users[one]]
    if models and not gone:
        names = ", ".join(sorted({name for one in models for name in users[one]}))
        raise StoreError(
            f"{hub} is used by the aliases {names}: remove these first, jaxinfer rm {names.split(', ')[0]}"
        )
    if not models and (every or not is_whole or hub.variant is not None):
        names = ", ".join(one.pinned_name for one in every)
        raise UnknownModelError(f"{hub} is not here; of {hub.repository} there are {names or 'no pulled models'}")
    for one in gone:  # first: what has lost a file is not listed
        one.manifest.unlink(missing_ok=True)
    kept = [one for one in every if one not in gone]
    before = {path: path.stat().st_size for path in _blobs(gone)}
    total = folder_bytes(hub_cache() / hub.folder)
    if models:
        _remove_files(hub, gone, kept)
    else:
        _remove_repository(hub)
    freed = total - folder_bytes(hub_cache() / hub.folder)
    kept_bytes = sum(size for path, size in before.items() if path.exists())
    kept_by = {name for names in users.values() for name in names} | (_others(kept, before) if kept_bytes else set())
    names = tuple(one.pinned_name for one in gone) or (hub.repository,)
    return Removed(names, freed, kept_bytes, tuple(sorted(kept_by)))


def users_of(model: PulledModel) -> list[str]:
    """Aliases whose model, or whose draft, this one is."""
    found = []
    for alias in aliases():
        for name, revision in ((alias.model, alias.revision), (alias.draft or "", None)):
            hub = None if not name or read_alias(name) is not None else parse_hub_name(name, revision)
            if hub is None or (hub.repository, hub.variant) != (model.repository, model.variant):
                continue
            named = find_pulled(hub)
            if named is not None and named.commit == model.commit:
                found.append(alias.name)
    return sorted(set(found))


def _blobs(models: list[PulledModel]) -> set[Path]:
    return {(one.snapshot / file.name).resolve() for one in models for file in one.files}


def _others(kept: list[PulledModel], before: dict[Path, int]) -> set[str]:
    """Names of the models that have any of the files; snapshots of other tools, if there are none."""
    names = {one.pinned_name for one in kept if not _blobs([one]).isdisjoint(before)}
    return names or {"snapshots in the hub's cache that were not pulled"}


def _remove_files(hub: HubName, gone: list[PulledModel], kept: list[PulledModel]) -> None:
    """Removes snapshots without a kept model, of others the files that only removed models have; then what no
    snapshot links to."""
    folder = hub_cache() / hub.folder
    for model in gone:
        beside = {file.name for one in kept if one.commit == model.commit for file in one.files}
        if beside:
            for file in model.files:
                if file.name not in beside:
                    (model.snapshot / file.name).unlink(missing_ok=True)
        else:
            _remove_references(folder, model.commit)
            shutil.rmtree(model.snapshot, ignore_errors=True)
    if any((folder / "snapshots").glob("*/*")):
        _remove_unlinked(folder)
    else:
        _remove_repository(hub)


def _remove_references(folder: Path, commit: str) -> None:
    for path in (folder / "refs").rglob("*"):
        with suppress(OSError):
            if path.is_file() and path.read_text() == commit:
                path.unlink()
    (folder / "trees" / f"{commit}.json").unlink(missing_ok=True)


def _remove_unlinked(folder: Path) -> None:
    """Removes files that no snapshot links to, and unfinished downloads.

    Each under the lock that `huggingface_hub` holds while it downloads and links the file.
    """
    from huggingface_hub.utils import WeakFileLock

    for blob in sorted((folder / "blobs").iterdir()):
        digest = blob.name.partition(".")[0]
        lock = hub_cache() / ".locks" / folder.name / f"{digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.name not in _linked(folder):
                blob.unlink()


def _linked(folder: Path) -> set[str]:
    """Names of the blobs that snapshots link to."""
    links = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink())
    return {path.readlink().name for path in links}


def _remove_repository(hub: HubName) -> None:
    folder = hub_cache() / hub.folder
    # Snapshots before blobs, so that no snapshot lacks a file if this is killed.
    for part in ("refs", "snapshots", "blobs"):
        shutil.rmtree(folder / part, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; of links nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            status = path.lstat()
            total += status.st_size if not path.is_symlink() and path.is_file() else 0
    return total
