"""Trials of arguments of `LLM`, goals, and whether one trial is better than another.

Better means beyond the noise of the repeats, and within the limits.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

# In the order of a command line.
ORDER = ("method", "quantize", "kv_dtype", "kv_policy", "max_seqs", "draft", "num_draft_tokens", "prefix_cache")
ORDER += ("offload", "mesh")
# These change the answers; all others do not. "method" is one of `jaxinfer quantize`, with calibration.
ROUNDING = ("method", "quantize", "kv_dtype", "kv_policy")
# Figures of each repeat.
REPEATED = ("ttft", "tpot", "one", "rate", "batch_ttft", "goodput")
Arguments = dict[str, Any]


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial. Times are in seconds, with one value for each repeat; () and None are unknown.

    Attributes:
      arguments: of `LLM`, in addition to those that the user gave; {} is the baseline.
      reason: why there are no figures.
      ttft, tpot, one: of one request alone: time to first token, per output token, total.
      rate, batch_ttft, goodput: of concurrent requests: output tokens/s, median time to first token, requests/s within
        the limits.
      weight_bytes: of the model and its draft. token_bytes: of a token in the cache. needed_bytes: of weights,
        temporaries and the cache of the concurrent requests. cache_tokens: that fit beside the rest.
      kl, top1: nats per token, and share of equal most probable tokens, compared with the baseline; None if unknown.
      acceptance: rate of acceptance of draft tokens. notes: explanations.
      stopped: why its repeats were not all made; None for a complete trial.
    """

    arguments: Arguments = field(default_factory=dict)
    reason: str | None = None
    ttft: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()
    one: tuple[float, ...] = ()
    rate: tuple[float, ...] = ()
    batch_ttft: tuple[float, ...] = ()
    goodput: tuple[float, ...] = ()
    weight_bytes: int | None = None
    token_bytes: float | None = None
    needed_bytes: int | None = None
    cache_tokens: int | None = None
    kl: float | None = None
    top1: float | None = None
    acceptance: float | None = None
    notes: tuple[str, ...] = ()
    stopped: str | None = None

    @property
    def is_exact(self) -> bool:
        """True if its answers equal the baseline's by construction."""
        return not any(name in self.arguments for name in ROUNDING)

    @property
    def name(self) -> str:
        """The changed flags."""
        return flags(self.arguments) or "baseline"

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TrialResult":
        """The inverse of `to_dict`."""
        values: dict[str, Any] = {attribute.name: data[attribute.name] for attribute in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def flags(arguments: Mapping[str, Any]) -> str:
    """The arguments as flags of a command line."""
    parts = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is False and name == "prefix_cache":
            parts.append("--no-prefix-cache")
        elif value is False and name == "deterministic":
            parts.append(f"{flag} off")
        elif value is True:
            parts.append(flag)
        elif value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
            parts.append(f"{flag} {shlex.quote(text)}")
    return " ".join(parts)


def ordered(arguments: Mapping[str, Any]) -> Arguments:
    """The arguments in the order of a command line."""
    return dict(sorted(arguments.items(), key=lambda item: ORDER.index(item[0])))


GOALS = ("cost", "latency", "users", "quality")
# Smaller differences are ignored, even if the repeats vary less.
LEAST = 0.02
DEFAULT_MAX_KL = 0.05

Verdict = Literal["better", "worse", "same", "in doubt", "ruled out", "unknown"]


@dataclass(frozen=True)
class Goal:
    """The figure to optimize, and the limits.

    Attributes:
      name: one of `GOALS`. max_kl: limit in nats per token. memory: limit in bytes, None for no limit.
      is_planned: whether trials are planned, without KL; weights and caches of 4 bits, and policies of the cache, are
        then a last resort.
    """

    name: str
    max_kl: float = DEFAULT_MAX_KL
    memory: int | None = None
    is_planned: bool = False

    def values(self, row: TrialResult) -> tuple[float, ...]:
        """The compared figure of each repeat, the larger the better; () if it is not known."""
        if self.name == "latency":
            return tuple(1 / seconds for seconds in row.one)
        if self.name == "users":
            return row.goodput or (() if row.cache_tokens is None else (float(row.cache_tokens),))
        return row.rate

    def title(self, row: TrialResult) -> str:
        """The name of `values`."""
        if self.name == "latency":
            return "speed of one request"
        if self.name == "users":
            return "requests/s within limits" if row.goodput else "tokens of cache"
        return "tokens/s"

    def ruled_out(self, row: TrialResult) -> str | None:
        """Why the result may not be recommended; None if it may."""
        if row.reason is not None:
            return row.reason
        if self.memory is not None and row.needed_bytes is not None and row.needed_bytes > self.memory:
            return f"needs {row.needed_bytes / 2**30:,.2f} GiB of {self.memory / 2**30:,.2f}"
        if row.kl is not None and row.kl > self.max_kl:
            return f"KL {row.kl:.3g} nats per token is above --max-kl {self.max_kl:g}"
        return None

    def doubt(self, row: TrialResult) -> str | None:
        """Why the result is recommended only if nothing else fits; None if it is not in doubt."""
        if not self.is_planned:
            return None
        if any("int4" in str(row.arguments.get(name, "")) for name in ("quantize", "kv_dtype")):
            return "4 bits may lose much quality, and no KL is measured"
        if "kv_policy" in row.arguments:
            return "what a policy drops may be needed, and no KL is measured"
        return None


@dataclass(frozen=True)
class Judgement:
    """A comparison with the baseline: `ratio` of the medians, above 1 is better; within `noise`, a share, it counts as
    the same."""

    verdict: Verdict
    ratio: float | None = None
    noise: float = 0.0
    why: str | None = None


def judge(goal: Goal, row: TrialResult, base: Sequence[TrialResult]) -> Judgement:
    """Compares a trial with the baseline's measurements, or with another trial. The noise is the largest of its own
    spread, theirs, and the drift between them."""
    why = goal.ruled_out(row)
    values, others = goal.values(row), [goal.values(base_row) for base_row in base if goal.values(base_row)]
    if not values or not others:
        return Judgement("ruled out" if why else "unknown", why=why)
    middle = median([value for measured in others for value in measured])
    if middle == 0:  # no request of the baseline was within the limits
        ratio = math.inf if median(values) > 0 else 1.0
    else:
        ratio = median(values) / middle
    drift = max(map(median, others)) / max(min(map(median, others)), 1e-12) - 1 if middle else 0.0
    noise = max(LEAST, drift, *(spread(group) for group in (values, *others)))
    if why is not None or (why := goal.doubt(row)) is not None:
        return Judgement("ruled out" if goal.ruled_out(row) else "in doubt", ratio, noise, why)
    if abs(math.log(max(ratio, 1e-12))) <= math.log1p(noise):
        return Judgement("same", ratio, noise)
    return Judgement("better" if ratio > 1 else "worse", ratio, noise)


def compare(goal: Goal, rounds: Sequence[TrialResult], others: Sequence[TrialResult]) -> Judgement:
    """Compares two trials that were measured in turn: `ratio` is the median of the rounds' ratios, `noise` their
    spread. Better, or worse, is what is so in each round."""
    ratios = ratios_in_turn(goal, rounds, others)
    ratio, noise = median(ratios), max(LEAST, max(ratios) / max(min(ratios), 1e-12) - 1)
    if ratio > 1 + LEAST and min(ratios) > 1:
        return Judgement("better", ratio, noise)
    return Judgement("worse" if ratio < 1 - LEAST and max(ratios) < 1 else "same", ratio, noise)


def ratios_in_turn(goal: Goal, rounds: Sequence[TrialResult], others: Sequence[TrialResult]) -> list[float]:
    """The ratio of the figures of each round of two trials that were measured in turn."""
    pairs = zip(rounds, others, strict=True)
    return [median(goal.values(row)) / max(median(goal.values(other)), 1e-12) for row, other in pairs]


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def spread(values: Sequence[float]) -> float:
    """The interquartile range as a share of the median, which is robust against single outliers."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float(high - low) / float(middle) if middle else 0.0
