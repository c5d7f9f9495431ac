"""Budgets of prompts: the best tokens of a prompt, chosen at its end. The programs are in `compaction`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from jaxinfer.cache.policy.contract import CachePolicy, EndWork, LayerPages, PolicyUse, refuse_draft_in_cache

if TYPE_CHECKING:
    from jaxinfer.models import ModelConfig

PROMPT_METHODS = ("snapkv", "pyramidkv", "keydiff", "expected_attention")
OBSERVED = 32  # last tokens of a prompt, whose queries score the others (SnapKV, section 4: 16 to 64)
BLOCK = 512  # tokens of a pass over all of a prompt: as many products for each weight that is read as chips can do
PYRAMID_SLOPE = 20  # the last layer of PyramidKV has this share of the mean budget


@dataclass(frozen=True)
class PromptBudget(CachePolicy):
    """Keeps the tokens of a prompt with the best scores, chosen once, at its end; all tokens of the answer stay.

    Attributes:
      method: how tokens are scored (`jaxinfer.cache.policy.scores`), each key head for itself: "snapkv", by what the
        prompt's last `OBSERVED` tokens attend to, and these are kept; "pyramidkv", the same, with more tokens in lower
        layers; "keydiff", by how far a key is from the mean key; "expected_attention", by what is expected of the
        queries after it, which are taken for a normal distribution with the moments of the prompt's own.
      budget: tokens kept, at least: whole pages are dropped. Shorter prompts are kept whole.

    Raises ValueError for a budget of no more than `OBSERVED` tokens.
    """

    method: str
    budget: int

    drops: ClassVar[bool] = True
    is_same_in_prompts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.method not in PROMPT_METHODS:
            raise ValueError(f"{self.method!r} is none of {', '.join(PROMPT_METHODS)}")
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget <= OBSERVED:
            raise ValueError(
                f"{self.method}({self.budget}) of a kv_policy: give more tokens than the {OBSERVED} at a prompt's end, "
                f"which are computed against all of it"
            )

    def __str__(self) -> str:
        return f"{self.method}({self.budget})"

    @property
    def prompt_block(self) -> int:
        # Expected attention chooses by the queries of all of a prompt's tokens.
        return BLOCK if self.method == "expected_attention" else 0

    @property
    def num_kept(self) -> int:
        return self.budget

    def describe(self, config: ModelConfig) -> str:
        size = self.page_size
        kept = f"{self.budget:,} to {self.budget + size - 1:,} tokens of a longer prompt"
        if self.method == "pyramidkv":
            kept = f"{self.budget:,} tokens of a longer prompt on average over the layers"
        last, twice = f", the last {OBSERVED} among them" if self.method in ("snapkv", "pyramidkv") else "", ""
        if self.prompt_block:
            last, twice = ", the first 4 among them", "; prompts that lose some are computed twice"
        return f"{self}: each key head keeps {kept}{last}, chosen at its end; pages of {size} tokens{twice}"

    def check(self, use: PolicyUse) -> None:
        """Raises ValueError for sequences longer than the model's, for models whose layers are not all alike attention
        to all keys, for several devices, and for drafts by the model's own layers."""
        config = use.config
        if use.max_model_len > config.max_length:
            raise ValueError(
                f"{use.name}: positions stay those of the whole sequence, so max_model_len={use.max_model_len} may be "
                f"at most the {config.max_length} tokens that {config.architecture} was trained for"
            )
        for is_refused, reason in (
            (config.mla is not None, "has latent attention, whose keys are of all heads"),
            (bool(config.recurrent_layers), "has recurrent layers, whose states are of all tokens"),
            (any(config.window(layer) is not None for layer in config.attention_layers), "has layers with a window"),
            (config.attention_chunk is not None, "attends within chunks"),
            (config.has_sinks, "has attention sinks, which scores do not count"),
            (not all(map(config.caches_keys, config.attention_layers)), "has layers that read the keys of others"),
            (len(config.attention_layers) < config.num_layers, "has layers without attention"),
            (
                bool(self.prompt_block) and config.attention_softcap is not None,
                "caps its scores, of which no expectation is known",
            ),
        ):
            if is_refused:
                raise ValueError(f"{use.name}: {config.architecture} {reason}")
        if use.num_devices > 1:
            raise ValueError(f"{use.name} runs on one device, not {use.num_devices}")
        refuse_draft_in_cache(use)

    def layers(self, config: ModelConfig) -> tuple[LayerPages, ...]:
        count = config.num_layers
        return tuple(LayerPages("compacted", at_end=self.of_layer(layer, count)) for layer in range(count))

    def of_layer(self, layer: int, num_layers: int) -> LayerBudget:
        """Budget of one of the layers; equal for all but with pyramidkv."""
        place = (layer, num_layers) if self.method == "pyramidkv" else (0, 1)
        return LayerBudget(self, *place)

    def attend_end(self, work: EndWork) -> Any:
        from jaxinfer.cache.policy.compaction import compacting

        return compacting(self.method, self.prompt_block, work)

    def working_bytes(self, config: ModelConfig, max_model_len: int, max_seqs: int, itemsize: int) -> int:
        """Bytes of a prompt's tokens, while it is compacted: products with queries, and keys; where all queries count,
        values and products with covariances, as large as keys, and moments."""
        scored = 4 * max_model_len * (2 * config.num_heads * OBSERVED + config.num_kv_heads * config.head_dim)
        if self.prompt_block:
            scored += 8 * max_model_len * config.num_kv_heads * config.head_dim
            scored += 4 * config.num_layers * config.num_heads * config.head_dim * (config.head_dim + 1)
        return scored


