"""Writes docs/options.md and the tables of docs/serving.md: all options, from the dataclasses that describe them."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import typer

from jaxinfer.api.options import LLMOptions
from jaxinfer.cli import options
from jaxinfer.cli.main import app
from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.ray_serve.options import FleetOptions, Placement
from jaxinfer.fleet.simulate.options import ServiceGoal, SimulationOptions
from jaxinfer.option_names import NAMES, OtherName
from jaxinfer.options import Description, describe
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.server.options import ServerOptions

OTHER_NAMES = """
## Names of other engines

`LLM`, `SamplingParams`, the methods of `LLM`, plain rows of a batch and the command line (with dashes) take these names
too, those of a server only `jaxinfer serve`. A name is applied where it means exactly what ours does. Any other raises
an error with what to write instead, unless its value asks for what happens anyway, such as `enforce_eager=False`. Two
names of one option raise an error.
`dtype` and `kv_dtype` also take `half`, `float`, `fp16`, `bf16` and `fp32`, `kv_dtype` also `fp8`.
"""
FILE = Path(__file__).parent / "options.md"
SERVING = Path(__file__).parent / "serving.md"
TABLES = (
    (
        "Model, engine and speculative decoding",
        "Arguments of `LLM`; most are also flags of the commands.",
        LLMOptions,
    ),
    ("Sampling", "Fields of `SamplingParams` and flags of the commands that generate.", SamplingParams),
    ("Server", "Flags of `jaxinfer serve`, fields of `jaxinfer.server.options.ServerOptions`.", ServerOptions),
    ("Front", "Flags of `jaxinfer front`, fields of `jaxinfer.fleet.front.options.FrontOptions`.", FrontOptions),
    ("Simulated fleet", "Flags of `jaxinfer fleet simulate`, fields of `SimulationOptions`.", SimulationOptions),
    ("Goal of a fleet", "Flags of `jaxinfer fleet simulate`, fields of `ServiceGoal`.", ServiceGoal),
    ("Several hosts", "Flags of `jaxinfer generate` and `jaxinfer batch`.", options.HostsOptions),
)

IN_FILES = (
    ("Fleet", "Names in the file of `jaxinfer fleet serve`, keywords of `jaxinfer.fleet.build`.", FleetOptions),
    ("Placement", "Names in `placement` of a fleet.", Placement),
)


def page() -> str:
    parts = [
        "# Options\n\nWritten by `python docs/update_options.py` from the dataclasses that describe the options.\n"
    ]
    for title, text, cls in TABLES:
        parts.append(f"\n## {title}\n\n{text}\n\n| name | flag | default | |\n| --- | --- | --- | --- |\n")
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, about in describe(cls).items():
            parts.append(_row(name, about, defaults[name]))
    for title, text, cls in IN_FILES:
        parts.append(f"\n## {title}\n\n{text}\n\n| name | default | |\n| --- | --- | --- |\n")
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, about in describe(cls).items():
            parts.append(f"| `{name}` | {_default(defaults[name])} | {about.help} |\n")
    return "".join([*parts, *_other_names()])


def server_tables() -> str:
    """Tables for docs/serving.md: the server's options by group, and the names that other servers give them."""
    groups: dict[str, list[str]] = {}
    defaults = {field.name: field.default for field in dataclasses.fields(ServerOptions)}
    for name, about in describe(ServerOptions).items():
        groups.setdefault(about.group or "", []).append(_row(name, about, defaults[name], has_name=False))
    parts = []
    for group, rows in groups.items():
        parts += [f"**{group}**\n\n| flag | default | |\n| --- | --- | --- |\n", *rows, "\n"]
    parts += ["**Flags of other servers**\n\n| flag | of | here |\n| --- | --- | --- |\n"]
    others = [one for one in NAMES if one.scope == "server"]
    parts += [f"| `--{one.name.replace('_', '-')}` | {one.engines} | {_flag_of(one)} |\n" for one in others]
    return "".join(parts)


def _flag_of(one: OtherName) -> str:
    return one.ours if one.read is None else f"`--{one.ours.replace('_', '-')}`"


def serving_page() -> str:
    """docs/serving.md with its tables as they are now."""
    text = SERVING.read_text(encoding="utf-8")
    start, end = "<!-- server_options -->\n", "<!-- /server_options -->"
    before, _, rest = text.partition(start)
    return before + start + server_tables() + end + rest.partition(end)[2]


@cache
def _taken_flags() -> frozenset[str]:
    """Flags that some command takes; other options are for Python alone."""
    groups, flags = [typer.main.get_command(app)], set()
    while groups:
        group = groups.pop()
        groups += getattr(group, "commands", {}).values()
        flags |= {flag for given in group.params for flag in (*given.opts, *given.secondary_opts)}
    return frozenset(flags)


def _row(name: str, about: Description, default: Any, has_name: bool = True) -> str:
    flags = about.flags or (f"--{name.replace('_', '-')}",)
    taken = any(part in _taken_flags() for flag in flags for part in flag.split("/"))
    flag = "`" + ", ".join(flags) + (f" {about.metavar}" if about.metavar else "") + "`" if taken else ""
    cells = [f"`{name}`"] * has_name + [flag, _default(default), about.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _other_names() -> list[str]:
    """Tables of the names of other engines: those that are applied, those that are not."""
    applied = [one for one in NAMES if one.read is not None]
    refused = [one for one in NAMES if one.read is None]
    parts = [OTHER_NAMES, "\n| name | of | here |\n| --- | --- | --- |\n"]
    parts += [f"| `{one.name}` | {one.engines} | {_code(one.ours)} |\n" for one in applied]
    parts += ["\nNo option here means the same as these:\n\n| name | instead |\n| --- | --- |\n"]
    return [*parts, *(f"| `{one.name}` | {one.ours.replace('|', '/')} |\n" for one in refused)]


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _default(value: Any) -> str:
    return "" if value is dataclasses.MISSING or value in (None, ()) else f"`{value!r}`"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    SERVING.write_text(serving_page(), encoding="utf-8")
