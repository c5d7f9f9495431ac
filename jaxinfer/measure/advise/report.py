"""The report of a search: a table, what helped and what did not, a recommended command line; and its JSON."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxinfer.checks import format_bytes
from jaxinfer.measure.advise.goals import Arguments, Goal, Judgement, TrialResult, flags, judge, median, ratios_in_turn
from jaxinfer.measure.advise.search import Findings, pooled, recommended, turns
from jaxinfer.measure.bench.metrics import cost_per_million
from jaxinfer.measure.bench.model import public_name
from jaxinfer.measure.bench.results import ResultError, check_same, read_schema

COLUMNS = ("trial", "TTFT ms", "TPOT ms", "tokens/s", "weights", "B/token", "KL")


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
      row: the recommended result, None if nothing is within the limits. judgement: its comparison with the baseline.
      arguments: all arguments of `LLM`. command, python: the same as a command line and as code.
    """

    row: TrialResult | None = None
    judgement: Judgement | None = None
    arguments: Arguments = field(default_factory=dict)
    command: str = ""
    python: str = ""

    def to_dict(self) -> dict[str, Any] | None:
        """The recommendation as JSON values; None if nothing is recommended."""
        if self.row is None or self.judgement is None:
            return None
        judged = {name: getattr(self.judgement, name) for name in ("verdict", "ratio", "noise")}
        return {"name": self.row.name, "arguments": self.row.arguments, **judged}


def advice(goal: Goal, findings: Findings, model: str, given: Mapping[str, Any]) -> Advice:
    """The recommendation; `given` are the arguments of all trials."""
    best = recommended(goal, findings)
    if best is None:
        return Advice()
    row, judgement = best
    row = row if row.arguments else pooled(findings.base)
    arguments = {**given, **row.arguments}
    first = ""
    if (method := arguments.pop("method", None)) is not None:
        made = f"{public_name(model)}-{method}"
        first = f"jaxinfer quantize {shlex.quote(model)} {shlex.quote(made)} --method {method} --calibration FILE && "
        model = made
    options = f" {flags(arguments)}" if arguments else ""
    if goal.name == "latency":
        command = f'{first}jaxinfer generate "..." --model {shlex.quote(model)}{options}'
    else:
        command = f"{first}jaxinfer batch requests.jsonl answers.jsonl --model {shlex.quote(model)}{options}"
    values = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return Advice(row, judgement, arguments, command, f"LLM({model!r}{values})")


