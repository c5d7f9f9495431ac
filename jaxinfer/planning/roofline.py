"""The roofline (Williams et al. 2009): the least time of a step, from its bytes at the memory's bandwidth, its FLOPs at
the chip's rate and its exchanges at the links' bandwidth. Nothing is measured."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxinfer.chips import Rates
from jaxinfer.planning.compiled import ProgramFigures
from jaxinfer.planning.counted import Counted, pass_flops
from jaxinfer.planning.step_model import StepPrediction

# Rates of acceptance that speculative rounds are computed for.
ACCEPTANCE_RATES = (0.6, 0.8, 0.9)


@dataclass(frozen=True)
class RooflinePoint:
    """A decode step of `batch` sequences of `context` tokens on each replica.

    Attributes:
      flops, hbm_bytes, sent_bytes: of one device. host_bytes: copied to it from the host's memory.
      seconds: the largest of memory_seconds, compute_seconds and host_seconds, plus link_seconds; also those of an
        output token of each sequence (TPOT of `jaxinfer bench`).
      bound: "memory", "compute", "host" or "links", whichever takes longest.
      tokens_per_second: output tokens of all sequences on all replicas, as `out` of `jaxinfer bench`.
      predicted: what a step is expected to take (`step_model`), on one device of a chip that has a model.
    """

    batch: int
    context: int
    flops: float
    hbm_bytes: float
    sent_bytes: float
    memory_seconds: float
    compute_seconds: float
    link_seconds: float
    tokens_per_second: float
    host_bytes: float = 0.0
    host_seconds: float = 0.0
    predicted: StepPrediction | None = None

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds, self.host_seconds) + self.link_seconds

    @property
    def bound(self) -> str:
        parts = {"memory": self.memory_seconds, "compute": self.compute_seconds}
        parts |= {"host": self.host_seconds, "links": self.link_seconds}
        return max(parts, key=lambda name: parts[name])

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "seconds": self.seconds, "tpot": self.seconds, "bound": self.bound}
        if self.predicted is not None:
            values["predicted"] |= {"seconds": self.predicted.seconds, "share": self.predicted_share}
        return values

    @property
    def predicted_share(self) -> float | None:
        """The least time as a share of the predicted one."""
        return None if self.predicted is None else self.seconds / self.predicted.seconds


def decode_point(
    rates: Rates,
    counted: Counted,
    compiled: ProgramFigures | None,
    *,
    batch: int,
    context: int,
    compiled_batch: int,
    compiled_context: int,
    num_replicas: int,
    host_bytes: float = 0.0,
) -> RooflinePoint:
    """The roofline of one decode step.

    Bytes are those of the weights, of the cache of `batch` sequences, and of everything else that the compiled program
    moves per sequence (activations, logits, the sampler's arrays); `compiled` None leaves the latter out. `host_bytes`
    are copied from the host's memory beside all that, and written to the device's before they are read.
    """
    cache = batch * counted.read_cache_bytes(context)
    rows = sent = 0.0
    if compiled is not None:
        share = batch / compiled_batch
        sent = compiled.sent_bytes * share
        if compiled.moved_bytes is not None and compiled.kernel_bytes is not None:
            read = min(counted.read_weight_bytes(compiled_batch) + host_bytes, compiled.moved_bytes)
            rows = (compiled.moved_bytes - read) * share
            longer = counted.read_cache_bytes(compiled_context)
            cache = compiled.kernel_bytes * share * (counted.read_cache_bytes(context) / longer if longer else 1)
    moved = counted.read_weight_bytes(batch) + cache + rows + host_bytes
    flops = pass_flops(counted, [(context - 1, 1)] * batch)
    memory, compute, links = moved / rates.hbm, rates.compute_seconds(flops), sent / rates.links
    host = host_bytes / rates.host if host_bytes else 0.0
    return RooflinePoint(
        batch=batch,
        context=context,
        flops=sum(flops.values()),
        hbm_bytes=moved,
        sent_bytes=sent,
        memory_seconds=memory,
        compute_seconds=compute,
        link_seconds=links,
        tokens_per_second=num_replicas * batch / (max(memory, compute, host) + links),
        host_bytes=host_bytes,
        host_seconds=host,
    )


def prefill_seconds(rates: Rates, counted: Counted, lengths: list[int]) -> float:
    """Seconds of the products and the attention of prompts of these lengths, one after another."""
    return rates.compute_seconds(pass_flops(counted, [(0, length) for length in lengths]))


@dataclass(frozen=True)
class RoundPoint:
    """A speculative round of `batch` sequences: `num_draft_tokens` are drafted one by one and verified together.

    Attributes:
      seconds: of the round. tokens_per_second: of all replicas, by acceptance rate.
    """

    batch: int
    context: int
    num_draft_tokens: int
    seconds: float
    tokens_per_second: dict[str, float]


def round_point(
    rates: Rates, target: RooflinePoint, draft: RooflinePoint | None, *, num_draft_tokens: int, num_replicas: int
) -> RoundPoint:
    """A round from the roofline of decode steps: `num_draft_tokens` steps of the draft (None: drafts are free), and one
    pass of the target that reads what a decode step reads and computes all the round's tokens."""
    width = num_draft_tokens + 1
    reading = max(target.memory_seconds, target.host_seconds)
    verifying = max(reading, target.compute_seconds * width) + target.link_seconds * width
    seconds = verifying + (0.0 if draft is None else num_draft_tokens * draft.seconds)
    rates_by_acceptance = {
        str(accepted): num_replicas * target.batch * (1 - accepted**width) / (1 - accepted) / seconds
        for accepted in ACCEPTANCE_RATES
    }
    return RoundPoint(target.batch, target.context, num_draft_tokens, seconds, rates_by_acceptance)
