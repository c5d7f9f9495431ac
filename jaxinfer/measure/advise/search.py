"""The search for good options: the baseline, each change alone, combinations of those that helped, and at last the best
few and the baseline in turn. What cannot win is stopped early."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jaxinfer.measure.advise.goals import (
    LEAST,
    REPEATED,
    Arguments,
    Goal,
    Judgement,
    TrialResult,
    compare,
    judge,
    median,
    ordered,
)

# Called before a trial is timed, and after each repeat: why it stops there, or None to go on.
Stop = Callable[[TrialResult], str | None]
Measure = Callable[[Arguments, Stop], TrialResult]
# Trials between two measurements of the baseline, whose differences are the noise of the machine.
BASELINE_INTERVAL = 4
NUM_FINALISTS, NUM_ROUNDS = 2, 5  # measured in turn with the baseline, at the end
SEARCH_SHARE = 0.75  # of the time; the rest is for the finalists
# Noise of a single repeat that is assumed at least: a trial goes on if it may still be as good as the baseline.
REPEAT_NOISE = 0.15


@dataclass
class Findings:
    """All results in order: measurements of the baseline, single changes, combinations; then those of the finalists and
    the baseline in turn, a repeat each."""

    base: list[TrialResult]
    alone: list[TrialResult]
    together: list[TrialResult]
    finals: list[TrialResult] = field(default_factory=list)

    @property
    def rows(self) -> list[TrialResult]:
        """All but the baseline and the finals."""
        return [*self.alone, *self.together]


class Search:
    """One search.

    Args:
      measure: returns the result of a trial; its exceptions end the search.
      used: the share of the time that has passed; from 1 on the remaining trials get results without figures.
      findings: results of an earlier search, which are kept except for failures.
      report: called with the findings after each trial.
      repeats: whether the baseline is measured again, and finalists in turn: not where figures are computed.
      bound: the best figures that a trial could have, as far as they are known; a trial that would not win with them
        is not measured.
    """

    def __init__(
        self,
        goal: Goal,
        measure: Measure,
        *,
        used: Callable[[], float] = lambda: 0.0,
        findings: Findings | None = None,
        report: Callable[[Findings], None] = lambda findings: None,
        repeats: bool = True,
        bound: Callable[[Arguments], TrialResult | None] = lambda arguments: None,
    ):
        self.goal, self.measure, self.used, self.report = goal, measure, used, report
        self.repeats, self.bound = repeats, bound
        self.findings = findings = findings or Findings([], [], [])
        findings.alone, findings.together = (
            list(filter(self._is_kept, rows)) for rows in (findings.alone, findings.together)
        )

    def run(self, trials: Sequence[Arguments]) -> Findings:
        """Measures the baseline, the trials and combinations of them."""
        findings = self.findings
        self._repeat_baseline(1)
        for number, arguments in enumerate(trials, 1):
            self._tried(arguments, findings.alone)
            if number % BASELINE_INTERVAL == 0 or number == len(trials):
                self._repeat_baseline(1 + -(-number // BASELINE_INTERVAL))
        self._combine()
        if self.repeats:
            self._play_finals()
        return findings

    def _tried(self, arguments: Arguments, rows: list[TrialResult]) -> TrialResult:
        known = next((row for row in self.findings.rows if row.arguments == arguments), None)
        if known is not None:
            return known
        if self.used() >= SEARCH_SHARE:
            row = TrialResult(arguments, "not tried: time limit reached")
        elif (why := self._why_not(arguments)) is not None:
            row = TrialResult(arguments, f"not tried: {why}")
        else:
            row = self.measure(arguments, self._why_stop)
        rows.append(row)
        self.report(self.findings)
        return row

    def _repeat_baseline(self, count: int) -> None:
        base = self.findings.base
        if len(base) < count and (not base or (self.repeats and self.used() < SEARCH_SHARE)):
            base.append(self.measure({}, lambda row: after_one(row) if base else None))
            self.report(self.findings)

    def _combine(self) -> None:
        """Climbs from the best single change, or the best two where the baseline is outside the limits; then once
        without each change of what was reached: one that is good alone may keep better ones out."""
        alone, base = self.findings.alone, self.findings.base
        most = 1 if self.goal.ruled_out(base[0]) is None else 2
        best, *others = map(self._climb, promising(self.goal, alone, base)[:most] or base[:1])
        for row in others:
            best = row if is_better(self.goal, row, best) else best
        for name in list(best.arguments):
            rest = {other: value for other, value in best.arguments.items() if other != name}
            if rest and name in best.arguments:
                row = self._climb(self._tried(ordered(rest), self.findings.together), without=name)
                best = row if is_better(self.goal, row, best) else best

    def _climb(self, best: TrialResult, without: str | None = None) -> TrialResult:
        """Adds a change, exchanges one for another of its kind or leaves one out, the largest gains first, until
        nothing is better. Changes that made no difference alone may make one beside others, and those that need too
        much memory alone may fit beside others."""
        alone, base = self.findings.alone, self.findings.base
        if not best.arguments and self.goal.ruled_out(best) is None and not additions(self.goal, alone, base):
            return best
        changes = [row.arguments for row in additions(self.goal, alone, base, least=1 - LEAST)]
        is_improved = True
        while is_improved:
            is_improved = False
            for change in [*changes, *({name: None} for name in best.arguments)]:
                both = {name: value for name, value in {**best.arguments, **change}.items() if value is not None}
                if both and both != best.arguments and without not in both:
                    row = self._tried(ordered(both), self.findings.together)
                    if is_better(self.goal, row, best):
                        best, is_improved = row, True
        return best

    def _is_kept(self, row: TrialResult) -> bool:
        """Tells if an earlier search's result is final: no failure, and stopped only if it would be stopped again."""
        return row.reason is None and (row.stopped is None or self._why_stop(row) is not None)

    # What cannot win.

    def _why_not(self, arguments: Arguments) -> str | None:
        """Why a trial cannot win, before it is measured."""
        base, row = self.findings.base[0], TrialResult(arguments)
        fits = self.goal.ruled_out(base) is None
        if self.goal.name == "quality" and fits and not row.is_exact and not self.goal.is_planned:
            return "it cannot win: the model fits as it is, and its answers would change"
        limit = self.bound(arguments) or _batch_bound(arguments, base)
        if limit is None or not fits:
            return None
        most, least = self.goal.values(limit), self.goal.values(pooled(self.findings.base))
        if most and least and median(most) * (1 + REPEAT_NOISE) < median(least):
            return (
                f"it cannot win: {self.goal.title(base)} of {median(most):,.4g} at most, and the baseline has "
                f"{median(least):,.4g}"
            )
        return None

    def _why_stop(self, row: TrialResult) -> str | None:
        """Why a trial that has so many repeats stops; the baseline is known."""
        base = self.findings.base
        if row.kl is not None and row.kl > self.goal.max_kl:
            return "it is ruled out"
        values, others = self.goal.values(row), [value for measured in base for value in self.goal.values(measured)]
        if not row.one or not values:
            return None
        if self.used() >= 1:
            return "time limit reached"
        if self.goal.ruled_out(row) is not None:
            return "it is ruled out"
        if self.goal.name == "users" and not row.goodput:
            return "the goal needs no time"
        noise = max(REPEAT_NOISE, (max(others) - min(others)) / max(median(others), 1e-12) if others else 0.0)
        if others and self.goal.ruled_out(base[0]) is None and max(values) * (1 + noise) < median(others):
            return f"{median(values) / median(others):.2f}x the baseline"
        return None

    # The best in turn.

    def _play_finals(self) -> None:
        """Measures the best few and the baseline in turn, forwards and backwards, a repeat each: what drifts then
        changes all of them."""
        best = promising(self.goal, self.findings.rows, self.findings.base)
        finalists = [row.arguments for row in best[:NUM_FINALISTS]]
        if not finalists or self.findings.finals or (self.goal.name == "users" and not self.findings.base[0].goodput):
            return
        order: list[Arguments] = [{}, *finalists]
        for number in range(NUM_ROUNDS):
            if self.used() >= 1:
                break
            done = []
            for arguments in order if number % 2 == 0 else reversed(order):
                row = self.measure(arguments, after_one)
                if row.reason is not None:
                    return  # it ran before; what is known of it decides
                done.append(row)
            self.findings.finals += done
            self.report(self.findings)