def table(goal: Goal, findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Column titles, and a row of cells for each trial; the last column compares with the baseline."""
    columns = [*COLUMNS, "vs base"]
    rows = [_base_cells(goal, findings, findings.base[0], "baseline")]
    for row in findings.rows:
        rows.append([*_cells(row), _ratio(judge(goal, row, findings.base))])
    rows += [_base_cells(goal, findings, row, "baseline again") for row in findings.base[1:]]
    return columns, rows


def _base_cells(goal: Goal, findings: Findings, row: TrialResult, name: str) -> list[str]:
    """A measurement of the baseline, compared with the median of all of them."""
    values, all_ = goal.values(row), goal.values(pooled(findings.base))
    ratio = median(values) / median(all_) if values and median(all_) else 1.0
    return [*_cells(row, name), f"{ratio:.2f}x"]


def _cells(row: TrialResult, name: str | None = None) -> list[str]:
    kl = "exact" if row.is_exact else "" if row.kl is None else f"{row.kl:.2g}"
    if not row.one:
        kl = ""
    return [
        name or row.name,
        _middle(row.ttft, 1e3),
        _middle(row.tpot, 1e3),
        _middle(row.rate, 1),
        "" if row.weight_bytes is None else format_bytes(row.weight_bytes),
        "" if row.token_bytes is None else f"{row.token_bytes:,.0f}",
        kl if row.arguments else "",
    ]


def _middle(values: tuple[float, ...], unit: float) -> str:
    """The median, with at least three digits."""
    if not values:
        return ""
    value = median(values) * unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(judgement: Judgement) -> str:
    if judgement.ratio is None:
        return ""
    return "same" if judgement.verdict == "same" else f"{judgement.ratio:.2f}x"


def sections(
    goal: Goal, findings: Findings, advice: Advice, left_out: Mapping[str, str], *, price_per_hour: float | None = None
) -> list[str]:
    """Lines on what helped, what did not and why, what is unknown, and the recommendation."""
    helped, others, unknown = [], [], []
    for row in findings.rows:
        verdict = judge(goal, row, findings.base)
        part = unknown if verdict.ratio is None else helped if verdict.verdict == "better" else others
        part = others if verdict.verdict == "ruled out" and row.reason is None else part
        notes = [row.stopped, _draft_share(row, findings.base[0])]
        text = "; ".join(filter(None, [_verdict_text(goal, row, verdict), *notes]))
        part.append(f"  {row.name}: {text}")
    unknown += [f"  {what}: not tried: {why}" for what, why in left_out.items()]
    lines = []
    for title, part in (("Helped", helped), ("Did not help", others), ("Unknown", unknown)):
        lines += [title, *part, ""] if part else []
    lines += _in_turn(goal, findings)
    lines += _recommended(goal, findings, advice, price_per_hour)
    if len(findings.base) < 2 and not findings.finals and not goal.is_planned:
        lines += ["", "The baseline was measured only once, so the drift of the machine is unknown."]
    return lines


def _verdict_text(goal: Goal, row: TrialResult, judgement: Judgement) -> str:
    verdict, ratio = judgement.verdict, judgement.ratio
    noise = "" if goal.is_planned else f", noise {judgement.noise:.0%}"
    if verdict == "unknown":
        text = "nothing to compare"
    elif verdict == "same":
        text = f"no difference ({ratio:.2f}x{noise})"
    elif verdict in ("ruled out", "in doubt"):
        text = judgement.why or ""
        if ratio is not None and row.reason is None:
            text += f" ({goal.title(row)} {ratio:.2f}x)"
    else:
        text = f"{goal.title(row)} {ratio:.2f}x" + (noise if verdict == "worse" else "")
    return "; ".join([text, *row.notes]) if row.reason is None else text


def _draft_share(row: TrialResult, base: TrialResult) -> str | None:
    """The size of a draft beside its model's, and the rule where to begin."""
    if "draft" not in row.arguments or not row.weight_bytes or not base.weight_bytes:
        return None
    share = row.weight_bytes / base.weight_bytes - 1
    if share <= 0:
        return None
    rule = "" if 0.1 <= share <= 0.2 else "; begin with a draft of 10 to 20 % (docs/advising.md)"
    return f"the draft has {share:.0%} of the model's size{rule}"


def _in_turn(goal: Goal, findings: Findings) -> list[str]:
    """The finalists' figures in turn with the baseline's, relative to it."""
    finalists, base = {row.name: row for row in findings.finals if row.arguments}, turns(findings, {})
    if not finalists:
        return []
    lines = [f"In turn with the baseline, {len(base)} times"]
    for name, row in finalists.items():
        ratios = ratios_in_turn(goal, turns(findings, row.arguments), base)
        lines.append(f"  {name}: {goal.title(row)} {', '.join(f'{ratio:.2f}x' for ratio in ratios)}")
    return [*lines, ""]


def _recommended(goal: Goal, findings: Findings, advice: Advice, price_per_hour: float | None) -> list[str]:
    if advice.row is None or advice.judgement is None:
        return ["Recommended", "  no trial is within the limits"]
    row, base = advice.row, pooled(findings.base)
    if not row.arguments:
        lines = ["Recommended: no change", "  no trial is better than the baseline beyond the noise"]
    else:
        lines = [f"Recommended: {row.name}"]
        if advice.judgement.ratio is not None:
            lines.append(f"  {advice.judgement.ratio:.2f}x the baseline's {goal.title(base)}")
    sizes = [row.arguments["max_seqs"] for row in findings.rows if "max_seqs" in row.arguments and row.rate]
    if row.arguments.get("max_seqs") == max(sizes, default=0) > 1:
        lines.append("  the best batch size is the largest that was tried: try larger ones with --sizes")
    lines.append(f"  {_figures(row, price_per_hour)}")
    if row.arguments:
        lines.append(f"  baseline: {'; '.join([_figures(base, price_per_hour), *base.notes])}")
    return [*lines, "", f"  {advice.command}", f"  {advice.python}"]


def _figures(row: TrialResult, price_per_hour: float | None) -> str:
    parts = []
    if row.one:
        parts.append(f"TTFT {_middle(row.ttft, 1e3)} ms, TPOT {_middle(row.tpot, 1e3)} ms of one request")
    if row.rate:
        parts.append(f"{median(row.rate):,.0f} tokens/s in total")
        if price_per_hour is not None:
            cost = cost_per_million(price_per_hour, median(row.rate))
            parts.append(f"cost per million output tokens {cost:,.2f}")
    if row.goodput:
        parts.append(f"{median(row.goodput):,.2f} requests/s within the limits")
    if row.needed_bytes is not None:
        parts.append(f"{format_bytes(row.needed_bytes)} of memory")
    if row.cache_tokens is not None:
        parts.append(f"cache for {row.cache_tokens:,} tokens")
    if row.is_exact:
        parts.append("identical answers")
    elif row.kl is None:
        parts.append("KL not measured")
    else:
        best = f", same most probable token {row.top1:.1%}" if row.top1 else ""
        parts.append(f"KL {row.kl:.3g} nats per token{best}")
    return "; ".join(parts)


def about(machine: Mapping[str, Any]) -> str:
    """The machine that figures were measured on."""
    count, device = machine["num_devices"], machine["device"]
    cores = f" with {machine['num_cores']} cores" if machine["platform"] == "cpu" else ""
    return f"{count} x {device}{cores} ({machine['machine']}), jax {machine['jax']}, jaxinfer {machine['jaxinfer']}"


SCHEMA, VERSION = "jaxinfer.advise", 2


def new_result(model: str, options: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A result without trials."""
    return {"schema": SCHEMA, "version": VERSION, "model": model, "options": options, "machine": machine}


def with_findings(result: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The result with all trials, without paths of drafts."""
    parts = {name: [public(row).to_dict() for row in rows] for name, rows in vars(findings).items()}
    return {**result, **parts}


def public(row: TrialResult) -> TrialResult:
    """The result without the path of a draft."""
    return _with_draft(row, public_name)


def _with_draft(row: TrialResult, rename: Callable[[str], str]) -> TrialResult:
    draft = row.arguments.get("draft")
    return row if draft is None else replace(row, arguments={**row.arguments, "draft": rename(draft)})


def earlier_findings(file: Path, result: dict[str, Any], drafts: Sequence[str] = ()) -> Findings | None:
    """The findings of an earlier run with the same options, without the finals, which each run measures at its end.
    Paths of `drafts` are restored. None if there is no file.

    Raises ResultError, with the difference, for a file of other options or another machine.
    """
    if not file.exists():
        return None
    earlier = read_schema(file, SCHEMA, VERSION)
    check_same(file, earlier, result, ("model",))
    try:
        parts = [[TrialResult.from_dict(row) for row in earlier[name]] for name in ("base", "alone", "together")]
    except (KeyError, TypeError) as error:
        raise ResultError(f"{file.name} is not complete: {error}") from None
    named = {public_name(draft): draft for draft in drafts}
    return Findings(*([_with_draft(row, lambda name: named.get(name, name)) for row in rows] for rows in parts))
