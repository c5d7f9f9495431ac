"""Faults in adapters: answers of another adapter, or of one that was not trained so; hostile files that are read."""

from tests.faults.fault import Fault

ADAPTERS = "checkpoints_convert/adapters/"
MERGE = "tests/checkpoints_convert/adapters/test_merge.py::"
READ = "tests/checkpoints_convert/adapters/test_read.py::"
REFUSED = "tests/checkpoints_convert/adapters/test_refusals.py::"
SAVED = "tests/checkpoints_convert/adapters/test_save.py::"
WRITTEN = "tests/checkpoints_convert/adapters/test_checkpoint.py::"

COMPUTED = (
    Fault(
        "adapters/a-stabilized-scale-is-divided-by-the-rank",
        ADAPTERS + "config.py",
        "alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)",
        "alpha / rank",
        (MERGE + "test_a_stabilized_scale_is_by_the_root_of_the_rank", READ + "test_rank_and_scale"),
        "rank-stabilized adapters hardly change their base",
    ),
    Fault(
        "adapters/magnitudes-are-factors",
        ADAPTERS + "merge.py",
        "(pair.magnitude.astype(np.float32) / lengths)",
        "pair.magnitude.astype(np.float32)",
        (MERGE + "test_a_merged_weight_is_the_papers[llama-ends0-dora]",),
        "merged DoRA adapters answer nonsense",
    ),
    Fault(
        "adapters/columns-of-b-are-one-expert-after-the-other",
        ADAPTERS + "read.py",
        "b.reshape(b.shape[0], -1, count).transpose(2, 0, 1)",
        "b.reshape(b.shape[0], count, -1).transpose(1, 0, 2)",
        (MERGE + "test_all_experts_in_one_parameter",),
        "each expert has columns of the others",
    ),
    Fault(
        "adapters/the-first-parameter-is-the-outermost",
        ADAPTERS + "read.py",
        "enumerate(reversed(wrapped))",
        "enumerate(wrapped)",
        (MERGE + "test_all_experts_in_one_parameter",),
        "adapters of experts do not open, or change the wrong matrices where these are square",
    ),
    Fault(
        "adapters/a-tied-head-follows-a-saved-embedding",
        ADAPTERS + "read.py",
        "not is_own and not is_copy",
        "not is_own",
        (MERGE + "test_saved_modules_stand_in_place_of_the_bases",),
        "an adapter whose input embedding was trained has another head than in training",
    ),
    Fault(
        "adapters/patterns-match-anywhere",
        ADAPTERS + "patterns.py",
        'rf"(.*\\.)?({pattern})$"',
        'rf"(.*)?({pattern})$"',
        (READ + "test_rank_and_scale", "tests/checkpoints_convert/adapters/test_patterns.py"),
        "alphas of other modules scale a pair",
    ),
)

KEPT_APART = (
    Fault(
        "adapters/scales-are-not-in-the-fingerprint",
        ADAPTERS + "adapter.py",
        '_add(digest, "low_rank", name, float(pair.scale).hex())',
        '_add(digest, "low_rank", name)',
        (READ + "test_the_fingerprint_changes_with_every_setting_that_matters",),
        "an adapter reads the cached keys of one with another scale",
    ),
    Fault(
        "adapters/unknown-fields-are-ignored",
        ADAPTERS + "config.py",
        'value is None or value is False or value in ("", [], {})',
        "value is None or name not in _REFUSED",
        (REFUSED + "test_a_configuration_is_refused_before_tensors_are_opened",),
        "adapters of a method that PEFT adds next are served as plain ones",
    ),
    Fault(
        "adapters/values-are-not-looked-at",
        ADAPTERS + "read.py",
        "        check_finite(self.file.path, stored, count_nonfinite(array), array.size)\n",
        "",
        (REFUSED + "test_hostile_tensors_give_one_clear_error",),
        "a NaN in an adapter ends the requests of all who use it",
    ),
    Fault(
        "adapters/links-are-followed-anywhere",
        ADAPTERS + "read.py",
        "    check_inside(folder, names)\n",
        "",
        (REFUSED + "test_links_out_of_the_folder_are_refused",),
        "a folder that is loaded over HTTP reads other files of the machine",
    ),
    Fault(
        "adapters/experts-are-written-by-rank",
        ADAPTERS + "save.py",
        "pair.b.transpose(2, 1, 0)",
        "pair.b.transpose(2, 0, 1)",
        (SAVED + "test_experts_in_one_are_named_as_peft_nests_them",),
        "PEFT and vLLM give each expert columns of the others",
    ),
)

CONVERTED = (
    Fault(
        "adapters/another-adapter-resumes-a-merge",
        ADAPTERS + "checkpoint.py",
        "self.source.fingerprint(), self.adapter.fingerprint, ",
        "self.source.fingerprint(), ",
        (WRITTEN + "test_an_interrupted_merge_resumes_with_the_same_adapter_only",),
        "a merge that is repeated after a retraining has the first layers of the old adapter",
    ),
    Fault(
        "adapters/a-merged-model-keeps-the-bases-template",
        ADAPTERS + "checkpoint.py",
        "        if _has_template(own):\n",
        "        if False:\n",
        (WRITTEN + "test_the_tokenizer_and_template_of_an_adapter_replace_those_of_the_base",),
        "a merged model is prompted in the base's form, not in that of its training",
    ),
    Fault(
        "adapters/weights-are-cast-before-the-sum",
        ADAPTERS + "checkpoint.py",
        'dtype=dtype if dtype == "auto" else "float32"',
        "dtype=dtype",
        (WRITTEN + "test_weights_are_rounded_once",),
        "small changes of an adapter are lost in a cast model",
    ),
    Fault(
        "adapters/any-base-is-merged",
        "checkpoints_convert/convert.py",
        "base_model=base_model or own_name",
        "base_model=base_model",
        (WRITTEN + "test_the_name_of_the_base",),
        "an adapter of another version of a model is merged without a word",
    ),
)

FAULTS = (*COMPUTED, *KEPT_APART, *CONVERTED)
