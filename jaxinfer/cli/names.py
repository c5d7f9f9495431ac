"""Flags that other engines use, from the table in `jaxinfer.option_names`, beside a command's own."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand

from jaxinfer.cli.command import USAGE, say
from jaxinfer.option_names import OptionNameError, OtherName, Scope, find, translated

# A command takes the names of a scope if it has this option.
_SCOPES: tuple[tuple[Scope, str], ...] = (("LLM", "dtype"), ("SamplingParams", "temperature"), ("call", "prompts"))


class NamedCommand(TyperCommand):
    """A command that takes the flags of `jaxinfer.option_names` too: those that mean what one of ours does are applied,
    the others are refused with the flag to use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            found = _scan(self.params, args)
            rest = super().parse_args(ctx, found.rest)
            for name, value in _values(found, list(ctx.params)).items():
                # On the command line None is an option that is not given.
                ctx.params[name] = [*(ctx.params[name] or ()), value] if name == "prompts" else _text_of_none(value)
        except OptionNameError as error:
            say(f"error: {_as_flags(str(error), error.name, {one.name for one in self.params})}")
            raise typer.Exit(USAGE) from None
        return rest


def _text_of_none(value: Any) -> Any:
    return "none" if value is None else value


@dataclass
class _Scan:
    """Arguments without the flags of others. `own`: the flags of our options among them, by the option's name. `given`:
    values of the others, by their scope."""

    rest: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    given: dict[Scope, dict[str, Any]] = field(default_factory=dict)


def _scan(params: Sequence[Any], args: Sequence[str]) -> _Scan:
    """Raises OptionNameError for a flag without its value, and for one option under two names."""
    flags = {flag: one for one in params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("-")}
    scopes: list[Scope] = [scope for scope, mark in _SCOPES if any(one.name == mark for one in params)]
    found, left = _Scan(), list(args)
    while left:
        arg = left.pop(0)
        flag, equals, text = arg.partition("=")
        if arg == "--":
            found.rest += [arg, *left]
            break
        if flag in flags or not arg.startswith("--"):
            found.rest.append(arg)
            if flag in flags:
                _note(found, flags[flag], flag)
                if left and not equals and _takes_value(flags[flag]):
                    found.rest.append(left.pop(0))
            continue
        entry, is_negative = _entry(flag, scopes)
        if entry is None:
            found.rest.append(arg)
            continue
        if not equals and not entry.is_switch:
            if not left:
                raise OptionNameError(entry.name, f"{entry.name} ({entry.engines}) needs a value")
            text = left.pop(0)
        own = next((one for one in params if one.name == entry.ours and one.opts[0].startswith("-")), None)
        if entry.is_renamed and not entry.is_switch and own is not None:
            _note(found, own, flag)
            found.rest += [own.opts[0], text]
        else:
            value = _literal(text) if equals or not entry.is_switch else True
            found.given.setdefault(entry.scope, {})[entry.name] = not value if is_negative else value
    return found


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


def _takes_value(param: Any) -> bool:
    return not getattr(param, "is_flag", False) and not getattr(param, "count", False)


def _note(found: _Scan, param: Any, flag: str) -> None:
    """Remembers that an option was given; raises for two names of one that may not be repeated."""
    earlier = found.own.setdefault(param.name, flag)
    names = (*param.opts, *param.secondary_opts)
    if earlier != flag and not param.multiple and not (earlier in names and flag in names):
        raise OptionNameError(flag, f"{flag} and {earlier} are the same option: give one of them")


def _values(found: _Scan, known: Sequence[str]) -> dict[str, Any]:
    """Our options that the other flags stand for."""
    values: dict[str, Any] = {}
    for scope, given in found.given.items():
        values |= translated(scope, given, known, "this command has no option {}")
    for name in values:
        if name in found.own:
            other = next(one for given in found.given.values() for one in given)
            raise OptionNameError(other, f"{found.own[name]} and {other} are the same option: give one of them")
    return values


def _literal(text: str) -> Any:
    """A JSON value, with true, false and none in any case; anything else is a text."""
    known = {"none": None, "true": True, "false": False}
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
        return match[0] if match[1] not in known else f"{shown} {match[2]}" if match[2] else shown

    # The name itself comes first, with the value that was given.
    message = re.sub(rf"^{re.escape(name)}=(.*) \(", lambda match: f"{name} {match[1]} (", message)
    message = re.sub(r'\b([a-z][a-z_]*)=(?:"([^"]*)")?(?![^\s",;:)])', flag, message)
    return message.replace(name, f"--{name.removeprefix('--').replace('_', '-')}", 1)
