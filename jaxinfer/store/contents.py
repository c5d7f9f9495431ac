"""Models and aliases that are here, facts of a model, bytes of repositories on the disk; and copies of names."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.data import EMBEDDED, embedded_path
from jaxinfer.store.aliases import Alias, alias_path, aliases, read_alias, write_alias
from jaxinfer.store.names import FoundModel, UnknownModelError, find_model
from jaxinfer.store.pulled import HubName, PulledModel, find_pulled, hub_cache, pulled_models
from jaxinfer.store.remove import folder_bytes, users_of


@dataclass(frozen=True)
class StoredModel:
    """A name that can be loaded without the hub.

    Attributes:
      name: what loads it. kind: "pulled", "adapter" (pulled too), "alias" or "embedded". path: as of `FoundModel`.
      num_bytes: of its files. modified_at: when it was pulled or made, seconds since 1970.
      commit: of a repository. target: what an alias stands for. digest: tells models apart: of the name's files.
      options: what an alias sets, as of `Alias.to_dict`, without the model.
    """

    name: str
    kind: str
    path: Path
    num_bytes: int
    modified_at: float
    commit: str | None
    target: str | None
    digest: str
    options: Mapping[str, Any]


def list_models() -> tuple[StoredModel, ...]:
    """Pulled models, aliases of models that are here, and embedded models. None of them lacks a file.

    An alias that cannot be read is left out, with a warning. Raises StoreError for a manifest that cannot be
    read.
    """
    models = []
    newest: set[str] = set()
    for model in pulled_models():
        name = model.name if model.name not in newest else model.pinned_name
        newest.add(name)
        models.append(_pulled(name, model))
    models += [stored for alias in aliases() if (stored := _alias(alias)) is not None]
    for name in EMBEDDED:
        path = embedded_path(name)
        assert path is not None
        models.append(StoredModel(name, "embedded", path, *_size_and_time(path), None, None, _digest(name), {}))
    return tuple(models)


def _pulled(name: str, model: PulledModel) -> StoredModel:
    digest = _digest(*(f"{file.name} {file.digest}" for file in model.files))
    kind = "adapter" if model.is_adapter else "pulled"
    return StoredModel(name, kind, model.path, model.num_bytes, model.pulled_at, model.commit, None, digest, {})


def _alias(alias: Alias) -> StoredModel | None:
    """None where its model is not here, or is just being removed."""
    try:
        target = find_model(alias.name, fetch=False)
        if target.path is None:
            return None
        model = None if target.hub is None else find_pulled(target.hub)
        num_bytes = _size_and_time(target.path)[0] if model is None else model.num_bytes
        modified = alias_path(alias.name).stat().st_mtime
    except (ValueError, OSError):
        return None
    options = {key: value for key, value in alias.to_dict().items() if key not in ("model", "revision")}
    commit = None if target.hub is None else target.hub.revision
    digest = _digest(str(target.path), repr(sorted(alias.to_dict().items())))
    return StoredModel(alias.name, "alias", target.path, num_bytes, modified, commit, alias.model, digest, options)


def _size_and_time(path: Path) -> tuple[int, float]:
    """Bytes of a checkpoint's files, and when it was last changed."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files), path.stat().st_mtime


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def copy_model(source: str, name: str, *, overwrite: bool = False) -> Alias:
    """Makes an alias: of an alias a copy of its settings, of a pulled model a name of its present commit.

    Raises StoreError for a name that is taken, UnknownModelError for a source that is not here.
    """
    alias = read_alias(source)
    if alias is None:
        model, revision = pin_model(source)
        alias = Alias(name, model, revision)
    copied = replace(alias, name=name)
    write_alias(copied, overwrite=overwrite)
    return copied


def pin_model(model: str) -> tuple[str, str | None]:
    """A model as an alias names it: a repository with its commit, a folder with its whole path.

    Raises UnknownModelError for one that is not here.
    """
    if embedded_path(model) is not None or read_alias(model) is not None:
        return model, None
    location = find_model(model, fetch=False)
    if location.hub is not None and location.path is not None:
        pulled = find_pulled(location.hub)
        variant = location.hub.variant if pulled is None else pulled.variant
        return str(HubName(location.hub.repository, variant=variant)), location.hub.revision
    if location.path is None:
        raise UnknownModelError(f"{model} is not here: jaxinfer pull {model}")
    is_file = Path(model).expanduser().exists()
    return str(Path(model).expanduser().resolve()) if is_file else model, None


