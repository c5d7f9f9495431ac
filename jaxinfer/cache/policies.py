"""Policies of a cache: which keys and values stay when a sequence grows, or are read. Plain Python: no JAX here.

A policy is a property of an engine. What it drops, it drops at positions (where a page fills), so that an answer is
still a function of its request: a token attends to the same keys alone or in a batch, however its prompt is cut.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

_CALL = re.compile(r"([a-z_0-9]+)\(([0-9]+)\)")


@dataclass(frozen=True)
class SinksWindow:
    """Keeps the first tokens of a sequence and its last ones (StreamingLLM, Xiao et al. 2023, section 3.2).

    Attributes:
      sinks, window: tokens, at least so many of each: the policy keeps whole pages. A token attends to the pages of the
        sinks, to those of the window before its own page, and to its own page up to itself.

    Raises ValueError for numbers below 1.
    """

    sinks: int
    window: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name}({value}) of a kv_policy must be a positive number of tokens")

    def __str__(self) -> str:
        return f"sinks({self.sinks})+window({self.window})"

    def pages(self, page_size: int, trained: int | None = None) -> "KeptPages":
        """What is kept of a cache with pages of so many tokens; `trained` as in `KeptPages`."""
        return KeptPages(-(-self.sinks // page_size), -(-self.window // page_size), page_size, trained)


@dataclass(frozen=True)
class Quest:
    """Keeps everything; a token of an answer attends to the best pages only (Quest, Tang et al. 2024, section 3).

    Attributes:
      budget: tokens, at least so many: whole pages are read, beside the token's own page.

    Raises ValueError for a number below 1.
    """

    budget: int

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 1:
            raise ValueError(f"quest({self.budget}) of a kv_policy must be a positive number of tokens")

    def __str__(self) -> str:
        return f"quest({self.budget})"

    def pages(self, page_size: int, num_dense_layers: int = 2) -> "BestPages":
        """What is read of a cache with pages of so many tokens."""
        return BestPages(-(-self.budget // page_size), page_size, num_dense_layers)


@dataclass(frozen=True)
class BestPages:
    """What a token of an answer attends to in a layer without a window: the `num_pages` full pages with the greatest
    bounds of its scores, and its own; `page_size` is in tokens. Prompts, and the first `num_dense_layers` layers,
    attend to everything.

    `num_replayed` are the tokens of answers that one step takes from preempted sequences, at most, beside one of each:
    each has a choice of its own.
    """

    num_pages: int
    page_size: int
    num_dense_layers: int = 2
    num_replayed: int = 32

    @property
    def num_tokens(self) -> int:
        """Tokens that a token attends to, at most."""
        return (self.num_pages + 1) * self.page_size


@dataclass(frozen=True)
class KeptPages:
    """The pages that a token of a sequence attends to: the first `num_sinks`, the last `num_window` before its own, and
    its own; `page_size` is in tokens.

    `trained` is the length, in tokens, that the model was trained for, if sequences may be longer. Tokens of pages that
    end beyond it see the sinks right before the window: positions are those in the cache.
    """

    num_sinks: int
    num_window: int
    page_size: int
    trained: int | None = None

    @property
    def num_columns(self) -> int:
        """Pages that a token attends to, at most."""
        return self.num_sinks + self.num_window + 1

    @property
    def window(self) -> int:
        """The window, in tokens, of which a group of layers must have all pages: that of a page's first token, which
        sees `num_window` whole pages and itself."""
        return self.num_window * self.page_size + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that a token attends to, at most."""
        return self.num_columns * self.page_size

    def num_scratch(self, num_tokens: int, num_slots: int) -> int:
        """Pages for the moved sinks of such a step; none where no position is relative."""
        if self.trained is None:
            return 0
        return self.num_sinks * max(num_parts(self.page_size, num_tokens, num_slots), num_slots)


PROMPT_METHODS = ("snapkv", "pyramidkv", "keydiff", "expected_attention")
OBSERVED = 32  # last tokens of a prompt, whose queries score the others (SnapKV, section 4: 16 to 64)
PYRAMID_SLOPE = 20  # the last layer of PyramidKV has this share of the mean budget


