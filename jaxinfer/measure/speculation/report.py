"""Gains of drafts from measured runs: plain arithmetic, and sentences for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.speculative import SpeculationStats, expected_speedup

MIN_GAIN = 1.03  # below which an adaptive length does not draft either
REPEATED_TOKENS = 16
# Three rules of thumb: what a draft costs, how much of it has to be accepted, and that a busy chip has nothing to give.
MAX_COST, MIN_RATE = 0.2, 0.5


@dataclass(frozen=True)
class Run:
    """A run of the prompts with one draft length, 0 for plain decoding.

    Attributes:
      seconds_per_token: of one answer, without its first token. host_share: share of the time in which the host's
        thread worked. answers: token ids. num_tokens: tokens after the first ones, of all repeats. stats: of all
        repeats; None for plain decoding. by_kind: statistics of the answers of each kind of text.
    """

    num_draft_tokens: int
    seconds_per_token: float
    host_share: float
    answers: list[list[int]]
    num_tokens: int
    stats: SpeculationStats | None = None
    by_kind: Mapping[str, SpeculationStats] = field(default_factory=dict)


@dataclass(frozen=True)
class LengthReport:
    """One draft length compared with plain decoding.

    Attributes:
      cost_ratio: time of drafting one token, in plain decode steps. verify_ratio: likewise, of the rest of a round.
      expected: speedup by Leviathan et al. (2023, theorem 3.8). measured: the measured speedup.
    """

    num_draft_tokens: int
    stats: SpeculationStats
    cost_ratio: float
    verify_ratio: float
    expected: float
    measured: float
    host_share: float
    num_different: int
    by_kind: Mapping[str, SpeculationStats] = field(default_factory=dict)

    @property
    def if_perfect(self) -> dict[str, float]:
        """The speedup if one of the costs were zero, or if every draft token were accepted."""
        per_round, k = self.verify_ratio + self.num_draft_tokens * self.cost_ratio, self.num_draft_tokens
        length = self.measured * per_round  # tokens per round
        return {
            "acceptance": (k + 1) / per_round,
            "draft cost": length / self.verify_ratio,
            "verify cost": length / (1 + k * self.cost_ratio),
            "host": self.measured / (1 - self.host_share),
        }

    @property
    def limit(self) -> str:
        """The cost whose absence would gain most."""
        return max(self.if_perfect, key=lambda name: self.if_perfect[name])

    def data(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            **_acceptance(self.stats),
            "by_kind": {kind: _acceptance(stats) for kind, stats in self.by_kind.items()},
            "cost_ratio": self.cost_ratio,
            "verify_ratio": self.verify_ratio,
            "expected_speedup": self.expected,
            "measured_speedup": self.measured,
            "host_share": self.host_share,
            "num_different_answers": self.num_different,
            "speedup_if_perfect": self.if_perfect,
            "limited_by": self.limit,
        }


@dataclass(frozen=True)
class DraftReport:
    """One draft.

    Attributes:
      lengths: one answer at a time. loads: speedup of an adaptive length by the number of answers at a time.
      tokens: of a draft with another tokenizer, how many of the model's it drafts.
    """

    draft: str
    lengths: Sequence[LengthReport]
    loads: Mapping[int, float] = field(default_factory=dict)
    tokens: str | None = None

    @property
    def best(self) -> LengthReport:
        return max(self.lengths, key=lambda row: row.measured)

    def data(self) -> dict[str, Any]:
        best = self.best
        return {
            "draft": self.draft,
            **({} if self.tokens is None else {"tokens": self.tokens}),
            "lengths": [row.data() for row in self.lengths],
            "best_num_draft_tokens": best.num_draft_tokens if best.measured > 1 else 0,
            "speedup_by_load": {str(load): speedup for load, speedup in self.loads.items()},
            "conclusion": conclusion(self.lengths),
            "warnings": warnings(self),
        }


def _acceptance(stats: SpeculationStats) -> dict[str, Any]:
    names = ("acceptance_rate", "conditional_rate", "acceptance_by_position", "mean_accepted_length")
    return {name: getattr(stats, name) for name in names}


def compare(run: Run, plain: Run, cost_ratio: float) -> LengthReport:
    """Compares a run with plain decoding. The time of a round follows from the tokens per round; all of it that is not
    drafting counts as verifying."""
    stats, k = run.stats or SpeculationStats(), run.num_draft_tokens
    measured = plain.seconds_per_token / run.seconds_per_token
    # Tokens that were generated without a draft took one plain step each.
    steps = run.num_tokens / measured - max(run.num_tokens - stats.num_tokens, 0)
    per_round = steps / stats.num_rounds if stats.num_rounds else 1.0
    return LengthReport(
        num_draft_tokens=k,
        stats=stats,
        cost_ratio=cost_ratio,
        verify_ratio=max(per_round - k * cost_ratio, 0.01),
        expected=expected_speedup(stats.conditional_rate, k, cost_ratio),
        measured=measured,
        host_share=min(run.host_share, 0.99),
        num_different=sum(
            answer != plain_answer for answer, plain_answer in zip(run.answers, plain.answers, strict=True)
        ),
        by_kind=run.by_kind,
    )


def repeats_itself(tokens: Sequence[int], length: int = REPEATED_TOKENS) -> bool:
    """Tells whether a run of `length` tokens occurs twice. Small models fall into loops, which any draft predicts."""
    runs = [tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]
    return len(set(runs)) < len(runs)


def conclusion(rows: Sequence[LengthReport]) -> str:
    """Advice on a draft, one answer at a time, and what limits its speedup."""
    best = max(rows, key=lambda row: row.measured)
    k, limit = best.num_draft_tokens, best.limit
    cause = {
        "acceptance": f"acceptance: {best.stats.conditional_rate:.0%} of the draft tokens are accepted if those before "
        f"them were; with all accepted, the speedup would be",
        "draft cost": f"the draft: one of its tokens takes {best.cost_ratio:.2f} of a plain step; if it were free, the "
        f"speedup would be",
        "verify cost": f"verifying: a round without its draft takes {best.verify_ratio:.2f} plain steps; with 1, the "
        f"speedup would be",
        "host": f"the host, which works for {best.host_share:.0%} of the time; without it, the speedup would be",
    }[limit]
    if best.measured > 1:
        start = f"Use num_draft_tokens={k}: {best.measured:.2f}x plain decoding."
    else:
        start = f"Decode without this draft: {k} draft tokens are best, with {best.measured:.2f}x plain decoding."
    return f"{start} It is limited mostly by {cause} {best.if_perfect[limit]:.2f}x."


def warnings(report: DraftReport) -> list[str]:
    """The rules of thumb that a draft breaks."""
    best, broken = report.best, []
    if best.cost_ratio > MAX_COST:
        broken.append(
            f"One of its tokens takes {best.cost_ratio:.2f} of a plain step: above {MAX_COST} a draft seldom pays."
        )
    if best.stats.conditional_rate < MIN_RATE:
        broken.append(
            f"{best.stats.conditional_rate:.0%} of its tokens are accepted: below {MIN_RATE:.0%} a draft seldom pays."
        )
    poor = [kind for kind, stats in best.by_kind.items() if stats.conditional_rate < MIN_RATE]
    if best.stats.conditional_rate >= MIN_RATE and poor:
        broken.append(f"It helps little with {', '.join(poor)}.")
    return broken


def recommendation(reports: Sequence[DraftReport]) -> list[str]:
    """Which draft to use at which load, and at which to decode without one."""
    sentences: dict[str, list[int]] = {}
    for load in sorted({load for report in reports for load in report.loads}):
        measured = [(report.loads[load], report.draft) for report in reports if load in report.loads]
        speedup, draft = max(measured)
        gains = speedup >= MIN_GAIN
        words = f"use {draft}" if gains else f"decode without a draft ({draft} reaches {speedup:.2f}x)"
        sentences.setdefault(words, []).append(load)
    by_draft = {report.draft: report.loads for report in reports}

    def sentence(words: str, loads: list[int]) -> str:
        figures = ""
        if words.startswith("use "):
            figures = ": " + ", ".join(f"{by_draft[words[4:]][load]:.2f}x" for load in loads)
        which = f"{loads[0]} answer" + ("" if loads == [1] else "s") if len(loads) == 1 else _listed(loads) + " answers"
        return f"With {which} at a time {words}{figures}."

    return [sentence(words, loads) for words, loads in sentences.items()]


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"
