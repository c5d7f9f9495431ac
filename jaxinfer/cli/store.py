"""`jaxinfer list`, `show`, `cp`, `create`, `rm`, `disk`: what is here, and what it is called."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxinfer.checks import format_bytes
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import SamplingOptions, as_json, overwrite, sampling_values
from jaxinfer.cli.output import console, write_json, write_report, write_text
from jaxinfer.options import MISSING, argument, option
from jaxinfer.tables import facts_text, make_table

_NOT_IN_ALIASES = ("seed", "n", "structured")


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    as_json: bool = as_json("JSON lines, one for each model.")


def list_(options: ListOptions) -> None:
    """List the models that can be loaded without a download.

    Pulled models, aliases whose model is here, and the embedded ones. A model that was not pulled to its end is not
    listed.
    """
    from jaxinfer.store import list_models

    models = list_models()
    if options.as_json:
        for model in models:
            write_json(vars(model))
        return
    rows = [
        (
            model.name,
            f"{model.kind} of {model.target}" if model.target is not None else model.kind,
            (model.commit or "")[:12],
            format_bytes(model.num_bytes),
            datetime.fromtimestamp(model.modified_at).strftime("%Y-%m-%d %H:%M"),
        )
        for model in models
    ]
    console().print(make_table(("name", "kind", "commit", "size", "changed"), rows, num_left=3))


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    name: str = argument(MISSING, "A model or a LoRA adapter that is here, by any of its names.", "NAME")
    template: bool = option(False, "Print the chat template alone.")
    base: str | None = option(
        None, "The model that an adapter is checked with; default: the one that it names, if that is here.", "MODEL"
    )
    as_json: bool = as_json("One JSON object.")


def show(options: ShowOptions) -> None:
    """Print what a model is: size, license, configuration, quantization, chat template, aliases.

    Of a LoRA adapter: rank, modules, parts, tensors, the base's name; and what is refused of it, by any base or by this
    one.
    """
    from jaxinfer.store import show_model

    facts = show_model(options.name)
    if facts.get("kind") == "adapter":
        if options.template:
            raise UsageError(f"{options.name} is an adapter: its base has the chat template")
        _show_adapter(facts | _checked_with_base(facts, options.base), as_json=options.as_json)
        return
    if options.base is not None:
        raise UsageError(f"--base is for adapters, and {options.name} is a model")
    if options.as_json:
        write_json(facts)
        return
    template = facts.pop("chat template")
    if options.template:
        if template is None:
            raise ValueError(f"{options.name} has no chat template")
        write_text(template + "\n")
        return
    for name in ("bytes", "weight bytes"):
        facts[name] = format_bytes(facts[name])
    facts["parameters"] = f"{facts['parameters']:,}"
    facts["chat template"] = "none" if template is None else f"{len(template):,} characters (--template prints it)"
    facts["aliases"] = ", ".join(facts["aliases"]) or None
    facts |= {name: _settings(facts[name]) for name in ("generation config", "alias") if facts.get(name)}
    write_text(facts_text({name: value for name, value in facts.items() if value is not None}))


def _show_adapter(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(facts)
        return
    for name in ("bytes", "tensor bytes"):
        facts[name] = format_bytes(facts[name])
    facts["modules"] = ", ".join(f"{name} x {count}" for name, count in facts["modules"].items())
    facts["scales"] = ", ".join(f"{scale:g}" for scale in facts["scales"])
    tokens = facts["invocation tokens"]
    facts["invocation tokens"] = ", ".join(map(str, tokens)) or "none" if isinstance(tokens, list) else tokens
    facts["parts"] = ", ".join(facts["parts"]) or "none"
    refused = facts.pop("refused")
    if facts["base here"] is None:
        facts["base here"] = "no: tensors are not compared with it (--base MODEL)"
    if not refused:
        facts["refused"] = "nothing"
    text = facts_text({name: value for name, value in facts.items() if value not in (None, "")})
    write_text(text + "".join(f"refused: {reason}\n" for reason in refused))


def _checked_with_base(facts: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    """Facts that need an adapter's base, if that is here: its parts, and what is refused of it."""
    path = _base_path(facts["base model"], base)
    if path is None or facts["refused"]:
        return {"base here": path}
    from checkpoints_convert import CheckpointError, abstract
    from checkpoints_convert.adapters import read_adapter
    from jaxinfer.api.adapters import check_served, parts_of

    try:
        config, _ = abstract(path)
        adapter = read_adapter(facts["path"], config)
        tokens = [part for part in facts["parts"] if part.startswith("tokens:")]
        parts = [*sorted(parts_of(adapter)), *tokens]
        try:
            check_served(adapter, config)
        except ValueError as error:
            return {"base here": path, "parts": parts, "refused": [str(error).partition(": ")[2]]}
        return {"base here": path, "parts": parts}
    except CheckpointError as error:
        return {"base here": path, "refused": list(error.problems)}


