"""The options of commands that measure a model: which requests, and what is made of their times."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.command import UsageError

if TYPE_CHECKING:
    from jaxinfer.measure.bench.workload import Workload

WORKLOAD, FIGURES = "Workload", "Figures"

AnswerTokens = Annotated[
    str, typer.Option(metavar="N|A:B|log:A:B", help="Lengths of answers; nothing ends one.", rich_help_panel=WORKLOAD)
]
Seed = Annotated[
    int, typer.Option(min=0, metavar="N", help="The same seed, the same requests.", rich_help_panel=WORKLOAD)
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all figures.", rich_help_panel=FIGURES),
]


@dataclass(frozen=True)
class WorkloadOptions:
    """Requests, and limits and prices that their times are held against."""

    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="N|A:B|log:A:B", help="Lengths of prompts that no --dataset gives.", rich_help_panel=WORKLOAD
        ),
    ] = "128"
    answer_tokens: AnswerTokens = "128"
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON lines with "prompt" and, if they are known, "output_tokens".',
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0, metavar="X", help="0 takes the most probable token.", rich_help_panel=WORKLOAD)
    ] = 0.0
    seed: Seed = 0
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="ttft:MS,...",
            help="Also count requests within limits of ttft, tpot and e2el.",
            rich_help_panel=FIGURES,
        ),
    ] = None
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="Of the machine: cost per million tokens.", rich_help_panel=FIGURES),
    ] = None
    json: JsonFile = None


def read_workload(options: WorkloadOptions) -> "Workload":
    """Raises UsageError or ValueError for what cannot be read, before the model is opened."""
    from jaxinfer.measure.bench.metrics import parse_goodput
    from jaxinfer.measure.bench.workload import Lengths, Workload, read_dataset

    parse_goodput(options.goodput)
    check_folder(options.json, "--json")
    return Workload(
        Lengths.parse(options.prompt_tokens, "--prompt-tokens"),
        Lengths.parse(options.answer_tokens, "--answer-tokens"),
        () if options.dataset is None else read_dataset(options.dataset),
        options.seed,
    )


def check_folder(file: Path | None, option: str) -> None:
    """Raises UsageError where a file that will be written has no folder to be in."""
    if file is not None and not file.resolve().parent.is_dir():
        raise UsageError(f"{option}: no folder {file.resolve().parent}")
