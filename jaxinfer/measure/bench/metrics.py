"""Metrics of requests, by the definitions of `vllm bench serve`.

Tokens/s: tokens of the prompts, of the answers or of both, of all requests, over the time of the run.

TTFT: from sending a request to its first tokens. E2EL: from sending it to its last tokens. TPOT = (E2EL - TTFT) /
(tokens - 1), of each request with more than one token. ITL: gaps between deliveries of all requests; a delivery may
have several tokens. Goodput: requests per second that are within all limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTS = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2el")


@dataclass
class Trace:
    """Times of one request, as seen by its client.

    Attributes:
      sent, times: when it was sent, and when each delivery arrived, in seconds of one clock.
      num_prompt, num_tokens: tokens of prompt and answer.
    """

    sent: float
    num_prompt: int
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)

    def deliver(self, now: float, num_tokens: int) -> None:
        """Records the arrival of tokens."""
        self.times.append(now)
        self.num_tokens += num_tokens

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None without values."""
    if not len(values):
        return None
    percentiles = np.percentile(values, PERCENTS).tolist()
    return {"mean": float(np.mean(values)), **{f"p{p}": value for p, value in zip(PERCENTS, percentiles, strict=True)}}


def parse_goodput(text: str | None) -> dict[str, float]:
    """Parses limits in milliseconds, such as "ttft:500,tpot:50", to seconds by name. Raises ValueError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, number = part.partition(":")
        try:
            limits[name] = float(number) / 1000
        except ValueError:
            limits[name] = -1
        if name not in LIMITS or not limits[name] > 0:
            raise ValueError(
                f"--goodput: {part!r} is not a limit in milliseconds, such as ttft:500, tpot:50, e2el:9000"
            )
    return limits


def is_within(trace: Trace, limits: dict[str, float]) -> bool:
    """Tells if a request is within every limit; an answer of one token has a TPOT of 0."""
    times = {"ttft": trace.ttft, "tpot": trace.tpot or 0.0, "e2el": trace.e2el}
    return all(times[name] <= limit for name, limit in limits.items())


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """The cost of a million tokens at a price per hour of the machine, in its currency."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


def figures(
    traces: Sequence[Trace],
    seconds: float,
    *,
    limits: dict[str, float] | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """All metrics of requests that took `seconds` in total; times in seconds, cost in the currency of the price."""
    num_in, num_out = sum(trace.num_prompt for trace in traces), sum(trace.num_tokens for trace in traces)
    rates = {"in": num_in / seconds, "out": num_out / seconds, "total": (num_in + num_out) / seconds}
    metrics: dict[str, Any] = {
        "requests": len(traces),
        "seconds": seconds,
        "prompt_tokens": num_in,
        "answer_tokens": num_out,
        "requests_per_second": len(traces) / seconds,
        "tokens_per_second": rates,
        "ttft": distribution([trace.ttft for trace in traces]),
        "tpot": distribution([trace.tpot for trace in traces if trace.tpot is not None]),
        "itl": distribution([gap for trace in traces for gap in trace.gaps]),
        "e2el": distribution([trace.e2el for trace in traces]),
    }
    if limits:
        good = sum(is_within(trace, limits) for trace in traces)
        metrics["goodput"] = {
            "limits": limits,
            "requests_per_second": good / seconds,
            "share": good / max(len(traces), 1),
        }
    if price_per_hour is not None:
        metrics["cost_per_million_tokens"] = {
            name: cost_per_million(price_per_hour, rate) for name, rate in rates.items() if rate
        }
    return metrics
