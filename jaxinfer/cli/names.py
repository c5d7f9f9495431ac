"""Commands and flags of other engines; the flags are from the table in `jaxinfer.option_names`."""

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from jaxinfer.api.options import LLMOptions
from jaxinfer.cli.command import USAGE, say
from jaxinfer.option_names import OptionNameError, OtherName, Scope, check_do_sample, find, translated
from jaxinfer.options import describe

# A command takes the names of a scope if it has this option.
_SCOPES: tuple[tuple[Scope, str], ...] = (
    ("server", "allowed_hosts"),
    ("LLM", "dtype"),
    ("SamplingParams", "temperature"),
    ("call", "prompts"),
)
# Flags that may stand alone, and the values that they may have.
_BARE = {"--" + name.replace("_", "-"): about.bare for name, about in describe(LLMOptions).items() if about.bare}
# llama.cpp's flags of one dash.
_SHORT = {"-p": "--prompt", "-c": "--ctx-size", "-t": "--threads", "-ngl": "--n-gpu-layers", "-hf": "--hf-repo"}
# What a name means on the command line, where that is not what it means in Python.
_HERE = {
    "stream": "the answer to a single prompt is streamed: leave it out",
    "verbose": "a terminal shows times and rates, --json everything: leave it out",
    "prompt_token_ids": '--file takes lines such as {"prompt": [1, 2, 3]}',
    "generation_config": "the checkpoint's own file is applied: leave it out",
    "options": "each option has a flag of its own",
}
_LIST = "jaxinfer list lists the models that are here, jaxinfer models the supported families"
_SHOW = "jaxinfer show MODEL shows what a model is, jaxinfer doctor this machine"
_COMMANDS = {
    **dict.fromkeys(("complete", "completion", "infer"), "jaxinfer generate PROMPT --model MODEL continues a text"),
    **dict.fromkeys(("server", "api", "start", "launch"), "jaxinfer serve MODEL is the HTTP server"),
    "download": "jaxinfer pull NAME downloads a model",
    **dict.fromkeys(("copy", "alias"), "jaxinfer cp MODEL NAME gives a model another name"),
    **dict.fromkeys(("remove", "delete"), "jaxinfer rm NAME removes a model or an alias"),
    **dict.fromkeys(("ls", "ps"), _LIST),
    **dict.fromkeys(("info", "env", "collect-env"), _SHOW),
    "version": "jaxinfer --version prints it",
    "benchmark": "jaxinfer bench latency MODEL, throughput or load",
    **dict.fromkeys(("eval", "evaluate", "perplexity"), "jaxinfer score shows the log-probabilities of texts"),
    **dict.fromkeys(
        ("train", "finetune", "lora"), "jaxinfer train-head and jaxinfer distill train drafts, nothing else"
    ),
    "export": "jaxinfer convert SRC DST --to huggingface writes safetensors",
    "compile": "jaxinfer warm MODEL compiles the programs of a model",
}


class NamedGroup(TyperGroup):
    """Commands, which answer those of other engines with what to type instead. `help COMMAND` is COMMAND --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            command = next((arg for arg in args if arg in self.commands and arg != "demo"), None)
            if type(error).__name__ != "NoSuchOption" or command is None:
                raise
            _refuse(f"options follow the command: {ctx.command_path} {command} ... {getattr(error, 'option_name', '')}")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in self.commands:
            if name == "help":
                if not rest:
                    typer.echo(ctx.get_help())
                    raise typer.Exit
                args = [*rest, "--help"]
            elif ctx.parent is not None:
                *most, last = self.commands
                command = f"{ctx.command_path} {next(iter(self.commands))} {name}"
                _refuse(f"{name!r} is none of {', '.join(most)} and {last}, which come first, as in {command}")
            elif name in _COMMANDS:
                _refuse(f"there is no command {name!r}: {_COMMANDS[name]}")
        return super().resolve_command(ctx, args)


def _refuse(message: str) -> NoReturn:
    say(f"error: {message}")
    raise typer.Exit(USAGE)


class NamedCommand(TyperCommand):
    """A command that takes the flags of `jaxinfer.option_names` too: those that mean what one of ours does are applied,
    the others are refused with the flag to use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            scan = _scan(self.params, args)
            rest = self._parse(ctx, scan.rest)
            check_do_sample(scan.given.get("SamplingParams", {}), ctx.params.get("temperature"))
            for name, value in _values(scan, list(ctx.params)).items():
                if name == "prompts":
                    value = [*(ctx.params[name] or ()), value]
                # On the command line None is an option that is not given.
                ctx.params[name] = "none" if value is None else value
        except OptionNameError as error:
            _refuse(_as_flags(str(error), error.name, {param.name for param in self.params}))
        return rest

    def _parse(self, ctx: Any, args: list[str]) -> list[str]:
        """As the library does; an option that is missing is described, and names that are not alike are no hints."""
        try:
            return super().parse_args(ctx, args)
        except Exception as caught:
            error: Any = caught
            if type(error).__name__ == "MissingParameter" and not error.message:
                error.message = getattr(error.param, "help", None) or ""
            if name := getattr(error, "option_name", ""):
                near = getattr(error, "possibilities", None) or ()
                error.possibilities = difflib.get_close_matches(name, near, cutoff=0.75)
            raise


