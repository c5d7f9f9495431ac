"""From a path, a hub id or a URL to a local directory."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import translate
from pathlib import Path

from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError, HubUnreachableError
from checkpoints_convert.files import (
    COMPANION_FILES,
    CONFIG,
    MANIFEST,
    NATIVE_CONFIG,
    PARAMS,
    QUANTIZATION_FILES,
    WEIGHTS_INDEX,
    read_json,
)
from checkpoints_convert.formats import with_side_file
from checkpoints_convert.huggingface.config import model_config
from checkpoints_convert.safetensors_files import TensorHeader, weight_files
from checkpoints_convert.storage import is_url, stage

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*(/[A-Za-z0-9][A-Za-z0-9_.\-]*)?")
_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.\-]*:/[^/]")
DESCRIBING = (*COMPANION_FILES, *QUANTIZATION_FILES, WEIGHTS_INDEX, NATIVE_CONFIG, MANIFEST)
_NO_CONNECTION = re.compile(r"\b(ConnectError|ConnectTimeout|ReadTimeout|ConnectionError|gaierror|ProxyError)\b")
_NO_NETWORK = "no network: it is not in the local cache, and the hub cannot be reached; give a folder, or demo"
_NO_SAFETENSORS = "the repository has no safetensors of a whole model; pickled weights (.bin, .pt) are never opened. "
# Draft heads that are published as pickles, and heads of the same model as safetensors.
_OTHER_HEADS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    "Tengyunw/qwen3_8b_eagle3": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "AngelSlim/Qwen3-8B_eagle3": "RedHatAI/Qwen3-8B-speculator.eagle3",
}
WEIGHTS = ("model.safetensors", "model-*.safetensors")


def no_safetensors(repo_id: str) -> CheckpointError:
    """The error of a repository that has weights in another form alone, with what can be opened instead."""
    other = _OTHER_HEADS.get(repo_id)
    advice = (
        f"{other} is a head as safetensors" if other else "Convert them to safetensors with the library that wrote them"
    )
    return CheckpointError(repo_id, _NO_SAFETENSORS + advice)


def resolve(path_or_hub_id: str | Path, *, revision: str | None = None) -> Path:
    """The local directory of a checkpoint, or its GGUF file; downloaded from the hub if no directory has that name.

    For a URL such as gs://bucket/model (any store that fsspec opens), the directory has copies of the small files; the
    weights stay in the store and are read by ranges when this process opens the directory.

    Only safetensors, JSON and tokenizer files of a repository are downloaded; never pickles, never code. Configuration
    files come first, so that an unsupported model raises before its weights are downloaded. The environment variables
    HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME have the meaning of `huggingface_hub`.

    Args:
      revision: branch, tag or commit of a hub id.

    Raises:
      CheckpointNotFoundError: no such directory or repository, no access to it, or no connection.
      CheckpointError: an unsupported model. ValueError: a revision of a local directory or a URL.
    """
    name = str(path_or_hub_id)
    if is_url(name):
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for hub ids; {name} is a URL")
        return stage(name)
    path = Path(path_or_hub_id).expanduser()
    is_path = bool(name) and "\0" not in name
    if is_path and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        if revision is not None:
            kind = "directory" if path.is_dir() else "file"
            raise ValueError(f"revision={revision!r} is for hub ids; {name} is a local {kind}")
        return path
    if is_path and path.is_file():
        raise CheckpointError(path, "is a file: pass the directory it lies in, with its config.json")
    if isinstance(path_or_hub_id, Path) and _URL_AS_PATH.match(name):
        raise CheckpointNotFoundError(name, "no such directory; a URL is a string, which a Path takes a slash from")
    if _looks_local(path_or_hub_id) or not _HUB_ID.fullmatch(name):
        raise CheckpointNotFoundError(name, "no such directory, and not the form of a hub id (owner/name)")
    return _download(name, revision)


def is_local(path_or_hub_id: str | Path) -> bool:
    """True if `resolve` does not access the hub: for an existing path, a URL, or a name that is no hub id."""
    name = str(path_or_hub_id)
    if not name or "\0" in name or _looks_local(path_or_hub_id) or not _HUB_ID.fullmatch(name):
        return True
    return Path(path_or_hub_id).expanduser().exists()


def describe(repo_id: str, revision: str | None) -> tuple[Path, dict[str, TensorHeader] | None]:
    """A directory with the configuration files of a repository, and the headers {name: (dtype, shape)} of its
    safetensors, read without the weights; None as headers for a converted checkpoint.

    Raises CheckpointNotFoundError as `resolve`, CheckpointError for a repository without safetensors.
    """
    from huggingface_hub import errors, get_safetensors_metadata, snapshot_download

    with explained(repo_id, revision), _without_bars():
        snapshot = Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(DESCRIBING)))
    if (snapshot / NATIVE_CONFIG).is_file():
        return snapshot, None
    with explained(repo_id, revision), _without_bars():
        try:
            metadata = get_safetensors_metadata(repo_id, revision=snapshot.name)
        except errors.NotASafetensorsRepoError:
            raise CheckpointError(repo_id, "the repository has no safetensors of a whole model") from None
    return snapshot, {
        name: (tensor.dtype, tuple(tensor.shape))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


@contextmanager
def _without_bars() -> Iterator[None]:
    """The client shows no bars of its own: headers are small."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def cached(repo_id: str, revision: str | None) -> Path:
    """The directory of a repository in the hub's cache, without a request.

    Raises CheckpointNotFoundError if it is not there, or not complete.
    """
    from huggingface_hub import errors, snapshot_download

    patterns = [*DESCRIBING, *WEIGHTS, f"{PARAMS}/*"]
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, local_files_only=True))
    except errors.IncompleteSnapshotError as error:
        reason = f"is not complete in the local cache, and the hub may not be contacted (offline): {_first_line(error)}"
    except errors.LocalEntryNotFoundError:
        reason = "is not in the local cache, and the hub may not be contacted (offline)"
    raise CheckpointNotFoundError(repo_id, reason)


