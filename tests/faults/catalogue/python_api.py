"""Faults in what `LLM` gives to one's own code: parameters, scores of texts, saved checkpoints, exported functions."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "doors/parameters-take-changes-that-no-engine-sees",
        "jaxinfer/param_dict.py",
        "if self.is_read_only:",
        "if not self.is_read_only:",
        ("tests/test_param_dict.py::test_a_change_raises_at_every_depth_and_says_what_works",),
        "weights are set, nothing changes, and nothing is said",
    ),
    Fault(
        "doors/only-the-outer-dict-refuses-changes",
        "jaxinfer/param_dict.py",
        "cls.read_only(entry) if isinstance(entry, dict) else entry",
        "entry",
        ("tests/test_param_dict.py::test_a_change_raises_at_every_depth_and_says_what_works",),
        "a layer's weights are set, nothing changes, and nothing is said",
    ),
    Fault(
        "doors/a-text-is-scored-from-its-third-token",
        "jaxinfer/engine/client.py",
        "start = 1\n",
        "start = 2\n",
        ("tests/api/test_llm_scores.py::test_texts_are_scored_from_the_first_token_after_bos",),
        "losses and perplexities of texts leave a token out",
    ),
    Fault(
        "doors/a-score-ignores-its-parameters",
        "jaxinfer/engine/request.py",
        "self.score_from is not None and not self.params.keeps_distribution",
        "False",
        ("tests/api/test_llm_scores.py::test_processed_is_under_the_parameters",),
        "processed log-probabilities are raw ones, whatever the temperature",
    ),
    Fault(
        "doors/another-tokenizer-is-not-saved",
        "jaxinfer/saving.py",
        "own is None or own.parent != loaded.source",
        "own is None",
        ("tests/test_saving.py::test_another_tokenizer_is_the_one_that_is_written",),
        "what was saved reads texts as other tokens than the model that was saved",
    ),
    Fault(
        "kernels/an-exported-function-has-kernels-of-this-platform",
        "pallas_kernels/platform.py",
        "if _is_portable.value:",
        "if not _is_portable:",
        ("tests/test_own_code.py::test_what_was_traced_before_is_traced_again_within_portable",),
        "a function is exported that runs nowhere else, or cannot be exported",
    ),
)
