"""The search for good options: the baseline, each change alone, then combinations of those that helped. The baseline is
measured again in between and at the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.measure.advise.goals import Arguments, Goal, Judgement, TrialResult, judge, ordered

Measure = Callable[[Arguments], TrialResult]
# Trials between two measurements of the baseline, whose differences are the noise of the machine.
EVERY = 4


@dataclass
class Findings:
    """All results in order: measurements of the baseline, single changes, combinations."""

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
    report: Callable[[Findings], None] = lambda found: None,
    repeats_baseline: bool = True,
) -> Findings:
    """Measures the baseline, the trials and combinations of them.

    Args:
      measure: returns the result of a trial; its exceptions end the search.
      is_over: whether the time limit has passed; the remaining trials then get results without figures.
      found: results of an earlier search, which are kept except for failures.
      report: called with the findings after each trial.
    """
    found = found or Findings([], [], [])
    found.alone = [row for row in found.alone if row.reason is None]
    found.together = [row for row in found.together if row.reason is None]

    def tried(arguments: Arguments, rows: list[TrialResult]) -> TrialResult:
        known = next((row for row in found.rows if row.arguments == arguments), None)
        if known is None:
            known = TrialResult(arguments, "not tried: time limit reached") if is_over() else measure(arguments)
            rows.append(known)
            report(found)
        return known

    def again(count: int) -> None:
        if len(found.base) < count and (not found.base or (repeats_baseline and not is_over())):
            found.base.append(measure({}))
            report(found)

    again(1)
    for number, arguments in enumerate(trials, 1):
        tried(arguments, found.alone)
        if number % EVERY == 0 or number == len(trials):
            again(1 + -(-number // EVERY))
    # In the order of their gain alone, each added to those that were kept.
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
    """The results that beat the baseline, the best first; if the baseline is outside the limits, all that are
    within."""
    pairs = [(row, judge(goal, row, base)) for row in rows]
    if goal.ruled_out(base[0]) is None:
        good = [pair for pair in pairs if pair[1].verdict == "better"]
        if goal.name == "quality":
            good = [pair for pair in good if pair[0].is_exact]
    else:
        good = [pair for pair in pairs if pair[1].verdict in ("better", "same", "worse")]
        good = good or [pair for pair in pairs if pair[1].verdict == "in doubt"]
    # By the loss of quality if that is the goal, then by the gain.
    return sorted(good, key=lambda pair: (_kl(pair[0]) if goal.name == "quality" else 0.0, -(pair[1].ratio or 0.0)))


def is_improvement(goal: Goal, row: TrialResult, before: TrialResult) -> bool:
    """Whether a combination is better than the result that it extends."""
    if goal.name == "quality" and _kl(row) > _kl(before):
        return False
    return judge(goal, row, [before]).verdict == "better"


def recommended(goal: Goal, found: Findings) -> tuple[TrialResult, Judgement] | None:
    """The best result, the baseline if nothing beats it, None if nothing is within the limits."""
    pairs = ranked(goal, found.rows, found.base)
    if not pairs:
        base = found.base[0]
        return None if goal.ruled_out(base) is not None else (base, judge(goal, base, found.base))
    best = pairs[0]
    # Prefer fewer changes, if more of them gain no more than the noise.
    fewer = [pair for pair in pairs if len(pair[0].arguments) < len(best[0].arguments)]
    return next((pair for pair in fewer if not is_improvement(goal, best[0], pair[0])), best)


def _kl(row: TrialResult) -> float:
    """Nats per token; a rank by the number of bits if it was not measured."""
    if row.kl is not None or row.is_exact:
        return row.kl or 0.0
    weights = str(row.arguments.get("quantize", ""))
    cache = ("int4" in str(row.arguments.get("kv_dtype", ""))) + ("kv_policy" in row.arguments)
    bits = weights.startswith("int4") + cache + 0.1 * bool(weights) + 0.01 * ("kv_dtype" in row.arguments)
    return 1e6 * bits


WEIGHTS = ("int8", "int4-g128")
CACHES = ("int8", "fp8_e4m3")
SMALL_CACHES = ("int8_int4", "int4")
# Values of kv_policy, a line for each; what they keep is these parts of the longest request. The KL is of prompts, in
# which a policy has to drop what it drops of answers.
POLICIES = ("sinks(4)+window({tokens})",)
KEPT_PARTS = (2, 4)
LONG = 2048  # tokens of a request from which on reading the cache takes time
LEAST_DROPPED = 256  # tokens of a request: a policy keeps whole pages
# Share of the prompts' tokens; prompts cut from texts have a token or two in common by chance.
LEAST_SHARED = 0.05


@dataclass(frozen=True)
class ModelFacts:
    """Facts that decide which trials make sense.

    Attributes:
      given: arguments of `LLM` that the user gave. is_quantized: whether the checkpoint's weights are quantized.
      caches_values: whether its cache has values beside keys. sizes: of max_seqs to try. default_size: of max_seqs.
      drafts: names. shared: share of prompt tokens in common prefixes; None if there are no prompts.
      longest: tokens of the longest request, its answer included.
      has_limits: whether users are counted by requests within limits.
    """

    given: Mapping[str, Any]
    is_quantized: bool
    caches_values: bool
    sizes: Sequence[int]
    default_size: int
    drafts: Sequence[str]
    shared: float | None
    longest: int
    has_limits: bool = False


def candidates(goal: Goal, about: ModelFacts) -> tuple[list[Arguments], dict[str, str]]:
    """Single changes to try, the most promising first, and those that are not tried, with the reason. Options that the
    user gave are not tried."""
    left_out: dict[str, str] = {}
    weights = _unless(left_out, "weights", _why_no_weights(about), [{"quantize": name} for name in WEIGHTS])
    caches = [{"kv_dtype": name} for name in CACHES if about.caches_values or name != "int8"]
    caches = _unless(left_out, "cache", _given(about, "kv_dtype"), caches)
    small = [{"kv_dtype": name} for name in SMALL_CACHES if about.caches_values]
    why = None if "cache" in left_out else _why_no_small_cache(goal, about)
    caches += [] if "cache" in left_out else _unless(left_out, "cache of 4 bits", why, small)
    texts = [text.format(tokens=about.longest // part) for text in POLICIES for part in KEPT_PARTS]
    policies = [{"kv_policy": text} for text in texts]
    policies = _unless(left_out, "policies of the cache", _why_no_policies(goal, about), policies)
    sizes = [{"max_seqs": size} for size in about.sizes if size != about.default_size]
    sizes = _unless(left_out, "batch sizes", _why_no_sizes(goal, about), sizes)
    why = "a draft takes memory from the cache" if _counts_memory(goal, about) else None
    drafts = _unless(left_out, "drafts", why, [{"draft": name} for name in about.drafts])
    reuse = _unless(left_out, "prefix reuse", _why_no_reuse(goal, about), [{"prefix_cache": False}])
    if goal.name == "latency":
        return [*drafts, *weights, *caches, *policies, *reuse], left_out
    if goal.name == "users" and not about.has_limits:
        return [*caches, *policies, *weights], left_out
    return [*sizes, *weights, *drafts, *reuse, *caches, *policies], left_out


def _unless(left_out: dict[str, str], what: str, why: str | None, found: list[Arguments]) -> list[Arguments]:
    if why is None:
        return found
    left_out[what] = why
    return []


def _given(about: ModelFacts, *names: str) -> str | None:
    name = next((name for name in names if name in about.given), None)
    return None if name is None else f"you gave --{name.replace('_', '-')}"


def _why_no_weights(about: ModelFacts) -> str | None:
    if (why := _given(about, "quantize", "requantize")) is not None:
        return why
    return "the checkpoint's weights are quantized already" if about.is_quantized else None


def _why_no_small_cache(goal: Goal, about: ModelFacts) -> str | None:
    """A small cache saves memory, and time where reading the cache takes some."""
    if not about.caches_values:
        return "its cache has no values beside keys"
    if goal.memory is not None or _counts_memory(goal, about) or about.longest >= LONG:
        return None
    return f"memory is not limited (--memory GIB), and requests of {about.longest:,} tokens read little cache"


def _why_no_policies(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "kv_policy")) is not None:
        return why
    if about.longest < LEAST_DROPPED:
        return f"requests of {about.longest} tokens are short: there is little to drop"
    return _why_no_small_cache(goal, about)


def _why_no_sizes(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "max_seqs")) is not None:
        return why
    if goal.name == "latency":
        return "they do not affect a single request"
    return "without --goodput, users are counted by tokens of cache" if _counts_memory(goal, about) else None


def _why_no_reuse(goal: Goal, about: ModelFacts) -> str | None:
    if (why := _given(about, "prefix_cache")) is not None:
        return why
    if about.shared is None:
        return "its benefit depends on the prompts, and nothing runs"
    if _counts_memory(goal, about):
        return "without --goodput, users are counted by tokens of cache"
    if about.shared < LEAST_SHARED:
        return (
            f"on by default, and {about.shared:.0%} of the prompts' tokens are in common prefixes (--shared-prefix N)"
        )
    return None


def _counts_memory(goal: Goal, about: ModelFacts) -> bool:
    return goal.name == "users" and not about.has_limits
