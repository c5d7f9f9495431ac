"""From what a user names as a model to where it lies, and what its alias adds."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxinfer.data import embedded_path
from jaxinfer.store.aliases import Alias, read_alias
from jaxinfer.store.library import hint, repository_of
from jaxinfer.store.pull import Download, prepare_download
from jaxinfer.store.pulled import (
    MAIN,
    HubName,
    PulledModel,
    StoreError,
    UnknownModelError,
    find_pulled,
    is_offline,
)

_MAX_CHAIN = 8
_PART = r"[A-Za-z0-9][A-Za-z0-9_.\-]*"
_HUB_NAME = re.compile(
    rf"(?P<repository>{_PART}(?:/{_PART})?)(?::(?P<first>[^@:\s]+))?(?:@(?P<revision>[^@:\s]+))?(?::(?P<last>[^@:\s]+))?"
)


@dataclass(frozen=True)
class FoundModel:
    """Attributes:
    name: as the user wrote it. path: a checkpoint's folder, or a GGUF file; None for a repository that is not here.
    hub: the repository it is of, with the commit; None for others.
    options: what its alias sets of the options of `LLM`: quantize, draft. sampling: fields of `SamplingParams`.
    system: the alias's system prompt.
    """

    name: str
    path: Path | None
    hub: HubName | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None

    @property
    def source(self) -> tuple[str | Path, str | None]:
        """The argument of `checkpoints_convert.abstract`: the path, or a repository and its revision.

        Raises UnknownModelError for a GGUF file of a repository, whose header can be read only after it was pulled.
        """
        if self.path is not None:
            return self.path, None
        assert self.hub is not None
        if self.hub.variant is not None:
            raise UnknownModelError(f"{self.hub} is not here: jaxinfer pull {self.hub}")
        return self.hub.repository, self.hub.revision


def parse_hub_name(name: str, revision: str | None = None) -> HubName | None:
    """`user/model[@revision]`, `user/model:variant[@revision]`, or a short name `qwen3[:tag][@revision]`; None for what
    is no such name.

    Raises StoreError for two revisions, UnknownModelError for a tag that a short name does not have.
    """
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name or "://" in name or name.endswith(("/", ".safetensors", ".bin", ".pt")):
        return None
    if match["first"] and match["last"]:
        return None
    if name.endswith(".gguf") and not (match["first"] or match["last"]):
        return None
    if revision is not None and match["revision"]:
        raise StoreError(f"{name} names a revision, and revision={revision!r} another one")
    variant = match["first"] or match["last"]
    at = revision or match["revision"] or MAIN
    if (repository := repository_of(match["repository"], variant)) is not None:
        return HubName(repository, at)
    return HubName(match["repository"], at, variant)


def find_model(
    model: str | Path, revision: str | None = None, *, offline: bool | None = None, fetch: bool = True
) -> FoundModel:
    """Finds an embedded model, an alias, a folder, a GGUF file, a URL, or a repository, also by a short name, in this
    order.

    A repository that was pulled is used as it was pulled, without a request to the hub. Another one is pulled if
    `fetch`, unless `offline` (None: as HF_HUB_OFFLINE says), where only the hub's cache is looked in.

    Raises StoreError, and CheckpointError as `checkpoints_convert.resolve` and `pull`.
    """
    name = str(model)
    if isinstance(model, Path):
        return FoundModel(name, _resolved(model, revision))
    if (path := embedded_path(name)) is not None:
        return FoundModel(name, path)
    alias = _whole_alias(name)
    if alias is None:
        hub = _repository(name, revision)
        if hub is None:
            return FoundModel(name, _resolved(name, revision))
        return _in_hub(name, hub, is_offline() if offline is None else offline, fetch)
    if alias.revision is None:
        target = find_model(alias.model, revision, offline=offline, fetch=fetch)
    elif revision is not None:
        raise StoreError(f"revision={revision!r} is for repositories, and {name} is an alias")
    else:
        hub = _repository(alias.model, alias.revision, is_pinned=True)
        if hub is None:
            raise StoreError(f"the alias {name} has a revision, and its model {alias.model} is no repository's name")
        target = _in_hub(alias.model, hub, is_offline() if offline is None else offline, fetch)
    return replace(target, name=name, options=alias.options, sampling=alias.sampling, system=alias.system)


def alias_options(model: str) -> Mapping[str, str]:
    """Options of `LLM` that an alias sets; {} for any other name. Raises StoreError for a broken alias."""
    alias = _whole_alias(model)
    return {} if alias is None else alias.options


def find_path(model: str | Path, revision: str | None = None) -> Path:
    """Path of a model, for what reads its files alone; an alias's options are not applied, with a warning."""
    location = find_model(model, revision)
    if location.options:
        names = ", ".join(f"{name} = {value}" for name, value in location.options.items())
        warnings.warn(f"{location.name} is an alias with {names}, which is not applied here", stacklevel=2)
    assert location.path is not None
    return location.path


