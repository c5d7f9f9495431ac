"""Faults in functions of users that the engine runs."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "engine/processors-are-skipped-for-greedy-answers",
        "jaxinfer/sampling/transforms.py",
        "changed if batch.processors is None else jnp.ones_like(changed)",
        "changed",
        ("tests/sampling/test_processors.py::test_a_row_with_nan_is_reported_alone",),
        "greedy answers without other parameters are as if there were no processor",
    ),
    Fault(
        "engine/processors-allow-what-a-grammar-forbids",
        "jaxinfer/sampling/processors.py",
        "logits = jnp.where(is_forbidden, -jnp.inf, logits)",
        "del is_forbidden",
        ("tests/sampling/test_processors.py::test_rows_are_processed_alone_and_forbidden_tokens_stay_forbidden",),
        "an answer does not match its grammar, where a processor adds to a forbidden token",
    ),
    Fault(
        "engine/processors-see-drafts-in-the-place-of-prompts",
        "jaxinfer/sampling/state.py",
        "jnp.where(is_active, state.num_prompt + state.num_output, state.sequence.shape[1])",
        "jnp.where(is_active, state.num_output, state.sequence.shape[1])",
        ("tests/sampling/test_processors.py::test_tokens_so_far_follow_advances_and_rewinds",),
        "processors read other tokens than those that were chosen",
    ),
    Fault(
        "engine/processors-lose-the-answer-at-a-preemption",
        "jaxinfer/engine/model_runner.py",
        "with_sequences(history, [sequence.tokens]",
        "with_sequences(history, [sequence.request.token_ids]",
        ("tests/engine/test_processors.py::test_a_processor_sees_all_tokens_before_each_that_is_chosen",),
        "an answer that was preempted goes on with other tokens than alone",
    ),
    Fault(
        "engine/processors-that-change-are-taken",
        "jaxinfer/sampling/processors.py",
        "if _hash_of(traced) != _hash_of(again):",
        "if traced is None:",
        ("tests/sampling/test_processors.py::test_functions_that_cannot_be_compiled_once_are_refused",),
        "a function that reads something that changes has whatever value it had when it was opened",
    ),
    Fault(
        "replays/coordinates-forget-the-arrays-of-processors",
        "jaxinfer/api/replayed_answers.py",
        "arrays=to_plain(origin.arrays)",
        "arrays={}",
        ("tests/api/test_processors.py::test_a_coordinate_has_the_arrays_and_the_functions",),
        "an answer is made again without its arrays, and differs",
    ),
)