@dataclass(frozen=True)
class PromptBudget:
    """Keeps the tokens of a prompt with the best scores, chosen once, at its end; all tokens of the answer stay.

    Attributes:
      method: how tokens are scored (`jaxinfer.cache.policy.scores`), each key head for itself: "snapkv", by what the prompt's
        last `OBSERVED` tokens attend to, and these are kept; "pyramidkv", the same, with more tokens in lower layers;
        "keydiff", by how far a key is from the mean key; "expected_attention", by what is expected of the queries after
        it, which are taken for a normal distribution with the moments of the prompt's own.
      budget: tokens kept, at least: whole pages are dropped. Shorter prompts are kept whole.

    Raises ValueError for a budget of no more than `OBSERVED` tokens.
    """

    method: str
    budget: int

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
    def observes_prompt(self) -> bool:
        """Whether it chooses by the queries of all of a prompt's tokens: all are computed once more."""
        return self.method == "expected_attention"

    def describe(self, page_size: int) -> str:
        """What people read of it."""
        kept = f"{self.budget:,} to {self.budget + page_size - 1:,} tokens of a longer prompt"
        if self.method == "pyramidkv":
            kept = f"{self.budget:,} tokens of a longer prompt on average over the layers"
        last, twice = f", the last {OBSERVED} among them" if self.method in ("snapkv", "pyramidkv") else "", ""
        if self.observes_prompt:
            last, twice = ", the first 4 among them", "; prompts that lose some are computed twice"
        return f"{self}: each key head keeps {kept}{last}, chosen at its end; pages of {page_size} tokens{twice}"

    def of_layer(self, page_size: int, layer: int, num_layers: int) -> "LayerBudget":
        """What one of the layers keeps of a prompt; the same for all but with pyramidkv."""
        place = (layer, num_layers) if self.method == "pyramidkv" else (0, 1)
        return LayerBudget(self, page_size, *place)


