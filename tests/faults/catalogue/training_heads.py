"""Faults in the training of heads: what is trained is not what is drafted, and next to nothing is accepted."""

from tests.faults.fault import Fault

CHAINS = "tests/training/test_head_objectives.py::test_unrolled_chains_are_those_of_the_speculators_library"
BLOCKS = "tests/training/test_head_objectives.py::test_blocks_are_those_of_the_speculators_library"
LOSS = "tests/training/test_head_objectives.py::"
MESH = "tests/training/test_head_mesh.py::"
ROWS = "tests/training/test_head_rows.py::"
SAVED = "tests/checkpoints_convert/huggingface/test_save_heads.py::test_what_is_written_is_read_again"
FORM = "tests/checkpoints_convert/huggingface/test_speculators_form.py::"
HEADS = "checkpoints_convert/huggingface/families_heads.py"
OBJECTIVES, ATTENTION = "jaxinfer/training/head_objectives.py", "jaxinfer/training/head_attention.py"

COMPUTED = (
    Fault(
        "training_heads/states-are-paired-with-their-own-token",
        OBJECTIVES,
        "head.store_pairs(jnp.roll(batch.tokens, -1, axis=1)",
        "head.store_pairs(batch.tokens",
        (CHAINS,),
        "the context of a trained head has other keys than the engine stores",
    ),
    Fault(
        "training_heads/each-step-repeats-the-first-token",
        OBJECTIVES,
        "at_places(batch.tokens, anchors + 1 + step)",
        "at_places(batch.tokens, anchors + 1)",
        (CHAINS,),
        "a head learns to draft from the same token at every step",
    ),
    Fault(
        "training_heads/steps-do-not-move-on",
        OBJECTIVES,
        "head.pairs(token, states, first + step, attend)",
        "head.pairs(token, states, first, attend)",
        (CHAINS,),
        "later drafts have positions that they never had in training",
    ),
    Fault(
        "training_heads/steps-do-not-see-the-earlier-ones-of-their-chain",
        ATTENTION,
        "self._own.append((k, v))",
        "self._own = [(k, v)]",
        (CHAINS,),
        "the third and later drafts see keys that they did not see in training",
    ),
    Fault(
        "training_heads/chains-see-what-comes-after-them",
        OBJECTIVES,
        "ChainAttend(same_text & (places <= anchors[..., None]))",
        "ChainAttend(same_text & (places <= anchors[..., None] + 1))",
        (CHAINS,),
        "a head is trained on what it cannot know, and is nearly always wrong",
    ),
    Fault(
        "training_heads/texts-of-a-row-see-each-other",
        OBJECTIVES,
        "ChainAttend(same_text & (places <= anchors[..., None]))",
        "ChainAttend(places <= anchors[..., None])",
        (CHAINS + "[eagle3_llama-5]",),
        "heads are trained with the contexts of other texts",
    ),
    Fault(
        "training_heads/blocks-see-the-state-of-their-root",
        OBJECTIVES,
        "BlockAttend(same_text & (places < anchors[..., None]))",
        "BlockAttend(same_text & (places <= anchors[..., None]))",
        (BLOCKS,),
        "blocks are trained with a state that the engine does not have yet",
    ),
)

COUNTED = (
    Fault(
        "training_heads/all-steps-weigh-the-same",
        "jaxinfer/training/heads.py",
        "STEP_DECAY**numbers",
        "1.0 + 0 * numbers",
        ("tests/training/test_heads.py::test_what_draft_tokens_weigh",),
        "the first drafts, on which all others depend, are learned less well",
    ),
    Fault(
        "training_heads/weights-of-steps-are-left-out",
        OBJECTIVES,
        "(best != NOT_DRAFTED) * step_weights",
        "(best != NOT_DRAFTED)",
        (LOSS + "test_a_step_of_a_chain_weighs_what_it_is_given_and_undraftable_tokens_nothing",),
        "as above",
    ),
    Fault(
        "training_heads/tokens-outside-the-vocabulary-count",
        OBJECTIVES,
        "shares = counts * (best != NOT_DRAFTED)",
        "shares = counts * (best == best)",
        (LOSS + "test_a_step_of_a_chain_weighs_what_it_is_given_and_undraftable_tokens_nothing",),
        "a head learns what it could only say where no draft is accepted",
    ),
    Fault(
        "training_heads/a-chain-is-compared-with-the-token-that-it-is-given",
        OBJECTIVES,
        "return anchors[..., None] + 1 + jnp.arange(num_steps)",
        "return anchors[..., None] + jnp.arange(num_steps)",
        (LOSS + "test_places_of_drafts",),
        "a head learns to repeat the newest token",
    ),
    Fault(
        "training_heads/anchors-of-two-texts",
        "jaxinfer/training/head_rows.py",
        "(self.weights[:, later[0]] > 0) & same_text",
        "self.weights[:, later[0]] > 0",
        (ROWS + "test_anchors_are_places_whose_first_draft_counts",),
        "drafts after the end of a text are trained with another text's first token",
    ),
    Fault(
        "training_heads/a-text-that-goes-in-circles-is-whole",
        "jaxinfer/training/head_rows.py",
        "return DraftedText(tokens[:start], text.first)",
        "return text",
        (ROWS + "test_a_text_is_cut_where_it_repeats_itself",),
        "heads learn to copy loops, and acceptance is flattered by them",
    ),
)

