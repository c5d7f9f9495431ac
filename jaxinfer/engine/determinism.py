"""Decides whether an engine is deterministic, and the rows of the one shape that all of its passes then have.

A pass reads all weights whatever its rows are, so more rows take no more time as long as the chip multiplies them while
the weights arrive, and one shape for a token alone and for a chunk of a prompt costs nothing. Neither depends on the
load. On a TPU the multiplication takes what its bundles of instructions take, more than FLOPs at the public rate.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jaxinfer.chips import Rates, chips
from jaxinfer.engine.weight_work import WeightWork, weight_work
from jaxinfer.models import host_layers

# Rows without a chip's figures, and steps of them there.
DEFAULT_ROWS = 256
# Steps of the number of rows on a chip: a GPU multiplies tiles of 64 rows, and attention on a TPU has parts of 32.
ROWS_STEP = {"gpu": 64, "tpu": 32}
# More are not needed to be at the ridge, except by experts, of which one token reads few.
MAX_ROWS = 1024
# Prompt tokens beside all slots, at least.
MIN_CHUNK = 64
# deterministic="auto" accepts so much more time of a decode step.
MAX_COST = 1.02
# Bytes between memory and chip for each row of a layer beside its weights and pages, in numbers of the model's type for
# each of 4 hidden_size + 3 intermediate_size: of compiled programs (benchmarks/deterministic_cost.py). Two TPUs keep
# all in vector memory. Of a GPU beside what its cache serves; an H100 has 2.9 in bfloat16, and more in int8.
MOVED_PER_ROW = {"v6e": 0.0, "tpu7x": 0.0, "tpu": 1.3, "gpu": 2.9}
# Shares of a TPU's FLOP/s that XLA's products reach, by bits of a stored weight and rows, from the bundles of compiled
# programs: `python -m benchmarks.tpu_products --json benchmarks/results/tpu_products.json`. Rows between are
# interpolated; of fewer or more rows, and of other chips, the nearest and the last are taken.
SHARES_OF_FLOPS: dict[str, dict[int, dict[int, float]]] = {
    "v5e": {16: {192: 1.0, 224: 1.0}, 8: {96: 1.0, 128: 1.0}, 4: {1: 0.0195, 8: 0.155, 128: 0.332}},
    "v6e": {
        16: {480: 0.916, 512: 0.918, 544: 0.92},
        8: {224: 0.926, 256: 0.933},
        4: {1: 0.00492, 8: 0.0393, 64: 0.237, 128: 0.122, 512: 0.252},
    },
    "tpu7x": {16: {256: 1.0, 288: 1.0}, 8: {128: 0.757, 160: 1.0}, 4: {1: 0.00388, 8: 0.0315, 128: 0.146}},
}
OTHER_SHARES = {"tpu": 0.9, "gpu": 1.0}
# Bundles of the largest product take at most this share of the time in which its weight arrives: a listing has no
# waits, and Llama 3 8B's down projection takes 2 % more bundles than its gate.
BUNDLES_MARGIN = 0.95


@dataclass(frozen=True)
class Determinism:
    """The decision, with its reason.

    Attributes:
      is_on: whether every pass has one shape. num_rows: its rows.
      cost: predicted time of a decode step over that without, the most of any number of sequences; None if unknown.
      reason: why it is on or off, in words.
    """

    is_on: bool
    num_rows: int
    cost: float | None
    reason: str

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each step where all have one shape, as `programs.paged.decode` takes them; () for others."""
        return (self.num_rows,) if self.is_on else ()

    def __str__(self) -> str:
        return f"{'on' if self.is_on else 'off'}: {self.reason}"


def decide(spec: Any) -> Determinism:
    """Resolves the option `deterministic` of an `EngineSpec`; "auto" is on where decoding is predicted to take at most
    `MAX_COST` of the time."""
    asked = spec.options.deterministic
    work = weight_work(spec.config, spec.params)
    chip = chips().get(spec.chip)
    rates = None if chip is None else Rates.of(chip)
    num_rows = _num_rows(spec, rates, work)
    cost = None if rates is None else _cost(spec, rates, work, num_rows)
    decision = Determinism(asked is True, num_rows, cost, f"deterministic={asked}")
    if asked != "auto":
        return decision
    if (refusal := _refusal(spec)) is not None:
        return replace(decision, reason=f"auto, {refusal}")
    if cost is None:
        return replace(decision, reason="auto, the figures of this chip are not known")
    is_on = cost <= MAX_COST
    limit = f"{'at most' if is_on else 'more than'} {MAX_COST:.2f}"
    return replace(decision, is_on=is_on, reason=f"auto, decoding is predicted to take {cost:.3f} of the time, {limit}")


