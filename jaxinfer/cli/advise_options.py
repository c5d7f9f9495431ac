"""What `jaxinfer advise` is told: its options, and what of them does not go together."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import ModelArgument, ServingOptions
from jaxinfer.cli.workload_options import FIGURES, WORKLOAD, AnswerTokens, WorkloadOptions, read_workload

if TYPE_CHECKING:
    from jaxinfer.measure.advise.goals import Goal
    from jaxinfer.measure.bench.workload import Workload

_GOAL, _TRIALS = "Goal", "Trials"
CPU_SIZES, SIZES = "1,4,16,32", "1,16,64,128,256"


@dataclass(frozen=True)
class AdviseOptions(WorkloadOptions, ServingOptions):
    """The engine's, which every trial keeps, and what is asked. The model has no flag."""

    model: ModelArgument
    answer_tokens: AnswerTokens = "64"
    goal: Annotated[
        str,
        typer.Option(metavar="GOAL", help="cost, latency, users or quality.", rich_help_panel=_GOAL),
    ] = "cost"
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="PLACE",
            help="Plan for chips, such as v5e:2x2 or h200x1: nothing runs.",
            rich_help_panel=_GOAL,
        ),
    ] = None
    max_kl: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="X", help="Nats per token that rounding may cost; default: 0.05.", rich_help_panel=_GOAL
        ),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="That weights, cache and work may take.", rich_help_panel=_GOAL),
    ] = None
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="ttft:MS,...",
            help="For --goal users: limits of ttft, tpot and e2el; without, tokens of cache count.",
            rich_help_panel=FIGURES,
        ),
    ] = None
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text that the KL is measured on and prompts are cut from; may be repeated.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None
    shared_prefix: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens that all prompts begin with.", rich_help_panel=WORKLOAD)
    ] = 0
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="That come at once; default: the largest batch size.", rich_help_panel=WORKLOAD
        ),
    ] = None
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFT",
            help="A draft to try beside ngram: a model or layers:N; may be repeated.",
            rich_help_panel=_TRIALS,
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help="With --on: chance that a drafted token is accepted.",
            rich_help_panel=_TRIALS,
        ),
    ] = None
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help=f"Batch sizes to try; default: {CPU_SIZES} on a CPU, else {SIZES}.",
            rich_help_panel=_TRIALS,
        ),
    ] = None
    repeats: Annotated[int, typer.Option(min=2, metavar="N", help="Of each measurement.", rich_help_panel=_TRIALS)] = 3
    minutes: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="No trial begins after; default: 30.", rich_help_panel=_TRIALS),
    ] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Keep the trials that --json FILE has.", rich_help_panel=FIGURES),
    ] = False


OWN = ("goal", "on", "max_kl", "memory", "goodput", "price_per_hour", "prompt_tokens", "answer_tokens", "dataset")
OWN += ("texts", "shared_prefix", "requests", "temperature", "seed", "draft", "acceptance", "sizes", "repeats")
OWN += ("minutes", "json", "resume")
# What changes no trial's figures, so that a file goes on under another.
LATER = ("json", "resume", "minutes", "goal", "max_kl", "price_per_hour")
# What says how a trial runs, so that a plan has no use for it. Its sequences are as long as prompt and answer.
RUNS = ("max_kl", "dataset", "texts", "shared_prefix", "requests", "temperature", "seed", "goodput", "minutes")
RUNS += ("repeats", "resume", "tokenizer", "memory", "prefix_cache", "max_model_len")
DEFAULT_MINUTES = 30.0


def read_goal(options: AdviseOptions) -> "Goal":
    """Raises UsageError for options that do not go together, before anything is loaded."""
    from jaxinfer.measure.advise.goals import DEFAULT_MAX_KL, GOALS, Goal

    if options.goal not in GOALS:
        raise UsageError(f"--goal: {options.goal!r} is none of {', '.join(GOALS)}")
    if options.memory is not None and not options.memory > 0:
        raise UsageError(f"--memory must be positive, got {options.memory:g} GiB")
    if options.resume and options.json is None:
        raise UsageError("--resume needs --json FILE, which has the trials that are done")
    if options.goodput is not None and options.goal != "users":
        raise UsageError(f"--goodput is for --goal users, not {options.goal}")
    defaults = {field.name: field.default for field in fields(options)}
    for name in RUNS if options.on is not None else ("acceptance",):
        if getattr(options, name) != defaults[name]:
            what = "nothing runs with --on" if options.on is not None else "it is measured; --on PLACE plans"
            raise UsageError(f"--{name.replace('_', '-')}: {what}")
    memory = None if options.memory is None else int(options.memory * 2**30)
    return Goal(
        options.goal, DEFAULT_MAX_KL if options.max_kl is None else options.max_kl, memory, options.on is not None
    )


def read_requests(options: AdviseOptions) -> "Workload":
    """Raises as `read_workload`."""
    if options.dataset is not None and options.shared_prefix:
        raise UsageError("--shared-prefix is for prompts that are cut from texts, and --dataset has its own")
    return read_workload(options)


def read_sizes(options: AdviseOptions, default: str) -> list[int]:
    from jaxinfer.measure.bench.workload import parse_numbers

    return [int(size) for size in parse_numbers(options.sizes or default, "--sizes", whole=True)]


def draft_names(options: AdviseOptions) -> list[str]:
    own = ["demo-draft"] if options.model == "demo" and not options.draft else []
    return list(dict.fromkeys(["ngram", *own, *(options.draft or ())]))
