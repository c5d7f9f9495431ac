"""Aliases: names that users give a model, with what is to be used with it, each in a small TOML file."""

import json
import math
import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxinfer.checks import did_you_mean
from jaxinfer.data import EMBEDDED
from jaxinfer.files import write_text_atomically
from jaxinfer.speculative import names_kind
from jaxinfer.store.pulled import StoreError, home, lock_aliases

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*(:[A-Za-z0-9_.\-]+)?")
_MAX_LENGTH = 120
_SUFFIX = ".toml"


@dataclass(frozen=True)
class Alias:
    """Attributes:
    name: as users write it. model: a folder, a GGUF file, a repository, an embedded model or another alias.
    revision: of a repository: the commit at which it was made.
    quantize, draft: as of `LLMOptions`. system: put in front of conversations that have no system message.
    sampling: fields of `SamplingParams`, over those of the checkpoint's generation_config.
    """

    name: str
    model: str
    revision: str | None = None
    quantize: str | None = None
    draft: str | None = None
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """The options of `LLM` that it sets."""
        options = {"quantize": self.quantize, "draft": self.draft}
        return {name: value for name, value in options.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """The content of its file."""
        values = {name: value for name, value in vars(self).items() if name not in ("name", "sampling")}
        values = {name: value for name, value in values.items() if value is not None}
        return {**values, **({"sampling": dict(self.sampling)} if self.sampling else {})}


def alias_path(name: str) -> Path:
    return home() / "aliases" / f"{name}{_SUFFIX}"


def is_alias_name(name: str) -> bool:
    """True if an alias may have the name: letters, digits, and - _ . with one colon, and no name of another kind."""
    return (
        _NAME.fullmatch(name) is not None
        and len(name) <= _MAX_LENGTH
        and name not in EMBEDDED
        and not names_kind(name)
        and not name.endswith((".gguf", ".safetensors"))
    )


def is_alias(name: str) -> bool:
    """True if there is an alias of that name; its file may be broken."""
    return is_alias_name(name) and alias_path(name).exists()


def read_alias(name: str) -> Alias | None:
    """The alias of that name, or None. Raises StoreError for a file that is not one, with the key."""
    if not is_alias_name(name):
        return None
    path = alias_path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None
    return parse_alias(name, text, path)


def parse_alias(name: str, text: str, where: str | Path) -> Alias:
    """Reads and checks the content of an alias's file. Raises StoreError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StoreError(f"{where} is not TOML: {error}") from None
    known = [field.name for field in fields(Alias) if field.name != "name"]
    for key, value in data.items():
        if key not in known:
            raise StoreError(f"{where}: {key!r} is no key of an alias{did_you_mean(key, known)}")
        if not isinstance(value, dict if key == "sampling" else str):
            kind = "a table" if key == "sampling" else "a text"
            raise StoreError(f"{where}: {key} must be {kind}, got {value!r:.60}")
    if not data.get("model"):
        raise StoreError(f"{where}: model is missing: the model that {name} stands for")
    alias = Alias(name, **data)
    _check_sampling(alias, where)
    return alias


def _check_sampling(alias: Alias, where: str | Path) -> None:
    from jaxinfer.sampling.params import SamplingParams, SamplingParamsError

    try:
        SamplingParams.from_dict({"max_tokens": None, **alias.sampling})
    except (SamplingParamsError, TypeError) as error:
        raise StoreError(f"{where}: sampling: {error}") from None


def aliases() -> list[Alias]:
    """All aliases, by name. A file that cannot be read as one is left out, with a warning."""
    readable = []
    for path in sorted((home() / "aliases").glob(f"*{_SUFFIX}")):
        name = path.name.removesuffix(_SUFFIX)
        try:
            alias = read_alias(name)
        except StoreError as error:
            warnings.warn(f"{error}: the alias is left out; jaxinfer rm {name} removes it", stacklevel=2)
            continue
        if alias is not None:
            readable.append(alias)
    return readable


def write_alias(alias: Alias, *, overwrite: bool = False) -> Path:
    """Writes an alias's file.

    Raises StoreError for a name that cannot be one, or that is taken, and for a model that is an alias of this one.
    """
    if not is_alias_name(alias.name):
        raise StoreError(
            f"{alias.name!r} cannot be an alias: letters, digits, - _ and . with at most one colon, such as coder or "
            "coder:small, and no name that means something else (demo, ngram, layers:N, *.gguf)"
        )
    path = alias_path(alias.name)
    _check_sampling(alias, alias.name)
    if alias.quantize is not None:
        from jaxinfer.quantization import recipe  # imports JAX, which reading an alias need not

        try:
            recipe(alias.quantize)
        except ValueError as error:
            raise StoreError(f"{alias.name}: quantize: {error}") from None
    text = toml_text(alias.to_dict())
    with lock_aliases():
        if path.exists() and not overwrite:
            message = f"the alias {alias.name} exists already: --overwrite replaces it, or jaxinfer rm {alias.name}"
            raise StoreError(message)
        _check_cycle(alias)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text_atomically(path, text)
    return path


def _check_cycle(alias: Alias) -> None:
    """Raises StoreError for an alias that stands for itself, by way of others too."""
    names, model = [alias.name], alias.model
    while model not in names[1:]:
        names.append(model)
        if model == alias.name:
            raise StoreError(f"the aliases {' -> '.join(names)} never come to a model")
        inner = read_alias(model)
        if inner is None:
            return
        model = inner.model


def remove_alias(name: str) -> bool:
    """Removes an alias's file, also a broken one; returns whether there was one."""
    if not is_alias(name):
        return False
    with lock_aliases():
        was_there = is_alias(name)
        alias_path(name).unlink(missing_ok=True)
    return was_there


def toml_text(data: Mapping[Any, Any], within: str = "") -> str:
    """A table of texts, numbers and lists, and of such tables, in TOML; numbers as keys become texts.

    Raises StoreError for other values.
    """
    plain = {str(key): value for key, value in data.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(key, value)}\n" for key, value in plain.items() if value is not None]
    for key, table in data.items():
        if isinstance(table, Mapping):
            path = within + _key(str(key))
            lines += [f"\n[{path}]\n", toml_text(table, f"{path}.")]
    return "".join(lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_\-]+", key) else _text(key)


def _text(text: str) -> str:
    # A basic string of TOML is one of JSON, but that DEL is escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (int, float)) and math.isfinite(value):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(key, item) for item in value) + "]"
    if isinstance(value, Mapping):  # in a list or a table of a table
        return "{" + ", ".join(f"{_key(str(name))} = {_value(key, item)}" for name, item in value.items()) + "}"
    raise StoreError(f"{key}={value!r:.60} cannot be written to TOML")
