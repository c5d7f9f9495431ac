"""An advice for people: a table, what helped and what did not, and a command line."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.measure.advise.goals import Goal, Judgement, judge, median
from jaxinfer.measure.advise.search import Findings, recommended
from jaxinfer.measure.advise.trials import REPEATED, Arguments, TrialResult, flags

COLUMNS = ("trial", "TTFT ms", "TPOT ms", "tokens/s", "weights", "B/token", "KL")


@dataclass(frozen=True)
class Advice:
    """Attributes:
    row: what is recommended, None where nothing may be; judgement: of it. arguments: of `LLM`, all that are needed.
    command, python: how to write it.
    """

    row: TrialResult | None = None
    judgement: Judgement | None = None
    arguments: Arguments = field(default_factory=dict)
    command: str = ""
    python: str = ""

    def to_dict(self) -> dict[str, Any] | None:
        """JSON-ready, without a path; None where nothing is recommended."""
        if self.row is None or self.judgement is None:
            return None
        its = self.judgement
        judged = {"verdict": its.verdict, "ratio": its.ratio, "noise": its.noise}
        return {"name": self.row.name, "arguments": self.row.arguments, **judged}


def advice(goal: Goal, found: Findings, model: str, given: Mapping[str, Any]) -> Advice:
    """What to write; `given` is what every trial had."""
    best = recommended(goal, found)
    if best is None:
        return Advice()
    row, its = best
    row = row if row.arguments else pooled(found.base)
    arguments = {**given, **row.arguments}
    options = f" {flags(arguments)}" if arguments else ""
    if goal.name == "latency":
        command = f'jaxinfer generate "..." --model {shlex.quote(model)}{options}'
    else:
        command = f"jaxinfer batch requests.jsonl answers.jsonl --model {shlex.quote(model)}{options}"
    values = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return Advice(row, its, arguments, command, f"LLM({model!r}{values})")


def table(goal: Goal, found: Findings) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells, a row for each trial; the last column is next to the baseline."""
    columns = [*COLUMNS, "vs base"]
    rows = [_base_cells(goal, found, found.base[0], "baseline")]
    for row in found.rows:
        rows.append([*_cells(row), _ratio(judge(goal, row, found.base))])
    rows += [_base_cells(goal, found, row, "baseline again") for row in found.base[1:]]
    return columns, rows


def _base_cells(goal: Goal, found: Findings, row: TrialResult, name: str) -> list[str]:
    """Next to the median of all the baseline's measurements, as trials are."""
    values, all_ = goal.values(row), goal.values(pooled(found.base))
    ratio = median(values) / median(all_) if values and median(all_) else 1.0
    return [*_cells(row, name), f"{ratio:.2f}x"]


def pooled(rows: Sequence[TrialResult]) -> TrialResult:
    """One row of all repeats of several."""
    values = {name: sum((getattr(row, name) for row in rows), ()) for name in REPEATED}
    return replace(rows[0], **values)


def _cells(row: TrialResult, name: str | None = None) -> list[str]:
    kl = "exact" if row.is_exact else "" if row.kl is None else f"{row.kl:.2g}"
    if not row.one:
        kl = ""
    return [
        name or row.name,
        _middle(row.ttft, 1e3),
        _middle(row.tpot, 1e3),
        _middle(row.rate, 1),
        "" if row.weight_bytes is None else size(row.weight_bytes),
        "" if row.token_bytes is None else f"{row.token_bytes:,.0f}",
        kl if row.arguments else "",
    ]


def _middle(values: tuple[float, ...], unit: float) -> str:
    """The median, with three digits at least."""
    if not values:
        return ""
    value = median(values) * unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(its: Judgement) -> str:
    if its.ratio is None:
        return ""
    return "same" if its.verdict == "same" else f"{its.ratio:.2f}x"


