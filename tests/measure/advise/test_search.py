"""What is tried after what, and what is recommended, where the figures are known beforehand."""

from dataclasses import replace

import pytest

from jaxinfer.cache.policies import parse_policy
from jaxinfer.measure.advise import search as searching
from jaxinfer.measure.advise.goals import Goal, TrialResult, flags, judge
from jaxinfer.measure.advise.search import KEPT_PARTS, POLICIES, Findings, ModelFacts, candidates, search


def recommended(goal, found):
    its = searching.recommended(goal, found)
    assert its is not None
    return its


TRIALS = [{"quantize": "int8"}, {"max_seqs": 32}, {"max_seqs": 64}, {"draft": "ngram"}, {"kv_dtype": "int8"}]


class Machine:
    """Answers from gains that multiply; counts what it was asked."""

    def __init__(self, gains, kls=None, memory=None):
        self.gains, self.kls, self.memory = gains, kls or {}, memory or {}
        self.asked = []

    def __call__(self, arguments):
        self.asked.append(flags(arguments))
        rate, kl, size = 100.0, 0.0, 1000
        for name, value in arguments.items():
            key = f"{name}={value}"
            gain = self.gains.get(key, 1.0)
            if isinstance(gain, str):
                return TrialResult(arguments, gain)
            rate, kl, size = rate * gain, kl + self.kls.get(key, 0.0), size * self.memory.get(key, 1.0)
        return TrialResult(arguments, rate=(rate,) * 3, one=(100 / rate,) * 3, kl=kl, needed_bytes=int(size))


def test_gains_are_added_from_the_largest_and_one_of_a_kind():
    machine = Machine({"quantize=int8": 1.5, "max_seqs=32": 1.8, "max_seqs=64": 2.0, "draft=ngram": 0.7})
    found = search(Goal("cost"), TRIALS, machine)
    assert [row.name for row in found.together] == ["--quantize int8 --max-seqs 64"]
    alone = [flags(one) for one in TRIALS]
    assert machine.asked == ["", *alone[:4], "", *alone[4:], "", "--quantize int8 --max-seqs 64", ""]
    row, its = recommended(Goal("cost"), found)
    assert (row.name, its.ratio) == ("--quantize int8 --max-seqs 64", pytest.approx(3.0))


def test_what_spoils_the_combination_is_left_out():
    class Clash(Machine):
        def __call__(self, arguments):
            row = super().__call__(arguments)
            clashes = {"quantize", "draft"} <= set(arguments)
            return TrialResult(arguments, rate=(90.0,) * 3) if clashes else row

    machine = Clash({"quantize=int8": 2.0, "draft=ngram": 1.5, "kv_dtype=int8": 1.2})
    found = search(Goal("cost"), TRIALS, machine)
    assert [row.name for row in found.together] == [
        "--quantize int8 --draft ngram",
        "--quantize int8 --kv-dtype int8",
    ]
    assert recommended(Goal("cost"), found)[0].name == "--quantize int8 --kv-dtype int8"


def test_quality_that_a_combination_loses_rules_it_out():
    machine = Machine({"quantize=int8": 2.0, "kv_dtype=int8": 1.5}, {"quantize=int8": 0.03, "kv_dtype=int8": 0.03})
    found = search(Goal("cost", max_kl=0.05), TRIALS, machine)
    assert [row.kl for row in found.together] == [0.06]
    assert recommended(Goal("cost", max_kl=0.05), found)[0].name == "--quantize int8"


def test_nothing_that_helps_leaves_the_model_as_it_is():
    found = search(Goal("cost"), TRIALS, Machine({"quantize=int8": 0.9}))
    row, its = recommended(Goal("cost"), found)
    assert (row.name, its.verdict, found.together) == ("baseline", "same", [])