def _batch_bound(arguments: Arguments, base: TrialResult) -> TrialResult | None:
    """A batch's tokens/s at most, if a step of it takes as long as one of a single request, with no prompts."""
    if set(arguments) != {"max_seqs"} or not base.tpot or min(base.tpot) <= 0:
        return None
    return TrialResult(arguments, rate=(arguments["max_seqs"] / min(base.tpot),))


def after_one(row: TrialResult) -> str | None:
    """Stops after one repeat."""
    return "one repeat" if row.one else None


def pooled(rows: Sequence[TrialResult]) -> TrialResult:
    """One result with the repeats of several."""
    values = {name: sum((getattr(row, name) for row in rows), ()) for name in REPEATED}
    return replace(rows[0], **values)


def promising(goal: Goal, rows: Sequence[TrialResult], base: Sequence[TrialResult]) -> list[TrialResult]:
    """The results within the limits whose median is better than the baseline's, whatever the noise, the best first;
    if the baseline is outside the limits, all results that are within."""
    pairs = [(row, judge(goal, row, base)) for row in rows]
    good = [(row, its) for row, its in pairs if its.verdict in ("better", "same", "worse")]
    if goal.ruled_out(base[0]) is None:
        good = [(row, its) for row, its in good if (its.ratio or 0.0) > 1 + LEAST]
        if goal.name == "quality":
            good = [pair for pair in good if pair[0].is_exact]
    else:
        good = good or [pair for pair in pairs if pair[1].verdict == "in doubt"]
    return [row for row, _ in sorted(good, key=lambda pair: _rank(goal, *pair))]