@dataclass(frozen=True)
class LayerBudget:
    """What layer `layer` of `num_layers` keeps of a prompt, in a cache with pages of `page_size` tokens.

    Whole pages are dropped, so that later tokens keep their places within pages.
    """

    policy: PromptBudget
    page_size: int
    layer: int = 0
    num_layers: int = 1

    @property
    def num_observed(self) -> int:
        """Last tokens of a prompt, which are computed in the pass that compacts it."""
        return OBSERVED

    def num_dropped(self, num_prompt: int) -> int:
        """Pages that a prompt of so many tokens loses: as many tokens stay as are asked for, or less than a page
        more."""
        budget = self.policy.budget
        if self.policy.method == "pyramidkv":
            budget = pyramid_budgets(budget, num_prompt, self.num_layers, window=OBSERVED)[self.layer]
        return max(num_prompt - budget, 0) // self.page_size

    @property
    def most_pages(self) -> int:
        """Pages that a compacted prompt takes, at most."""
        most = budget = self.policy.budget
        if self.policy.method == "pyramidkv":
            highest, lowest = _pyramid(budget)
            most = max(budget, round(highest - self.layer * (highest - lowest) / max(self.num_layers - 1, 1)))
        return -(-(most + self.page_size - 1) // self.page_size)


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


@dataclass(frozen=True)
class HeavyHitters:
    """Keeps the last tokens of a sequence, and of the older ones those that queries attended to most, each key head for
    itself (H2O, Zhang et al. 2023, section 4).

    Attributes:
      budget: tokens, at least so many are kept: whole pages are dropped. Half of them are the last ones.

    Raises ValueError for a budget below 2.
    """

    budget: int

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 2:
            raise ValueError(f"h2o({self.budget}) of a kv_policy must be at least 2 tokens")

    def __str__(self) -> str:
        return f"h2o({self.budget})"

    def describe(self, page_size: int) -> str:
        """What people read of it."""
        heavy = self.pages(page_size)
        return (
            f"{self}: each key head keeps at most {heavy.num_tokens:,} tokens of a prompt that has ended and its "
            f"answer, the last {heavy.num_recent:,} and those that were attended to most; pages of {page_size} tokens; "
            f"no prefix is reused"
        )

    def pages(self, page_size: int) -> "HeavyPages":
        """What is kept of a cache with pages of so many tokens."""
        return HeavyPages(-(-self.budget // page_size), self.budget // 2, page_size)


@dataclass(frozen=True)
class LayerBudgets:
    """What stays of a prompt at its end in each group of layers, None where all does."""

    groups: tuple[LayerBudget | None, ...]


@dataclass(frozen=True)
class HeavyPages:
    """How many tokens of a sequence stay, as a function of its length: when page `num_pages` + 1 is full, a page of
    tokens is dropped, and at a prompt's end as many whole pages as leave less than that.

    Tokens that stay are moved together, in the sequence's first pages. The last `num_recent` tokens always stay;
    `page_size` is in tokens.
    """

    num_pages: int
    num_recent: int
    page_size: int

    @property
    def num_columns(self) -> int:
        """Pages that an answer needs, at most."""
        return self.num_pages + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that a token of an answer attends to, at most."""
        return self.num_columns * self.page_size

    def num_dropped(self, num_stored: int) -> int:
        """Tokens that are dropped of an answer with its prompt, of which so many tokens were stored."""
        return max(num_stored // self.page_size - self.num_pages, 0) * self.page_size

    def num_held(self, num_prompt: int, num_tokens: int) -> int:
        """Tokens for which a sequence of `num_tokens` tokens needs room, of which `num_prompt` are the prompt's."""
        return num_tokens if num_tokens <= num_prompt else min(num_tokens, self.num_tokens)

    def most_held(self, num_prompt: int, num_tokens: int) -> int:
        """The most of `num_held` while it grows to `num_tokens` tokens."""
        return max(min(num_prompt, num_tokens), self.num_held(num_prompt, num_tokens))


def num_parts(page_size: int, num_tokens: int, num_slots: int) -> int:
    """Parts within a page of a step of so many tokens, at most: n tokens of a sequence lie in n / page_size pages and
    two more."""
    return min(num_tokens, num_tokens // page_size + 2 * num_slots)


Policy = SinksWindow | PromptBudget | HeavyHitters | Quest
# What programs know of each.
ProgramPolicy = KeptPages | LayerBudgets | HeavyPages | BestPages


def _of_prompts(method: str) -> Callable[..., PromptBudget]:
    return lambda **values: PromptBudget(method, values[method])


# By the names of its parts, what makes a policy of their numbers, which it gets by name.
_KINDS: dict[tuple[str, ...], Callable[..., Policy]] = {
    ("sinks", "window"): SinksWindow,
    ("h2o",): lambda h2o: HeavyHitters(h2o),
    **{(method,): _of_prompts(method) for method in PROMPT_METHODS},
    ("quest",): lambda quest: Quest(quest),
}


def parse_policy(text: str) -> Policy:
    """The policy of a text such as "sinks(4)+window(1024)", "snapkv(1024)" or "quest(1024)". Raises ValueError for any
    other."""
    kinds = ", ".join("+".join(f"{name}(N)" for name in names) for names in _KINDS)
    found: dict[str, int] = {}
    for part in text.replace(" ", "").split("+"):
        call = _CALL.fullmatch(part)
        if call is None or call[1] in found or not any(call[1] in names for names in _KINDS):
            raise ValueError(f"kv_policy={text!r}: {part!r} is not understood; give one of {kinds}, in tokens")
        found[call[1]] = int(call[2])
    for names, make in _KINDS.items():
        if set(found) == set(names):
            return make(**found)
    for names in _KINDS:
        if set(found) < set(names):
            missing = next(name for name in names if name not in found)
            raise ValueError(f"kv_policy={text!r} lacks {missing}(N): give one of {kinds}, in tokens")
    raise ValueError(f"kv_policy={text!r} combines {' and '.join(found)}: give one of {kinds}, in tokens")


def extends_length(text: str | None) -> bool:
    """Whether a `kv_policy` lets sequences be longer than what the model was trained for."""
    return text is not None and isinstance(parse_policy(text), SinksWindow)
