"""Which changes are tried alone for a goal, and which are not, with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.measure.advise.goals import Goal
from jaxinfer.measure.advise.trials import Arguments

WEIGHTS = ("int8", "int4-g128")
CACHES = ("int8", "fp8_e4m3")
# Of the prompts' tokens: prompts cut from texts begin alike for a token or two.
LEAST_SHARED = 0.05


@dataclass(frozen=True)
class ModelFacts:
    """What decides which trials make sense.

    Attributes:
      given: arguments of `LLM` that are kept. is_quantized: the checkpoint's weights. caches_values: whether its cache
        has values beside keys. sizes: for max_seqs; default_size: what it is. drafts: names. shared: the share of
        prompt tokens that a prompt before has begun with; None where there are no prompts. has_limits: whether users
        are counted by requests within limits.
    """

    given: Mapping[str, Any]
    is_quantized: bool
    caches_values: bool
    sizes: Sequence[int]
    default_size: int
    drafts: Sequence[str]
    shared: float | None
    has_limits: bool = False


def candidates(goal: Goal, about: ModelFacts) -> tuple[list[Arguments], dict[str, str]]:
    """What is tried alone, what promises most first, and what is not, with the reason. An option that was given is kept
    and not tried."""
    left_out: dict[str, str] = {}
    weights = _unless(left_out, "weights", _why_no_weights(about), [{"quantize": name} for name in WEIGHTS])
    caches = [{"kv_dtype": name} for name in CACHES if about.caches_values or name != "int8"]
    caches = _unless(left_out, "cache", _given(about, "kv_dtype"), caches)
    sizes = [{"max_seqs": size} for size in about.sizes if size != about.default_size]
    sizes = _unless(left_out, "batch sizes", _why_no_sizes(goal, about), sizes)
    why = "a draft leaves no more room for the cache" if _counts_memory(goal, about) else None
    drafts = _unless(left_out, "drafts", why, [{"draft": name} for name in about.drafts])
    reuse = _unless(left_out, "prefix reuse", _why_no_reuse(goal, about), [{"prefix_cache": False}])
    if goal.name == "latency":
        return [*drafts, *weights, *caches, *reuse], left_out
    if goal.name == "users" and not about.has_limits:
        return [*caches, *weights], left_out
    return [*sizes, *weights, *drafts, *reuse, *caches], left_out


def _unless(left_out: dict[str, str], what: str, why: str | None, found: list[Arguments]) -> list[Arguments]:
    if why is None:
        return found
    left_out[what] = why
    return []


def _given(about: ModelFacts, *names: str) -> str | None:
    name = next((name for name in names if name in about.given), None)
    return None if name is None else f"you gave --{name.replace('_', '-')}"


def _why_no_weights(about: ModelFacts) -> str | None:
    if (why := _given(about, "quantize", "requantize")) is not None:
        return why
    return "those of the checkpoint are quantized already" if about.is_quantized else None


def _why_no_sizes(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "max_seqs")) is not None:
        return why
    if goal.name == "latency":
        return "they change nothing for one request alone"
    return "without --goodput, users are tokens of cache" if _counts_memory(goal, about) else None


def _why_no_reuse(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "prefix_cache")) is not None:
        return why
    if about.shared is None:
        return "what it saves depends on the prompts, and nothing runs"
    if _counts_memory(goal, about):
        return "without --goodput, users are tokens of cache"
    if about.shared < LEAST_SHARED:
        return f"on by default, and {about.shared:.0%} of the prompts' tokens are as another begins (--shared-prefix N)"
    return None


def _counts_memory(goal: Goal, about: ModelFacts) -> bool:
    return goal.name == "users" and not about.has_limits
