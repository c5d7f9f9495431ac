"""From a model on chips to what a replica is: pages that fit, options of the scheduler, times of steps."""

from dataclasses import replace

from jaxinfer.checks import format_bytes
from jaxinfer.engine.scheduler import SchedulerOptions
from jaxinfer.fleet.simulate.run import ReplicaModel
from jaxinfer.fleet.simulate.times import StepTimes
from jaxinfer.planning import PlanRequest, make_plan


def replica_model(request: PlanRequest, max_waiting: int | None = 1024) -> ReplicaModel:
    """One replica of a plan's request, counted and not compiled: an engine of `jaxinfer serve` on the devices of a
    mesh. A place on which the mesh has several (`data`) holds several replicas.

    Raises ValueError where not even one sequence of the greatest length fits.
    """
    plan, spec = make_plan(request, compiles=False), request.spec()
    num_pages = plan.memory.tokens // spec.page_size + 1
    needed = -(-spec.max_model_len // spec.page_size) + 1
    if num_pages < needed:
        raise ValueError(
            f"{request.name} does not fit {request.place.name}: the cache has {max(num_pages - 1, 0)} pages of "
            f"{spec.page_size} tokens, and a sequence of {spec.max_model_len} needs {needed - 1}"
        )
    spec = spec.with_pages(num_pages)
    times = StepTimes.of(request.place.chip, spec, plan.counted)
    layout = plan.layout
    notes = [
        f"a replica: {request.name}, {layout.num_devices} of {request.place.num_devices} devices of "
        f"{request.place.name}, {spec.max_seqs} sequences, {num_pages - 1:,} pages of {spec.page_size} tokens "
        f"({format_bytes((num_pages - 1) * spec.page_bytes)} a device), prompts in pieces of {spec.prefill_chunk}",
        *times.notes,
        "the host, the network and tokenizing take no time",
    ]
    options = SchedulerOptions.of(spec)
    return ReplicaModel(
        options=replace(options, steps_per_dispatch=1, max_waiting=max_waiting),
        times=replace(times, notes=tuple(notes)),
        max_model_len=spec.max_model_len,
        num_chips=request.place.num_chips / layout.num_replicas,
    )
