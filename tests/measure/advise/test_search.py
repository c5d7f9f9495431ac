"""What is tried after what, and what is recommended, where the figures are known beforehand."""

from dataclasses import replace

import pytest

from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.measure.advise import search as searching
from jaxinfer.measure.advise.candidates import (
    KEPT_PARTS,
    POLICIES,
    PROMPT_POLICIES,
    ModelFacts,
    candidates,
    mesh_shapes,
)
from jaxinfer.measure.advise.goals import Goal, TrialResult, flags, judge
from jaxinfer.measure.advise.search import NUM_ROUNDS, Findings, Search


def recommended(goal, found):
    its = searching.recommended(goal, found)
    assert its is not None
    return its


def search(goal, trials, measure, **options):
    return Search(goal, measure, **options).run(trials)


TRIALS = [{"quantize": "int8"}, {"max_seqs": 32}, {"max_seqs": 64}, {"draft": "ngram"}, {"kv_dtype": "int8"}]


class Machine:
    """Answers from gains that multiply; counts what it was asked."""

    def __init__(self, gains, kls=None, memory=None):
        self.gains, self.kls, self.memory = gains, kls or {}, memory or {}
        self.asked = []

    def __call__(self, arguments, stop=lambda row: None):
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
    # Then what makes no difference alone, and what else helped alone in the place of what is kept or left out.
    together = [
        "--quantize int8 --max-seqs 64",
        "--quantize int8 --kv-dtype int8 --max-seqs 64",
        "--quantize int8 --max-seqs 32",
        "--kv-dtype int8 --max-seqs 64",
        "--quantize int8 --kv-dtype int8",
    ]
    assert [row.name for row in found.together] == together
    alone = [flags(one) for one in TRIALS]
    assert machine.asked[: -3 * NUM_ROUNDS] == ["", *alone[:4], "", *alone[4:], "", *together]
    # The best two and the baseline in turn, forwards and backwards.
    best = [together[0], together[1]]
    turns = [["", *best] if number % 2 == 0 else [*reversed(best), ""] for number in range(NUM_ROUNDS)]
    assert machine.asked[-3 * NUM_ROUNDS :] == [name for turn in turns for name in turn]
    row, its = recommended(Goal("cost"), found)
    assert (row.name, its.ratio) == ("--quantize int8 --max-seqs 64", pytest.approx(3.0))


def test_what_spoils_the_combination_is_left_out():
    class Clash(Machine):
        def __call__(self, arguments, stop=lambda row: None):
            row = super().__call__(arguments)
            clashes = {"quantize", "draft"} <= set(arguments)
            return TrialResult(arguments, rate=(90.0,) * 3) if clashes else row

    machine = Clash({"quantize=int8": 2.0, "draft=ngram": 1.5, "kv_dtype=int8": 1.2})
    found = search(Goal("cost"), TRIALS, machine)
    assert [row.name for row in found.together[:2]] == [
        "--quantize int8 --draft ngram",
        "--quantize int8 --kv-dtype int8",
    ]
    assert recommended(Goal("cost"), found)[0].name == "--quantize int8 --kv-dtype int8"


def test_quality_that_a_combination_loses_rules_it_out():
    machine = Machine({"quantize=int8": 2.0, "kv_dtype=int8": 1.5}, {"quantize=int8": 0.03, "kv_dtype=int8": 0.03})
    found = search(Goal("cost", max_kl=0.05), TRIALS, machine)
    assert found.together[0].kl == 0.06
    assert recommended(Goal("cost", max_kl=0.05), found)[0].name == "--quantize int8"


def test_nothing_that_helps_leaves_the_model_as_it_is():
    found = search(Goal("cost"), TRIALS, Machine({"quantize=int8": 0.9}))
    row, its = recommended(Goal("cost"), found)
    assert (row.name, its.verdict, found.together) == ("baseline", "same", [])


def test_fewer_changes_where_more_bring_no_more():
    machine = Machine({"quantize=int8": 2.0, "kv_dtype=int8": 1.5})
    found = search(Goal("cost"), TRIALS, machine)
    found.together[0] = TrialResult(found.together[0].arguments, rate=(201.0,) * 3, kl=0.0)
    del found.together[1:], found.finals[:]
    assert recommended(Goal("cost"), found)[0].name == "--quantize int8"


