"""The tokenizer files of a Hugging Face repository, read and checked, without a tokenizer built from them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxinfer.text.spec_checks import MAX_ADDED_TOKENS, MAX_FILE_BYTES, parse_json

_COPIED_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerNotFoundError(FileNotFoundError):
    """A directory holds no tokenizer that can be read."""


@dataclass(frozen=True)
class AddedTokenSpec:
    """A token that the configuration adds to the tokenizer: text, flags, and the id it must get (None: any)."""

    content: str
    special: bool
    flags: Mapping[str, bool] = field(default_factory=dict)
    token_id: int | None = None


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer files of a repository, merged by the rules of Transformers 5.

    `special_tokens` maps names (`bos_token`, `image_token`, ...) to text; `extra_special_tokens` have no name.
    `chat_templates` maps names to Jinja sources; the one named "default" is used unless tools ask for "tool_use".
    `contents` are texts by file name where they do not come from `paths`.
    """

    tokenizer_json: str
    config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    extra_special_tokens: tuple[str, ...] = ()
    added_tokens: tuple[AddedTokenSpec, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what texts and ids are made one from the other by."""
        added = [vars(token) for token in self.added_tokens]
        parts = json.dumps([added, self.special_tokens, self.extra_special_tokens], default=dict)
        digest = hashlib.sha256(f"{parts}\n".encode())
        digest.update(self.tokenizer_json.encode())
        return digest.hexdigest()


def tokenizer_files_of(contents: Mapping[str, str]) -> TokenizerFiles:
    """Tokenizer files from texts by file name, tokenizer.json and tokenizer_config.json, that were read from elsewhere.

    Raises ValueError as `read_tokenizer_files`.
    """
    config = parse_json(contents["tokenizer_config.json"], "tokenizer_config.json")
    return TokenizerFiles(
        tokenizer_json=contents["tokenizer.json"],
        config=config,
        special_tokens=_special_tokens(config),
        extra_special_tokens=_extra_special_tokens(config),
        chat_templates=_chat_templates(Path("tokenizer_config.json"), config, {}),
        contents=contents,
    )


def read_tokenizer_files(directory: str | Path) -> TokenizerFiles:
    """Read the tokenizer files of a local directory.

    Raises:
        TokenizerNotFoundError: No directory, or no tokenizer.json in it.
        ValueError: A file that is not valid JSON (the error names it) or has the wrong shape.
    """
    root = Path(directory)
    if not (root / "tokenizer.json").is_file():
        raise TokenizerNotFoundError(_explain_missing(root))
    config = _read_json(root / "tokenizer_config.json")
    merged = dict(config)
    if "added_tokens_decoder" not in config:
        merged |= _read_json(root / "special_tokens_map.json")
    special_tokens = _special_tokens(merged)
    extra = _extra_special_tokens(merged)
    paths = {name: root / name for name in _COPIED_FILES if (root / name).is_file()}
    for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
        paths[f"additional_chat_templates/{path.name}"] = path
    return TokenizerFiles(
        tokenizer_json=_read_text(root / "tokenizer.json"),
        config=config,
        special_tokens=special_tokens,
        extra_special_tokens=extra,
        added_tokens=_added_tokens(root, config, {*special_tokens.values(), *extra}),
        chat_templates=_chat_templates(root, config, paths),
        paths=paths,
    )


def _explain_missing(root: Path) -> str:
    if not root.is_dir():
        return f"{root} is not a directory; a tokenizer is read from a local directory with a tokenizer.json"
    for name in ("tokenizer.model", "tekken.json", "tiktoken.model"):
        if (root / name).is_file():
            return (
                f"{root} has a {name} but no tokenizer.json. Only tokenizer.json is supported: convert it once with "
                "Transformers, AutoTokenizer.from_pretrained(path).save_pretrained(path), or take the "
                "tokenizer.json of another copy of the model"
            )
    return f"{root} has no tokenizer.json; copy it from the model's repository"


def _read_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are allowed")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = parse_json(_read_text(path), path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """The text of a token, given as a string or as a serialized AddedToken."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
    for name, value in config.items():  # model-specific ones such as image_token
        if name.endswith("_token") and name not in named and (text := _token_text(value)):
            named[name] = text
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= {name: text for name, value in extra.items() if (text := _token_text(value))}
    return named


def _extra_special_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    extra = config.get("extra_special_tokens")
    if not extra:
        extra = config.get("additional_special_tokens")
    return tuple(text for value in extra if (text := _token_text(value))) if isinstance(extra, list) else ()


def _added_tokens(root: Path, config: Mapping[str, Any], special: set[str]) -> tuple[AddedTokenSpec, ...]:
    declared = config.get("added_tokens_decoder")
    specs = []
    if declared is not None:
        name = root / "tokenizer_config.json"
        if not isinstance(declared, dict):
            raise ValueError(f"{name}: added_tokens_decoder must be an object, got {declared!r:.60}")
        if len(declared) > MAX_ADDED_TOKENS:
            raise ValueError(
                f"{name}: added_tokens_decoder has {len(declared)} tokens; at most {MAX_ADDED_TOKENS} are allowed"
            )
        for token_id, token in declared.items():
            text = _token_text(token)
            if text is None or not isinstance(token, dict) or not (token_id.isdecimal() and len(token_id) <= 9):
                raise ValueError(f"{name}: bad added_tokens_decoder entry {token_id!r:.60}")
            names = ("single_word", "lstrip", "rstrip", "normalized")
            flags = {name: bool(token[name]) for name in names if name in token}
            specs.append(AddedTokenSpec(text, bool(token.get("special", False)), flags, int(token_id)))
    else:
        path = root / "added_tokens.json"
        for text, token_id in _read_json(path).items():
            if type(token_id) is not int:
                raise ValueError(f"{path}: {text!r:.60} must have a token id, got {token_id!r:.60}")
            is_special = text in special
            specs.append(AddedTokenSpec(text, is_special, {"normalized": not is_special}, token_id))
    return tuple(sorted(specs, key=lambda spec: spec.token_id or 0))


def _chat_templates(root: Path, config: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, str]:
    """chat_template.jinja and additional ones win over tokenizer_config.json, which wins over chat_template.json."""
    from_files = {
        "default" if name == "chat_template.jinja" else path.stem: _read_text(path)
        for name, path in paths.items()
        if name.endswith(".jinja")
    }
    if from_files:
        return from_files
    source = config.get("chat_template")
    if source is None:
        source = _read_json(root / "chat_template.json").get("chat_template")
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        source = {entry.get("name"): entry.get("template") for entry in source}
    if isinstance(source, dict) and all(isinstance(text, str) for item in source.items() for text in item):
        return dict(source)
    raise ValueError(f"{root}: chat_template must be a string or a list of {{name, template}}")
