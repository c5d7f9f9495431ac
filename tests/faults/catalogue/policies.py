"""Faults in policies of the cache: what tokens attend to, what is given back, and what is found again."""

from tests.faults.fault import Fault

POLICY_TESTS = ("tests/cache/test_policies.py",)
GOLDEN_TESTS = ("tests/oracle/test_policy_golden.py",)
SCORE_TESTS = ("tests/oracle/test_policy_scores_golden.py",)

FAULTS = (
    Fault(
        "policies/a-page-is-dropped-a-token-early",
        "jaxinfer/cache/kept_pages.py",
        "    page = positions // kept.page_size\n    num_dropped",
        "    page = (positions + 1) // kept.page_size\n    num_dropped",
        POLICY_TESTS,
        "the last token of each page does not see the oldest page of its window, nor itself in its place",
    ),
    Fault(
        "policies/sinks-are-given-back",
        "jaxinfer/engine",
        "for number in range(max(first, group.num_sinks), end):",
        "for number in range(first, end):",
        ("tests/engine/test_scheduler.py::test_random_work_gives_one_answer_with_windows",),
        "the first tokens of a text are those of another one",
    ),
    Fault(
        "policies/a-prefix-hit-lacks-its-sinks",
        "jaxinfer/engine",
        "is_usable &= all(one.has(group) for one in sinks)",
        "is_usable &= True",
        ("tests/engine/test_prefix.py::test_a_match_has_the_sinks_too",),
        "a prompt that begins like an earlier one is answered without its first tokens",
    ),
    Fault(
        "policies/sinks-stay-where-they-were",
        "jaxinfer/cache/kept_pages.py",
        "is_beyond & (lengths > 0), num_dropped * kept.page_size, 0)",
        "is_beyond & (lengths > 0), 0 * num_dropped, 0)",
        (*POLICY_TESTS, *GOLDEN_TESTS),
        "texts longer than the model was trained for turn to nonsense",
    ),
    Fault(
        "policies/sinks-move-a-page-too-late",
        "jaxinfer/cache/kept_pages.py",
        "is_beyond = (page + 1) * kept.page_size > kept.trained",
        "is_beyond = page * kept.page_size > kept.trained",
        POLICY_TESTS,
        "the tokens of a page see the first ones from farther than the model was trained for",
    ),
    Fault(
        "policies/sinks-move-away",
        "jaxinfer/cache/kept_pages.py",
        "    return jnp.cos(angles), jnp.sin(angles)",
        "    return jnp.cos(angles), jnp.sin(-angles)",
        GOLDEN_TESTS,
        "beyond the trained length, sinks are twice as far as they should be near",
    ),
    Fault(
        "policies/new-sinks-are-moved-before-they-are-stored",
        "jaxinfer/cache/ragged.py",
        'if appends_first and (schedule.implementation != "xla" or moved is not None):',
        'if appends_first and schedule.implementation != "xla":',
        (*GOLDEN_TESTS, "tests/engine/test_policies.py::test_alone_is_what_dense_attention_under_a_mask_gives"),
        "a long prompt that is computed in one step attends to another text's first tokens",
    ),
    Fault(
        "policies/a-kernel-reads-pages-that-it-writes",
        "jaxinfer/cache/ragged.py",
        'if appends_first and (schedule.implementation != "xla" or moved is not None):',
        "if appends_first and moved is not None:",
        ("tests/cache/test_policies.py::test_the_kernel_of_tpus_reads_what_a_step_stores",),
        "on a TPU a prompt attends to what was in its pages before",
    ),
    Fault(
        "policies/drafts-cross-the-end-of-a-page",
        "jaxinfer/engine/programs/speculative.py",
        "jnp.minimum(num_nodes, room_in_page(self.model.kept, slots.positions))",
        "num_nodes",
        ("tests/engine/test_policies.py::test_drafts_change_no_answer",),
        "answers with a draft differ from those without, as drafts after a page's end see a page too many",
    ),
    Fault(
        "policies/snapkv-pools-to-one-side",
        "jaxinfer/cache/scores.py",
        "jnp.pad(means, ((0, 0), (pool // 2, pool // 2)))",
        "jnp.pad(means, ((0, 0), (pool - 1, 0)))",
        SCORE_TESTS,
        "the tokens after what matters are kept, and not those around it",
    ),
    Fault(
        "policies/a-pyramid-stands-on-its-top",
        "jaxinfer/cache/scores.py",
        "[round(highest - layer * step) for layer in range(num_layers)]",
        "[round(lowest + layer * step) for layer in range(num_layers)]",
        SCORE_TESTS,
        "the first layers keep the fewest tokens",
    ),
    Fault(
        "policies/expected-attention-leaves-out-the-spread",
        "jaxinfer/cache/scores.py",
        "jax.nn.softmax(linear + square, axis=-1)",
        "jax.nn.softmax(linear, axis=-1)",
        SCORE_TESTS,
        "what only some questions ask for is dropped",
    ),
    Fault(
        "policies/keydiff-means-lengths-too",
        "jaxinfer/cache/scores.py",
        "    anchor = _unit(directions.mean(axis=0))",
        "    anchor = _unit(k.astype(jnp.float32).mean(axis=0))",
        SCORE_TESTS,
        "long keys decide alone which keys are unlike the others",
    ),
)