def test_a_trial_that_fails_is_a_row():
    found = search(Goal("cost"), TRIALS, Machine({"quantize=int8": "failed: out of memory", "max_seqs=64": 2.0}))
    assert found.alone[0].reason == "failed: out of memory"
    assert recommended(Goal("cost"), found)[0].name == "--max-seqs 64"


def test_a_drifting_machine_gains_nothing():
    class Warming(Machine):
        def __call__(self, arguments, stop=lambda row: None):
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
    assert recommended(tight, found)[0].name == "--kv-dtype int8 --max-seqs 64"
    none = Goal("quality", memory=10)
    assert searching.recommended(none, search(none, TRIALS, Machine(gains, kls))) is None


def test_when_the_time_is_over_the_rest_is_said_to_be_untried():
    machine = Machine({})
    found = search(Goal("cost"), TRIALS, machine, used=lambda: len(machine.asked) / 4)
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
    found = search(Goal("cost"), TRIALS, second, findings=kept[-1])
    assert second.asked[:5] == ["--draft ngram", "", "--kv-dtype int8", "", "--quantize int8 --max-seqs 64"]
    assert {row.name for row in found.alone} == set(map(flags, TRIALS))
    whole = search(Goal("cost"), TRIALS, Machine({**gains, "draft=ngram": 1.0}))
    assert sorted(map(repr, found.rows)) == sorted(map(repr, whole.rows))


def test_an_earlier_search_keeps_what_it_stopped_and_measures_again_what_the_time_stopped():
    base = TrialResult(rate=(100.0,) * 3, one=(1.0,) * 3)
    slow = TrialResult({"quantize": "int8"}, rate=(50.0,), one=(2.0,), stopped="0.50x the baseline")
    late = TrialResult({"max_seqs": 64}, rate=(150.0,), one=(1.0,), stopped="time limit reached")
    machine = Machine({"quantize=int8": 0.5, "max_seqs=64": 1.5})
    found = search(Goal("cost"), TRIALS, machine, findings=Findings([base], [slow, late], []))
    assert found.alone[0] is slow
    assert ("--quantize int8" in machine.asked, "--max-seqs 64" in machine.asked) == (False, True)
    # Another goal judges it anew.
    machine = Machine({"quantize=int8": 0.5})
    latency = replace(slow, one=(0.9,))
    search(Goal("latency"), TRIALS, machine, findings=Findings([base], [latency], []))
    assert "--quantize int8" in machine.asked


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
        "calibrated weights": "give a text with --calibration FILE",
        "offload": "the model fits: copying layers in each step only takes time",
        "meshes": "there is one device",
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


def test_calibrated_weights_meshes_and_offload_where_there_is_something_for_them():
    about = replace(ABOUT, has_calibration=True, meshes=mesh_shapes(4), why_no_offload=None, num_layers=8)
    found, left_out = names(Goal("cost"), about)
    new = {"--method awq", "--method gptq", "--mesh model=4", "--mesh data=2,model=2", "--mesh data=4"}
    new |= {"--offload 4", "--offload 8", "--draft layers:1", "--draft layers:2"}
    assert new <= found
    assert not {"calibrated weights", "meshes", "offload"} & set(left_out)
    assert not TrialResult({"method": "awq"}).is_exact
    assert "--mesh data=4" not in names(Goal("latency"), about)[0]
    assert not any("layers:" in name for name in names(Goal("cost"), replace(about, drafts=("ngram", "small")))[0])
    assert not any("layers:" in name for name in names(Goal("cost"), replace(about, num_layers=4))[0])
    given = replace(about, given={"mesh": "model=4", "quantize": "int8"})
    found, left_out = names(Goal("cost"), given)
    assert not new & found - {"--draft layers:1", "--draft layers:2"}
    assert {left_out[name] for name in ("meshes", "offload", "weights")} == {"you gave --mesh", "you gave --quantize"}


