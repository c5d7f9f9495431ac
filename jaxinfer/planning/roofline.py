"""The least time that a step can take: what its bytes take at the memory's rate, its FLOPs at the chip's, and its
exchanges at the links' (Williams et al. 2009). No measured speed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxinfer.planning.chips import Chip
from jaxinfer.planning.counted import Counted
from jaxinfer.planning.figures import Figures

# Of drafted tokens that the target accepts: for what rounds bring.
ACCEPTANCE_RATES = (0.6, 0.8, 0.9)


@dataclass(frozen=True)
class RooflinePoint:
    """A step that makes one token for each of `batch` sequences of `context` tokens, on a replica.

    Attributes:
      flops, hbm_bytes, sent_bytes: of one device. seconds: of a step; memory_seconds and compute_seconds, of which the
        larger counts, and link_seconds, which is added.
      bound: "memory", "compute" or "links": what takes longest.
      tokens_per_second: of all replicas.
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

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds) + self.link_seconds

    @property
    def bound(self) -> str:
        parts = {"memory": self.memory_seconds, "compute": self.compute_seconds, "links": self.link_seconds}
        return max(parts, key=lambda name: parts[name])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "bound": self.bound}


@dataclass(frozen=True)
class Rates:
    """What a device does in a second; FLOPs by what is multiplied."""

    hbm: float
    links: float
    flops: dict[str, float]

    @classmethod
    def of(cls, chip: Chip) -> "Rates":
        share = chip.devices_per_chip
        known = {name: rate / share for name, rate in chip.flops.items() if rate is not None}
        # A chip without a rate of its own for a type multiplies it as bf16.
        flops = {name: known.get(name, known["bf16"]) for name in chip.flops}
        return cls(chip.hbm_bandwidth / share, chip.link_bandwidth / share / 2, flops)

    def compute_seconds(self, flops: Mapping[str, float]) -> float:
        return sum(number / self.flops[kind] for kind, number in flops.items())


def pass_flops(
    counted: Counted, spans: Sequence[tuple[int, int]], *, reads_all_logits: bool = False
) -> dict[str, float]:
    """FLOPs of a pass, by what is multiplied, for spans (tokens before, tokens of it): each token attends to those
    before it and itself. Logits are of every token (`reads_all_logits`), or of a span's last."""
    num_tokens = sum(length for _, length in spans)
    flops = {kind: per_token * num_tokens for kind, per_token in counted.token_flops.items()}
    if not reads_all_logits:
        kind, head = counted.head
        flops[kind] -= head * (num_tokens - len(spans))
    attention = sum(counted.attention_flops(start + (length + 1) / 2) * length for start, length in spans)
    return {**flops, "bf16": flops.get("bf16", 0.0) + attention}


def decode_point(
    rates: Rates,
    counted: Counted,
    compiled: Figures | None,
    *,
    batch: int,
    context: int,
    compiled_batch: int,
    compiled_context: int,
    num_replicas: int,
) -> RooflinePoint:
    """One decode step.

    Bytes are the weights and the cache of so many sequences, and what else the compiled program of `compiled_batch`
    sequences moves, by the row: activations, logits, the sampler's arrays. Without a compiled program that is left
    out.
    """
    cache = batch * context * counted.token_cache_bytes
    rows = sent = 0.0
    if compiled is not None:
        share = batch / compiled_batch
        sent = compiled.sent_bytes * share
        if compiled.moved_bytes is not None and compiled.kernel_bytes is not None:
            read = min(counted.read_weight_bytes(compiled_batch), compiled.moved_bytes)
            rows = (compiled.moved_bytes - read) * share
            cache = compiled.kernel_bytes * share * context / compiled_context
    moved = counted.read_weight_bytes(batch) + cache + rows
    flops = pass_flops(counted, [(context - 1, 1)] * batch)
    point = RooflinePoint(
        batch=batch,
        context=context,
        flops=sum(flops.values()),
        hbm_bytes=moved,
        sent_bytes=sent,
        memory_seconds=moved / rates.hbm,
        compute_seconds=rates.compute_seconds(flops),
        link_seconds=sent / rates.links,
        tokens_per_second=0.0,
    )
    return _with_rate(point, num_replicas * batch)


def prefill_seconds(rates: Rates, counted: Counted, lengths: list[int]) -> float:
    """What the products and the attention of prompts of these lengths take at the rates, one after another."""
    return rates.compute_seconds(pass_flops(counted, [(0, length) for length in lengths]))


def _with_rate(point: RooflinePoint, tokens: float) -> RooflinePoint:
    return RooflinePoint(**{**asdict(point), "tokens_per_second": tokens / point.seconds})


@dataclass(frozen=True)
class RoundPoint:
    """A speculative round of `batch` sequences: `num_draft_tokens` drafted one after the other, and checked together.

    Attributes:
      seconds: of the round. tokens_per_second: of all replicas, by the share of drafted tokens that is accepted.
    """

    batch: int
    context: int
    num_draft_tokens: int
    seconds: float
    tokens_per_second: dict[str, float]


def round_point(
    rates: Rates, target: RooflinePoint, draft: RooflinePoint | None, *, num_draft_tokens: int, num_replicas: int
) -> RoundPoint:
    """A round whose target pass reads what a decode step does and computes for all its tokens at once, after as many
    steps of the draft as there are tokens (none for drafts that are looked up). Counted from the two kinds of step."""
    width = num_draft_tokens + 1
    checking = max(target.memory_seconds, target.compute_seconds * width) + target.link_seconds * width
    seconds = checking + (0.0 if draft is None else num_draft_tokens * draft.seconds)
    rate = {
        str(accepted): num_replicas * target.batch * (1 - accepted**width) / (1 - accepted) / seconds
        for accepted in ACCEPTANCE_RATES
    }
    return RoundPoint(target.batch, target.context, num_draft_tokens, seconds, rate)