def _refusal(spec: Any) -> str | None:
    """Why "auto" is off whatever the rows would take."""
    options = spec.options
    sizes = options.token_buckets or options.decode_slots
    refusals = {
        f"the sizes {sizes} are for programs of several shapes": sizes,
        f"draft_tree={options.draft_tree} has keys that are summed in another order": options.draft_tree,
        "recurrent layers would read tokens one by one": spec.has_states,
        f"the cost with kv_policy={options.kv_policy!r} is not known": options.kv_policy,
        "latent attention would compute 16 queries for each": spec.config.mla,
        "layers that arrive from the host take longer": host_layers.host_rows(spec.params),
        "on a CPU a step takes longer the more rows it has, and in float32 tokens do not depend on them": (
            spec.platform == "cpu"
        ),
    }
    return next((text for text, is_so in refusals.items() if is_so), None)


def _num_rows(spec: Any, rates: Rates | None, work: WeightWork) -> int:
    """The rows at the ridge of the products with the layers' weights, or more where slots and chunks need them."""
    nodes = spec.most_nodes
    chunk = min(spec.options.prefill_chunk or MIN_CHUNK, spec.max_model_len)
    least = max(chunk + spec.max_seqs, spec.max_seqs * nodes)
    if rates is None:
        return -(-least // DEFAULT_ROWS) * DEFAULT_ROWS
    step = ROWS_STEP.get(spec.platform, DEFAULT_ROWS)
    reading = (work.dense_bytes + work.expert_bytes - work.head[2]) / rates.hbm
    most = reading * (BUNDLES_MARGIN if spec.platform == "tpu" else 1.0)
    fitting = (rows for rows in range(MAX_ROWS, 0, -step) if _computing(spec, rates, work, rows) <= most)
    return max(next(fitting, 0), -(-least // step) * step)


def _computing(spec: Any, rates: Rates, work: WeightWork, num_rows: int) -> float:
    """Seconds in which a chip multiplies rows by the weights of the layers."""
    flops = {kind: count * num_rows for kind, count in _layer_flops(work).items()}
    return rates.compute_seconds(flops) / share_of_flops(spec.chip, spec.platform, stored_bits(work), num_rows)


def stored_bits(work: WeightWork) -> int:
    """Bits of a weight of the layers, without its scales: 16, 8 or 4, whichever most of them have."""
    num_weights = sum(_layer_flops(work).values()) / 2
    num_bytes = work.dense_bytes - work.head[2]
    if work.expert_bytes or not num_weights:  # a token multiplies by some experts
        return 16
    return next(bits for bits in (16, 8, 4, 0) if 8 * num_bytes >= 0.75 * bits * num_weights) or 4


def share_of_flops(chip: str | None, platform: str, bits: int, num_rows: int) -> float:
    """The share of a chip's FLOP/s that products of some rows reach, see `SHARES_OF_FLOPS`."""
    known = sorted(SHARES_OF_FLOPS.get(chip or "", {}).get(bits, {}).items())
    if not known:
        return OTHER_SHARES.get(platform, 1.0)
    for (low, before), (high, after) in pairwise(known):
        if low <= num_rows <= high:
            return before + (after - before) * (num_rows - low) / (high - low)
    return known[0][1] if num_rows < known[0][0] else known[-1][1]


def _layer_flops(work: WeightWork) -> dict[str, float]:
    """FLOPs of a token without the output layer, which has one row for each slot."""
    kind, count, _ = work.head
    return {**work.token_flops, kind: work.token_flops.get(kind, 0.0) - count}


def _cost(spec: Any, rates: Rates, work: WeightWork, num_rows: int) -> float:
    """Time of a decode step of one shape over that of as many rows as sequences, the most for 1 to all slots: the
    products of the layers, what is moved beside them, the products of the output layer, and what devices exchange.
    Attention takes the same."""
    config = spec.config
    vectors = 4 * config.hidden_size + 3 * config.intermediate_size
    moved = MOVED_PER_ROW.get(spec.chip, MOVED_PER_ROW["gpu" if spec.platform == "gpu" else "tpu"])
    row_bytes = moved * vectors * spec.dtype.itemsize

    def seconds(num_layer_rows: int, num_read: int, num_head_rows: int) -> float:
        moe, missed = config.moe, 0.0
        if moe is not None:
            missed = (1 - moe.num_experts_per_token / moe.num_experts) ** num_read
        kind, head_flops, head_bytes = work.head
        reading = work.dense_bytes - head_bytes + (1 - missed) * work.expert_bytes
        layers = max(reading / rates.hbm, _computing(spec, rates, work, num_layer_rows))
        layers += config.num_layers * num_layer_rows * row_bytes / rates.hbm
        head = max(head_bytes / rates.hbm, rates.compute_seconds({kind: head_flops * num_head_rows}))
        count = spec.num_devices
        sent = 2 * (count - 1) / count * 2 * config.num_layers * config.hidden_size * 2 * num_layer_rows
        return (layers + head) / count + (sent / rates.links if count > 1 else 0.0)

    slots = spec.max_seqs
    # Rows of padding are all the same token, which goes to experts of its own.
    return max(
        seconds(num_rows, num_seqs + 1, slots) / seconds(num_seqs, num_seqs, num_seqs) for num_seqs in (1, slots)
    )
