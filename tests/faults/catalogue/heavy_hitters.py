"""Faults in the policy that keeps what is attended to most: its sums, what is evicted, what is computed again."""

from tests.faults.fault import Fault

SUMS_TESTS = ("tests/cache/policy/test_heavy_hitters.py",)
ENGINE_TESTS = ("tests/engine/test_heavy_hitters.py",)
GOLDEN_TESTS = ("tests/oracle/test_policy_heavy_golden.py",)
SUMS = "jaxinfer/cache/policy/heavy_hitters.py"

FAULTS = (
    Fault(
        "policies/an-answers-token-inherits-a-sum",
        SUMS,
        "jnp.where(is_own, 0, slot_sums) + shares",
        "slot_sums + shares",
        ENGINE_TESTS,
        "a token seems to be attended to as much as the one whose place in a page it got",
    ),
    Fault(
        "policies/a-prompts-token-inherits-a-sum",
        SUMS,
        "jnp.where(keys == places[number], 0, page_sums) + shares",
        "page_sums + shares",
        ENGINE_TESTS,
        "what an answer keeps depends on who had its pages before",
    ),
    Fault(
        "policies/one-query-head-counts",
        SUMS,
        "(weights / total[..., None]).mean(axis=2)",
        "(weights / total[..., None]).max(axis=2)",
        SUMS_TESTS,
        "the other heads of a group lose the keys that they need",
    ),
    Fault(
        "policies/a-prompts-first-tokens-win",
        SUMS,
        "scores = stored_sums / jnp.maximum(stored - place, 1) if is_prompt else stored_sums",
        "scores = stored_sums",
        (*SUMS_TESTS, *GOLDEN_TESTS),
        "of a prompt, tokens stay because they are old",
    ),
    Fault(
        "policies/a-recent-token-goes",
        SUMS,
        "place >= stored - heavy.num_recent, jnp.inf",
        "place > stored - heavy.num_recent, jnp.inf",
        (*SUMS_TESTS, *GOLDEN_TESTS),
        "a token that few have seen yet is dropped",
    ),
    Fault(
        "policies/sums-stay-where-they-were",
        SUMS,
        "moved = jnp.take_along_axis(stored_sums, chosen, axis=1).T",
        "moved = stored_sums[:, : target.shape[0]].T",
        SUMS_TESTS,
        "after the first eviction, sums are other tokens'",
    ),
    Fault(
        "policies/an-answer-is-computed-again-in-other-pieces",
        "jaxinfer/cache/policy/h2o.py",
        "(count // self.page_size + 1) * self.page_size",
        "(count // self.page_size + 2) * self.page_size",
        ("tests/engine/test_heavy_hitters.py::test_preempted_anywhere",),
        "after a preemption, tokens attend to others than before",
    ),
    Fault(
        "policies/a-page-too-few",
        "jaxinfer/cache/policy/h2o.py",
        "else min(num_tokens, self.num_tokens)",
        "else min(num_tokens, self.num_tokens - self.page_size)",
        (*SUMS_TESTS, "tests/engine/test_heavy_limits.py::test_an_answer_takes_constant_memory"),
        "the newest tokens of an answer are stored nowhere",
    ),
    Fault(
        "policies/refused-tokens-are-in-the-sums",
        "jaxinfer/cache/policy/h2o.py",
        "    can_rewind: ClassVar[bool] = False\n",
        "",
        ("tests/engine/test_heavy_limits.py::test_grammars_change_nothing",),
        "where masks come from the host, what an answer keeps depends on what it was refused",
    ),
)