def size(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def sections(
    goal: Goal, found: Findings, its: Advice, left_out: Mapping[str, str], *, price_per_hour: float | None = None
) -> list[str]:
    """What helped, what did not and why, what is not known, and the recommendation."""
    helped, others, unknown = [], [], []
    for row in found.rows:
        verdict = judge(goal, row, found.base)
        part = unknown if verdict.ratio is None else helped if verdict.verdict == "better" else others
        part.append(f"  {row.name}: {_said(goal, row, verdict)}")
    unknown += [f"  {what}: not tried: {why}" for what, why in left_out.items()]
    lines = []
    for title, part in (("Helped", helped), ("Did not help", others), ("Not known", unknown)):
        lines += [title, *part, ""] if part else []
    lines += _recommended(goal, found, its, price_per_hour)
    if len(found.base) < 2 and not goal.is_planned:
        lines += ["", "The baseline was measured once: how the machine drifted meanwhile is not known."]
    return lines


def _said(goal: Goal, row: TrialResult, its: Judgement) -> str:
    if its.verdict == "unknown":
        said = "nothing to compare"
    elif its.verdict == "same":
        said = f"no difference ({its.ratio:.2f}x{_noise(goal, its)})"
    elif its.verdict in ("ruled out", "in doubt"):
        said = its.why or ""
        if its.ratio is not None and row.reason is None:
            said += f" ({goal.title(row)} {its.ratio:.2f}x)"
    else:
        said = f"{goal.title(row)} {its.ratio:.2f}x"
        if its.verdict == "worse":
            said += _noise(goal, its)
    return "; ".join([said, *row.notes]) if row.reason is None else said


def _noise(goal: Goal, its: Judgement) -> str:
    return "" if goal.is_planned else f", noise {its.noise:.0%}"


def _recommended(goal: Goal, found: Findings, its: Advice, price_per_hour: float | None) -> list[str]:
    if its.row is None or its.judgement is None:
        return ["Recommended", "  nothing that was tried is within the limits"]
    row, base = its.row, pooled(found.base)
    if not row.arguments:
        lines = ["Recommended: as it is", "  nothing that was tried is better beyond the noise"]
    else:
        lines = [f"Recommended: {row.name}"]
        if its.judgement.ratio is not None:
            lines.append(f"  {its.judgement.ratio:.2f}x the baseline's {goal.title(base)}")
    sizes = [one.arguments["max_seqs"] for one in found.rows if "max_seqs" in one.arguments and one.rate]
    if row.arguments.get("max_seqs") == max(sizes, default=0) > 1:
        lines.append("  the largest batch size that was tried is the best one: --sizes takes larger ones")
    lines.append(f"  {_figures(row, price_per_hour)}")
    if row.arguments:
        lines.append(f"  baseline: {'; '.join([_figures(base, price_per_hour), *base.notes])}")
    return [*lines, "", f"  {its.command}", f"  {its.python}"]


def _figures(row: TrialResult, price_per_hour: float | None) -> str:
    parts = []
    if row.one:
        parts.append(f"TTFT {_middle(row.ttft, 1e3)} ms, TPOT {_middle(row.tpot, 1e3)} ms of one request")
    if row.rate:
        parts.append(f"{median(row.rate):,.0f} tokens/s of all")
        if price_per_hour is not None:
            parts.append(f"a million tokens out cost {price_per_hour / 3600 / median(row.rate) * 1e6:,.2f}")
    if row.goodput:
        parts.append(f"{median(row.goodput):,.2f} requests/s in the limits")
    if row.needed_bytes is not None:
        parts.append(f"{size(row.needed_bytes)} of memory")
    if row.cache_tokens is not None:
        parts.append(f"cache for {row.cache_tokens:,} tokens")
    if row.is_exact:
        parts.append("the same answers")
    elif row.kl is None:
        parts.append("KL not measured")
    else:
        parts.append(f"KL {row.kl:.3g} nats per token" + (f", same best token {row.top1:.1%}" if row.top1 else ""))
    return "; ".join(parts)