def additions(
    goal: Goal, rows: Sequence[TrialResult], base: Sequence[TrialResult], least: float = 1 + LEAST
) -> list[TrialResult]:
    """The results with more than `least` of the baseline's figure, the best first, whatever memory they need; not those
    that lose too much quality or are in doubt."""
    before = median(goal.values(pooled(base))) if goal.values(base[0]) else 0.0
    good = [row for row in rows if goal.values(row) and goal.doubt(row) is None and (row.kl or 0.0) <= goal.max_kl]
    good = [row for row in good if median(goal.values(row)) > least * before]
    if goal.name == "quality":
        good = [row for row in good if row.is_exact]
    return sorted(good, key=lambda row: -median(goal.values(row)))


def is_better(goal: Goal, row: TrialResult, before: TrialResult) -> bool:
    """True if a combination's median is better than that of the result that it extends; where that is outside the
    limits, if it is within, or needs less memory."""
    if goal.ruled_out(before) is not None:
        return goal.ruled_out(row) is None or _needed(row) < _needed(before)
    if goal.ruled_out(row) is not None or not goal.values(row) or not goal.values(before):
        return False
    if goal.name == "quality" and _kl(row) != _kl(before):
        return _kl(row) < _kl(before)
    return median(goal.values(row)) > (1 + LEAST) * median(goal.values(before))


def _needed(row: TrialResult) -> float:
    return math.inf if row.needed_bytes is None else row.needed_bytes


def recommended(goal: Goal, findings: Findings) -> tuple[TrialResult, Judgement] | None:
    """The best result, the baseline if nothing beats it, None if nothing is within the limits. Finalists are compared
    by their figures in turn; without them a result must beat the baseline by more than the noise."""
    fits, best_rows = goal.ruled_out(findings.base[0]) is None, promising(goal, findings.rows, findings.base)
    if findings.finals and fits:
        pairs = []
        for row in best_rows:
            if rounds := turns(findings, row.arguments):
                figures = {name: getattr(pooled(rounds), name) for name in REPEATED}
                pairs.append((replace(row, **figures), compare(goal, rounds, turns(findings, {}))))
    else:
        pairs = [(row, judge(goal, row, findings.base)) for row in best_rows]
    good = [pair for pair in pairs if pair[1].verdict == "better" or not fits]
    if not good:
        base = findings.base[0]
        return (base, judge(goal, base, findings.base)) if fits else None
    best = min(good, key=lambda pair: _rank(goal, *pair))
    # Prefer fewer changes, if more of them gain no more than the noise.
    fewer = [pair for pair in good if len(pair[0].arguments) < len(best[0].arguments)]
    fewer.sort(key=lambda pair: (len(pair[0].arguments), _rank(goal, *pair)))
    return next((pair for pair in fewer if not is_improvement(goal, findings, best[0], pair[0])), best)


def is_improvement(goal: Goal, findings: Findings, row: TrialResult, before: TrialResult) -> bool:
    """True if more changes are better than fewer, by more than the noise."""
    if goal.name == "quality" and _kl(row) != _kl(before):
        return _kl(row) < _kl(before)
    rows, others = (turns(findings, trial.arguments) for trial in (row, before))
    if rows and others:
        return compare(goal, rows, others).verdict == "better"
    return judge(goal, row, [before]).verdict == "better"


def turns(findings: Findings, arguments: Arguments) -> list[TrialResult]:
    """The rounds of a finalist, {} for the baseline."""
    return [row for row in findings.finals if row.arguments == arguments]


def _rank(goal: Goal, row: TrialResult, judgement: Judgement) -> tuple[float, float]:
    """By the loss of quality if that is the goal, then by the gain."""
    return _kl(row) if goal.name == "quality" else 0.0, -(judgement.ratio or 0.0)


def _kl(row: TrialResult) -> float:
    """Nats per token; a rank by the number of bits if it was not measured."""
    if row.kl is not None or row.is_exact:
        return row.kl or 0.0
    weights = str(row.arguments.get("quantize", ""))
    cache = ("int4" in str(row.arguments.get("kv_dtype", ""))) + ("kv_policy" in row.arguments)
    bits = weights.startswith("int4") + cache + 0.1 * bool(weights) + 0.01 * ("kv_dtype" in row.arguments)
    return 1e6 * bits