def test_policies_of_prompts_where_there_are_prompts():
    about = replace(ABOUT, longest=600, prompt=400)
    found, _ = names(Goal("users"), about)
    texts = {one.format(tokens=200) for one in PROMPT_POLICIES}
    assert {f"--kv-policy '{text}'" for text in texts} <= found
    for text in texts:
        parse_policy(text)
    assert not {f"--kv-policy '{text}'" for text in texts} & names(Goal("users"), replace(about, shared=None))[0]


class Repeating(Machine):
    """Makes repeats one by one, as long as it is not told to stop."""

    def __call__(self, arguments, stop=lambda row: None):
        whole = super().__call__(arguments)
        row = replace(whole, rate=(), one=())
        for number in range(3):
            if (why := stop(row)) is not None:
                return replace(row, stopped=f"stopped after {number} of 3 repeats: {why}")
            row = replace(row, rate=whole.rate[: number + 1], one=whole.one[: number + 1])
        return row


def test_what_cannot_win_is_stopped_and_what_may_is_not():
    gains = {"quantize=int8": 0.5, "max_seqs=32": 0.95, "max_seqs=64": 1.3}
    machine = Repeating(gains, {"kv_dtype=int8": 0.3})
    found = search(Goal("cost"), TRIALS, machine)
    rows = {row.name: row for row in found.alone}
    assert (len(rows["--quantize int8"].rate), len(rows["--max-seqs 32"].rate)) == (1, 3)
    assert rows["--quantize int8"].stopped == "stopped after 1 of 3 repeats: 0.50x the baseline"
    assert rows["--kv-dtype int8"].stopped == "stopped after 0 of 3 repeats: it is ruled out"
    assert (rows["--kv-dtype int8"].rate, rows["--max-seqs 64"].stopped) == ((), None)
    assert recommended(Goal("cost"), found)[0].name == "--max-seqs 64"


def test_a_bound_keeps_what_cannot_win_from_running():
    class Timed(Machine):
        def __call__(self, arguments, stop=lambda row: None):
            return replace(super().__call__(arguments), tpot=(0.02,) * 3)

    trials = [{"max_seqs": 1}, {"max_seqs": 4}, {"quantize": "int8"}]
    machine = Timed({})
    bound = {"--quantize int8": TrialResult({"quantize": "int8"}, rate=(80.0,))}
    found = search(Goal("cost"), trials, machine, bound=lambda arguments: bound.get(flags(arguments)))
    assert [row.reason for row in found.alone] == [
        "not tried: it cannot win: tokens/s of 50 at most, and the baseline has 100",
        None,
        "not tried: it cannot win: tokens/s of 80 at most, and the baseline has 100",
    ]
    assert machine.asked[:2] == ["", "--max-seqs 4"]
    found = search(Goal("latency"), trials, Timed({}))
    assert all(row.reason is None for row in found.alone)


def test_quality_does_not_run_what_changes_answers_of_a_model_that_fits():
    machine = Machine({})
    found = search(Goal("quality"), TRIALS, machine)
    assert {"--quantize int8", "--kv-dtype int8"} & set(machine.asked) == set()
    [why] = {row.reason for row in found.alone if not row.is_exact}
    assert why == "not tried: it cannot win: the model fits as it is, and its answers would change"


def test_turns_decide_where_the_machine_drifts():
    """Its speed halves and doubles from trial to trial; a change that gains 10 % is still found, and no other."""

    class Drifting(Machine):
        def __call__(self, arguments, stop=lambda row: None):
            row = super().__call__(arguments)
            slow = 0.6 if len(self.asked) % 5 < 2 and len(self.asked) < 9 else 1 + 0.01 * len(self.asked)
            return replace(row, rate=tuple(slow * one for one in row.rate[:1]))

    found = search(Goal("cost"), TRIALS, Drifting({"max_seqs=64": 1.3, "kv_dtype=int8": 0.97}))
    turns = [row.name for row in found.finals]
    assert len(turns) == NUM_ROUNDS * len(set(turns))
    row, its = recommended(Goal("cost"), found)
    assert (row.arguments.get("max_seqs"), its.verdict) == (64, "better")
    assert its.ratio == pytest.approx(1.3, rel=0.1)