def _base_path(named: Any, given: str | None) -> Path | None:
    """The base's path; None if it is not here. Raises UnknownModelError for one that is `given` and is not."""
    from jaxinfer.store import UnknownModelError, find_model

    name = named if given is None else given
    # An adapter comes from others: what it names is looked for here only.
    if not isinstance(name, str) or (given is None and "://" in name):
        return None
    try:
        path = find_model(name, fetch=False, offline=True).path
    except (ValueError, OSError):
        if given is not None:
            raise
        return None
    if path is None and given is not None:
        raise UnknownModelError(f"{given} is not here: jaxinfer pull {given}")
    return path


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    source: str = argument(MISSING, "A model that is here, or an alias.", "SOURCE")
    name: str = argument(MISSING, "The alias: letters, digits, - _ and . with at most one colon.", "NAME")
    overwrite: bool = overwrite("Replace an alias of that name.")
    as_json: bool = as_json("One JSON object.")


def copy(options: CopyOptions) -> None:
    """Give a model another name.

    The alias is of the commit that was pulled, and keeps it when the model is pulled again. No files are copied.
    """
    from jaxinfer.store import copy_model

    alias = copy_model(options.source, options.name, overwrite=options.overwrite)
    _print_alias(alias, options.as_json)


def _print_alias(alias: Any, is_json: bool) -> None:
    from jaxinfer.store.aliases import alias_path

    path, settings = alias_path(alias.name), alias.to_dict()
    text = f"{alias.name}: {_settings(settings)}\nwritten to {path}\n"
    write_report({"name": alias.name, "path": path, **settings}, lambda _: text, as_json=is_json)


@dataclass(frozen=True, kw_only=True)
class CreateOptions:
    name: str = argument(MISSING, "The alias: letters, digits, - _ and . with at most one colon.", "NAME")
    model: str | None = option(None, "The model or alias that it stands for.", "MODEL", "--from")
    file: Path | None = option(
        None, "Take the settings from this TOML file; options given here win.", "FILE", "--file -f"
    )
    system: str | None = option(None, "System prompt, for conversations that have none.", "TEXT")
    quantize: str | None = option(None, "Quantize the weights as they are loaded, such as int8.", "FORMAT")
    draft: str | None = option(None, "What drafts: a model or head, ngram, mtp or layers:N.", "MODEL")
    overwrite: bool = overwrite("Replace an alias of that name.")
    as_json: bool = as_json("One JSON object.")


def create(options: CreateOptions, sampling_options: SamplingOptions) -> None:
    """Make an alias with a system prompt, sampling defaults, a quantization and a draft.

    It is a small TOML file that can be edited. What a command or a request gives explicitly wins over it.
    """
    from jaxinfer.sampling.params import our_names
    from jaxinfer.store.aliases import Alias, parse_alias, write_alias
    from jaxinfer.store.contents import pin_model

    sampling = our_names(sampling_values(sampling_options))
    if refused := [name for name in _NOT_IN_ALIASES if name in sampling]:
        raise UsageError(f"--{refused[0]} is of one request, and no default of an alias")
    alias = Alias(options.name, "")
    if options.file is not None:
        alias = parse_alias(options.name, options.file.read_text(encoding="utf-8"), options.file)
    if options.model is not None:
        model, revision = pin_model(options.model)
        alias = replace(alias, model=model, revision=revision)
    if not alias.model:
        raise UsageError("an alias needs a model: --from MODEL, or model in its --file")
    given = {name: value for name in ("system", "quantize", "draft") if (value := getattr(options, name)) is not None}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()}
    alias = replace(alias, **given, sampling={**alias.sampling, **plain})
    write_alias(alias, overwrite=options.overwrite)
    _print_alias(alias, options.as_json)


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    names: list[str] = argument(MISSING, "Aliases, or models of the hub's cache.", "NAME")
    as_json: bool = as_json("JSON lines, one for each name.")


def remove(options: RemoveOptions) -> None:
    """Remove aliases and pulled models.

    Of a model the files go that no other model and no snapshot of another tool has; commits that an alias uses stay. An
    alias goes alone: its model stays.
    """
    from jaxinfer.store import remove as remove_model

    for name in options.names:
        removal = remove_model(name)
        if options.as_json:
            write_json(vars(removal))
            continue
        text = f"removed {', '.join(removal.removed)}: {format_bytes(removal.freed_bytes)} freed"
        if removal.kept_by:
            text += f"; {format_bytes(removal.kept_bytes)} stay for {', '.join(removal.kept_by)}"
        write_text(text + "\n")


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    as_json: bool = as_json("JSON lines, one for each repository.")


def disk(options: DiskOptions) -> None:
    """Show what repositories take on the disk, with those that other tools have downloaded."""
    from jaxinfer.store import disk_usage, home
    from jaxinfer.store.pulled import hub_cache

    usage = disk_usage()
    if options.as_json:
        for repository in usage:
            write_json(repository)
        return
    rows = [
        (
            repository["repository"],
            len(repository["models"]) or "not pulled",
            format_bytes(repository["unfinished bytes"]),
            format_bytes(repository["other bytes"]),
            format_bytes(repository["bytes"]),
        )
        for repository in usage
    ]
    rows.append(("total", "", "", "", format_bytes(sum(repository["bytes"] for repository in usage))))
    console().print(make_table(("repository", "models", "unfinished", "other files", "size"), rows))
    write_text(f"files are in {hub_cache()}, aliases and manifests in {home()}\n")
