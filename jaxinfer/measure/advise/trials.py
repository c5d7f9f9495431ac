"""What is tried: changes of the arguments of `LLM`, and what came of each."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# In the order in which they stand in a command line.
FLAGS = {
    "quantize": "--quantize",
    "kv_dtype": "--kv-dtype",
    "max_seqs": "--max-seqs",
    "draft": "--draft",
    "num_draft_tokens": "--num-draft-tokens",
    "prefix_cache": "--prefix-cache",
}
# These change the answers; all others leave every token as it is.
ROUNDING = ("quantize", "kv_dtype")
# Figures of each repeat.
REPEATED = ("ttft", "tpot", "one", "rate", "batch_ttft", "goodput")
Arguments = dict[str, Any]


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial. Seconds; one value for each repeat; () and None are not known.

    Attributes:
      arguments: of `LLM`, beside those that were given: what was tried; {} is the baseline.
      reason: why there are no figures.
      ttft, tpot, one: of one request alone: until the first token, per token after it, in all.
      rate, batch_ttft, goodput: of all requests at once: tokens of answers a second, the median time until a first
        token, and requests a second within the limits.
      weight_bytes: of the model, and of its draft. token_bytes: of a token in the cache. needed_bytes: of weights, work
        arrays and the cache of as many requests as run at once. cache_tokens: that fit beside the rest.
      kl, top1: nats per token, and the share of equal best tokens, next to the baseline. None is not measured.
      acceptance: of drafted tokens. notes: why it is as it is.
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
        """Whether its answers are the baseline's by design."""
        return not any(name in self.arguments for name in ROUNDING)

    @property
    def name(self) -> str:
        """Its flags."""
        return flags(self.arguments) or "baseline"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TrialResult":
        """What `to_dict` gave, as JSON has it."""
        values: dict[str, Any] = {one.name: data[one.name] for one in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def flags(arguments: Mapping[str, Any]) -> str:
    """As a command line has them."""
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
    """The same in the order of a command line."""
    places = list(FLAGS)
    return dict(sorted(arguments.items(), key=lambda item: places.index(item[0])))