def _looks_local(path_or_hub_id: str | Path) -> bool:
    name = str(path_or_hub_id)
    return (
        isinstance(path_or_hub_id, Path)
        or name.startswith(("/", ".", "~"))
        or name.endswith((".safetensors", ".gguf", ".bin", ".pt"))
        or ".." in name
    )


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    with explained(repo_id, revision):
        snapshot = Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(DESCRIBING)))
    if (snapshot / NATIVE_CONFIG).is_file():
        weights = ["params/*"]
    elif (snapshot / CONFIG).is_file():
        weights = check_description(snapshot, repo_id) or list(WEIGHTS)
    else:
        raise CheckpointNotFoundError(repo_id, f"the repository has no {CONFIG}")
    with explained(repo_id, revision):
        # The commit, not the branch, so that both calls see the same state of the repository.
        snapshot = Path(snapshot_download(repo_id, revision=snapshot.name, allow_patterns=weights))
    present = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*")]
    if not any(re.fullmatch(translate(pattern), name) for pattern in weights for name in present):
        raise no_safetensors(repo_id)
    return snapshot


def check_description(snapshot: Path, repo_id: str) -> list[str] | None:
    """The files of weights that a repository's index names; None without an index. `snapshot` has its configuration.

    Raises CheckpointError for a model that is not supported.
    """
    config = read_json(snapshot / CONFIG)
    try:
        model_config(with_side_file(snapshot, config), f"{repo_id}/{CONFIG}")
    except CheckpointError as error:
        if not config.get("auto_map"):
            raise
        reason = f"the model is code of the repository (auto_map), which is never run; {error}"
        raise CheckpointError(repo_id, reason) from None
    return weight_files(snapshot)


@contextmanager
def explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns the errors of huggingface_hub into CheckpointNotFoundError, with what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointNotFoundError(
            repo_id, "access is gated: accept the model's terms on its page, then set HF_TOKEN to a token of yours"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointNotFoundError(repo_id, f"the repository has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointNotFoundError(
            repo_id, "no such directory, and no such repository on the hub; if it is private, set HF_TOKEN"
        ) from None
    except errors.IncompleteSnapshotError as error:
        raise CheckpointNotFoundError(repo_id, f"the local cache is incomplete: {_first_line(error)}") from None
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub gave {_first_line(error)}"
        if not constants.HF_HUB_OFFLINE and _has_no_connection(error):
            raise HubUnreachableError(repo_id, _NO_NETWORK) from None
        raise CheckpointNotFoundError(repo_id, f"is not in the local cache, and {reason}") from None
    except errors.HfHubHTTPError as error:
        raise CheckpointNotFoundError(repo_id, f"the hub answered: {_first_line(error)}") from None
    except InterruptedError:  # the caller stopped it
        raise
    except Exception as error:
        if _has_no_connection(error):
            raise HubUnreachableError(repo_id, _NO_NETWORK) from None
        if isinstance(error, OSError):
            raise CheckpointNotFoundError(repo_id, f"could not be fetched: {_first_line(error)}") from None
        raise


def _has_no_connection(error: BaseException | None) -> bool:
    """True if the hub could not be reached: by the errors' names, as versions of huggingface_hub have other clients."""
    while error is not None:
        names = [*(kind.__name__ for kind in type(error).__mro__), _first_line(error)]
        if any(map(_NO_CONNECTION.search, names)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