WRITTEN = (
    Fault(
        "training_heads/d2t-is-written-as-ids",
        "checkpoints_convert/huggingface/save.py",
        "tokens.astype(np.int64) - np.arange(size)",
        "tokens.astype(np.int64)",
        (SAVED,),
        "a saved head drafts other tokens than it was trained on, or does not open",
    ),
    Fault(
        "training_heads/layers-are-named-as-inputs",
        "checkpoints_convert/huggingface/families_heads.py",
        "outputs = [layer - 1 for layer in head.tap_layers]",
        "outputs = list(head.tap_layers)",
        (SAVED,),
        "other engines give a DFlash head the states after those that it was trained on",
    ),
    Fault(
        "training_heads/all-steps-unroll",
        "jaxinfer/training/loop.py",
        "make_step = early_fn if step < num_early else step_fn",
        "make_step = step_fn",
        ("tests/training/test_heads.py::test_the_first_steps_learn_one_token",),
        "an option is ignored, and training takes three times as long",
    ),
    Fault(
        "training_heads/what-follows-a-text-counts",
        "jaxinfer/training/distill.py",
        "weights = np.where(is_prompt, options.prompt_weight, 1.0) * goes_on",
        "weights = np.where(is_prompt, options.prompt_weight, 1.0)",
        ("tests/training/test_distill.py::test_what_the_target_wrote_already_is_learned",),
        "the draft learns what the target says after token 0 again and again",
    ),
    Fault(
        "training_heads/texts-are-measured-beyond-their-end",
        "jaxinfer/training/acceptance.py",
        "row[first - 1 : end - 1]",
        "row[first - 1 :]",
        ("tests/training/test_acceptance.py::test_texts_end_where_they_end",),
        "short answers lower the acceptance of a draft",
    ),
    Fault(
        "training_heads/texts-are-written-again",
        "jaxinfer/training/texts.py",
        "            if not path.exists():\n                some",
        "            if path is not None:\n                some",
        ("tests/training/test_distill.py::test_texts_written_before_an_interruption_are_kept",),
        "a run that was stopped while the target wrote begins again",
    ),
)

IN_SPECULATORS_FORM = (
    Fault(
        "training_heads/tensors-of-the-library-have-the-authors-names",
        HEADS,
        "return replace(family, tensors=_TENSORS)",
        "return family",
        (FORM + "test_the_library_opens_what_is_written[eagle3]",),
        "the speculators library opens an EAGLE-3 head with a layer of random weights",
    ),
    Fault(
        "training_heads/states-of-the-library-are-those-before",
        HEADS,
        "taps = list(head.tap_layers)",
        "taps = [layer - 1 for layer in head.tap_layers]",
        (FORM + "test_the_library_opens_what_is_written[dflash]",),
        "the speculators library and vLLM give a head other states than it was trained on",
    ),
    Fault(
        "training_heads/scales-are-written-where-the-library-does-not-look",
        HEADS,
        "others |= {setting.name for setting in HEADS[config.architecture].settings}",
        "others |= set()",
        (FORM + "test_what_the_library_does_not_compute_is_refused",),
        "a DFlash head of a Gemma drafts without the scale of its embedding in the speculators library",
    ),
    Fault(
        "training_heads/a-form-that-fails-is-found-at-the-end",
        "jaxinfer/cli/train_head.py",
        "    huggingface_config(head_config(llm.config, own.kind, taps=own.taps, **sizes), form)\n",
        "",
        ("tests/cli/test_train_head.py::test_a_form_that_cannot_be_written_is_told_before_training",),
        "hours of training end with a head that cannot be written",
    ),
    Fault(
        "training_heads/chains-are-written-without-an-embedding",
        "jaxinfer/cli/train_head.py",
        "if form is not None and not training.options.is_block:",
        "if form is not None and training.options.is_block:",
        ("tests/cli/test_train_head.py::test_a_head_is_written_as_the_speculators_library_does",),
        "the speculators library runs an EAGLE-3 head with a random embedding",
    ),
)

