"""Figures of simulated fleets, how many replicas are needed, and all of it as text and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.fleet.simulate.options import ServiceGoal
from jaxinfer.fleet.simulate.run import LOST, QUEUE_FULL, SERVED, TOO_LONG, FleetRun
from jaxinfer.fleet.simulate.times import MILLISECOND
from jaxinfer.tables import table_text

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class FleetFigures:
    """Figures of one fleet. Times are milliseconds; lists have the percentiles of `PERCENTS`.

    Attributes:
      num_requests, num_good: all, and those that are served within the goal. refused, too_long, lost: by their number.
      ttft: until the first token. tpot: between the tokens, of each request of several tokens the mean.
      goodput: good requests per second. tokens_per_second: of answers. prefix_hits: share of the prompts' tokens that
        were cached. cost_per_million: dollars for a million tokens of answers; None without a price.
      mean_batch: tokens of answers for each step of a replica.
    """

    num_replicas: int
    num_requests: int
    num_good: int
    refused: int
    too_long: int
    lost: int
    seconds: float
    ttft: list[float]
    tpot: list[float]
    goodput: float
    tokens_per_second: float
    prefix_hits: float
    cost_per_million: float | None
    mean_batch: float
    num_failures: int
    num_failovers: int
    num_preemptions: int

    @property
    def share(self) -> float:
        """Share of the requests that are served within the goal."""
        return self.num_good / self.num_requests


def request_times(run: FleetRun) -> tuple[np.ndarray, np.ndarray]:
    """TTFT and TPOT of the requests that were served, in milliseconds; TPOT is NaN for an answer of one token."""
    served = run.status == SERVED
    tokens = np.asarray(run.trace.answers)[served]
    first, last = run.first[served] / MILLISECOND, run.last[served] / MILLISECOND
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return first, (last - first) / gaps


def figures_of(run: FleetRun, goal: ServiceGoal, num_chips: float) -> FleetFigures:
    """Figures of a run whose replicas have so many chips each."""
    ttft, tpot = request_times(run)
    several = tpot[~np.isnan(tpot)]
    num_good = int(np.sum((ttft <= goal.slo_ttft) & ~(tpot > goal.slo_itl)))
    tokens = int(np.asarray(run.trace.answers)[run.status == SERVED].sum())
    cost = None
    if goal.chip_price is not None and tokens:
        cost = goal.chip_price * num_chips * run.num_replicas * run.seconds / 3600 / (tokens / 1e6)
    prompts = run.reused_tokens + run.computed_tokens
    return FleetFigures(
        num_replicas=run.num_replicas,
        num_requests=len(run.trace),
        num_good=num_good,
        refused=int(np.sum(run.status == QUEUE_FULL)),
        too_long=int(np.sum(run.status == TOO_LONG)),
        lost=int(np.sum(run.status == LOST)),
        seconds=run.seconds,
        ttft=_percentiles(ttft),
        tpot=_percentiles(several),
        goodput=num_good / run.seconds if run.seconds else 0.0,
        tokens_per_second=tokens / run.seconds if run.seconds else 0.0,
        prefix_hits=run.reused_tokens / prompts if prompts else 0.0,
        cost_per_million=cost,
        mean_batch=tokens / run.num_steps if run.num_steps else 0.0,
        num_failures=run.num_failures,
        num_failovers=run.num_failovers,
        num_preemptions=run.num_preemptions,
    )


def _percentiles(values: np.ndarray) -> list[float]:
    return np.percentile(values, PERCENTS).tolist() if len(values) else [float("nan")] * len(PERCENTS)


def parse_replicas(text: str) -> tuple[list[int], bool]:
    """Numbers of replicas, and whether the smallest that is enough is looked for between them: "8", "2,4,8" (each), or
    "2..64". Raises ValueError for other texts."""
    first, dots, last = text.partition("..")
    try:
        numbers = [int(part) for part in ([first, last] if dots else text.split(","))]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or numbers != sorted(set(numbers)):
        raise ValueError(f"--replicas: {text!r} is none of 8, 2,4,8 and 2..64 (ascending, from 1)")
    return numbers, bool(dots)


def search_replicas(
    low: int, high: int, share: float, run: Callable[[int], FleetFigures]
) -> tuple[list[FleetFigures], int | None]:
    """Figures of the fleets that were tried, by their size, and the smallest size of which a `share` of the requests
    is good; None if that of `high` is not.

    Sizes are doubled until one is enough, and the gap before it is halved: a larger fleet is taken to be no worse.
    """
    tried: dict[int, FleetFigures] = {}

    def is_enough(size: int) -> bool:
        tried[size] = run(size)
        return tried[size].share >= share

    size, below = low, low - 1
    while not is_enough(size):
        if size == high:
            return [tried[size] for size in sorted(tried)], None
        below, size = size, min(2 * size, high)
    while size - below > 1:
        middle = (size + below) // 2
        if is_enough(middle):
            size = middle
        else:
            below = middle
    return [tried[size] for size in sorted(tried)], size


def report_dict(
    trace: Any, rows: Sequence[FleetFigures], needed: int | None, goal: ServiceGoal, notes: Sequence[str]
) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "rate": _number(trace.rate),
            "prompt_tokens": sum(trace.prompts),
            "answer_tokens": sum(trace.answers),
        },
        "goal": {"ttft_ms": goal.slo_ttft, "itl_ms": goal.slo_itl, "share": goal.slo_share},
        "replicas_needed": needed,
        "fleets": [_fleet_dict(row) for row in rows],
        "notes": list(notes),
    }


def _fleet_dict(row: FleetFigures) -> dict[str, Any]:
    values = {
        "replicas": row.num_replicas,
        "requests": row.num_requests,
        "good": row.num_good,
        "share": row.share,
        "goodput": row.goodput,
        "tokens_per_second": row.tokens_per_second,
        "seconds": row.seconds,
        "prefix_hits": row.prefix_hits,
        "mean_batch": row.mean_batch,
        "cost_per_million_tokens": row.cost_per_million,
        "refused": {"queue_full": row.refused, "too_long": row.too_long, "lost": row.lost},
        "failures": row.num_failures,
        "failovers": row.num_failovers,
        "preemptions": row.num_preemptions,
    }
    for name in ("ttft", "tpot"):
        pairs = zip(PERCENTS, getattr(row, name), strict=True)
        values[f"{name}_ms"] = {f"p{percent}": _number(value) for percent, value in pairs}
    return values


def _number(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if np.isfinite(value) else None


def report_text(
    trace: Any,
    rows: Sequence[FleetFigures],
    needed: int | None,
    goal: ServiceGoal,
    notes: Sequence[str],
    *,
    is_search: bool,
) -> str:
    """A table for people, and what it rests on."""
    has_price = goal.chip_price is not None
    titles = ["replicas", "good", "good/s", "TTFT p50", "p90", "p99 ms", "TPOT p50", "p90", "p99 ms", "tokens/s"]
    titles += ["batch", "prefix hits", *(["$/M tokens"] if has_price else [])]
    table = [
        [
            f"{row.num_replicas:,}",
            f"{row.share:.1%}",
            f"{row.goodput:,.2f}",
            *(f"{value:,.0f}" for value in row.ttft),
            *(f"{value:,.1f}" for value in row.tpot),
            f"{row.tokens_per_second:,.0f}",
            f"{row.mean_batch:.1f}",
            f"{row.prefix_hits:.0%}",
            *([f"{row.cost_per_million:,.3f}" if row.cost_per_million is not None else "-"] if has_price else []),
        ]
        for row in rows
    ]
    mean = sum(trace.prompts) / len(trace), sum(trace.answers) / len(trace)
    lines = [
        f"{trace.name}: {len(trace):,} requests, {trace.rate:,.2f} a second, of {mean[0]:,.0f} + {mean[1]:,.0f} tokens",
        f"good: first token within {goal.slo_ttft:g} ms, then at most {goal.slo_itl:g} ms between tokens (TPOT)",
        "",
        table_text(titles, table, num_left=0).rstrip("\n"),
        "",
    ]
    for row in rows:
        counts = {
            "refused (queue full)": row.refused,
            "refused (too long)": row.too_long,
            "lost": row.lost,
            "failures": row.num_failures,
            "failovers": row.num_failovers,
            "preemptions": row.num_preemptions,
        }
        if told := ", ".join(f"{count:,} {name}" for name, count in counts.items() if count):
            lines.append(f"{row.num_replicas} replicas: {told}")
    if is_search:
        number = f"more than {rows[-1].num_replicas}" if needed is None else f"{needed}"
        lines.append(f"needed: {number} replicas, for {100 * goal.slo_share:.4g} % of the requests to be good")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)]) + "\n"
