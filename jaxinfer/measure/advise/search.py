"""The order in which things are tried: the baseline, each change alone, then those that helped together; the baseline
again in between and at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.measure.advise.goals import Goal, Judgement, judge
from jaxinfer.measure.advise.trials import Arguments, TrialResult, ordered

Measure = Callable[[Arguments], TrialResult]
# Trials alone between two measurements of the baseline: how the machine drifts meanwhile is noise.
EVERY = 4


@dataclass
class Findings:
    """Everything that was tried, in order. `base` are the baseline's measurements."""

    base: list[TrialResult]
    alone: list[TrialResult]
    together: list[TrialResult]

    @property
    def rows(self) -> list[TrialResult]:
        """All but the baseline."""
        return [*self.alone, *self.together]


def search(
    goal: Goal,
    trials: Sequence[Arguments],
    measure: Measure,
    *,
    is_over: Callable[[], bool] = lambda: False,
    found: Findings | None = None,
    told: Callable[[Findings], None] = lambda found: None,
    repeats_baseline: bool = True,
) -> Findings:
    """Measures all. `told` hears of the findings after each trial.

    Args:
      measure: gives the row of a trial. What it raises ends the search.
      is_over: whether the time is; then the rest becomes rows that say so.
      found: what an earlier search had, which is kept; what had failed is tried again.
    """
    found = found or Findings([], [], [])
    found.alone = [row for row in found.alone if row.reason is None]
    found.together = [row for row in found.together if row.reason is None]

    def tried(arguments: Arguments, rows: list[TrialResult]) -> TrialResult:
        known = next((row for row in found.rows if row.arguments == arguments), None)
        if known is None:
            known = TrialResult(arguments, "not tried: the time was over") if is_over() else measure(arguments)
            rows.append(known)
            told(found)
        return known

    def again(count: int) -> None:
        if len(found.base) < count and (not found.base or (repeats_baseline and not is_over())):
            found.base.append(measure({}))
            told(found)

    again(1)
    for number, arguments in enumerate(trials, 1):
        tried(arguments, found.alone)
        if number % EVERY == 0 or number == len(trials):
            again(1 + -(-number // EVERY))
    # In the order of what they gave alone, each beside those that were kept.
    helping = [row for row, _ in ranked(goal, found.alone, found.base)]
    best = helping[0] if helping else TrialResult()
    for row in helping[1:]:
        if any(name in best.arguments for name in row.arguments):
            continue
        both = tried(ordered({**best.arguments, **row.arguments}), found.together)
        if is_improvement(goal, both, best):
            best = both
    if found.together:
        again(2 + -(-len(trials) // EVERY))
    return found


def ranked(goal: Goal, rows: Sequence[TrialResult], base: Sequence[TrialResult]) -> list[tuple[TrialResult, Judgement]]:
    """Those that beat the baseline, the best first. Where it is out of the limits itself, all that are within them."""
    pairs = [(row, judge(goal, row, base)) for row in rows]
    if goal.ruled_out(base[0]) is None:
        good = [pair for pair in pairs if pair[1].verdict == "better"]
        if goal.name == "quality":
            good = [pair for pair in good if pair[0].is_exact]
    else:
        good = [pair for pair in pairs if pair[1].verdict in ("better", "same", "worse")]
        good = good or [pair for pair in pairs if pair[1].verdict == "in doubt"]
    return sorted(good, key=lambda pair: _order(goal, *pair))


def _order(goal: Goal, row: TrialResult, its: Judgement) -> tuple[float, float]:
    """The least first: by what is lost, where quality is the goal, then by what is gained."""
    return (_kl(row) if goal.name == "quality" else 0.0, -(its.ratio or 0.0))


def is_improvement(goal: Goal, row: TrialResult, before: TrialResult) -> bool:
    """Whether a trial is better than one that it was made from."""
    if goal.name == "quality" and _kl(row) > _kl(before):
        return False
    return judge(goal, row, [before]).verdict == "better"


def recommended(goal: Goal, found: Findings) -> tuple[TrialResult, Judgement] | None:
    """The best of all that was tried, the baseline where nothing beats it; None where nothing may be recommended."""
    pairs = ranked(goal, found.rows, found.base)
    if not pairs:
        base = found.base[0]
        return None if goal.ruled_out(base) is not None else (base, judge(goal, base, found.base))
    best = pairs[0]
    # Fewer changes, where more of them bring no more than the noise.
    fewer = [pair for pair in pairs if len(pair[0].arguments) < len(best[0].arguments)]
    return next((pair for pair in fewer if not is_improvement(goal, best[0], pair[0])), best)


def _kl(row: TrialResult) -> float:
    """Nats per token; of what was not measured, by the bits that are left."""
    if row.kl is not None or row.is_exact:
        return row.kl or 0.0
    weights = str(row.arguments.get("quantize", ""))
    return 1e6 * (weights.startswith("int4") + 0.1 * bool(weights) + 0.01 * ("kv_dtype" in row.arguments))