PLACED = (
    Fault(
        "training_heads/old-checkpoints-stay-after-a-kill",
        "jaxinfer/training/loop.py",
        "    _remove_old(directory)  # what is left",
        "    # what is left",
        ("tests/training/test_training.py::test_checkpoints_that_a_killed_run_did_not_remove_go_at_the_next_start",),
        "a run that was killed after its last checkpoint leaves more files than one that was not",
    ),
    Fault(
        "training_heads/totals-of-a-mesh-are-of-other-rows",
        "jaxinfer/training/target_states.py",
        "(x.swapaxes(0, 1).reshape(tokens.shape) for x in summaries)",
        "(x.reshape(tokens.shape) for x in summaries)",
        (MESH + "test_two_devices_train_the_head_of_one",),
        "on a mesh a head learns the probabilities of other rows",
    ),
    Fault(
        "training_heads/an-optimizer-lies-in-full-on-each-device",
        "jaxinfer/training/head_mesh.py",
        "own.get(path[start:])",
        "own.get(path)",
        (MESH + "test_the_optimizer_keeps_what_is_of_a_parameter_beside_it",),
        "a mesh holds the moments of all parameters on each of its devices",
    ),
)

PRODUCTS = "tests/pallas_kernels/dense_matmul/test_dense_matmul.py::"
FAST = (
    Fault(
        "training_heads/what-is-trained-is-rounded",
        "jaxinfer/training/heads.py",
        "    params = placement.head(training.config, params)",
        "    params = placement.head(training.config, computed_in(options.compute_dtype, params))",
        ("tests/training/test_heads.py::test_bfloat16_learns_as_float32_does[eagle3]",),
        "small updates are lost: they are below a bfloat16 weight's last bit",
    ),
    Fault(
        "training_heads/bfloat16-is-ignored",
        OBJECTIVES,
        "computed_in(compute_dtype, {**params, **given})",
        "{**params, **given}",
        (LOSS + "test_bfloat16_is_of_products_and_not_of_gradients",),
        "a step takes as long as in float32",
    ),
    Fault(
        "training_heads/gradients-of-weights-are-of-other-rows",
        "pallas_kernels/dense_matmul/bfloat16_cpu.py",
        "transpose(2, 0, 1)",
        "transpose(2, 1, 0)",
        (PRODUCTS + "test_bfloat16_derivatives_are_those_of_float32[64-False]",),
        "a head that is trained in bfloat16 on a CPU learns nothing",
    ),
    Fault(
        "training_heads/transposed-weights-get-the-gradient-of-others",
        "pallas_kernels/dense_matmul/bfloat16_cpu.py",
        "(gradient, x) if spec.is_transposed else (x, gradient)",
        "(x, gradient)",
        (PRODUCTS + "test_bfloat16_derivatives_are_those_of_float32[64-True]",),
        "tied embeddings cannot be trained in bfloat16 on a CPU",
    ),
    Fault(
        "training_heads/bfloat16-sums-are-rounded",
        "pallas_kernels/dense_matmul/bfloat16_cpu.py",
        "preferred_element_type=jnp.float32)",
        "preferred_element_type=jnp.bfloat16).astype(jnp.float32)",
        (PRODUCTS + "test_bfloat16_products_are_summed_in_float32[64-float32-False]",),
        "logits have 8 bits, and a CPU's matrix units are not used",
    ),
    Fault(
        "training_heads/prompts-begin-alike",
        "jaxinfer/training/head_data.py",
        "beginnings[number % len(beginnings)]",
        "beginnings[0]",
        (ROWS + "test_prompts_of_the_target_are_those_that_end_each_once",),
        "a head sees questions alone, and drafts code, lists and summaries badly",
    ),
    Fault(
        "training_heads/prompts-lose-their-beginnings",
        "jaxinfer/training/head_data.py",
        "        text[len(header) :].tolist()",
        "        text[len(request.prompt) :].tolist()",
        (ROWS + "test_prompts_of_the_target_are_those_that_end_each_once",),
        "half sentences are answered",
    ),
    Fault(
        "training_heads/answers-are-as-long-as-rows",
        "jaxinfer/training/head_data.py",
        "min(options.length - len(prompt), options.answer_tokens or options.length)",
        "options.length - len(prompt)",
        (ROWS + "test_an_answer_has_at_most_so_many_tokens",),
        "--answer-tokens is ignored",
    ),
    Fault(
        "training_heads/texts-come-in-the-order-in-which-they-were-written",
        "jaxinfer/cli/training_data.py",
        "return [texts[number] for number in range(len(requests))]",
        "return list(texts.values())",
        ("tests/cli/test_training_data.py::test_greedy_texts_are_written_apart_from_sampled_ones",),
        "answers stand after the prompts of others",
    ),
)

FAULTS = (*COMPUTED, *COUNTED, *WRITTEN, *IN_SPECULATORS_FORM, *PLACED, *FAST)
