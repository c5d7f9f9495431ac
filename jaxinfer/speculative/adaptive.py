"""How many tokens to draft: as many as pay now, none where drafting does not pay.

Plain Python, no JAX. The host asks before each dispatch and reports after it. What is known is measured: how often
drafted tokens are accepted, row by row, and what a round of K drafted tokens takes next to a plain decode step, for
each slot bucket (the number of rows that a program computes).

A purse for each load keeps it safe whatever the model of time and acceptance says: it loses what speculation took
longer than plain decoding would have, and gets SHARE of all decoding. Where it is empty, decoding is plain. So the
whole loss stays about SHARE of the time and ALLOWANCE plain steps of each load (compare Wu et al. 2016, Conservative
Bandits).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

MARGIN = 0.03  # expected gain below which drafting is not worth it
SHARE, ALLOWANCE = 0.005, 32.0  # of the purse; the allowance in plain steps
RESERVE = 8.0  # plain steps that trials leave in the purse for what is known to pay
TRIAL_ROUNDS = 2  # of a dispatch that only finds something out
MANY_BEHIND = 32  # tokens that take the draft noticeable time
MAX_SKIPPED = 4  # measurements in a row in which the draft caught up; where it always does, they count
IN_FLIGHT = 2  # dispatches after which the outcome of one is known
FIRST_INTERVAL, LAST_INTERVAL = 32, 512  # dispatches between trials of what is not chosen
CLOSE_INTERVAL = 8  # of plain decoding, where it may be as good, which costs nothing, or is little known
WELL_KNOWN = 9  # samples
TOLERANCE = 0.8  # a time measured earlier may be by so much shorter now
MIN_SAMPLES = 2  # one measurement may be a hiccup
WINDOW = 25  # measurements that count
HICCUP = 2.0  # of what the dispatch usually takes: what catching up takes beyond its own usual time and this
OUTLIER_FACTOR = 10.0  # a measurement that many times the estimate, such as one that compiled, must be seen twice

PRIOR_RATE, PRIOR_ROUNDS = 0.7, 4.0  # what an engine begins with, and how many rounds that counts for
ROW_DECAY, OVERALL_DECAY = 0.96, 0.995  # per round of a row: some 25 rounds of it count, some 200 of all rows'


class AcceptanceEstimate:
    """The chances that a drafted token is accepted given that those before it were: of the first token of a round,
    and of later ones. They differ where a draft finds either the right place or nothing, as n-grams do.

    Recent rounds count most. With few rounds the estimate leans on `overall`, that of all rows.
    """

    def __init__(self, overall: "AcceptanceEstimate | None" = None, prior_rate: float = PRIOR_RATE):
        self._overall = overall
        self._prior_rate = prior_rate
        self._decay = OVERALL_DECAY if overall is None else ROW_DECAY
        self._first = self._later = (0.0, 0.0)  # accepted and all, both decayed
        self.num_rounds = 0
        self.num_behind = 0  # tokens that the draft has not seen

    def observe(self, num_asked: int, num_accepted: int) -> None:
        """A round that was asked for `num_asked` tokens. A draft that had fewer to offer gains as little as one that
        was rejected there, so it counts the same."""
        if not 0 <= num_accepted <= num_asked:
            raise ValueError(f"{num_accepted} of {num_asked} drafted tokens cannot be accepted")
        if num_asked == 0:
            return
        if self._overall is not None:
            self._overall.observe(num_asked, num_accepted)
        self.num_rounds += 1
        is_first = num_accepted > 0
        self._first = self._add(self._first, is_first, 1)
        if is_first and num_asked > 1:
            self._later = self._add(self._later, num_accepted - 1, min(num_accepted, num_asked - 1))

    def _add(self, counts: tuple[float, float], num_accepted: int, num_all: int) -> tuple[float, float]:
        return counts[0] * self._decay + num_accepted, counts[1] * self._decay + num_all

    @property
    def first_rate(self) -> float:
        prior = self._prior_rate if self._overall is None else self._overall.first_rate
        return (self._first[0] + PRIOR_ROUNDS * prior) / (self._first[1] + PRIOR_ROUNDS)

    @property
    def later_rate(self) -> float:
        prior = self.first_rate if self._overall is None else self._overall.later_rate
        return (self._later[0] + PRIOR_ROUNDS * prior) / (self._later[1] + PRIOR_ROUNDS)

    @property
    def rate(self) -> float:
        """Of any drafted token, given those before it."""
        num_first, num_later = self._first[1] + PRIOR_ROUNDS, self._later[1] + PRIOR_ROUNDS
        return (self.first_rate * num_first + self.later_rate * num_later) / (num_first + num_later)


def expected_tokens(first_rate: float, later_rate: float, num_draft_tokens: int) -> float:
    """Of a round, the target's own token included: 1 + a (1 + b + ... + b^(k-1)), which for a = b is
    (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    if num_draft_tokens == 0:
        return 1.0
    if later_rate >= 1:
        return 1 + first_rate * num_draft_tokens
    return 1 + first_rate * (1 - later_rate**num_draft_tokens) / (1 - later_rate)


@dataclass(frozen=True)
class LengthChoice:
    """Attributes:
    num_draft_tokens: of the dispatch's program, K; 0 for plain decoding. lengths: of each row, at most K. max_rounds:
      rounds, or plain steps, that the dispatch should not exceed, None for any number.
    """

    num_draft_tokens: int
    lengths: tuple[int, ...]
    max_rounds: int | None = None


class LengthController:
    """Chooses the number of drafted tokens with the most expected tokens per second of the whole batch.

    Args:
      choices: numbers of drafted tokens that programs exist for.
      cost_ratio: what drafting a token takes next to a plain step, as far as is known; times that nobody has measured
        yet are taken as if verifying were free, so that every promising choice is tried.
      prior_rate: the acceptance rate to begin with.

    Every row drafts all K tokens, or as many as it may still need: the rows of a program are computed whether they are
    used or not, so a shorter draft saves nothing, and rounds of poor rows keep their estimates fresh.
    """

    def __init__(self, choices: Sequence[int], cost_ratio: float = 0.1, prior_rate: float = PRIOR_RATE):
        if not choices or any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in choices):
            raise ValueError(f"choices must be positive numbers of draft tokens, got {choices!r}")
        if not cost_ratio >= 0:
            raise ValueError(f"cost_ratio must be at least 0, got {cost_ratio!r}")
        if not 0 <= prior_rate <= 1:
            raise ValueError(f"prior_rate must be in [0, 1], got {prior_rate!r}")
        self.choices = tuple(sorted(set(choices)))
        self.cost_ratio = cost_ratio
        self.overall = AcceptanceEstimate(prior_rate=prior_rate)
        self._buckets: dict[int, _Bucket] = {}
        self._catch_ups: deque[float] = deque(maxlen=WINDOW)  # seconds per token

    def new_estimate(self, num_tokens: int = 0) -> AcceptanceEstimate:
        """For a sequence that begins with so many tokens, which the draft has not seen."""
        estimate = AcceptanceEstimate(self.overall)
        estimate.num_behind = num_tokens
        return estimate

    def choose(
        self, num_slots: int, estimates: Sequence[AcceptanceEstimate], limits: Sequence[int] | None = None
    ) -> LengthChoice:
        """What the next dispatch of a program of `num_slots` rows should do for the rows with these estimates.

        `limits` is how many drafted tokens each row can use at most: one less than its answer may still have.
        """
        if limits is not None and len(limits) != len(estimates):
            raise ValueError(f"{len(limits)} limits for {len(estimates)} rows")
        bucket = self._bucket(num_slots)
        bucket.num_dispatches += 1
        if not estimates or len(bucket.times(0).samples) < MIN_SAMPLES:
            return LengthChoice(0, (0,) * len(estimates))
        plain = self.seconds(num_slots, 0)
        # A round does more than a plain step, so where it seems to take less, one of the two was mismeasured.
        ratios = {k: max(self.seconds(num_slots, k) / plain, 1.0) for k in self.choices}
        tokens = _mean_tokens(estimates, limits, self.choices)
        best = max(self.choices, key=lambda k: tokens[k] / ratios[k])
        if tokens[best] <= (1 + MARGIN) * ratios[best]:
            best = 0
        if best != bucket.best:
            bucket.best, bucket.interval = best, FIRST_INTERVAL
        choice, bucket.again = bucket.again, None
        is_again = choice is not None
        if choice is None:
            choice = self._trial(bucket, estimates, ratios, tokens)
        choice = best if choice is None else choice
        is_trial = choice != best or (choice > 0 and len(bucket.times(choice).samples) < MIN_SAMPLES)
        is_pending = is_trial and 0 <= bucket.num_dispatches - bucket.times(choice).used_at <= IN_FLIGHT
        num_behind = sum(one.num_behind for one in estimates)
        reserve = RESERVE + num_behind * self._catch_up_seconds(plain) / plain if is_trial and not is_again else 0.0
        is_too_dear = bucket.budget <= reserve
        if choice > 0 and (is_too_dear or (is_pending and not is_again)):
            choice, is_trial = 0, False
        max_rounds = TRIAL_ROUNDS if is_trial else None
        if is_trial and choice > 0 and not is_again and num_behind >= MANY_BEHIND:
            max_rounds, bucket.again = 1, choice  # first the draft catches up, then comes what is measured
        bucket.times(choice).used_at = bucket.num_dispatches
        lengths = [choice] * len(estimates) if limits is None else [max(min(choice, one), 0) for one in limits]
        return LengthChoice(choice, tuple(lengths), max_rounds)

    def start(self, estimates: Sequence[AcceptanceEstimate], num_draft_tokens: int, num_rounds: int) -> int:
        """To be told of every dispatch in which these sequences decode. Returns how many tokens, that came without it,
        the draft must catch up with."""
        if num_draft_tokens == 0:
            for one in estimates:
                one.num_behind += num_rounds
            return 0
        num_behind = sum(one.num_behind for one in estimates)
        for one in estimates:
            one.num_behind = 0
        return num_behind

    def observe_time(
        self,
        num_slots: int,
        num_draft_tokens: int,
        seconds: float,
        num_rounds: int = 1,
        tokens_per_round: float = 1.0,
        *,
        num_behind: int = 0,
    ) -> None:
        """A dispatch took `seconds` for `num_rounds` rounds, or plain steps, in each of which a row that took part made
        `tokens_per_round` tokens on average. `num_behind` is what `start` said."""
        if num_draft_tokens != 0 and num_draft_tokens not in self.choices:
            raise ValueError(f"{num_draft_tokens} draft tokens are not among {self.choices}")
        if not seconds > 0 or num_rounds < 1:
            raise ValueError(f"{num_rounds} rounds in {seconds!r} s are no measurement")
        bucket = self._bucket(num_slots)
        times, per_round = bucket.times(num_draft_tokens), seconds / num_rounds
        if not bucket.times(0).samples:
            if num_draft_tokens == 0:
                times.samples.append(per_round)
            return
        usual = self.seconds(num_slots, num_draft_tokens)
        is_first, times.is_known = not times.is_known, True
        is_catching_up = num_draft_tokens > 0 and num_behind >= MANY_BEHIND
        times.is_strange = (
            per_round > OUTLIER_FACTOR * usual and not times.is_strange and (is_first or not is_catching_up)
        )
        if times.is_strange:
            return
        caught_up = 0.0
        if is_catching_up and times.num_skipped < MAX_SKIPPED:
            times.num_skipped += 1
            caught_up = max(seconds - num_rounds * usual, 0.0)
            self._catch_ups.append(caught_up / num_behind)
            caught_up = min(caught_up, num_behind * median_low(self._catch_ups) + HICCUP * num_rounds * usual)
        else:
            times.num_skipped = 0
            times.samples.append(per_round)
        num_plain = num_rounds * (tokens_per_round if num_draft_tokens else 1)  # steps that it stands for
        bucket.budget += SHARE * num_plain
        if num_draft_tokens:
            # By what is usual, not by this measurement: a hiccup would have hit plain decoding as well. What a draft
            # caught up with differs, so that counts as measured, but for hiccups: one could empty the purse, and
            # drafting would stop for thousands of steps.
            bucket.budget += num_plain - (num_rounds * usual + caught_up) / self.seconds(num_slots, 0)
        bucket.budget = min(max(bucket.budget, -ALLOWANCE), ALLOWANCE)

    def seconds(self, num_slots: int, num_draft_tokens: int) -> float:
        """The estimate for a round, or for a plain step, which must have been measured."""
        samples = self._bucket(num_slots).times(num_draft_tokens).samples
        if num_draft_tokens == 0:
            if not samples:
                raise ValueError(f"no plain step of {num_slots} slots was measured")
            return median_low(samples)
        # The guess is one of the values, so that a single measurement that was too long does not stand.
        return median_low([self._guess(num_slots, num_draft_tokens), *samples])

    def budget(self, num_slots: int) -> float:
        """Plain steps of this load that may still be lost."""
        return self._bucket(num_slots).budget

    # What is not measured.

    def _bucket(self, num_slots: int) -> "_Bucket":
        return self._buckets.setdefault(num_slots, _Bucket())

    def _guess(self, num_slots: int, num_draft_tokens: int) -> float:
        """From other lengths at this load: between two of them, or with only the drafting added to a shorter one. And
        no smaller a ratio to plain decoding than at a lower load, for verifying takes more of a busier chip."""
        known = {k: median_low(times.samples) for k, times in self._bucket(num_slots).all.items() if times.samples}
        plain = known[0]
        below = max(k for k in known if k < num_draft_tokens)
        above = min((k for k in known if k > num_draft_tokens), default=None)
        if above is not None:
            part = (num_draft_tokens - below) / (above - below)
            return known[below] + part * (known[above] - known[below])
        guess = known[below] + (num_draft_tokens - below) * self.cost_ratio * plain
        lower = (self._measured_ratio(size, num_draft_tokens) for size in self._buckets if size < num_slots)
        return max(guess, plain * max(lower, default=0.0))

    def _catch_up_seconds(self, plain: float) -> float:
        """Of a token that the draft has missed; a guess to begin with."""
        return median_low(self._catch_ups) if self._catch_ups else self.cost_ratio * plain / 16

    def _measured_ratio(self, num_slots: int, num_draft_tokens: int) -> float:
        rounds, plain = (self._bucket(num_slots).times(k).samples for k in (num_draft_tokens, 0))
        return median_low(rounds) / median_low(plain) if rounds and plain else 0.0

    def _trial(
        self,
        bucket: "_Bucket",
        estimates: Sequence[AcceptanceEstimate],
        ratios: dict[int, float],
        tokens: dict[int, float],
    ) -> int | None:
        """What to do instead of the best, now and then, to see whether that is still the best."""
        best = bucket.best
        is_new = best == 0 and 2 * sum(one.num_rounds == 0 for one in estimates) >= len(estimates)
        is_due = bucket.num_dispatches - bucket.tried_at >= bucket.interval
        plain = bucket.times(0)
        is_close = best > 0 and (tokens[best] * TOLERANCE < ratios[best] or len(plain.samples) < WELL_KNOWN)
        if is_close and bucket.num_dispatches - plain.used_at >= CLOSE_INTERVAL:
            return 0
        if not (is_new or is_due):
            return None
        if best == 0:  # nothing was seen of acceptance for a while: it may have risen half the way to 1
            rate = (1 + self.overall.rate) / 2
            tokens = {k: max(tokens[k], expected_tokens(rate, rate, k)) for k in self.choices}
            needed = 1 + MARGIN if is_new and not is_due else (1 + MARGIN) * TOLERANCE
            candidates = [k for k in self.choices if tokens[k] > needed * ratios[k]]
        else:
            value = tokens[best] / ratios[best]
            candidates = [k for k in self.choices if tokens[k] > value * TOLERANCE * ratios[k]]
        candidates = [k for k in candidates if k != best]
        if is_due:
            bucket.tried_at = bucket.num_dispatches
            if best == 0:  # where speculation pays, a look at what is nearly as good costs next to nothing
                bucket.interval = min(2 * bucket.interval, LAST_INTERVAL)
            return min(candidates, key=lambda k: bucket.times(k).used_at, default=None)
        return min(candidates, key=lambda k: ratios[k], default=None)


