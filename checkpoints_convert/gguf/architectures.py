"""The architectures of GGUF files, and how their metadata become fields of config.json.

Sources: llama.cpp's converter (convert_hf_to_gguf.py), which changes tensors and omits what the loader knows, and its
loader (llama-model.cpp).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints_convert.gguf.index import Metadata

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """Attributes:
    huggingface: the architecture in config.json, unless `fields` has another.
    fields: makes fields of config.json, with Llama's names, of the metadata, besides those that all architectures have.
    present: boolean fields of config.json, each with the tensor of the first block that tells whether it is true.
    pairs_neighbours: whether queries and keys are stored interleaved, for ggml's "normal" rope.
    has_layer_norm: whether the epsilon is LayerNorm's, rather than RMSNorm's. adds_one: norms are stored as w + 1.
    has_later_layers: whether files may have blocks beyond the last layer, for multi-token prediction, which are not
      used; `fields` gives the number of layers.
    """

    huggingface: str
    fields: Callable[[Metadata], Values] = lambda metadata: {}
    pairs_neighbours: bool = False
    has_layer_norm: bool = False
    adds_one: bool = False
    has_later_layers: bool = False
    present: Mapping[str, str] = field(default_factory=dict)

    def values(self, metadata: Metadata) -> Values:
        """Fields of config.json besides those that all architectures have."""
        return {**{name: _has(metadata, tensor) for name, tensor in self.present.items()}, **self.fields(metadata)}


def _has(metadata: Metadata, name: str) -> bool:
    return f"blk.0.{name}" in metadata.index.tensors


def _or_zero(metadata: Metadata, name: str) -> int:
    return 0 if metadata.is_zero(name) else metadata.integer(name, 0, is_width=False)


def _num_experts(metadata: Metadata) -> int:
    """Number of experts, which must be that of the routers."""
    count = metadata.integer("expert_count")
    tensors = metadata.index.tensors
    router = next((name for name in tensors if name.endswith(".ffn_gate_inp.weight")), None)
    if router is not None and tensors[router].shape[0] != count:
        shape = list(tensors[router].shape)
        metadata.problem("expert_count", f"is {count}, the router {router!r} has the shape {shape}")
        return 1
    return count


def _experts(
    metadata: Metadata, count: str, chosen: str = "num_experts_per_tok", size: str = "moe_intermediate_size"
) -> Values:
    """Sizes of experts, by these names in config.json."""
    return {
        count: _num_experts(metadata),
        chosen: metadata.integer("expert_used_count"),
        size: metadata.integer("expert_feed_forward_length"),
    }


def _mlp_experts(metadata: Metadata, count: str, chosen: str = "num_experts_per_tok") -> Values:
    """Numbers of experts of the MLP's width, by these names in config.json."""
    return {count: _num_experts(metadata), chosen: metadata.integer("expert_used_count")}


