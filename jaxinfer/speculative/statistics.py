"""Acceptance statistics of speculative decoding, and its expected speedup. Plain Python, no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

MAX_LENGTH = 16


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of rounds and tokens; + adds those of several requests.

    Attributes:
      num_rounds: rounds of each row: a round of a batch of 8 counts 8 times.
      proposed, accepted: draft tokens. proposed_at, accepted_at: the same by index in the round.
      num_full: rounds with at least one draft token in which all were accepted.
      num_tokens: tokens generated in rounds, the target's own included.
      num_plain_tokens: tokens generated without a draft.
    """

    num_rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    num_full: int = 0
    num_tokens: int = 0
    num_plain_tokens: int = 0

    @classmethod
    def of_rounds(
        cls,
        rounds: Mapping[tuple[int, int], int],
        num_plain_tokens: int = 0,
        *,
        depth: int | None = None,
        num_cut: int = 0,
    ) -> "SpeculationStats":
        """From the number of rounds for each (drafted, accepted) pair of token counts.

        Args:
          depth: depth of the token tree, where several tokens are drafted for one position; None for a chain.
          num_cut: generated tokens that were dropped because they follow the end of an answer.
        """
        pairs = [(drafted if depth is None else min(drafted, depth), got, n) for (drafted, got), n in rounds.items()]
        for drafted, got, count in pairs:
            if not 0 <= got <= drafted or count < 0:
                raise ValueError(f"{count} rounds in which {got} of {drafted} draft tokens were accepted")
        longest = max((drafted for drafted, _, _ in pairs), default=0)
        num_rounds, accepted = sum(n for *_, n in pairs), sum(got * n for _, got, n in pairs)
        return cls(
            num_rounds=num_rounds,
            proposed=sum(drafted * n for drafted, _, n in pairs),
            accepted=accepted,
            proposed_at=tuple(sum(n for drafted, _, n in pairs if drafted > place) for place in range(longest)),
            accepted_at=tuple(sum(n for _, got, n in pairs if got > place) for place in range(longest)),
            num_full=sum(n for drafted, got, n in pairs if got == drafted > 0),
            num_tokens=num_rounds + accepted - num_cut,
            num_plain_tokens=num_plain_tokens,
        )

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        return self._combined(other, 1) if isinstance(other, SpeculationStats) else NotImplemented

    def __sub__(self, other: "SpeculationStats") -> "SpeculationStats":
        """The counts since `other`, an earlier value of the same totals."""
        return self._combined(other, -1) if isinstance(other, SpeculationStats) else NotImplemented

    def _combined(self, other: "SpeculationStats", sign: int) -> "SpeculationStats":
        return SpeculationStats(
            num_rounds=self.num_rounds + sign * other.num_rounds,
            proposed=self.proposed + sign * other.proposed,
            accepted=self.accepted + sign * other.accepted,
            proposed_at=_combined(self.proposed_at, other.proposed_at, sign),
            accepted_at=_combined(self.accepted_at, other.accepted_at, sign),
            num_full=self.num_full + sign * other.num_full,
            num_tokens=self.num_tokens + sign * other.num_tokens,
            num_plain_tokens=self.num_plain_tokens + sign * other.num_plain_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all draft tokens, those after a rejected one included; 0 if none was drafted."""
        return _ratio(self.accepted, self.proposed)

    @property
    def conditional_rate(self) -> float:
        """Probability that a draft token is accepted given that those before it were: alpha of Leviathan et al."""
        num_rejected = (self.proposed_at[0] if self.proposed_at else 0) - self.num_full
        return _ratio(self.accepted, self.accepted + num_rejected)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Accepted share of the tokens drafted for each index in the round."""
        return tuple(_ratio(got, all_) for got, all_ in zip(self.accepted_at, self.proposed_at, strict=True))

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens per round, the target's own included; 0 without rounds."""
        return _ratio(self.num_rounds + self.accepted, self.num_rounds)


def mean_tokens(rate: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, the target's own included: (1 - a^(k+1)) / (1 - a) for an acceptance rate of a
    (Leviathan et al. 2023, equation 1)."""
    _check(rate, num_draft_tokens)
    # The sum is accurate near a = 1, too.
    return sum(rate**place for place in range(num_draft_tokens + 1))


def expected_speedup(rate: float, num_draft_tokens: int, cost_ratio: float, verify_ratio: float = 1.0) -> float:
    """Expected speed relative to plain decoding: E / (v + k c) (Leviathan et al. 2023, theorem 3.8, where v = 1).

    `cost_ratio` is the time to draft a token, `verify_ratio` the time to verify a round, both relative to a plain step.
    """
    if not cost_ratio >= 0 or not verify_ratio > 0:
        raise ValueError(f"cost_ratio must be >= 0 and verify_ratio > 0, got {cost_ratio!r} and {verify_ratio!r}")
    return mean_tokens(rate, num_draft_tokens) / (verify_ratio + num_draft_tokens * cost_ratio)


def best_length(
    rate: float,
    cost_ratio: float,
    max_length: int = MAX_LENGTH,
    *,
    verify_ratios: Mapping[int, float] | Sequence[float] | None = None,
) -> int:
    """The number of draft tokens with the greatest expected speedup, the smallest of equals; 0 if none is faster.

    `verify_ratios[k]` is the time to verify k draft tokens relative to a plain step; 1 for all by default.
    """
    if max_length < 0:
        raise ValueError(f"max_length must be at least 0, got {max_length}")

    def speedup(length: int) -> float:
        return expected_speedup(rate, length, cost_ratio, 1.0 if verify_ratios is None else verify_ratios[length])

    best, most = 0, 1.0
    for length in range(1, max_length + 1):
        if isinstance(verify_ratios, Mapping) and length not in verify_ratios:
            continue
        if speedup(length) > most:
            best, most = length, speedup(length)
    return best


def _check(rate: float, num_draft_tokens: int) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"an acceptance rate is in [0, 1], got {rate!r}")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be at least 0, got {num_draft_tokens}")


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _combined(counts: tuple[int, ...], other: tuple[int, ...], sign: int) -> tuple[int, ...]:
    return tuple(a + sign * b for a, b in zip_longest(counts, other, fillvalue=0))
