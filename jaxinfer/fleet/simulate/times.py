"""Times of an engine's steps, in whole picoseconds: many steps at once take exactly the sum of them all."""

from dataclasses import dataclass, replace
from functools import cached_property

from jaxinfer.chips import Chip, Rates
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.parallel import MODEL
from jaxinfer.planning.counted import Counted
from jaxinfer.planning.step_model import COSTS, KEYS, PRODUCTS_OF_LAYER, StepCosts, is_grouped

SECOND = 10**12  # picoseconds
MILLISECOND = 10**9
EXCHANGE_BYTES = 2  # of a value that devices exchange: bfloat16


@dataclass(frozen=True)
class StepTimes:
    """Picoseconds of a step of an engine:

        fixed + max(weights, tokens * token + logits * logit) + tokens * exchange
        + the sum over decoding sequences of key for each token that they attend to
        + the sum over pieces of prompts of max(pairs of query and key * pair, tokens read * key)

    Attributes:
      fixed: starts of products and of attention, small operations.
      weights: reading them, by number of tokens of the step (experts); the last one is of all larger numbers.
      token, logit: products of a token without the output layer, and that of a row of logits.
      exchange: between the devices, of a token.
      key: reading a token's keys and values. pair: attention of one query to one key in a prompt.
      windows: (tokens, key, pair) of layers with sliding windows, beside `key` and `pair` of those without.
      notes: for people, where the figures come from and what they leave out.
    """

    fixed: int
    weights: tuple[int, ...] = (0,)
    token: int = 0
    logit: int = 0
    exchange: int = 0
    key: int = 0
    pair: float = 0.0
    windows: tuple[tuple[int, int, float], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, chip: Chip, spec: EngineSpec, counted: Counted) -> "StepTimes":
        """Those of the step model (`planning.step_model`) where it has constants for the chip, else of the roofline.

        On several devices each has its share of weights and cache, and exchanges are estimated from the bandwidth of
        the links. Raises ValueError for a mesh with another axis than `model`.
        """
        axes = {} if spec.mesh is None else {name: size for name, size in spec.mesh.shape.items() if size > 1}
        if set(axes) - {MODEL}:
            raise ValueError(f"exchanges are estimated for a model axis, and the mesh has {', '.join(sorted(axes))}")
        rates, config = Rates.of(chip), spec.config
        costs = COSTS.get(chip.name) or StepCosts(
            *(rates.hbm, rates.hbm, rates.hbm, 0.0, 0.0, 0.0), attention=1.0, product_share=1.0
        )
        attention_layers = max(len(config.attention_layers), 1)
        layers = config.num_layers
        fixed = (
            (PRODUCTS_OF_LAYER * layers + 1) * costs.product_start
            + attention_layers * costs.attention_start
            + (costs.small_of_layer * layers + costs.small_beside) * costs.small
        )
        deterministic = max(spec.determinism.cost or 1.0, 1.0) if spec.is_deterministic else 1.0
        product = (costs.grouped if is_grouped(spec.params) else costs.product) / deterministic
        most = spec.token_buckets[-1] if counted.num_experts else 0
        head, head_flops = counted.head
        flops = {**counted.token_flops, head: counted.token_flops[head] - head_flops}
        seconds = rates.compute_seconds(flops) / costs.product_share * deterministic
        logit = rates.compute_seconds({head: head_flops}) / costs.product_share * deterministic
        devices = axes.get(MODEL, 1)
        block = KEYS * counted.token_cache_bytes * devices / (attention_layers * config.num_kv_heads)
        reading = costs.attention_rate(spec.kv_dtype, block)
        pair = SECOND / costs.product_share / rates.flops["bf16"]
        windows = {window for window, _ in (*counted.window_bytes, *counted.window_keys)}
        windowed: dict[int, tuple[int, float]] = dict.fromkeys(sorted(windows), (0, 0.0))
        for window, size in counted.window_bytes:
            windowed[window] = (windowed[window][0] + size, windowed[window][1])
        for window, of_key in counted.window_keys:
            windowed[window] = (windowed[window][0], windowed[window][1] + of_key)
        full = counted.token_cache_bytes - sum(size for size, _ in windowed.values())
        # Two sums over the devices in each layer, in which each sends and receives its parts of all others' rows.
        exchanged = 2 * layers * 2 * (devices - 1) / devices * config.hidden_size * EXCHANGE_BYTES
        return cls(
            fixed=round(SECOND * fixed),
            weights=tuple(
                round(SECOND * counted.read_weight_bytes(tokens) / product) for tokens in range(min(most, 1), most + 1)
            ),
            token=round(SECOND * seconds),
            logit=round(SECOND * logit),
            exchange=round(SECOND * exchanged / rates.links) if devices > 1 else 0,
            key=round(SECOND * full / reading),
            pair=pair * counted.key_flops,
            windows=tuple(
                (window, round(SECOND * size / reading), pair * of_key) for window, (size, of_key) in windowed.items()
            ),
            notes=_notes(chip, devices),
        )

    @cached_property
    def is_linear(self) -> bool:
        """True if a decode step takes as much longer for any token more in any sequence."""
        return not self.windows

    def products(self, num_tokens: int, num_logits: int) -> int:
        """Time of a step without attention."""
        weights = self.weights[min(num_tokens, len(self.weights)) - 1]
        computed = num_tokens * self.token + num_logits * self.logit
        return self.fixed + max(weights, computed) + num_tokens * self.exchange

    def decoding(self, context: int) -> int:
        """Attention of a decoding sequence to `context` tokens, its newest included."""
        if not self.windows:
            return self.key * context
        return self.key * context + sum(key * min(context, window) for window, key, _ in self.windows)

    def prompt(self, start: int, length: int) -> int:
        """Attention of a piece of a prompt after `start` tokens."""
        end = start + length
        total = max(round(self.pair * (length * start + length * (length + 1) // 2)), self.key * end)
        for window, key, pair in self.windows:
            fewer = min(max(window - start, 0), length)  # tokens that see less than the window
            pairs = fewer * start + fewer * (fewer + 1) // 2 + (length - fewer) * window
            total += max(round(pair * pairs), key * min(end, window + length))
        return total

    def scaled(self, factor: float) -> "StepTimes":
        """All times multiplied by a factor."""
        return replace(
            self,
            **{name: round(factor * getattr(self, name)) for name in ("fixed", "token", "logit", "exchange", "key")},
            weights=tuple(round(factor * weight) for weight in self.weights),
            pair=factor * self.pair,
            windows=tuple((window, round(factor * key), factor * pair) for window, key, pair in self.windows),
        )


def _notes(chip: Chip, devices: int) -> tuple[str, ...]:
    notes = []
    if chip.name in COSTS:
        notes.append(f"steps: the step model's constants of {chip.name}, which no chip has confirmed yet")
    else:
        notes.append(f"steps: the roofline, a lower bound: the step model has no constants of {chip.name}")
    if devices > 1:
        notes.append(
            f"{devices} devices a replica: each has its share of weights and cache; exchanges are estimated as two "
            f"sums of the hidden states a layer at the links' bandwidth, without their start times"
        )
    return tuple(notes)
