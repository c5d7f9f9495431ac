"""Names of served models: what clients call them, apart from where they lie on the server."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from jaxinfer.data import embedded_path
from jaxinfer.store import read_alias

_MAX_NAME = 200  # characters
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a GGUF file in several parts


def served_models(given: Iterable[str]) -> dict[str, str]:
    """The models by their names in requests, in the order in which they are given: each as `NAME=MODEL`, or as a
    model that is named by `public_name`.

    Raises ValueError for a name that cannot be one, and where one name would stand for two models.
    """
    models: dict[str, str] = {}
    for text in given:
        name, model = split_name(text)
        if models.setdefault(name, model) != model:
            raise ValueError(
                f"{models[name]} and {model} would both be served as {name!r}: name one of them, as in "
                f"--model OTHER={model}"
            )
    return models


def split_name(text: str) -> tuple[str, str]:
    """The name and the model of `NAME=MODEL`, or of a model alone. Raises ValueError for a name that cannot be one."""
    name, equals, model = text.partition("=")
    if not equals or "://" in name or _exists(text):
        return public_name(text), text
    if not (name and model and name.isprintable() and name == name.strip() and len(name) <= _MAX_NAME):
        raise ValueError(
            f"{text!r:.300} is no NAME=MODEL: a name has 1 to {_MAX_NAME} printable characters, without spaces at its "
            "ends, and a model follows it"
        )
    return name, model


def check_adapter_name(name: str, taken: Iterable[str]) -> None:
    """Raises ValueError for what cannot name an adapter in requests: names of models are taken, and commas separate
    names in metrics."""
    if name in taken:
        raise ValueError(f"adapter {name!r:.80} would have a name of the model itself")
    if not (name and name.isprintable() and name == name.strip() and len(name) <= _MAX_NAME and "," not in name):
        raise ValueError(
            f"{name!r:.300} cannot name an adapter: a name has 1 to {_MAX_NAME} printable characters, no comma, and no "
            "spaces at its ends"
        )


def public_name(model: str) -> str:
    """A model's name for clients, which does not show where it lies: of a folder, a GGUF file or a URL its last part,
    of any other model the text itself, such as a hub id or an alias."""
    if "://" in model:
        parts = urlsplit(model)
        last = parts.path.rstrip("/").rpartition("/")[2] or parts.hostname or ""
    elif is_path(model):
        last = os.path.basename(os.path.abspath(Path(model).expanduser()))  # a link's own name, not its target's
    else:
        return model
    return _PART.sub("", last.removesuffix(".gguf")) or "model"


def is_path(model: str) -> bool:
    """True for a folder or a file of this machine that is not hidden by an embedded model or an alias of that name."""
    if model.startswith(("/", "~", "./", "../")) or model in (".", ".."):
        return True
    return _exists(model) and embedded_path(model) is None and read_alias(model) is None


def _exists(text: str) -> bool:
    return "\0" not in text and Path(text).expanduser().exists()
