"""Trials: changes of the arguments of `LLM`, and their results."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# In the order of a command line.
FLAGS = {
    "quantize": "--quantize",
    "kv_dtype": "--kv-dtype",
    "max_seqs": "--max-seqs",
    "draft": "--draft",
    "num_draft_tokens": "--num-draft-tokens",
    "prefix_cache": "--prefix-cache",
}
# These change the answers; all others do not.
ROUNDING = ("quantize", "kv_dtype")
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

    @property
    def is_exact(self) -> bool:
        """Whether its answers equal the baseline's by construction."""
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
        values: dict[str, Any] = {one.name: data[one.name] for one in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def flags(arguments: Mapping[str, Any]) -> str:
    """The arguments as flags of a command line."""
    parts = []
    for name, value in arguments.items():
        flag = FLAGS.get(name, "--" + name.replace("_", "-"))
        if value is False and name == "prefix_cache":
            parts.append("--no-prefix-cache")
        elif value is True:
            parts.append(flag)
        elif value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
            parts.append(f"{flag} {shlex.quote(text)}")
    return " ".join(parts)


def ordered(arguments: Mapping[str, Any]) -> Arguments:
    """The arguments in the order of a command line."""
    places = list(FLAGS)
    return dict(sorted(arguments.items(), key=lambda item: places.index(item[0])))
