"""`jaxinfer fleet simulate`: fleets of replicas, on paper."""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.api.options import LLMOptions
from jaxinfer.cli.bench import check_picture
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.options import as_json, given, given_values
from jaxinfer.cli.output import write_report
from jaxinfer.cli.plan import PlanOptions, native_messages_hidden, plan_request
from jaxinfer.fleet.simulate.options import ServiceGoal, SimulationOptions
from jaxinfer.options import MISSING, option
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from jaxinfer.fleet.simulate.run import ReplicaModel

ENGINE = ("dtype", "quantize", "requantize", "revision", "kv_dtype", "kv_policy")
ENGINE += ("page_size", "prefill_chunk", "memory_fraction")


@given(LLMOptions, ENGINE)
@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The trace, the model, the chips and the report."""

    trace: str = option(
        MISSING,
        "Arrivals: a .csv file of BurstGPT or Azure, a .jsonl file of Mooncake, or made ones, such as "
        "poisson:rate=4,prompt=512,answer=128,requests=1000 (or gamma with cv, or conversations with turns, shared and "
        "think).",
        "FILE|KIND:...",
    )
    model: str = option(
        MISSING,
        "A checkpoint's folder (a config.json is enough), a GGUF file, or a hub id.",
        "MODEL",
        "--model -m",
    )
    on: str = option(MISSING, "Chips of a machine, such as v6e:2x4, v5e:2x2, h200x1 or h100x8.", "PLACE")
    mesh: str | None = option(
        None, "Such as model=4 or data=2,model=4; default: the model is sharded over all devices.", "AXES"
    )
    max_seqs: int = option(64, "Answers that a replica generates at once.", "N", min=1)
    context: int | None = option(
        None, "Tokens of a prompt with its answer; default: the model's limit, at most 4,096.", "N", min=1
    )
    replicas: str = option("1", "Sizes of the fleet; 2..64 looks for the smallest that is enough.", "N|N,N|N..N")
    rate: float | None = option(None, "Requests per second, to which the trace's times are stretched.", "X", min=1e-9)
    requests: int | None = option(None, "Only the first N requests of the trace.", "N", min=1)
    picture: Path | None = option(None, "Draw it, as .png, .svg or .pdf.", "FILE")
    as_json: bool = as_json("One JSON object.")


@native_messages_hidden()
def simulate(options: SimulateOptions, fleet: SimulationOptions, goal: ServiceGoal) -> None:
    """Simulate a fleet before renting it.

    Each replica is the engine's own scheduler, with its pages and its prefix tree, over the times of steps that a model
    of the chip gives; nothing is computed. The report has first-token and inter-token times, the requests that are
    served in time, tokens per second, prefix hits and cost, and with --replicas 2..64 how many replicas are enough.
    """
    from jaxinfer.fleet.simulate.report import parse_replicas

    check_picture(options.picture, "--picture")
    try:
        sizes, is_search = parse_replicas(options.replicas)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with Stage("starting"):
        import jax

        if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_platforms", "cpu")  # the chips of this machine are not needed
        from jaxinfer.fleet.simulate.report import figures_of, report_dict, report_text, request_times, search_replicas
        from jaxinfer.fleet.simulate.run import FleetRun, run_fleet
        from jaxinfer.fleet.simulate.traces import open_trace
    trace = open_trace(options.trace, fleet.seed)
    trace = trace.first(options.requests) if options.requests is not None else trace
    trace = trace.at_rate(options.rate) if options.rate is not None else trace
    with Stage("planning"):
        model = _replica_model(options, fleet, reuses_prefixes=trace.blocks is not None)
    runs: list[FleetRun] = []
    begun = time.perf_counter(), time.process_time()

    def run(size: int):
        with Stage(f"simulating {size} replicas", len(trace), "request") as stage:
            runs[:] = [run_fleet(trace, model, size, fleet, progress=lambda count: stage.update(1000 if count else 0))]
        return figures_of(runs[0], goal, model.num_chips)

    gc.freeze()  # what is loaded by now stays
    gc.disable()  # a fleet's records make no cycles
    try:
        if is_search:
            rows, needed = search_replicas(sizes[0], sizes[-1], goal.slo_share, run)
        else:
            rows = [run(size) for size in sizes]
            needed = next((row.num_replicas for row in rows if row.share >= goal.slo_share), None)
    finally:
        gc.enable()
    seconds, processor = time.perf_counter() - begun[0], time.process_time() - begun[1]
    notes = [*model.times.notes, *trace.notes]
    if options.picture is not None:
        from jaxinfer.fleet.simulate.picture import draw_fleets

        title = f"{options.model} on {options.on}, {trace.name}, {trace.rate:,.3g} requests a second"
        draw_fleets(title, rows, goal, request_times(runs[0]), options.picture)
    told = {
        **report_dict(trace, rows, needed, goal, notes),
        "simulated_in_seconds": seconds,
        "processor_seconds": processor,
    }
    text = report_text(trace, rows, needed, goal, notes, is_search=is_search)
    write_report(
        told,
        lambda _: text + f"simulated in {seconds:,.1f} s, {processor:,.1f} of them on the processor\n",
        as_json=options.as_json,
    )


def _replica_model(options: SimulateOptions, fleet: SimulationOptions, *, reuses_prefixes: bool) -> "ReplicaModel":
    """Raises as `plan_request` and `replica_model`."""
    from dataclasses import replace

    from jaxinfer.fleet.simulate.model import replica_model

    values = given_values(options)
    engine = {name: getattr(options, name) for name in ENGINE if name in values}
    request = plan_request(
        PlanOptions(
            model=options.model,
            on=options.on,
            mesh=options.mesh,
            max_seqs=options.max_seqs,
            context=options.context,
            compile_=False,
            **engine,
        )
    )
    model = replica_model(request, fleet.max_waiting)
    if reuses_prefixes:
        return model
    # No two prompts begin alike: their pages would be kept for nothing.
    return replace(model, options=replace(model.options, reuses_prefixes=False, num_saved_states=0))
