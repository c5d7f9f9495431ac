"""Adaptive draft length: the number of draft tokens that currently gives the most tokens per second, or 0.

Plain Python, no JAX. The engine calls `choose` before each dispatch and reports acceptance and time after it. The
decision rests on two measurements: the acceptance rate of each row, and the time of a round of K draft tokens relative
to a plain decode step, for each slot bucket (the number of rows that a program computes).

Each slot bucket has a budget, in plain steps, that bounds the loss if these estimates are wrong: time by which
speculation was slower than plain decoding is subtracted, and SHARE of all decoding is added. While the budget is spent,
decoding is plain. The total loss is therefore about SHARE of the time plus ALLOWANCE plain steps per bucket (compare
Wu et al. 2016, Conservative Bandits).
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

MARGIN = 0.03  # minimum expected gain of drafting
SHARE, ALLOWANCE = 0.005, 32.0  # budget: share of decoding added to it, and its initial and largest size in plain steps
RESERVE = 8.0  # plain steps of the budget that trials leave for lengths measured to be faster
TRIAL_ROUNDS = 2  # rounds of a dispatch whose only purpose is a measurement
MIN_CATCH_UP_TOKENS = 32  # tokens missing in the draft's cache that take noticeable time to store
MAX_SKIPPED = 4  # consecutive measurements skipped because the draft caught up; then they count
IN_FLIGHT = 2  # dispatches until the result of one is reported
FIRST_INTERVAL, LAST_INTERVAL = 32, 512  # dispatches between trials of other lengths
LAST_NEW_INTERVAL = 4  # new sequences of which one is tried where those before gained nothing
CLOSE_INTERVAL = 8  # dispatches between trials of plain decoding while it is nearly as fast or has few samples
MANY_SAMPLES = 9
TOLERANCE = 0.8  # an older measurement may be too long by this factor
MIN_SAMPLES = 2  # a single measurement may be an outlier
WINDOW = 25  # measurements kept
CATCH_UP_EXCESS = 2.0  # usual dispatch times by which a catch-up may exceed its own usual time; more is an outlier
OUTLIER_FACTOR = 10.0  # a measurement this many times the estimate (a compilation, for example) must occur twice

PRIOR_RATE, PRIOR_ROUNDS = 0.7, 4.0  # initial acceptance rate, and the number of rounds it weighs
MOST_ADAPTERS = 256  # whose rates are kept
ROW_DECAY, OVERALL_DECAY = 0.96, 0.995  # per round: about the last 25 rounds of a row count, and 200 of all rows


class AcceptanceEstimate:
    """Acceptance rates of a row: the probability that a draft token is accepted, given that those before it were.

    The first token of a round and later ones have separate rates: with n-grams, a draft either finds the right
    continuation or nothing. Recent rounds weigh most. With few rounds the estimate is close to `overall`, that of all
    rows.
    """

    def __init__(
        self,
        overall: "AcceptanceEstimate | None" = None,
        prior_rate: float = PRIOR_RATE,
        *,
        is_of_row: bool = True,
    ):
        self._overall = overall
        self._prior_rate = prior_rate
        self._decay = ROW_DECAY if overall is not None and is_of_row else OVERALL_DECAY
        self._first = self._later = (0.0, 0.0)  # decayed counts: accepted, total
        self.num_rounds = 0
        self.num_behind = 0  # tokens that the draft model has not stored
        self.is_passed_over = False  # while new sequences gain nothing, most are not tried

    def observe(self, num_requested: int, num_accepted: int) -> None:
        """Records a round of `num_requested` draft tokens. A draft that proposed fewer counts as rejected from there
        on."""
        if not 0 <= num_accepted <= num_requested:
            raise ValueError(f"{num_accepted} of {num_requested} draft tokens cannot be accepted")
        if num_requested == 0:
            return
        if self._overall is not None:
            self._overall.observe(num_requested, num_accepted)
        self.num_rounds += 1
        is_first = num_accepted > 0
        self._first = self._add(self._first, is_first, 1)
        if is_first and num_requested > 1:
            self._later = self._add(self._later, num_accepted - 1, min(num_accepted, num_requested - 1))

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
        """Mean acceptance rate of first and later tokens."""
        num_first, num_later = self._first[1] + PRIOR_ROUNDS, self._later[1] + PRIOR_ROUNDS
        return (self.first_rate * num_first + self.later_rate * num_later) / (num_first + num_later)


def expected_tokens(first_rate: float, later_rate: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, the target's own included: 1 + a (1 + b + ... + b^(k-1)).

    For a = b this is (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, equation 1).
    """
    if num_draft_tokens == 0:
        return 1.0
    if later_rate >= 1:
        return 1 + first_rate * num_draft_tokens
    return 1 + first_rate * (1 - later_rate**num_draft_tokens) / (1 - later_rate)


