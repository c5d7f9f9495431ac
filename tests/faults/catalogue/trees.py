"""Faults in how trees of other libraries are read, and in Tunix's rollout."""

from tests.faults.fault import Fault

_READ = "tests/checkpoints_convert/trees/test_trees.py"
_UPDATES = "tests/api/test_other_trees.py::test_a_model_is_made_and_updated_from_a_tree_of_tunix_as_from_ours"
_ROLLOUT = "tests/integrations/test_tunix_rollout.py::test_answers_scores_and_updates_are_those_of_the_merged_weights"

FAULTS = (
    Fault(
        "trees/values-of-gemma-are-its-keys",
        "checkpoints_convert/trees/gemma.py",
        '"attention.v_proj.weight", "2 Hkv D K", "D Hkv*K", 1)',
        '"attention.v_proj.weight", "2 Hkv D K", "D Hkv*K", 0)',
        (f"{_READ}::test_what_is_written_in_a_form_is_read_back",),
        "a Gemma from a trainer answers nonsense",
    ),
    Fault(
        "trees/interleaved-rotation-of-maxtext-is-kept",
        "checkpoints_convert/trees/maxtext.py",
        "heads.transpose(0, 1, 3, 2)",
        "heads",
        (f"{_READ}::test_what_is_written_in_a_form_is_read_back",),
        "queries and keys of MaxText's Llama 3.1 rotate in the wrong pairs",
    ),
    Fault(
        "trees/scanned-patterns-are-read-as-consecutive-layers",
        "checkpoints_convert/trees/maxtext.py",
        "tuple(range(int(of_pattern), num_scanned, _PATTERN))",
        "tuple(range(int(of_pattern) * 2, int(of_pattern) * 2 + 2))",
        (f"{_READ}::test_what_is_written_in_a_form_is_read_back",),
        "the layers of MaxText's Gemma 3 are shuffled",
    ),
    Fault(
        "trees/lora-of-fused-values-is-that-of-the-keys",
        "checkpoints_convert/trees/rules.py",
        "[:, self.part or 0]",
        "[:, 0]",
        (f"{_READ}::test_lora_pairs_are_an_adapter",),
        "an adapter trained in Tunix changes the values as it should change the keys",
    ),
    Fault(
        "trees/arrays-without-a-place-are-dropped",
        "jaxinfer/loading.py",
        "        other.check(is_partial=is_partial)\n",
        "",
        (_UPDATES,),
        "an update with an untied head is taken, and its head is not",
    ),
    Fault(
        "trees/an-update-keeps-the-trainers-arrays",
        "jaxinfer/loading.py",
        "other.weights.keys(), copies=copies)",
        "other.weights.keys(), copies=False)",
        (_UPDATES,),
        "the trainer donates its arrays to the next step, and the engine reads deleted ones",
    ),
    Fault(
        "trees/the-scale-of-lora-is-one",
        "jaxinfer/integrations/tunix.py",
        "tree.adapter(self._lora_scale)",
        "tree.adapter(1.0)",
        (_ROLLOUT,),
        "rollouts are sampled by another policy than the one that is trained",
    ),
    Fault(
        "trees/equal-prompts-get-equal-answers",
        "jaxinfer/integrations/tunix.py",
        "output.outputs[0 if params.is_greedy else place]",
        "output.outputs[0]",
        (_ROLLOUT,),
        "a group of GRPO has no advantages, and nothing is learned",
    ),
)