def prepare(model: str, revision: str | None = None) -> Download:
    """The download that pulling a repository, or an alias's, means; its configuration is downloaded.

    The hub resolves the revision, so that a branch that moved is pulled anew. Raises StoreError for a name that
    is no repository's, CheckpointError for one that cannot be loaded: before anything large is downloaded.
    """
    if embedded_path(model) is not None:
        raise StoreError(f"{model} is a part of jaxinfer: it need not be pulled")
    alias = _whole_alias(model)
    name = model if alias is None else alias.model
    own = None if alias is None else alias.revision
    hub = _repository(name, revision or own, is_pinned=own is not None)
    if hub is None:
        here = "is on this machine already" if _exists(name) else "is not of the form user/model[:variant][@revision]"
        raise StoreError(f"{name} {here}: repositories of the hub are pulled")
    if is_offline():
        raise StoreError(f"{name} cannot be pulled: HF_HUB_OFFLINE is set")
    return prepare_download(hub)


def pull(model: str, revision: str | None = None) -> PulledModel:
    """Downloads a model, or what of it is not here, and makes it one that is listed. Raises as `prepare` and
    `Download.fetch`."""
    return prepare(model, revision).fetch()


def _whole_alias(name: str) -> Alias | None:
    """The alias, with what aliases of its model add."""
    alias = read_alias(name)
    names = [name]
    while alias is not None and (inner := read_alias(alias.model)) is not None:
        names.append(inner.name)
        if inner.name in names[:-1] or len(names) > _MAX_CHAIN:
            raise StoreError(f"the aliases {' -> '.join(names)} never come to a model")
        alias = replace(
            inner,
            name=name,
            quantize=alias.quantize or inner.quantize,
            draft=alias.draft or inner.draft,
            system=inner.system if alias.system is None else alias.system,
            sampling={**inner.sampling, **alias.sampling},
            revision=alias.revision or inner.revision,
        )
    return alias


def _repository(name: str, revision: str | None, *, is_pinned: bool = False) -> HubName | None:
    """The repository of that name, if there is no file or folder of it. The name of a pinned alias always is one's."""
    return None if not is_pinned and _exists(name) else parse_hub_name(name, revision)


def _exists(name: str) -> bool:
    return bool(name) and "\0" not in name and Path(name).expanduser().exists()


def _resolved(model: str | Path, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if revision is None and _exists(str(model)) and (path.is_dir() or path.suffix == ".gguf"):
        return path

    import checkpoints_convert  # imports JAX, which takes longer than to list all models

    return checkpoints_convert.resolve(model, revision=revision)


def _in_hub(name: str, hub: HubName, offline: bool, fetch: bool) -> FoundModel:
    pulled = find_pulled(hub)
    if pulled is not None:
        return FoundModel(name, pulled.path, replace(hub, revision=pulled.commit))
    if not fetch:
        return FoundModel(name, None, hub)

    from checkpoints_convert.errors import CheckpointNotFoundError, HubUnreachableError
    from checkpoints_convert.hub import cached

    if not offline:
        try:
            pulled = prepare_download(hub).fetch()
            return FoundModel(name, pulled.path, replace(hub, revision=pulled.commit))
        except HubUnreachableError as error:
            if hub.variant is not None:
                raise
            try:  # another tool may have downloaded it
                path = cached(hub.repository, hub.revision)
            except CheckpointNotFoundError:
                raise error from None
            return FoundModel(name, path, replace(hub, revision=path.name))
    if hub.variant is not None:
        raise UnknownModelError(
            f"{name} was not pulled, and the hub may not be contacted (offline){hint(hub.repository, 'no network')}"
        )
    try:
        path = cached(hub.repository, hub.revision)
    except CheckpointNotFoundError as error:
        reason = f"{error}".removeprefix(f"{hub.repository}: ")
        raise CheckpointNotFoundError(hub.repository, f"{reason}{hint(hub.repository, 'no network')}") from None
    return FoundModel(name, path, replace(hub, revision=path.name))
