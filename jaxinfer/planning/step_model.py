"""A model of a decode step: bytes, issue slots and launches, each at what a chip is expected to give.

    seconds = max(weights / product rate, FLOPs / (product share * peak)) * deterministic cost
            + products * product start + layers * attention start + cache / attention rate
            + small operations * their seconds

The attention rate is a share of that of copies, or less where instructions are the bound: a block of 64 keys takes so
many issue slots, of which a chip has so many in a second.

The constants were read from programs that the chips' own compilers made, and from published measurements of other
systems; no chip has run these programs yet. They stay as they are until a measurement says otherwise.
"""

from dataclasses import dataclass, field

from jaxinfer.chips import Chip, Rates
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import Params
from jaxinfer.planning.counted import Counted, count, pass_flops
from jaxinfer.quantization.tree import scheme_of, weights

KEYS = 64  # of a block
LAUNCHES_OF_LAYER, LAUNCHES_BESIDE = 9, 33  # on a GPU (tests/chip/test_decode_step.py)
PRODUCTS_OF_LAYER = 4  # queries with keys and values, output, gate with up, down
# Of a warp for a block of keys of decode attention with heads of 128, compiled for sm_90a (benchmarks.gpu_resources).
HOPPER_INSTRUCTIONS = {"bfloat16": 460, "float8_e4m3fn": 569, "float8_e5m2": 569, "int8": 784, "int4": 760}
WARPS, ISSUED = 4, 0.6  # of a block; instructions that a scheduler issues in a cycle, of which one is the ceiling


@dataclass(frozen=True)
class StepCosts:
    """Rates and times that a chip is expected to give.

    Attributes:
      copy: bytes/s of a large copy. product: bytes/s at which products read weights; grouped: those whose integers have
        a scale for each group of inputs.
      product_start, attention_start, small: seconds of the start of a product, of that of attention in a layer, and of
        a small operation.
      small_of_layer, small_beside: operations of a layer beside products and attention, and of a step beside layers.
      attention: share of the copy at which attention reads pages. product_share: of the peak FLOP rate.
      slots: that instructions can be issued in, of a second. block_slots: of a block of 64 keys of a head, by dtype of
        the cache.
    """

    copy: float
    product: float
    grouped: float
    product_start: float
    attention_start: float
    small: float
    small_of_layer: int = LAUNCHES_OF_LAYER - PRODUCTS_OF_LAYER - 1
    small_beside: int = LAUNCHES_BESIDE - 1
    attention: float = 0.87
    product_share: float = 0.8
    slots: float = 0.0
    block_slots: dict[str, float] = field(default_factory=dict)

    def attention_rate(self, kv_dtype: str, block_bytes: float) -> float:
        """Bytes/s at which attention reads pages whose 64 keys and values of a head have `block_bytes`."""
        rate = self.attention * self.copy
        slots = self.block_slots.get(kv_dtype)
        return rate if slots is None else min(rate, self.slots / slots * block_bytes)


def _hopper(copy: float, product: float, grouped: float) -> StepCosts:
    slots = {dtype: WARPS * count / ISSUED for dtype, count in HOPPER_INSTRUCTIONS.items()}
    schedulers = 132 * 4
    return StepCosts(copy, product, grouped, 1.8e-6, 7e-6, 2.3e-6, slots=schedulers * 1.755e9, block_slots=slots)


def _tpu(bandwidth: float, clock: float, bundles: tuple[int, ...]) -> StepCosts:
    """Costs of a core of a TPU, from bytes/s of its memory, cycles/s, and bundles of 64 keys of 8 heads."""
    dtypes = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
    product = 0.93 * bandwidth
    return StepCosts(
        bandwidth,
        product,
        product,
        product_start=0.0,  # weights arrive while the operation before runs
        attention_start=12e-6,
        small=1e-6,
        small_of_layer=17,
        small_beside=30,
        attention=0.86,
        product_share=0.9,
        slots=clock,
        block_slots={dtype: count / 8 for dtype, count in zip(dtypes, bundles, strict=True)},
    )


COSTS = {
    "h100": _hopper(3.0e12, 2.85e12, 2.6e12),
    "h200": _hopper(4.3e12, 3.95e12, 3.6e12),
    "v5e": _tpu(0.819e12, 1.5e9, (132, 162, 109, 181, 168)),
    "v6e": _tpu(1.638e12, 1.75e9, (119, 150, 97, 145, 157)),
    "tpu7x": _tpu(3.69e12, 2.2e9, (113, 91, 91, 141, 156)),
}


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step, by part, launches (0 where a chip runs a program as a whole), and `least_seconds`, which
    reading the weights and the cache would take at the rate of the memory."""

    weights: float
    attention: float
    small: float
    launches: int
    least_seconds: float

    @property
    def seconds(self) -> float:
        return self.weights + self.attention + self.small

    @property
    def memory_share(self) -> float:
        """The share of the rate of the memory that the step has, as a whole."""
        return self.least_seconds / self.seconds


def predict(chip: Chip, spec: EngineSpec, counted: Counted, batch: int, context: int) -> StepPrediction | None:
    """A decode step of `batch` sequences of `context` tokens; None for a chip without costs, and for several devices,
    whose exchanges the model does not have."""
    if (costs := COSTS.get(chip.name)) is None or spec.num_devices > 1:
        return None
    config, layers = spec.config, spec.config.num_layers
    attention_layers = max(len(config.attention_layers), 1)
    flops = pass_flops(counted, [(context - 1, 1)] * batch)
    compute = Rates.of(chip).compute_seconds(flops) / costs.product_share
    product = costs.grouped if is_grouped(spec.params) else costs.product
    deterministic = max(spec.determinism.cost or 1.0, 1.0) if spec.is_deterministic else 1.0
    weight_bytes, cache_bytes = counted.read_weight_bytes(batch), batch * counted.read_cache_bytes(context)
    reading = weight_bytes / product
    block = KEYS * counted.token_cache_bytes / (attention_layers * config.num_kv_heads)
    cache = cache_bytes / costs.attention_rate(spec.kv_dtype, block)
    return StepPrediction(
        weights=max(reading, compute) * deterministic + (PRODUCTS_OF_LAYER * layers + 1) * costs.product_start,
        attention=cache + attention_layers * costs.attention_start,
        small=(costs.small_of_layer * layers + costs.small_beside) * costs.small,
        launches=LAUNCHES_OF_LAYER * layers + LAUNCHES_BESIDE if chip.platform == "gpu" else 0,
        least_seconds=(weight_bytes + cache_bytes) * chip.devices_per_chip / chip.hbm_bandwidth,
    )


def predicted_steps(chip: Chip, spec: EngineSpec) -> dict[str, str]:
    """Steps of one sequence and of all, of the greatest length, for people; {} where the chip has no model."""
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    steps = {}
    for batch in dict.fromkeys((1, spec.max_seqs)):
        if (step := predict(chip, spec, counted, batch, spec.max_model_len)) is not None:
            launches = f", {step.launches} launches" if step.launches else ""
            steps[f"{batch} of {spec.max_model_len} tokens"] = (
                f"{1000 * step.seconds:.2f} ms, {step.memory_share:.0%} of the rate of the memory{launches}"
            )
    return steps


def is_grouped(params: Params) -> bool:
    """True if a weight's integers have a scale for each group of inputs."""
    schemes = ((leaf.shape[-2], scheme_of(leaf)) for leaf in weights(params) if leaf.ndim > 1)
    return any(scheme is not None and 1 < scheme.block[0] < inputs for inputs, scheme in schemes)