def show_model(name: str) -> dict[str, Any]:
    """Facts about a model that is here, as JSON values: where it lies, its size, configuration, license, chat template,
    quantization, and the aliases of it; of an adapter those of `checkpoints_convert.adapters.adapter_facts`, with
    "adapter" as its kind. Raises UnknownModelError, and CheckpointError for a damaged one."""
    from jax import tree

    import checkpoints_convert
    from checkpoints_convert.adapters import adapter_facts, is_adapter
    from jaxinfer.models import abstract_params
    from jaxinfer.quantization.tree import num_bytes

    location = find_model(name, fetch=False)
    if location.path is None:
        raise UnknownModelError(f"{name} is not here: jaxinfer pull {name}")
    pulled = None if location.hub is None else find_pulled(location.hub)
    place = {
        "name": name,
        "path": location.path,
        "repository": None if location.hub is None else location.hub.repository,
        "commit": None if location.hub is None else location.hub.revision,
        "pulled": None if pulled is None else pulled.pulled_on,
        "files": len(pulled.files) if pulled is not None else None,
        "bytes": _size_and_time(location.path)[0] if pulled is None else pulled.num_bytes,
        "license": _license(location, pulled),
    }
    if is_adapter(location.path):
        return {**place, "kind": "adapter", **adapter_facts(location.path)}
    config, params = checkpoints_convert.abstract(location.path)
    alias = read_alias(name)
    with checkpoints_convert.open_checkpoint(location.path) as checkpoint:
        quantization = checkpoint.quantization
        defaults = dict(checkpoint.generation_config)
    facts: dict[str, Any] = {
        **place,
        "architecture": config.architecture,
        "parameters": sum(math.prod(leaf.shape) for leaf in tree.leaves(abstract_params(config))),
        "layers": config.num_layers,
        "context": config.max_length,
        "dtype": config.dtype,
        "weight bytes": num_bytes(params),
        "quantization": quantization,
        "generation config": defaults or None,
        "chat template": _template(location.path),
        "aliases": [its.name for its in aliases() if its.model == name] if pulled is None else users_of(pulled),
    }
    if alias is not None:
        facts["alias"] = alias.to_dict()
    return facts


def _license(location: FoundModel, pulled: PulledModel | None) -> str | None:
    """License by the repository's page, or else the first line of a LICENSE file."""
    if pulled is not None and pulled.license is not None:
        return pulled.license
    files = [] if location.path is None or location.path.is_file() else sorted(location.path.glob("LICENSE*"))
    lines = files[0].read_text(encoding="utf-8", errors="replace").strip().splitlines() if files else []
    return lines[0].strip() if lines else None


def _template(path: Path) -> str | None:
    """The chat template; of a GGUF file that of its metadata."""
    import checkpoints_convert
    from jaxinfer.text import Tokenizer, TokenizerNotFoundError, tokenizer_files_of

    contents = checkpoints_convert.tokenizer_files(path)
    try:
        if contents is None:
            return Tokenizer.from_dir(path).chat_template
        return Tokenizer(tokenizer_files_of(contents)).chat_template if contents else None
    except TokenizerNotFoundError:
        return None


def disk_usage() -> list[dict[str, Any]]:
    """Bytes of each repository in the hub's cache, the largest first: of all files, of unfinished downloads, of files
    that no pulled model has; and the names of its pulled models."""
    models = pulled_models()
    rows = []
    for folder in sorted(hub_cache().glob("models--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/")
        own = [model for model in models if model.repository == repository]
        used = {(model.snapshot / file.name).resolve(): file.num_bytes for model in own for file in model.files}
        partial, total = folder_bytes(folder / "blobs", ".incomplete"), folder_bytes(folder)
        rows.append(
            {
                "repository": repository,
                "bytes": total,
                "unfinished bytes": partial,
                "other bytes": max(total - partial - sum(used.values()), 0),
                "models": [model.pinned_name for model in own],
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])