def shared_lengths(
    rates: Sequence[tuple[float, float]], limits: Sequence[int], longest: int, num_drafts: int
) -> list[int]:
    """How many of `num_drafts` draft tokens each row gets, at most `longest` and its limit: those that are most likely
    to be accepted, by the rates (first, later) of each row. As far as they go, each row gets one, so that its rates
    stay up to date.
    """
    lengths = [0] * len(rates)
    # (-chance, row); no row has a second token before each has its first.
    waiting = [(-2.0, row) for row in range(len(rates)) if min(limits[row], longest) > 0]
    for _ in range(num_drafts):
        if not waiting:
            break
        chance, row = heapq.heappop(waiting)
        lengths[row] += 1
        first, later = rates[row]
        if lengths[row] < min(limits[row], longest):
            heapq.heappush(waiting, (-first * later if lengths[row] == 1 else chance * later, row))
    return lengths


@dataclass(frozen=True)
class LengthChoice:
    """The draft length of a dispatch.

    Attributes:
      num_draft_tokens: draft tokens per round, K; 0 for plain decoding. lengths: draft tokens of each row, at most K.
      max_rounds: largest number of rounds, or plain steps, in the dispatch; None for no limit.
      shares_rows: the rows of the bucket share a smaller number of draft tokens (`SharedRows`).
    """

    num_draft_tokens: int
    lengths: tuple[int, ...]
    max_rounds: int | None = None
    shares_rows: bool = False


@dataclass(frozen=True)
class SharedRows:
    """Rounds of `num_draft_tokens` in programs with as many rows as rounds of `mean` for each slot, one of the other
    choices. Slot buckets of more than `above` slots have them. A draft that `predicts` its acceptance shares the rows
    itself; otherwise the rates of the rows do."""

    num_draft_tokens: int
    mean: int
    above: int
    predicts: bool = False


_SHARED = -1  # stands for rounds with shared rows among the numbers of draft tokens


