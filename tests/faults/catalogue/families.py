"""Faults in what only some families of models compute, and in how their files are read."""

from tests.faults.fault import Fault

_ROUTES = "tests/models/test_moe.py"
_REFUSALS = "tests/checkpoints_convert/huggingface/test_config_refusals.py"

FAULTS = (
    Fault(
        "models/sparsemixer-weighs-the-second-expert-beside-the-first",
        "jaxinfer/models",
        "weight(others, second)",
        "weight(logits, second)",
        (f"{_ROUTES}::test_sparsemixer_weighs_each_expert_among_those_near_it",),
        "Phi-3.5-MoE adds too little of every second expert",
    ),
    Fault(
        "models/sparsemixer-compares-with-the-best-logit-alone",
        "jaxinfer/models",
        "/ jnp.maximum(jnp.abs(logits), best) > 2 * jitter",
        "/ jnp.abs(best) > 2 * jitter",
        (f"{_ROUTES}::test_sparsemixer_compares_with_the_larger_size_of_two_logits",),
        "Phi-3.5-MoE leaves out near experts where logits are negative",
    ),
    Fault(
        "models/scores-scale-what-experts-return",
        "jaxinfer/models",
        "self.shared, self.scales_input = shared, moe.scales_input",
        "self.shared, self.scales_input = shared, False",
        (f"{_ROUTES}::test_scores_may_scale_what_experts_read",),
        "Llama 4 adds other outputs of its experts",
    ),
    Fault(
        "models/query-temperature-one-position-late",
        "jaxinfer/models",
        "(self.positions.astype(jnp.float32) + 1) / period",
        "self.positions.astype(jnp.float32) / period",
        ("tests/models/test_rope.py::test_the_temperature_of_queries_grows_by_periods",),
        "Llama 4 scales the queries of one position in each period wrongly",
    ),
    Fault(
        "models/queries-are-normalized-before-rotation-only",
        "jaxinfer/models",
        "        if self.is_norm_after_rotation:\n",
        "        if False:\n",
        ("tests/oracle/test_golden.py::test_hidden_states_and_logits[hunyuan_dense]",),
        "Hunyuan's queries and keys are not normalized",
    ),
    Fault(
        "models/long-sequences-have-the-scale-of-short-ones",
        "jaxinfer/models",
        "rope.long_mscale if is_long else rope.short_mscale",
        "rope.short_mscale",
        ("tests/models/test_rope.py::test_longrope_may_have_a_scale_for_each_length",),
        "Phi-3.5-MoE attends too softly beyond 4,096 tokens",
    ),
    Fault(
        "models/xielu-without-its-slope-below-zero",
        "jaxinfer/models",
        "slope = beta + jax.nn.softplus(self.alpha_n[...])",
        "slope = jax.nn.softplus(self.alpha_n[...])",
        ("tests/models/test_basic.py::test_xielu_is_that_of_the_paper",),
        "Apertus computes another activation",
    ),
    Fault(
        "models/values-are-not-clipped",
        "jaxinfer/models",
        "q, k, v = (jnp.clip(y, -self.clip, self.clip) for y in (q, k, v))",
        "q, k = (jnp.clip(y, -self.clip, self.clip) for y in (q, k))",
        ("tests/oracle/test_golden.py::test_hidden_states_and_logits[olmoe]",),
        "OLMoE with clip_qkv adds values that are too large",
    ),
    Fault(
        "models/sequences-may-be-longer-than-a-chunk-of-attention",
        "jaxinfer/models",
        "num_tokens > self.attention_chunk:",
        "num_tokens > 2 * self.attention_chunk:",
        ("tests/models/test_config.py::test_sequences_are_not_longer_than_a_chunk_of_attention",),
        "Llama 4 attends to keys that it was not trained to see",
    ),
    Fault(
        "checkpoints/unsupported-values-are-read-as-if-absent",
        "checkpoints_convert",
        "is not None and value not in values:",
        "is not None and not values:",
        (f"{_REFUSALS}::test_values_that_are_not_applied_are_refused_by_name",),
        "a router with another scoring function loads and answers nonsense",
    ),
    Fault(
        "checkpoints/a-head-width-of-its-own-is-ignored",
        "checkpoints_convert",
        'data.get("head_dim") not in (None, head_dim):',
        'data.get("head_dim") in (None, -head_dim):',
        (f"{_REFUSALS}::test_values_that_are_not_applied_are_refused_by_name",),
        "OLMo 2 with wider heads is refused by its tensors' shapes, not by name",
    ),
    Fault(
        "checkpoints/blocks-of-later-tokens-are-layers",
        "checkpoints_convert",
        '"num_hidden_layers": max(1, metadata.integer("block_count", is_width=False) - later),',
        '"num_hidden_layers": metadata.integer("block_count", is_width=False),',
        ("tests/oracle/test_gguf_families.py::test_blocks_for_multi_token_prediction_are_left_out",),
        "GGUF files of GLM-4.5 do not open",
    ),
)
