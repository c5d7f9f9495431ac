"""`jaxinfer profile`: where a model's device time goes, from a trace of a few steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.bench import (
    MeasuredModelOptions,
    bench_arguments,
    check_folder,
    json_file_option,
    results_option,
    seed_option,
    workload_option,
)
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.output import console, json_ready
from jaxinfer.options import option
from jaxinfer.progress import Stage
from jaxinfer.tables import make_table

if TYPE_CHECKING:
    from jaxinfer.measure.profiling.phases import Workload

STEPS_PER_DISPATCH = 8  # the default of `LLM`


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(MeasuredModelOptions):
    """The model and the engine, what runs, and what is kept of it."""

    steps_per_dispatch: int = option(STEPS_PER_DISPATCH, "Decode steps of a dispatch.", "N", min=1, group="Engine")
    batch: int = workload_option(1, "Concurrent requests on each replica.", "N", min=1)
    prompt_tokens: int = workload_option(128, "Length of each prompt, of random tokens.", "N", min=1)
    steps: int = workload_option(
        16, "Number of decode steps or speculative rounds to trace, and the limit of prefill steps.", "N", min=1
    )
    phase: str | None = workload_option(None, "Profile only this phase; default: both.", "prefill|decode")
    seed: int = seed_option()
    trace: Path | None = results_option(None, "Keep the traces, for Perfetto or XProf.", "FOLDER")
    json: Path | None = json_file_option()


OWN = ("random_weights", "batch", "prompt_tokens", "steps", "phase", "seed", "trace", "json")


def profile(options: ProfileOptions) -> None:
    """Show where a model's device time goes.

    Prefill, then decoding of a full batch (speculative rounds with a draft), runs first without and then with JAX's
    profiler. The report has the device time by kind of operation and part of the model, how long the device waited for
    the host, and the roofline of the same work at rates measured in the same run.
    """
    with Stage("starting"):
        from jaxinfer.measure.bench import results
        from jaxinfer.measure.bench.model import public_options
        from jaxinfer.measure.profiling.phases import PHASES, Workload
        from jaxinfer.measure.profiling.run import profile as run

    if options.phase is not None and options.phase not in PHASES:
        raise UsageError(f"--phase: {options.phase!r} is neither {' nor '.join(PHASES)}")
    check_folder(options.json, "--json")
    if options.trace is not None and options.trace.exists() and not options.trace.is_dir():
        raise UsageError(f"--trace: {options.trace} is not a folder")
    workload = Workload(options.batch, options.prompt_tokens, options.steps, options.seed)
    arguments = {"max_seqs": options.batch, **bench_arguments(options, OWN)}
    if arguments["max_seqs"] < options.batch:
        raise UsageError(f"--batch {options.batch} is more than --max-seqs {options.max_seqs}")
    arguments.setdefault("max_model_len", _max_model_len(options, workload, arguments))
    with Stage("profiling") as stage:
        result = run(
            options.model,
            arguments,
            workload,
            phases=PHASES if options.phase is None else (options.phase,),
            random_weights=options.random_weights,
            folder=options.trace,
            progress=stage.describe,
        )
    result["options"] = public_options(arguments)
    if options.json is not None:
        results.write_result(options.json, json_ready(result))
    _show(result, options.trace)


def _max_model_len(options: ProfileOptions, workload: "Workload", arguments: dict[str, Any]) -> int:
    """The length that the phases need, up to the model's limit. Raises UsageError if the prompts leave no room."""
    import jax

    from jaxinfer.chips import chip_of_kind
    from jaxinfer.engine.spec import default_chunk
    from jaxinfer.loading import load_shapes

    config, _ = load_shapes(options.model, dtype=options.dtype or "auto", revision=options.revision)
    count, tree = arguments.get("num_draft_tokens", "auto"), arguments.get("draft_tree")
    depth = 0 if options.draft is None else len(tree) if tree else 16 if count == "auto" else count
    chip = chip_of_kind(jax.devices()[0].device_kind)
    chunk = arguments.get("prefill_chunk", default_chunk(chip and chip.name))
    answer = workload.answer_tokens(chunk, options.steps_per_dispatch, tokens_per_step=depth + 1)
    allowed = config.max_length
    if workload.prompt_tokens >= allowed:
        raise UsageError(
            f"--prompt-tokens {workload.prompt_tokens}: the model takes {allowed} tokens, answers included"
        )
    return min(workload.prompt_tokens + answer, allowed)


