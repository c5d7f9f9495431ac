"""`jaxinfer profile`: where a model's device time goes, from a trace of a few steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.bench import PATHS, MeasuredModelOptions, bench_arguments
from jaxinfer.cli.command import UsageError, say
from jaxinfer.cli.output import console, json_ready, shows_progress
from jaxinfer.cli.workload_options import FIGURES, WORKLOAD, JsonFile, Seed, check_folder

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.measure.profiling.phases import Workload

STEPS_PER_DISPATCH, PREFILL_CHUNK = 8, 512  # those of `LLM`


@dataclass(frozen=True)
class ProfileOptions(MeasuredModelOptions):
    """The model and the engine, what is run, and what is kept of it."""

    steps_per_dispatch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Decode steps of a dispatch.", rich_help_panel="Engine")
    ] = STEPS_PER_DISPATCH
    batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests at once, on each replica.", rich_help_panel=WORKLOAD)
    ] = 1
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of each request, at random.", rich_help_panel=WORKLOAD)
    ] = 128
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Decode steps (or speculative rounds) to trace, and steps of prompts at most.",
            rich_help_panel=WORKLOAD,
        ),
    ] = 16
    phase: Annotated[
        str | None,
        typer.Option(metavar="prefill|decode", help="Only this one; default: both.", rich_help_panel=WORKLOAD),
    ] = None
    seed: Seed = 0
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the traces, for Perfetto or XProf.", rich_help_panel=FIGURES),
    ] = None
    json: JsonFile = None


OWN = ("random_weights", "batch", "prompt_tokens", "steps", "phase", "seed", "trace", "json")


def profile(options: ProfileOptions) -> None:
    """Show where a model's device time goes.

    Prompts, then decoding of a full batch (speculative rounds where there is a draft) run under JAX's profiler, after
    the same without it. Their time on the device by kind of operation and part of the model, what the host kept it
    waiting, and the least that their bytes and products take at rates measured in the same run.
    """
    from jaxinfer.measure.bench import results
    from jaxinfer.measure.bench.model import public_name
    from jaxinfer.measure.profiling import text
    from jaxinfer.measure.profiling.phases import PHASES, Workload
    from jaxinfer.measure.profiling.run import profile as run

    if options.phase is not None and options.phase not in PHASES:
        raise UsageError(f"--phase: {options.phase!r} is neither {' nor '.join(PHASES)}")
    check_folder(options.json, "--json")
    if options.trace is not None and options.trace.exists() and not options.trace.is_dir():
        raise UsageError(f"--trace: {options.trace} is no folder")
    workload = Workload(options.batch, options.prompt_tokens, options.steps, options.seed)
    arguments = {"max_seqs": options.batch, **bench_arguments(options, OWN)}
    if arguments["max_seqs"] < options.batch:
        raise UsageError(f"--batch {options.batch} is more than --max-seqs {options.max_seqs}")
    arguments.setdefault("max_model_len", _max_model_len(options, workload, arguments))

    def told(step: str) -> None:
        if shows_progress():
            say(step)

    result = run(
        options.model,
        arguments,
        workload,
        phases=PHASES if options.phase is None else (options.phase,),
        random_weights=options.random_weights,
        folder=options.trace,
        told=told,
    )
    result["options"] = {name: public_name(str(value)) if name in PATHS else value for name, value in arguments.items()}
    if options.json is not None:
        results.write(options.json, json_ready(result))
    _show(result, text)
    if options.trace is not None:
        target = console()
        target.print(
            f"traces in {options.trace}: open a *.trace.json.gz of it at https://ui.perfetto.dev,", markup=False
        )
        target.print(f"or all with XProf: pip install xprof; xprof --logdir {options.trace}", markup=False)


def _max_model_len(options: ProfileOptions, workload: "Workload", arguments: dict[str, Any]) -> int:
    """As long as the phases need, where the model allows it. Raises UsageError for prompts that leave it no room."""
    from jaxinfer.loading import load_shapes

    config, _ = load_shapes(options.model, dtype=options.dtype, revision=options.revision)
    drafted = arguments.get("num_draft_tokens", "auto")
    tree = arguments.get("draft_tree")
    depth = 0 if options.draft is None else len(tree) if tree else 16 if drafted == "auto" else drafted
    answer = workload.answer_tokens(
        arguments.get("prefill_chunk", PREFILL_CHUNK), options.steps_per_dispatch, tokens_per_step=depth + 1
    )
    allowed = config.max_position_embeddings
    if workload.prompt_tokens >= allowed:
        raise UsageError(
            f"--prompt-tokens {workload.prompt_tokens}: the model takes {allowed} tokens, answers included"
        )
    return min(workload.prompt_tokens + answer, allowed)


def _show(result: dict[str, Any], text: Any) -> None:
    from jaxinfer.measure.bench.text import header

    target = console()
    lines = [*header({**result, "start": None}), text.note(result["machine"]["platform"])]
    target.print("\n".join(lines), markup=False)
    for phase in result["phases"]:
        target.print()
        target.print("\n".join(text.headline(phase)), markup=False)
        target.print()
        target.print(_table(*text.parts(phase)))
        target.print()
        target.print(_table(*text.longest(phase), left=3))


def _table(titles: list[str], rows: list[list[str]], left: int = 1) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    return table