@dataclass
class _Scan:
    """Arguments without the flags of others. `own`: the flags of our options among them, by the option's name. `given`:
    values of the others, by their scope."""

    rest: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    given: dict[Scope, dict[str, Any]] = field(default_factory=dict)


def _scan(params: Sequence[Any], args: Sequence[str]) -> _Scan:
    """Raises OptionNameError for a flag without its value, and for one option under two names."""
    flags = {flag: param for param in params for flag in (*param.opts, *param.secondary_opts) if flag.startswith("-")}
    scopes: list[Scope] = [scope for scope, mark in _SCOPES if any(param.name == mark for param in params)]
    scan, left = _Scan(), list(args)
    while left:
        arg = left.pop(0)
        if arg in _SHORT and arg not in flags:
            arg = _SHORT[arg]
        flag, equals, text = arg.partition("=")
        if arg == "--":
            scan.rest += [arg, *left]
            break
        if flag in flags or not arg.startswith("--"):
            scan.rest.append(arg)
            if (param := flags.get(flag)) is not None:
                _note(scan, param, flag)
                if not equals and flag in _BARE and (not left or left[0] not in _BARE[flag]):
                    scan.rest[-1] = f"{flag}={_BARE[flag][0]}"
                elif left and not equals and not (getattr(param, "is_flag", False) or getattr(param, "count", False)):
                    scan.rest.append(left.pop(0))
            continue
        entry, is_negative = _entry(flag, scopes)
        if entry is None:
            scan.rest.append(arg)
            continue
        if not equals and not entry.is_switch:
            if not left:
                raise OptionNameError(entry.name, f"{entry.name} ({entry.engines}) needs a value")
            text = left.pop(0)
        own = next((param for param in params if param.name == entry.ours and param.opts[0].startswith("-")), None)
        if entry.is_renamed and not entry.is_switch and own is not None:
            _note(scan, own, flag)
            scan.rest += [own.opts[0], text]
        else:
            value = literal(text) if equals or not entry.is_switch else True
            scan.given.setdefault(entry.scope, {})[entry.name] = not value if is_negative else value
    return scan


def _entry(flag: str, scopes: Sequence[Scope]) -> tuple[OtherName | None, bool]:
    """The entry of a flag, and whether the flag is its negative, --no-FLAG."""
    name = flag[2:].replace("-", "_")
    for scope in scopes:
        if (entry := find(scope, name)) is not None:
            return entry, False
        entry = find(scope, name.removeprefix("no_"))
        if entry is not None and entry.is_switch:
            return entry, True
    return None, False


def _note(scan: _Scan, param: Any, flag: str) -> None:
    """Remembers that an option was given; raises for two names of one that may not be repeated."""
    earlier = scan.own.setdefault(param.name, flag)
    names = (*param.opts, *param.secondary_opts)
    if earlier != flag and not param.multiple and not (earlier in names and flag in names):
        raise OptionNameError(flag, f"{flag} and {earlier} are the same option: give one of them")


_STRUCTURED = "--json-schema FILE, --regex PATTERN, --choice TEXT and --grammar FILE say what the answer must match"


def _values(scan: _Scan, known: Sequence[str]) -> dict[str, Any]:
    """Our options that the other flags stand for."""
    values: dict[str, Any] = {}
    for scope, given in scan.given.items():
        for name, value in given.items():
            entry = find(scope, name)
            if entry is not None and entry.ours.startswith("structured") and entry.read is not None:
                raise OptionNameError(name, f"{name}={value!r:.60} ({entry.engines}): {_STRUCTURED}")
        values |= translated(scope, given, known, "this command has no option {}")
    for name in values:
        if name in scan.own:
            other = next(flag for given in scan.given.values() for flag in given)
            raise OptionNameError(other, f"{scan.own[name]} and {other} are the same option: give one of them")
    return values


def literal(text: str) -> Any:
    """A JSON value, with true, false, null and none in any case; anything else is a text."""
    known = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_flags(message: str, name: str, known: set[str]) -> str:
    """A message of the Python API with flags in place of keywords: --kv-dtype int8 for kv_dtype="int8"."""

    def flag(match: re.Match[str]) -> str:
        shown = f"--{match[1].replace('_', '-')}"
        value = match[2] or match[3]
        return match[0] if match[1] not in known else f"{shown} {value}" if value else shown

    # The name itself comes first, with the value that was given.
    message = re.sub(
        rf"^{re.escape(name)}=(?:True|(.*)) \(", lambda match: f"{name} {match[1] or ''}".rstrip() + " (", message
    )
    if name in _HERE and ": " in message:
        message = f"{message.partition(': ')[0]}: {_HERE[name]}"
    message = re.sub(r'\b([a-z][a-z_]*)=(?:"([^"]*)"|([0-9]+))?(?![^\s",;:)])', flag, message)
    return message.replace(name, f"--{name.removeprefix('--').replace('_', '-')}", 1)