@dataclass(frozen=True)
class LayerBudget:
    """Budget of layer `layer` of `num_layers`: a `PromptEnd`."""

    policy: PromptBudget
    layer: int = 0
    num_layers: int = 1

    @property
    def name(self) -> str:
        return f"{self.policy}, layer {self.layer}" if self.num_layers > 1 else str(self.policy)

    @property
    def order(self) -> int:
        return self.layer

    @property
    def num_observed(self) -> int:
        return OBSERVED

    def num_dropped(self, num_prompt: int) -> int:
        """`budget` tokens of the prompt stay, or less than a page more."""
        budget = self.policy.budget
        if self.policy.method == "pyramidkv":
            budget = pyramid_budgets(budget, num_prompt, self.num_layers, window=OBSERVED)[self.layer]
        return max(num_prompt - budget, 0) // self.policy.page_size

    @property
    def most_pages(self) -> int:
        most = budget = self.policy.budget
        if self.policy.method == "pyramidkv":
            highest, lowest = _pyramid(budget)
            most = max(budget, round(highest - self.layer * (highest - lowest) / max(self.num_layers - 1, 1)))
        return -(-(most + self.policy.page_size - 1) // self.policy.page_size)


@lru_cache(maxsize=4096)
def pyramid_budgets(budget: int, num_tokens: int, num_layers: int, *, window: int) -> tuple[int, ...]:
    """Tokens that each layer keeps where they keep `budget` on average, the last `window` included (PyramidKV, Cai et
    al. 2024, section 3.2): fewer in higher layers. Where the pyramid does not fit a prompt of `num_tokens`, all layers
    keep as many."""
    highest, lowest = _pyramid(budget)
    if highest >= num_tokens - window:
        highest = num_tokens - window
        lowest = 2 * budget - highest
    if not num_tokens >= highest >= lowest >= window:
        return (max(1, min(budget, num_tokens)),) * num_layers
    step = (highest - lowest) / max(num_layers - 1, 1)
    return tuple(round(highest - layer * step) for layer in range(num_layers))


def _pyramid(budget: int) -> tuple[float, float]:
    """Tokens of the first layer and of the last one, for long prompts."""
    lowest = budget / PYRAMID_SLOPE
    return 2 * budget - lowest, lowest