class LengthController:
    """Chooses the number of draft tokens with the most expected tokens per second of the whole batch.

    Args:
      choices: numbers of draft tokens for which programs are compiled.
      cost_ratio: estimated time of a draft's pass, relative to a plain step. Times not measured yet are estimated from
        it as if verification were free, so that every promising length is tried.
      prior_rate: initial acceptance rate.
      shared: rounds in which the slots share rows; None for none.
      drafts_at_once: one pass drafts all tokens of a round, and not one of them.

    Every row drafts all K tokens, or as many as it may still need: a program computes all its rows anyway, so a shorter
    draft saves no time, and rounds of rows with low acceptance keep their estimates up to date. Where rows are shared,
    each drafts as many as are likely to be accepted.
    """

    def __init__(
        self,
        choices: Sequence[int],
        cost_ratio: float = 0.1,
        prior_rate: float = PRIOR_RATE,
        shared: SharedRows | None = None,
        *,
        drafts_at_once: bool = False,
    ):
        if not choices or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in choices):
            raise ValueError(f"choices must be positive numbers of draft tokens, got {choices!r}")
        if not cost_ratio >= 0:
            raise ValueError(f"cost_ratio must be at least 0, got {cost_ratio!r}")
        if not 0 <= prior_rate <= 1:
            raise ValueError(f"prior_rate must be in [0, 1], got {prior_rate!r}")
        self.choices, self._shared = tuple(sorted(set(choices))), shared
        if shared is not None and not {shared.num_draft_tokens, shared.mean} <= set(choices):
            raise ValueError(f"{shared} is not made of two of {self.choices}")
        self.cost_ratio, self._drafts_at_once = cost_ratio, drafts_at_once
        self.overall = AcceptanceEstimate(prior_rate=prior_rate)
        self._buckets: dict[int, _Bucket] = {}
        self._by_adapter: dict[str, AcceptanceEstimate] = {}
        self._catch_ups: deque[float] = deque(maxlen=WINDOW)  # seconds per token

    def new_estimate(self, num_tokens: int = 0, adapter: str = "") -> AcceptanceEstimate:
        """The estimate of a new sequence of `num_tokens` tokens, which the draft model has not stored. Sequences of one
        `adapter` of the target have a rate in common, since a draft without it guesses each of them more or less
        well."""
        overall = self.overall
        if adapter:
            if adapter not in self._by_adapter and len(self._by_adapter) >= MOST_ADAPTERS:
                del self._by_adapter[next(iter(self._by_adapter))]
            overall = self._by_adapter.setdefault(adapter, AcceptanceEstimate(self.overall, is_of_row=False))
        estimate = AcceptanceEstimate(overall)
        estimate.num_behind = num_tokens
        return estimate

    def choose(
        self, num_slots: int, estimates: Sequence[AcceptanceEstimate], limits: Sequence[int] | None = None
    ) -> LengthChoice:
        """The draft length of the next dispatch, of a program of `num_slots` rows, for rows with these estimates.

        `limits` is the largest number of draft tokens each row can use: one less than the tokens it may still generate.
        """
        if limits is not None and len(limits) != len(estimates):
            raise ValueError(f"{len(limits)} limits for {len(estimates)} rows")
        bucket = self._bucket(num_slots)
        bucket.num_dispatches += 1
        if not estimates or len(bucket.times(0).samples) < MIN_SAMPLES:
            return LengthChoice(0, (0,) * len(estimates))
        plain = self.seconds(num_slots, 0)
        # A round does more than a plain step: a shorter time is a measurement error.
        choices = self._choices_of(num_slots)
        ratios = {k: max(self.seconds(num_slots, k) / plain, 1.0) for k in choices}
        lengths: dict[int, Sequence[int]] = {k: self._lengths(k, num_slots, estimates, limits) for k in choices}
        tokens = {k: _mean_tokens(estimates, lengths[k]) for k in choices}
        best = max(choices, key=lambda k: tokens[k] / ratios[k])
        if tokens[best] <= (1 + MARGIN) * ratios[best]:
            best = 0
        if best != bucket.best:
            bucket.best, bucket.interval, bucket.new_interval = best, FIRST_INTERVAL, 1
        choice, bucket.pending_trial = bucket.pending_trial, None
        is_continued = choice is not None
        if choice is None:
            choice = self._trial(bucket, estimates, ratios, tokens)
        choice = best if choice is None else choice
        is_trial = choice != best or (choice != 0 and len(bucket.times(choice).samples) < MIN_SAMPLES)
        is_pending = is_trial and 0 <= bucket.num_dispatches - bucket.times(choice).used_at <= IN_FLIGHT
        num_behind = sum(estimate.num_behind for estimate in estimates)
        reserve = RESERVE + num_behind * self._catch_up_seconds(plain) / plain if is_trial and not is_continued else 0.0
        is_over_budget = bucket.budget <= reserve
        if choice != 0 and (is_over_budget or (is_pending and not is_continued)):
            choice, is_trial = 0, False
        max_rounds = TRIAL_ROUNDS if is_trial else None
        if is_trial and choice != 0 and not is_continued and num_behind >= MIN_CATCH_UP_TOKENS:
            max_rounds, bucket.pending_trial = 1, choice  # the draft catches up first, then the trial is measured
        bucket.times(choice).used_at = bucket.num_dispatches
        shared = self._shared if choice == _SHARED else None
        if shared is None:
            return LengthChoice(choice, tuple(lengths.get(choice, (0,) * len(estimates))), max_rounds)
        # A draft that predicts its acceptance drafts all, and the program takes the best of them.
        own = lengths[shared.num_draft_tokens if shared.predicts else choice]
        return LengthChoice(shared.num_draft_tokens, tuple(own), max_rounds, shares_rows=True)

    def _choices_of(self, num_slots: int) -> tuple[int, ...]:
        has_shared = self._shared is not None and num_slots > self._shared.above
        return (*self.choices, _SHARED) if has_shared else self.choices

    def _lengths(
        self, choice: int, num_slots: int, estimates: Sequence[AcceptanceEstimate], limits: Sequence[int] | None
    ) -> list[int]:
        """Draft tokens of each row with a choice."""
        shared = self._shared
        if choice == _SHARED and shared is not None:
            most = [max(limit, 0) for limit in limits] if limits is not None else [2**30] * len(estimates)
            rates = [(estimate.first_rate, estimate.later_rate) for estimate in estimates]
            room = num_slots * (1 + shared.mean) - len(estimates)
            return shared_lengths(rates, most, shared.num_draft_tokens, room)
        return [choice] * len(estimates) if limits is None else [max(min(choice, limit), 0) for limit in limits]

    def start(self, estimates: Sequence[AcceptanceEstimate], num_draft_tokens: int, num_rounds: int) -> int:
        """Records that a dispatch in which these sequences decode is launched. Returns the number of tokens that the
        draft model has to store first, because they were generated without it."""
        if num_draft_tokens == 0:
            for estimate in estimates:
                estimate.num_behind += num_rounds
            return 0
        num_behind = sum(estimate.num_behind for estimate in estimates)
        for estimate in estimates:
            estimate.num_behind = 0
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
        shares_rows: bool = False,
    ) -> None:
        """Records that a dispatch took `seconds` for `num_rounds` rounds, or plain steps, in each of which an active
        row generated `tokens_per_round` tokens on average. `num_behind` is the result of `start`."""
        if num_draft_tokens != 0 and num_draft_tokens not in self.choices:
            raise ValueError(f"{num_draft_tokens} draft tokens are not among {self.choices}")
        if not seconds > 0 or num_rounds < 1:
            raise ValueError(f"{num_rounds} rounds in {seconds!r} s are not a measurement")
        num_draft_tokens = _SHARED if shares_rows else num_draft_tokens
        bucket = self._bucket(num_slots)
        times, per_round = bucket.times(num_draft_tokens), seconds / num_rounds
        if num_draft_tokens != 0 and bucket.best == 0:  # a trial; some that were chosen are not made, beside prompts
            bucket.num_passed_over, bucket.new_interval = 0, min(2 * bucket.new_interval, LAST_NEW_INTERVAL)
        if not bucket.times(0).samples:
            if num_draft_tokens == 0:
                times.samples.append(per_round)
            return
        usual = self.seconds(num_slots, num_draft_tokens)
        is_first, times.has_measurement = not times.has_measurement, True
        is_catching_up = num_draft_tokens != 0 and num_behind >= MIN_CATCH_UP_TOKENS
        times.was_outlier = (
            per_round > OUTLIER_FACTOR * usual and not times.was_outlier and (is_first or not is_catching_up)
        )
        if times.was_outlier:
            return
        catch_up_time = 0.0
        if is_catching_up and times.num_skipped < MAX_SKIPPED:
            times.num_skipped += 1
            catch_up_time = max(seconds - num_rounds * usual, 0.0)
            self._catch_ups.append(catch_up_time / num_behind)
            catch_up_time = min(
                catch_up_time, num_behind * median_low(self._catch_ups) + CATCH_UP_EXCESS * num_rounds * usual
            )
        else:
            times.num_skipped = 0
            times.samples.append(per_round)
        num_plain = num_rounds * (tokens_per_round if num_draft_tokens else 1)  # plain steps for as many tokens
        bucket.budget += SHARE * num_plain
        if num_draft_tokens:
            # The estimate is charged, not this measurement: an outlier would have slowed plain decoding as well. The
            # catch-up differs each time and is charged as measured, but capped: one outlier could spend the budget and
            # stop drafting for thousands of steps.
            bucket.budget += num_plain - (num_rounds * usual + catch_up_time) / self.seconds(num_slots, 0)
        bucket.budget = min(max(bucket.budget, -ALLOWANCE), ALLOWANCE)

    def seconds(self, num_slots: int, num_draft_tokens: int) -> float:
        """Estimated seconds of a round, or of a plain step, which must have been measured."""
        samples = self._bucket(num_slots).times(num_draft_tokens).samples
        if num_draft_tokens == 0:
            if not samples:
                raise ValueError(f"no plain step of {num_slots} slots has been measured")
            return median_low(samples)
        # The extrapolated value is one of the samples, so that a single long measurement does not decide.
        return median_low([self._extrapolate(num_slots, num_draft_tokens), *samples])

    def budget(self, num_slots: int) -> float:
        """Plain steps of this slot bucket that may still be lost."""
        return self._bucket(num_slots).budget

    def _bucket(self, num_slots: int) -> "_Bucket":
        return self._buckets.setdefault(num_slots, _Bucket())

    def _extrapolate(self, num_slots: int, num_draft_tokens: int) -> float:
        """Seconds of a round, from other lengths in this bucket: interpolated, or a shorter one plus the time to draft.

        Its ratio to a plain step is at least that of a smaller bucket, since verification costs more on a busier chip.
        """
        known = {
            k: median_low(times.samples)
            for k, times in self._bucket(num_slots).by_length.items()
            if times.samples and k != _SHARED
        }
        plain, shared = known[0], self._shared
        if num_draft_tokens == _SHARED and shared is not None:
            drafting = self._drafting_ratio(shared.mean, shared.num_draft_tokens) * plain
            return self.seconds(num_slots, shared.mean) + drafting
        below = max(k for k in known if k < num_draft_tokens)
        above = min((k for k in known if k > num_draft_tokens), default=None)
        if above is not None:
            part = (num_draft_tokens - below) / (above - below)
            return known[below] + part * (known[above] - known[below])
        estimate = known[below] + self._drafting_ratio(below, num_draft_tokens) * plain
        lower = (self._measured_ratio(size, num_draft_tokens) for size in self._buckets if size < num_slots)
        return max(estimate, plain * max(lower, default=0.0))

    def _drafting_ratio(self, shorter: int, longer: int) -> float:
        """Estimated time by which drafting the longer round takes more than drafting the shorter, in plain steps."""
        num_passes = int(shorter == 0) if self._drafts_at_once else longer - shorter
        return num_passes * self.cost_ratio

    def _mean_length(self, choice: int) -> int:
        return self._shared.mean if choice == _SHARED and self._shared is not None else choice

    def _catch_up_seconds(self, plain: float) -> float:
        """Seconds to store a token that the draft model lacks."""
        return median_low(self._catch_ups) if self._catch_ups else self.cost_ratio * plain / 16

    def _measured_ratio(self, num_slots: int, num_draft_tokens: int) -> float:
        rounds, plain = (self._bucket(num_slots).times(k).samples for k in (num_draft_tokens, 0))
        return median_low(rounds) / median_low(plain) if rounds and plain else 0.0

    def _is_next_new(self, bucket: "_Bucket", untried: Sequence[AcceptanceEstimate]) -> bool:
        """Tells whether sequences without a round are tried; passes them over if not."""
        if bucket.num_passed_over + 1 >= bucket.new_interval:
            return True
        bucket.num_passed_over += 1
        for estimate in untried:
            estimate.is_passed_over = True
        return False

    def _trial(
        self,
        bucket: "_Bucket",
        estimates: Sequence[AcceptanceEstimate],
        ratios: dict[int, float],
        tokens: dict[int, float],
    ) -> int | None:
        """A length other than the best to measure in this dispatch, or None."""
        best, choices = bucket.best, tuple(ratios)
        untried = [estimate for estimate in estimates if estimate.num_rounds == 0 and not estimate.is_passed_over]
        is_new = best == 0 and 2 * len(untried) >= len(estimates) and self._is_next_new(bucket, untried)
        is_due = bucket.num_dispatches - bucket.tried_at >= bucket.interval
        plain = bucket.times(0)
        is_close = best != 0 and (tokens[best] * TOLERANCE < ratios[best] or len(plain.samples) < MANY_SAMPLES)
        if is_close and bucket.num_dispatches - plain.used_at >= CLOSE_INTERVAL:
            return 0
        if not (is_new or is_due):
            return None
        if best == 0:  # acceptance was not measured for a while: assume it rose half the way to 1
            rate = (1 + self.overall.rate) / 2
            tokens = {k: max(tokens[k], expected_tokens(rate, rate, self._mean_length(k))) for k in choices}
            needed = 1 + MARGIN if is_new and not is_due else (1 + MARGIN) * TOLERANCE
            candidates = [k for k in choices if tokens[k] > needed * ratios[k]]
        else:
            value = tokens[best] / ratios[best]
            candidates = [k for k in choices if tokens[k] > value * TOLERANCE * ratios[k]]
        candidates = [k for k in candidates if k != best]
        if is_due:
            bucket.tried_at = bucket.num_dispatches
            if best == 0:  # otherwise trials of nearly equal lengths cost next to nothing, and the interval stays
                bucket.interval = min(2 * bucket.interval, LAST_INTERVAL)
            return min(candidates, key=lambda k: bucket.times(k).used_at, default=None)
        return min(candidates, key=lambda k: ratios[k], default=None)


@dataclass
class _Times:
    """Measurements of rounds of one length in one slot bucket."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    used_at: int = -1 - IN_FLIGHT
    num_skipped: int = 0
    has_measurement: bool = False
    was_outlier: bool = False  # the last measurement


@dataclass
class _Bucket:
    """Measurements and trials of one slot bucket."""

    by_length: dict[int, _Times] = field(default_factory=dict)
    num_dispatches: int = 0
    tried_at: int = 0
    interval: int = FIRST_INTERVAL
    new_interval: int = 1
    num_passed_over: int = 0
    best: int = 0
    pending_trial: int | None = None  # a length to measure once the draft has caught up
    budget: float = ALLOWANCE  # plain steps

    def times(self, num_draft_tokens: int) -> _Times:
        return self.by_length.setdefault(num_draft_tokens, _Times())


def _mean_tokens(estimates: Sequence[AcceptanceEstimate], lengths: Sequence[int]) -> float:
    """Expected tokens of a round with these draft tokens of each row, averaged over the rows."""
    rows = zip(estimates, lengths, strict=True)
    return sum(expected_tokens(row.first_rate, row.later_rate, length) for row, length in rows) / len(lengths)
