"""Pulling a repository of the hub: which files, whether they can be used, whether there is room, then the download."""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from typing import Any

from jaxinfer.checks import format_bytes
from jaxinfer.progress import Stage
from jaxinfer.store.download import Transfer, missing_bytes, set_reference
from jaxinfer.store.library import hint
from jaxinfer.store.pulled import (
    HubName,
    PulledFile,
    PulledModel,
    StoreError,
    find_pulled,
    gguf_name,
    has_adapter,
    hub_cache,
    lock_repository,
    pulled_models,
    write_manifest,
)

_NUM_SHOWN = 12
_GGUF = re.compile(r"(?P<stem>.+?)(?P<part>-\d{5}-of-\d{5})?\.gguf")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Download:
    """A model to pull, before its weights are downloaded.

    Attributes:
      name: with the revision as it was asked for. commit: what that is at present. files: all of the model's files.
      num_missing_bytes: what is still to be received. license: as the repository's page says.
    """

    name: HubName
    commit: str
    files: tuple[PulledFile, ...]
    num_missing_bytes: int
    license: str | None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def is_adapter(self) -> bool:
        """True for a LoRA adapter of another model."""
        return has_adapter(self.files)

    @property
    def configuration(self) -> Path:
        """The folder with the configuration files, which were downloaded."""
        return hub_cache() / self.name.folder / "snapshots" / self.commit

    def check_room(self) -> None:
        """Raises StoreError if the disk has no room for what is missing."""
        folder = next(path for path in (hub_cache(), *hub_cache().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        if self.num_missing_bytes > free:
            raise StoreError(
                f"{self.name}: {format_bytes(self.num_missing_bytes)} are to be downloaded, and {format_bytes(free)} "
                f"are free in {folder}: jaxinfer disk shows what takes room; HF_HOME sets another folder"
            )

    def fetch(self, *, on_bytes: Callable[[int], None] | None = None, stop: Event | None = None) -> PulledModel:
        """Downloads what is missing, checks it, and writes the manifest.

        `on_bytes` is called with the bytes that are there, from several threads; `stop` ends the download.

        Raises StoreError where there is no room, CheckpointError for files that could not be downloaded or are damaged.
        """
        from checkpoints_convert.hub import explained

        with lock_repository(self.name.repository):
            replace(self, num_missing_bytes=missing_bytes(self.name, self.files)).check_room()
            stage = Stage(f"pulling {self.name}", self.num_bytes, "B")
            with stage, explained(self.name.repository, self.commit):
                transfer = Transfer(self.name, self.commit, stage, on_bytes, stop or Event())
                transfer.run(self.files, trusted=_checked(self.name))
            return self._record()

    def _record(self) -> PulledModel:
        """Writes the manifest, if all files are there."""
        model = PulledModel(
            self.name.repository,
            self._revisions(),
            self.commit,
            self.files,
            time.time(),
            self.name.variant,
            self.license,
        )
        if missing := model.missing():
            raise StoreError(f"{self.name}: {', '.join(missing[:3])} was removed while it was pulled: pull it again")
        set_reference(self.name, self.commit)
        write_manifest(model)
        return model

    def _revisions(self) -> tuple[str, ...]:
        """That of the name, and those by which the commit was pulled before, if no newer commit has them. The commit
        itself is one only without any other."""
        former = pulled_models(self.name.repository)
        names = [self.name.revision]
        for model in former:
            if model.commit == self.commit and model.variant == self.name.variant:
                for revision in model.revisions:
                    if find_pulled(replace(self.name, revision=revision)) == model:
                        names.append(revision)
        return tuple(dict.fromkeys(name for name in names if name != self.commit)) or (self.commit,)


def _checked(name: HubName) -> frozenset[str]:
    """Hashes of files that were compared with their bytes when another model of the repository was pulled."""
    models = pulled_models(name.repository)
    return frozenset(file.digest for model in models for file in model.files if file.digest is not None)


def prepare_download(name: HubName) -> Download:
    """Asks the hub which files a model has, and downloads those that describe it.

    Raises CheckpointError for a repository that is not there, needs a token, has no safetensors, or whose model is not
    supported: before anything large is downloaded.
    """
    info = _ask(name)
    assert info.sha is not None
    every = tuple(_file(sibling) for sibling in info.siblings or ())
    license = getattr(info.card_data, "license", None) if info.card_data is not None else None
    if name.variant is not None:
        variant, files = _gguf_files(name, every)
        name = replace(name, variant=variant)
    else:
        files = _checkpoint_files(name, info.sha, every)
    return Download(name, info.sha, files, missing_bytes(name, files), str(license) if license else None)


def _ask(name: HubName) -> Any:
    """The hub's description of a repository. Raises CheckpointNotFoundError, with the short name that may be meant."""
    from huggingface_hub import HfApi

    from checkpoints_convert import CheckpointNotFoundError
    from checkpoints_convert.hub import explained

    try:
        with Stage(f"asking for {name}"), explained(name.repository, name.revision):
            return HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
    except CheckpointNotFoundError as error:
        reason = "; ".join(error.problems)
        if not (more := hint(name.repository, reason)):
            raise
        raise type(error)(name.repository, reason + more) from None


def _file(sibling: Any) -> PulledFile:
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    is_hash = isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest)
    return PulledFile(sibling.rfilename, sibling.size or 0, digest if is_hash else None)


def _checkpoint_files(name: HubName, commit: str, every: Sequence[PulledFile]) -> tuple[PulledFile, ...]:
    """The files of a checkpoint of safetensors, or of one that `jaxinfer convert` wrote."""
    from checkpoints_convert import CheckpointError
    from checkpoints_convert.files import NATIVE_CONFIG, PARAMS
    from checkpoints_convert.hub import DESCRIBING, WEIGHTS, check_description, explained, no_safetensors

    names = {file.name for file in every}
    is_native = NATIVE_CONFIG in names
    if has_adapter(every):
        return _adapter_files(name, commit, every)
    if not is_native:
        _check_kind(name, every)
    describing = [file for file in every if _is_any(file.name, DESCRIBING)]
    with lock_repository(name.repository), Stage(f"reading {name}") as stage, explained(name.repository, commit):
        Transfer(name, commit, stage).run(describing, trusted=_checked(name))
    if is_native:
        weights = [file for file in every if file.name.startswith(f"{PARAMS}/")]
    else:
        wanted = check_description(hub_cache() / name.folder / "snapshots" / commit, name.repository)
        if wanted is not None and (absent := sorted(set(wanted) - names)):
            raise CheckpointError(name.repository, f"the index names {absent[0]!r}, which the repository does not have")
        weights = [file for file in every if _is_any(file.name, WEIGHTS if wanted is None else wanted)]
    if not weights:
        raise no_safetensors(name.repository)
    return (*describing, *(file for file in weights if file not in describing))


def _adapter_files(name: HubName, commit: str, every: Sequence[PulledFile]) -> tuple[PulledFile, ...]:
    """The files of a LoRA adapter in PEFT's form."""
    from checkpoints_convert import CheckpointError
    from checkpoints_convert.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_of_tokenizer
    from checkpoints_convert.hub import explained

    if not any(file.name == ADAPTER_WEIGHTS for file in every):
        raise CheckpointError(
            name.repository, f"the adapter has no {ADAPTER_WEIGHTS}; pickled weights (.bin, .pt) are never opened"
        )
    describing = [file for file in every if file.name == ADAPTER_CONFIG or is_of_tokenizer(file.name)]
    with lock_repository(name.repository), Stage(f"reading {name}") as stage, explained(name.repository, commit):
        Transfer(name, commit, stage).run(describing, trusted=_checked(name))
    return (*describing, *(file for file in every if file.name == ADAPTER_WEIGHTS))


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    """Tells if a name matches one of the patterns; * matches no slash."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in patterns)


def _check_kind(name: HubName, every: Sequence[PulledFile]) -> None:
    """Raises CheckpointError for a repository without config.json or safetensors, with what it has."""
    from checkpoints_convert import CheckpointError, CheckpointNotFoundError
    from checkpoints_convert.files import CONFIG
    from checkpoints_convert.hub import no_safetensors

    if any(file.name.endswith(".safetensors") and "/" not in file.name for file in every):
        if not any(file.name == CONFIG for file in every):
            raise CheckpointNotFoundError(name.repository, f"the repository has no {CONFIG}")
        return
    if variants := _variants(every):
        shown = ", ".join(f"{name.repository}:{variant}" for variant in list(variants)[:_NUM_SHOWN])
        raise CheckpointError(name.repository, f"the repository has GGUF files: name one of them, {shown}")
    if any(file.name.endswith(_PICKLED) for file in every):
        raise no_safetensors(name.repository)
    if any(file.name.endswith(".py") for file in every):
        raise CheckpointError(name.repository, "the repository has code but no weights, and its code is never run")
    raise CheckpointError(name.repository, "the repository has no safetensors: it is no model that can be loaded")


def _variants(every: Sequence[PulledFile]) -> dict[str, list[PulledFile]]:
    """GGUF checkpoints of a repository, with their parts, by what their names do not have in common: their
    quantization as a rule."""
    groups: dict[str, list[PulledFile]] = {}
    for file in sorted(every, key=lambda file: file.name):
        match = _GGUF.fullmatch(file.name)
        if match and "mmproj" not in file.name:
            groups.setdefault(match["stem"], []).append(file)
    variants: dict[str, list[PulledFile]] = {}
    for stem, files in groups.items():
        base = stem.rpartition("/")[2]
        match = re.search(r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|F16|F32|BF16))$", base)
        key = match[1] if match else base
        variants[key if key not in variants else base] = files
    return variants


def _gguf_files(name: HubName, every: Sequence[PulledFile]) -> tuple[str, tuple[PulledFile, ...]]:
    """One GGUF checkpoint, by its quantization such as Q4_K_M or by a file's name: the variant, and its parts."""
    from checkpoints_convert import CheckpointError

    variants = _variants(every)
    wanted = gguf_name(str(name.variant))
    keys = [key for key, files in variants.items() if wanted in (gguf_name(key), gguf_name(files[0].name))]
    if not keys:
        shown = ", ".join(list(variants)[:_NUM_SHOWN]) or "no GGUF file"
        raise CheckpointError(name.repository, f"the repository has no {name.variant}; it has {shown}")
    files = variants[keys[0]]
    match = re.search(r"-of-(\d{5})\.gguf$", files[0].name)
    if match and len(files) != int(match[1]):
        raise CheckpointError(name.repository, f"has {len(files)} of the {int(match[1])} parts of {keys[0]}")
    return keys[0], tuple(files)
