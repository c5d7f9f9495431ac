"""Short names of models, such as qwen3:0.6b, and the repositories of the hub that they stand for: library.toml."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jaxinfer.checks import did_you_mean
from jaxinfer.store.pulled import UnknownModelError

LATEST = "latest"  # as a tag, what the name alone stands for


def short_names() -> Mapping[str, Mapping[str, str]]:
    """Names with their tags, the default one first, and the repositories of these."""
    return _table()["names"]


def repository_of(name: str, tag: str | None = None) -> str | None:
    """The repository of a short name, in upper or lower case; None if `name` is not one.

    Raises UnknownModelError for a tag that the name does not have, with those that it has.
    """
    tags = short_names().get(name.lower())
    if tags is None:
        return None
    if tag is None or tag.lower() == LATEST:
        return next(iter(tags.values()))
    repository = tags.get(tag.lower())
    if repository is None:
        shown = ", ".join(f"{name}:{known_tag}" for known_tag in tags)
        raise UnknownModelError(
            f"{name} has no tag {tag!r:.60}, but {shown}; other models are named by their repository, user/model, and "
            "their GGUF files user/model:Q4_K_M"
        )
    return repository


def hint(repository: str, reason: str) -> str:
    """A clause, or "", for the end of an error: the likely mistake where a repository could not be had for a reason."""
    if "/" not in repository:
        return did_you_mean(repository.lower(), short_names(), cutoff=0.7)
    is_gated = repository.startswith(tuple(_table()["gated"]))
    if is_gated and "gated" not in reason and "no network" not in reason:
        return "; it is gated: accept the model's terms on its page, then set HF_TOKEN to a token of yours"
    return ""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("library.toml").read_text(encoding="utf-8"))