def test_fewer_changes_where_more_bring_no_more():
    machine = Machine({"quantize=int8": 2.0, "kv_dtype=int8": 1.5})
    found = search(Goal("cost"), TRIALS, machine)
    found.together[0] = TrialResult(found.together[0].arguments, rate=(201.0,) * 3, kl=0.0)
    assert recommended(Goal("cost"), found)[0].name == "--quantize int8"


def test_a_trial_that_fails_is_a_row():
    found = search(Goal("cost"), TRIALS, Machine({"quantize=int8": "failed: out of memory", "max_seqs=64": 2.0}))
    assert found.alone[0].reason == "failed: out of memory"
    assert recommended(Goal("cost"), found)[0].name == "--max-seqs 64"


def test_a_drifting_machine_gains_nothing():
    class Warming(Machine):
        def __call__(self, arguments):
            row = super().__call__(arguments)
            rate = 100.0 + 20 * len(self.asked)
            return TrialResult(row.arguments, rate=(rate,) * 3, kl=0.0)

    found = search(Goal("cost"), TRIALS, Warming({}))
    assert recommended(Goal("cost"), found)[0].name == "baseline"


def test_quality_takes_what_is_exact_and_rounds_only_to_fit():
    gains = {"quantize=int8": 2.0, "max_seqs=64": 1.5}
    kls = {"quantize=int8": 0.01, "kv_dtype=int8": 0.001}
    found = search(Goal("quality"), TRIALS, Machine(gains, kls))
    assert recommended(Goal("quality"), found)[0].name == "--max-seqs 64"
    tight = Goal("quality", memory=700)
    found = search(tight, TRIALS, Machine(gains, kls, {"quantize=int8": 0.5, "kv_dtype=int8": 0.6}))
    assert recommended(tight, found)[0].name == "--kv-dtype int8"
    none = Goal("quality", memory=10)
    assert searching.recommended(none, search(none, TRIALS, Machine(gains, kls))) is None


def test_when_the_time_is_over_the_rest_is_said_to_be_untried():
    machine = Machine({})
    found = search(Goal("cost"), TRIALS, machine, is_over=lambda: len(machine.asked) > 2)
    assert machine.asked == ["", "--quantize int8", "--max-seqs 32"]
    assert [row.reason for row in found.alone[2:]] == ["not tried: time limit reached"] * 3


def test_an_earlier_search_goes_on_and_what_failed_is_tried_again():
    kept = []
    gains = {"quantize=int8": 1.5, "max_seqs=64": 2.0, "draft=ngram": "failed: once"}

    def stop(found):
        kept.append(Findings(list(found.base), list(found.alone), list(found.together)))
        if len(found.alone) == 4:
            raise KeyboardInterrupt

    first = Machine(gains)
    with pytest.raises(KeyboardInterrupt):
        search(Goal("cost"), TRIALS, first, report=stop)
    second = Machine({**gains, "draft=ngram": 1.0})
    found = search(Goal("cost"), TRIALS, second, found=kept[-1])
    assert second.asked == ["--draft ngram", "", "--kv-dtype int8", "", "--quantize int8 --max-seqs 64", ""]
    assert {row.name for row in found.alone} == set(map(flags, TRIALS))
    whole = search(Goal("cost"), TRIALS, Machine({**gains, "draft=ngram": 1.0}))
    assert sorted(map(repr, found.rows)) == sorted(map(repr, whole.rows))


ABOUT = ModelFacts(
    given={},
    is_quantized=False,
    caches_values=True,
    sizes=(1, 16, 32),
    default_size=16,
    drafts=("ngram",),
    shared=0.5,
    longest=192,
)


def names(goal, about):
    found, left_out = candidates(goal, about)
    return {flags(one) for one in found}, left_out


def test_everything_is_a_candidate():
    found, left_out = names(Goal("cost"), ABOUT)
    assert found == {
        "--quantize int8",
        "--quantize int4-g128",
        "--kv-dtype int8",
        "--kv-dtype fp8_e4m3",
        "--max-seqs 1",
        "--max-seqs 32",
        "--draft ngram",
        "--no-prefix-cache",
    }
    assert left_out == {
        "cache of 4 bits": "memory is not limited (--memory GIB), and requests of 192 tokens read little cache",
        "policies of the cache": "requests of 192 tokens are short: there is little to drop",
    }


