"""Writes docs/options.md: tables of all options, from the dataclasses that describe them."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxinfer.cli import options
from jaxinfer.llm_options import LLMOptions
from jaxinfer.option_names import NAMES
from jaxinfer.options import describe
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.server.options import ServerOptions

OTHER_NAMES = """
## Names of other engines

`LLM`, `SamplingParams`, the methods of `LLM`, plain rows of a batch and the command line (with dashes) take these names
too. A name is applied where it means exactly what ours does. Any other raises an error with what to write instead,
unless its value asks for what happens anyway, such as `enforce_eager=False`. Two names of one option raise an error.
`dtype` and `kv_dtype` also take `half`, `float`, `fp16`, `bf16` and `fp32`, `kv_dtype` also `fp8`.
"""
FILE = Path(__file__).parent / "options.md"
TABLES = (
    (
        "Model, engine and speculative decoding",
        "Arguments of `LLM`; most are also flags of the commands.",
        LLMOptions,
    ),
    ("Sampling", "Fields of `SamplingParams` and flags of the commands that generate.", SamplingParams),
    ("Server", "Flags of `jaxinfer serve`, fields of `jaxinfer.server.options.ServerOptions`.", ServerOptions),
    ("Several hosts", "Flags of `jaxinfer generate` and `jaxinfer batch`.", options.HostsOptions),
)


def page() -> str:
    parts = [
        "# Options\n\nWritten by `python docs/update_options.py` from the dataclasses that describe the options.\n"
    ]
    for title, text, cls in TABLES:
        parts.append(f"\n## {title}\n\n{text}\n\n| name | flag | default | |\n| --- | --- | --- | --- |\n")
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, about in describe(cls).items():
            flags = about.flags or (f"--{name.replace('_', '-')}",)
            flag = ", ".join(flags) + (f" {about.metavar}" if about.metavar else "")
            cells = (f"`{name}`", f"`{flag}`", _default(defaults[name]), about.help)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join([*parts, *_other_names()])


def _other_names() -> list[str]:
    """Tables of the names of other engines: those that are applied, those that are not."""
    applied = [one for one in NAMES if one.read is not None]
    refused = [one for one in NAMES if one.read is None]
    parts = [OTHER_NAMES, "\n| name | of | here |\n| --- | --- | --- |\n"]
    parts += [f"| `{one.name}` | {one.engines} | {_code(one.ours)} |\n" for one in applied]
    parts += ["\nThe others:\n\n| name | of | here |\n| --- | --- | --- |\n"]
    return [*parts, *(f"| `{one.name}` | {one.engines} | {one.ours.replace('|', '/')} |\n" for one in refused)]


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _default(value: Any) -> str:
    return "" if value is dataclasses.MISSING or value in (None, ()) else f"`{value!r}`"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