@dataclass
class _Times:
    """Seconds of rounds of one length at one load."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    used_at: int = -1 - IN_FLIGHT
    num_skipped: int = 0
    is_known: bool = False
    is_strange: bool = False  # the last one was


@dataclass
class _Bucket:
    """What is known of one load."""

    all: dict[int, _Times] = field(default_factory=dict)
    num_dispatches: int = 0
    tried_at: int = 0
    interval: int = FIRST_INTERVAL
    best: int = 0
    again: int | None = None
    budget: float = ALLOWANCE  # plain steps

    def times(self, num_draft_tokens: int) -> _Times:
        return self.all.setdefault(num_draft_tokens, _Times())


def _mean_tokens(
    estimates: Sequence[AcceptanceEstimate], limits: Sequence[int] | None, choices: Sequence[int]
) -> dict[int, float]:
    """Expected tokens of a row's round, for each choice."""
    rates = [(one.first_rate, one.later_rate) for one in estimates]
    if limits is None:
        return {k: sum(expected_tokens(*pair, k) for pair in rates) / len(rates) for k in choices}
    lengths = [max(limit, 0) for limit in limits]
    return {
        k: sum(expected_tokens(*pair, min(k, limit)) for pair, limit in zip(rates, lengths, strict=True)) / len(rates)
        for k in choices
    }
