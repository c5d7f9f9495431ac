"""Writes docs/options.md: tables of all options, from the dataclasses that describe them."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxinfer.cli import options
from jaxinfer.llm_options import LLMOptions
from jaxinfer.options import describe
from jaxinfer.sampling.params import SamplingParams

FILE = Path(__file__).parent / "options.md"
TABLES = (
    (
        "Model, engine and speculative decoding",
        "Arguments of `LLM`; most are also flags of the commands.",
        LLMOptions,
    ),
    ("Sampling", "Fields of `SamplingParams` and flags of the commands that generate.", SamplingParams),
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
    return "".join(parts)


def _default(value: Any) -> str:
    return "" if value is dataclasses.MISSING or value in (None, ()) else f"`{value!r}`"


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