def _show(result: dict[str, Any], traces: Path | None) -> None:
    from jaxinfer.measure.bench.results import header

    target = console()
    is_cpu = result["machine"]["platform"] == "cpu"
    lines = [*header({**result, "start": None}), CPU_NOTE if is_cpu else DEVICE_NOTE]
    target.print("\n".join(lines), markup=False)
    for phase in result["phases"]:
        target.print("\n" + "\n".join(headline(phase)) + "\n", markup=False)
        target.print(make_table(*parts(phase)))
        target.print()
        target.print(make_table(*longest(phase), num_left=3))
    if traces is not None:
        target.print(f"traces in {traces}: open a *.trace.json.gz file at https://ui.perfetto.dev,", markup=False)
        target.print(f"or all of them with XProf: pip install xprof; xprof --logdir {traces}", markup=False)


MS = 1e3
SHORT = {"matrix products": "products", "gathers, copies, transposes": "moves"}
CPU_NOTE = (
    "Device time on a CPU is the time in which at least one operation of a program ran on any thread; it is divided "
    "equally among operations that run at the same time."
)
DEVICE_NOTE = "Device time is the time in which at least one operation ran, averaged over the devices."


def headline(phase: dict[str, Any]) -> list[str]:
    """Lines on what ran, how long it took, and the roofline."""
    steps, line, device = phase["steps"], phase["roofline"], phase["device"]
    unit = "step"
    if phase["phase"] == "prefill":
        what = f"{phase['prompt_tokens']:,} prompt tokens in {_count(steps, 'step')}"
    else:
        unit = {("decode",): "step", ("rounds",): "speculative round"}.get(tuple(phase["kinds"]), "step or round")
        batch = f"{phase['mean_batch']:g} sequence{'' if phase['mean_batch'] == 1 else 's'}"
        what = f"{_count(steps, unit)} of {batch} of {phase['mean_context']:,.0f} tokens"
    each, traced = phase["seconds"] / steps, phase["traced_seconds"] / steps
    gap = phase["host_gap"]
    waited = "" if gap is None else f" and waited {gap['per_step_mean'] * MS:.3f} ms per step for the host"
    lines = [
        f"{phase['phase']}: {what}, {_count(phase['dispatches'], 'dispatch', 'es')}",
        f"per {unit}: {each * MS:.2f} ms ({traced * MS:.2f} with the trace); "
        f"the device was idle for {100 * device['idle_share']:.1f} %{waited}",
        f"at least {line['bytes'] / steps / 1e6:,.1f} MB and {line['flops'] / steps / 1e9:,.2f} GFLOP per step: "
        f"{line['seconds'] / steps * MS:.2f} ms at the measured rates ({line['bound']}-bound), "
        f"{line['percent']:.0f} % of the roofline",
    ]
    if line["percent"] > 100:
        lines.append("faster than the roofline: other work slowed down the machine while its rates were measured")
    if (layers := phase["layers"]) is not None:
        lines.append(
            f"slowest layer: {layers['slowest']}, {layers['slowest_seconds'] / steps * MS:.3f} ms per step; "
            f"median layer: {layers['median_seconds'] / steps * MS:.3f} ms"
        )
    return lines


def parts(phase: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: milliseconds per step, by part of the model and kind of operation."""
    from jaxinfer.measure.profiling.ops import KINDS

    steps, total = phase["steps"], sum(phase["by_kind"].values())
    kinds = [kind for kind in KINDS if kind in phase["by_kind"]]
    rows = []
    for part, seconds in phase["by_part"].items():
        cells = phase["by_part_and_kind"][part]
        numbers = [f"{cells[kind] / steps * MS:.3f}" if kind in cells else "" for kind in kinds]
        rows.append([part, f"{seconds / steps * MS:.3f}", f"{100 * seconds / total:.1f} %", *numbers])
    sums = [phase["by_kind"][kind] for kind in kinds]
    rows.append(["all", f"{total / steps * MS:.3f}", "100.0 %", *(f"{seconds / steps * MS:.3f}" for seconds in sums)])
    rows.append(["", "", "", *(f"{100 * seconds / total:.1f} %" for seconds in sums)])
    return ["device ms per step", "all", "share", *(SHORT.get(kind, kind) for kind in kinds)], rows


def longest(phase: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: the operations that took longest, summed over layers."""
    steps, total = phase["steps"], sum(phase["by_kind"].values())
    rows = [
        [
            op["name"],
            op["part"],
            SHORT.get(op["kind"], op["kind"]),
            f"{op['count'] / steps:,.3g}",
            f"{op['seconds'] / steps * MS:.3f}",
            f"{100 * op['seconds'] / total:.1f} %",
        ]
        for op in phase["longest"]
    ]
    return ["longest per step", "part", "kind", "runs", "ms", "share"], rows


def _count(number: int, unit: str, ending: str = "s") -> str:
    return f"{number:,} {unit}{'' if number == 1 else ending}"