@pytest.mark.parametrize(
    ("goal", "longest", "are_tried"),
    [
        (Goal("cost"), 1000, False),
        (Goal("cost", memory=2**30), 1000, True),
        (Goal("quality", memory=2**30), 1000, True),
        (Goal("users"), 1000, True),
        (Goal("latency"), 1000, False),
        (Goal("latency"), 4000, True),
    ],
)
def test_small_caches_where_memory_or_the_time_to_read_it_counts(goal, longest, are_tried):
    found, left_out = names(goal, replace(ABOUT, longest=longest))
    small = {"--kv-dtype int8_int4", "--kv-dtype int4"}
    small |= {f"--kv-policy 'sinks(4)+window({longest // part})'" for part in (2, 4)}
    assert found & small == (small if are_tried else set())
    assert {"cache of 4 bits", "policies of the cache"} & set(left_out) == (
        set() if are_tried else {"cache of 4 bits", "policies of the cache"}
    )


def test_policies_that_are_tried_are_policies():
    found, _ = candidates(Goal("users"), replace(ABOUT, longest=300))
    policies = [parse_policy(one["kv_policy"]) for one in found if "kv_policy" in one]
    assert len(policies) == len(POLICIES) * len(KEPT_PARTS)


def test_small_caches_change_answers_and_are_a_last_resort_where_nothing_runs():
    planned = Goal("users", is_planned=True)
    for arguments in ({"kv_dtype": "int4"}, {"kv_dtype": "int8_int4"}, {"kv_policy": "sinks(4)+window(64)"}):
        row = TrialResult(arguments, cache_tokens=100)
        assert not row.is_exact
        assert judge(planned, row, [TrialResult(cache_tokens=10)]).verdict == "in doubt"
        assert judge(Goal("users"), row, [TrialResult(cache_tokens=10)]).verdict == "better"
        limited = replace(row, kl=0.1)
        assert judge(Goal("users"), limited, [TrialResult(cache_tokens=10)]).verdict == "ruled out"


@pytest.mark.parametrize(
    ("goal", "changes", "what", "why"),
    [
        ("cost", {"is_quantized": True}, "weights", "quantized already"),
        ("cost", {"given": {"quantize": "int8"}}, "weights", "you gave --quantize"),
        ("cost", {"given": {"kv_dtype": "int8"}}, "cache", "you gave --kv-dtype"),
        ("cost", {"given": {"max_seqs": 4}}, "batch sizes", "you gave --max-seqs"),
        ("cost", {"given": {"prefix_cache": False}}, "prefix reuse", "you gave --prefix-cache"),
        ("cost", {"shared": 0.02}, "prefix reuse", "2% of the prompts' tokens"),
        ("cost", {"shared": None}, "prefix reuse", "nothing runs"),
        ("latency", {}, "batch sizes", "a single request"),
        ("users", {}, "drafts", "takes memory"),
        ("users", {"given": {"kv_policy": "x"}}, "policies of the cache", "you gave --kv-policy"),
        ("users", {"caches_values": False}, "cache of 4 bits", "no values beside keys"),
        ("users", {"caches_values": False, "longest": 999}, "policies of the cache", "no values beside keys"),
    ],
)
def test_what_is_not_tried_has_a_reason(goal, changes, what, why):
    _, left_out = candidates(Goal(goal), replace(ABOUT, **changes))
    assert why in left_out[what]


def test_a_cache_of_keys_alone_is_tried_in_fp8_only():
    found, _ = names(Goal("cost"), replace(ABOUT, caches_values=False))
    assert {name for name in found if "kv" in name} == {"--kv-dtype fp8_e4m3"}