def _deepseek_experts(metadata: Metadata, *, normalizes: bool) -> Values:
    """Experts in groups; `normalizes` is the default."""
    return {
        **_experts(metadata, "n_routed_experts"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "first_k_dense_replace": _or_zero(metadata, "leading_dense_block_count"),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", normalizes),
    }


def _llama(metadata: Metadata) -> Values:
    windows = _windows(metadata)
    if metadata.has("expert_count") and not metadata.is_zero("expert_count"):  # llama.cpp writes 0
        metadata.expect("expert_weights_norm", True)
        return {"architectures": ["MixtralForCausalLM"], **_mlp_experts(metadata, "num_local_experts"), **windows}
    if windows["sliding_window"] is not None:
        return {"architectures": ["MistralForCausalLM"], **windows}
    return {"attention_bias": _has(metadata, "attn_output.bias"), "mlp_bias": _has(metadata, "ffn_down.bias")}


def _qwen2moe(metadata: Metadata) -> Values:
    shared = metadata.integer("expert_shared_feed_forward_length")
    normalizes = metadata.boolean("expert_weights_norm", False)
    experts = _experts(metadata, "num_experts")
    return {**experts, "shared_expert_intermediate_size": shared, "norm_topk_prob": normalizes}


def _qwen3moe(metadata: Metadata) -> Values:
    return {**_experts(metadata, "num_experts"), "norm_topk_prob": metadata.boolean("expert_weights_norm", True)}


def _deepseek2(metadata: Metadata) -> Values:
    """DeepSeek-V3 if the router has a correction bias, else V2."""
    experts = _deepseek_experts(metadata, normalizes=False)
    is_v3 = f"blk.{experts['first_k_dense_replace']}.exp_probs_b.bias" in metadata.index.tensors
    rope_size = metadata.integer("rope.dimension_count")
    # Then the lengths without the suffix are those of the latent vector.
    is_split = metadata.has("attention.key_length_mla")
    suffix = "_mla" if is_split else ""
    if is_split:
        metadata.expect("attention.value_length", metadata.integer("attention.kv_lora_rank"))
    _check_gating(metadata, is_v3)
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return {
        **experts,
        "head_dim": rope_size,
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank", None),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": max(1, metadata.integer(f"attention.key_length{suffix}") - rope_size),
        "v_head_dim": metadata.integer(f"attention.value_length{suffix}"),
        **({"architectures": ["DeepseekV3ForCausalLM"]} if is_v3 else {"topk_method": method}),
    }


def _check_gating(metadata: Metadata, is_v3: bool) -> None:
    """Reports a gating function of the other version; files without the key have V2's, as in llama.cpp."""
    known, wanted = {0: "softmax", 1: "softmax", 2: "sigmoid"}, "sigmoid" if is_v3 else "softmax"
    name = "expert_gating_func"
    value = _or_zero(metadata, name)
    if known.get(value) != wanted:
        bias = "a" if is_v3 else "no"
        stated = f"is {value}, {known.get(value, 'unknown')}" if metadata.has(name) else "is missing, which is softmax"
        metadata.problem(name, f"{stated}; with {bias} bias of the experts' choice only {wanted} is supported")


def _glm4moe(metadata: Metadata) -> Values:
    """The blocks for multi-token prediction are counted in `block_count`."""
    metadata.expect("expert_gating_func", 2)  # sigmoid
    later = _or_zero(metadata, "nextn_predict_layers")
    return {
        **_deepseek_experts(metadata, normalizes=True),
        "num_hidden_layers": max(1, metadata.integer("block_count", is_width=False) - later),
    }


def _minimax_m2(metadata: Metadata) -> Values:
    metadata.expect("expert_gating_func", 2)  # sigmoid
    return _experts(metadata, "num_local_experts", size="intermediate_size")


def _ernie4_5moe(metadata: Metadata) -> Values:
    metadata.integer("expert_shared_feed_forward_length", None)  # which some files have wrong
    return {
        **_experts(metadata, "moe_num_experts", "moe_k"),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_layer_start_index": _or_zero(metadata, "leading_dense_block_count"),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1, is_width=False),
    }


def _hunyuan_moe(metadata: Metadata) -> Values:
    size = metadata.integer("feed_forward_length")
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        metadata.expect(name, size)
    shared = metadata.integer("expert_shared_count", 1)
    return {**_mlp_experts(metadata, "num_experts", "moe_topk"), "num_shared_expert": shared}


def _gpt_oss(metadata: Metadata) -> Values:
    metadata.expect("expert_gating_func", 3)  # softmax of the chosen
    return {**_experts(metadata, "num_local_experts", size="intermediate_size"), **_windows(metadata)}


def _windows(metadata: Metadata) -> Values:
    """`sliding_window` (None for 0 or no such key) and, if the file has a pattern, `layer_types`."""
    name = "attention.sliding_window"
    window = None if metadata.is_zero(name) else metadata.integer(name, None, is_width=False)
    values: Values = {"sliding_window": window}
    pattern = f"{name}_pattern"
    num_layers = metadata.integer("block_count", is_width=False)
    if not metadata.has(pattern) or num_layers > len(metadata.index.tensors):
        return values
    if metadata.index.count(f"{metadata.prefix}{pattern}") is not None:
        is_sliding = metadata.flags(pattern, num_layers)
    else:  # every n-th layer has full attention; 0: none has
        every = _or_zero(metadata, pattern)
        is_sliding = [not every or (layer + 1) % every != 0 for layer in range(num_layers)]
    if window is None or is_sliding is None:  # the pattern has no effect, or was reported
        return values
    return {**values, "layer_types": ["sliding_attention" if slides else "full_attention" for slides in is_sliding]}


def _cap(metadata: Metadata, name: str, default: float | None) -> float | None:
    """A soft cap; None for 0."""
    return None if metadata.is_zero(name) else metadata.number(name, default)


def _score_scalar(metadata: Metadata, computed: int) -> float:
    """The number whose square root divides the scores: by the file's scale, by default `computed`."""
    name = "attention.scale"
    if not metadata.has(name) or metadata.is_zero(name):
        return computed
    scalar = metadata.number(name) ** -2
    return computed if math.isclose(scalar, computed, rel_tol=1e-5) else scalar


def _gemma2(
    metadata: Metadata,
    layers_of_27b: int = 46,
    softcap: float | None = 50.0,
    final_softcap: float | None = 30.0,
) -> Values:
    heads, width = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", 256)
    # The 27B divides scores by the root of hidden_size / heads, which is not in the file.
    is_27b = metadata.integer("block_count", is_width=False) == layers_of_27b
    return {
        **_windows(metadata),
        "attn_logit_softcapping": _cap(metadata, "attn_logit_softcapping", softcap),
        "final_logit_softcapping": _cap(metadata, "final_logit_softcapping", final_softcap),
        "query_pre_attn_scalar": _score_scalar(metadata, width // heads if is_27b else head_dim),
    }


def _gemma3(metadata: Metadata) -> Values:
    local = {"rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0)}
    return {**_gemma2(metadata, 62, None, None), **local}


def _phi3(metadata: Metadata) -> Values:
    original = metadata.integer("rope.scaling.original_context_length", None, is_width=False)
    values: Values = {**_windows(metadata)}
    return values if original is None else {**values, "original_max_position_embeddings": original}


def _stablelm(metadata: Metadata) -> Values:
    # Converters write true if config.json has no such field; the norm before the MLP decides.
    metadata.boolean("use_parallel_residual", True)
    return {"use_parallel_residual": not _has(metadata, "ffn_norm.weight")}


def _falcon(metadata: Metadata) -> Values:
    kv_heads = metadata.integer("attention.head_count_kv", 1)
    has_two_norms = _has(metadata, "attn_norm_2.weight")
    return {
        "new_decoder_architecture": has_two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": kv_heads == 1,
        "parallel_attn": True,
        "alibi": False,
    }


def _olmo2(metadata: Metadata) -> Values:
    windows = _windows(metadata)
    if windows["sliding_window"] is not None:
        return {"architectures": ["Olmo3ForCausalLM"], **windows}
    return {"attention_bias": False}


def _granite(metadata: Metadata) -> Values:
    return {
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


_QKV_BIAS, _OUTPUT_BIAS = {"attention_bias": "attn_q.bias"}, {"attention_bias": "attn_output.bias"}
_MLP_BIAS = {"mlp_bias": "ffn_down.bias"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _llama, pairs_neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM", lambda _: {"use_sliding_window": False}),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3": Architecture("Qwen3ForCausalLM", lambda _: {"use_sliding_window": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3moe),
    "gemma": Architecture("GemmaForCausalLM", adds_one=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, adds_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, adds_one=True),
    "phi2": Architecture("PhiForCausalLM", has_layer_norm=True),
    "phi3": Architecture("Phi3ForCausalLM", _phi3),
    "gpt2": Architecture("GPT2LMHeadModel", has_layer_norm=True),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        lambda metadata: {"use_parallel_residual": metadata.boolean("use_parallel_residual", True)},
        has_layer_norm=True,
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        _stablelm,
        has_layer_norm=True,
        present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    ),
    "falcon": Architecture("FalconForCausalLM", _falcon, has_layer_norm=True, present={"bias": "attn_qkv.bias"}),
    "olmo2": Architecture("Olmo2ForCausalLM", _olmo2),
    "command-r": Architecture(
        "CohereForCausalLM",
        lambda metadata: {"logit_scale": metadata.number("logit_scale")},
        pairs_neighbours=True,
        has_layer_norm=True,
        present={**_QKV_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        lambda metadata: {"logit_scale": metadata.number("logit_scale"), **_windows(metadata)},
        pairs_neighbours=True,
        has_layer_norm=True,
    ),
    "granite": Architecture(
        "GraniteForCausalLM", _granite, pairs_neighbours=True, present={**_OUTPUT_BIAS, **_MLP_BIAS}
    ),
    "glm4": Architecture("Glm4ForCausalLM", pairs_neighbours=True, present=_QKV_BIAS),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss, present=_OUTPUT_BIAS),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _deepseek2, present=_OUTPUT_BIAS),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs_neighbours=True),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", present={**_QKV_BIAS, "attention_out_bias": "attn_output.bias", **_MLP_BIAS}
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", pairs_neighbours=True, present={"use_bias": "attn_q.bias"}),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", _ernie4_5moe, pairs_neighbours=True, present={"use_bias": "attn_q.bias"}
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", present=_QKV_BIAS),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", _hunyuan_moe, present=_QKV_BIAS),
    "arcee": Architecture("ArceeForCausalLM", pairs_neighbours=True, present={**_OUTPUT_BIAS, **_MLP_BIAS}),
    "exaone4": Architecture("Exaone4ForCausalLM", _windows),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        lambda metadata: {**_mlp_experts(metadata, "num_experts"), "norm_topk_prob": False},
        present=_OUTPUT_BIAS,
    ),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _minimax_m2),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _glm4moe,
        has_later_layers=True,
        present={**_QKV_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    ),
}
