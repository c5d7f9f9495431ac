"""A tiny model of every family as GGUF: what llama.cpp's converter makes of its config.json and tensors.

Plain data and NumPy. The live test compares the names with gguf-py's own table.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.checkpoints_convert.gguf.gguf_models import side_by_side

Tensors = dict[str, np.ndarray]

# Case of cases.py: architecture of GGUF, and the fields of config.json to change because GGUF has no word for
# them (the loader knows the real models' values).
_NO_TYPES = {"layer_types": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("llama", {}),
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2moe", {**_NO_TYPES, "use_sliding_window": False, "mlp_only_layers": []}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {"decoder_sparse_step": 1}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**_NO_TYPES, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", {**_NO_TYPES, "query_pre_attn_scalar": 24}),
    "phi": ("phi2", {}),
    "phi3": ("phi3", {}),
    "phi3_longrope": ("phi3", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gptneox", {}),
    "gpt_neox_sequential": ("gptneox", {}),
    "stablelm": ("stablelm", {}),
    "stablelm_parallel": ("stablelm", {}),
    "falcon": ("falcon", {}),
    "falcon_multi_query": ("falcon", {}),
    "olmo2": ("olmo2", {}),
    "cohere": ("command-r", {}),
    "cohere_qk_norm": ("command-r", {}),
    "cohere2": ("cohere2", _NO_TYPES),
    "granite": ("granite", {}),
    "glm4": ("glm4", {}),
    "smollm3": (
        "smollm3",
        {**_NO_TYPES, "no_rope_layers": None, "no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "gpt_oss": ("gpt-oss", {"swiglu_limit": 7.0}),  # fixed in llama.cpp
    "deepseek_v2": ("deepseek2", {}),
    "deepseek_v2_lite": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5-moe", {}),
    # The converter stretches the base, which is then rounded to float32.
    "hunyuan_dense": ("hunyuan-dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 700000.0}}),
    "hunyuan_moe": ("hunyuan-moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 700000.0}}),
    "arcee": ("arcee", {}),
    "exaone4": ("exaone4", {}),
    "exaone4_full": ("exaone4", {}),
    "olmoe": ("olmoe", {"clip_qkv": None}),
    "minimax_m2": ("minimax-m2", {}),
    "glm4_moe": ("glm4moe", {}),
    "glm4_moe_groups": ("glm4moe", {}),
}

_LAYER = re.compile(r"(?:model|transformer|gpt_neox)\.(?:layers|h)\.(\d+)\.(.*)")
_TOP = {
    **dict.fromkeys(("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in"), "token_embd"),
    "transformer.word_embeddings": "token_embd",
    "transformer.wpe": "position_embd",
    **dict.fromkeys(("model.norm", "model.final_layernorm", "transformer.ln_f"), "output_norm"),
    "gpt_neox.final_layer_norm": "output_norm",
    **dict.fromkeys(("lm_head", "embed_out"), "output"),
}
_ATTENTION = {
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.dense", "attn.c_proj", "attention.dense"), "attn_output"),
    "self_attention.dense": "attn_output",
    **dict.fromkeys(("self_attn.qkv_proj", "attn.c_attn", "attention.query_key_value"), "attn_qkv"),
    "self_attention.query_key_value": "attn_qkv",
    **dict.fromkeys(("self_attn.q_norm", "self_attn.query_layernorm"), "attn_q_norm"),
    **dict.fromkeys(("self_attn.k_norm", "self_attn.key_layernorm"), "attn_k_norm"),
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
_MLP = {
    "mlp.gate_proj": "ffn_gate",
    **dict.fromkeys(("mlp.up_proj", "mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h", "mlp.gate_up_proj"), "ffn_up"),
    **dict.fromkeys(("mlp.down_proj", "mlp.fc2", "mlp.dense_4h_to_h"), "ffn_down"),
    "mlp.c_proj": "ffn_down",
    **dict.fromkeys(("mlp.gate", "mlp.gate.wg", "block_sparse_moe.gate", "mlp.router"), "ffn_gate_inp"),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{kind}.{name}_proj": f"ffn_{name}_shexp" for kind in ("shared_expert", "shared_experts", "shared_mlp")
       for name in ("gate", "up", "down")},
}  # fmt: skip
_NORMS = {
    **dict.fromkeys(("input_layernorm", "ln_1", "ln_mlp"), "attn_norm"),
    "ln_attn": "attn_norm_2",
    "ln_2": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    **dict.fromkeys(("post_feedforward_layernorm", "post_mlp_layernorm"), "post_ffw_norm"),
}
_NAMES = {**_ATTENTION, **_MLP, **_NORMS}
# Where the norm after attention is not the one before the MLP.
_POST_NORMED = ("gemma2", "gemma3", "olmo2", "gpt-oss", "seed_oss", "exaone4", "glm4moe")
_PERMUTED = ("llama", "granite", "smollm3", "arcee")


def gguf_name(name: str, architecture: str) -> str:
    """The name of a tensor that is one by itself in both."""
    module, _, kind = name.rpartition(".")
    match = _LAYER.fullmatch(module)
    if match is None:
        return f"{_TOP[module]}.{kind}"
    if match[2] == "post_attention_layernorm" and architecture in _POST_NORMED:
        return f"blk.{match[1]}.post_attention_norm.{kind}"
    return f"blk.{match[1]}.{_NAMES[match[2]]}.{kind}"


def with_all_layers_alike(shapes: Mapping[str, list[int]], config: dict[str, Any]) -> dict[str, list[int]]:
    """A mixture in which every layer has experts, as GGUF has no word for others (but for DeepSeek's first ones)."""
    experts = {match[1] for name in shapes if "expert" in name and (match := re.match(r"model\.layers\.(\d+)\.", name))}
    if not experts or "first_k_dense_replace" in config or "moe_layer_start_index" in config:
        return dict(shapes)
    prefix = f"model.layers.{min(experts)}."
    found = {name: shape for name, shape in shapes.items() if not name.startswith("model.layers.")}
    for layer in range(config["num_hidden_layers"]):
        found |= {
            f"model.layers.{layer}.{name.removeprefix(prefix)}": shape
            for name, shape in shapes.items()
            if name.startswith(prefix)
        }
    return found


def to_gguf(architecture: str, config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors. Norms, biases and routers are float32, as the converter writes them."""
    found: Tensors = {}
    rest = dict(tensors)
    for convert in (_stacked_norms, _experts, _latent):
        found |= convert(rest, config)
    for name, array in rest.items():
        found[gguf_name(name, architecture)] = _value(name, array, architecture, config)
    metadata, more = _metadata(architecture, config, set(found))
    return metadata, {name: np.ascontiguousarray(array) for name, array in (found | more).items()}


def _value(name: str, array: np.ndarray, architecture: str, config: dict[str, Any]) -> np.ndarray:
    heads = config.get("num_attention_heads") or config.get("n_head")
    kv_heads = config.get("num_key_value_heads") or heads
    if architecture in _PERMUTED and re.search(r"\.[qk]_proj\.", name):
        return side_by_side(array, heads if ".q_proj." in name else kv_heads)
    if architecture.startswith("gemma") and "norm" in name:
        return array + 1
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        return array.T
    if architecture == "gptneox" and "query_key_value" in name:
        return array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    if architecture == "falcon" and "query_key_value" in name:
        groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        parts = array.reshape(groups, heads // groups + 2, -1, *array.shape[1:])
        return np.concatenate(
            [part.reshape(-1, *array.shape[1:]) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])]
        )
    return array


def _stacked_norms(rest: Tensors, config: dict[str, Any]) -> Tensors:
    """StableLM's norm of each head."""
    found = {}
    for layer in range(config.get("num_hidden_layers", 0)):
        for letter in "qk":
            names = [name for name in rest if f"layers.{layer}.self_attn.{letter}_layernorm.norms." in name]
            if names:
                found[f"blk.{layer}.attn_{letter}_norm.weight"] = np.stack([rest.pop(name) for name in names])
    return found


def _experts(rest: Tensors, config: dict[str, Any]) -> Tensors:
    found = {}
    for layer in range(config.get("num_hidden_layers", 0)):
        here = f"model.layers.{layer}."
        for source, target in (("gate_proj", "gate"), ("w1", "gate"), ("up_proj", "up"), ("w3", "up"),
                               ("down_proj", "down"), ("w2", "down")):  # fmt: skip
            pattern = re.compile(rf"{re.escape(here)}.*\.experts\.(\d+)\.{source}\.weight")
            names = sorted((int(match[1]), name) for name in rest if (match := pattern.fullmatch(name)))
            if names:
                found[f"blk.{layer}.ffn_{target}_exps.weight"] = np.stack([rest.pop(name) for _, name in names])
        fused, down = f"{here}mlp.experts.gate_up_proj", f"{here}mlp.experts.down_proj"
        if fused in rest and f"{fused}_bias" not in rest:  # [E, out, in], gates and then ups
            gate, up = np.split(rest.pop(fused), 2, axis=1)
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            found[f"blk.{layer}.ffn_down_exps.weight"] = rest.pop(down)
        if fused in rest:  # gpt-oss: [E, in, out], gates and ups in turn
            for start, name in ((0, "gate"), (1, "up")):
                found[f"blk.{layer}.ffn_{name}_exps.weight"] = rest[fused][..., start::2].swapaxes(1, 2)
                found[f"blk.{layer}.ffn_{name}_exps.bias"] = rest[f"{fused}_bias"][..., start::2]
            found[f"blk.{layer}.ffn_down_exps.weight"] = rest[down].swapaxes(1, 2)
            found[f"blk.{layer}.ffn_down_exps.bias"] = rest[f"{down}_bias"]
            for name in (fused, f"{fused}_bias", down, f"{down}_bias"):
                del rest[name]
        if (name := f"{here}self_attn.sinks") in rest:
            found[f"blk.{layer}.attn_sinks.weight"] = rest.pop(name)
        for gate in ("mlp.gate.", "mlp.", "mlp.gate.moe_statics."):
            if (name := f"{here}{gate}e_score_correction_bias") in rest:
                found[f"blk.{layer}.exp_probs_b.bias"] = rest.pop(name).squeeze()
    return found


def _latent(rest: Tensors, config: dict[str, Any]) -> Tensors:
    """Keys and values of the latent vector apart, the keys' transposed."""
    found = {}
    for layer in range(config.get("num_hidden_layers", 0)):
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        if name in rest:
            array = rest.pop(name).reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
            keys = config["qk_nope_head_dim"]
            found[f"blk.{layer}.attn_k_b.weight"] = array[:, :keys].swapaxes(1, 2)
            found[f"blk.{layer}.attn_v_b.weight"] = array[:, keys:]
    return found


def _metadata(architecture: str, config: dict[str, Any], names: set[str]) -> tuple[dict[str, Any], Tensors]:
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads")
    if architecture == "falcon":
        kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    inner = next(config[name] for name in ("intermediate_size", "ffn_hidden_size", "n_inner") if config.get(name))
    values: dict[str, Any] = {
        "context_length": config.get("max_position_embeddings") or config["n_positions"],
        "embedding_length": hidden,
        "block_count": config.get("num_hidden_layers") or config["n_layer"],
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.sliding_window": config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps") or config.get("layer_norm_epsilon"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "use_parallel_residual": config.get("use_parallel_residual"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": config.get("logits_scaling") or config.get("logit_scale"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if config.get("head_dim"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    values |= {name: value for name, value in _newer(architecture, config).items() if value is not None}
    if architecture == "gpt-oss":
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "phi3" and values["attention.sliding_window"] is None:
        values["attention.sliding_window"] = 0
    if architecture == "deepseek2":
        values |= _deepseek(config)
        head_dim = config["qk_rope_head_dim"]
    rope, tensors = _rope(config, head_dim)
    values |= rope
    if architecture == "gpt2":
        values = {name: value for name, value in values.items() if not name.startswith("rope.")}
    named = {f"{architecture}.{name}": value for name, value in values.items() if value is not None}
    return {"general.architecture": architecture, **named}, tensors


def _newer(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Metadata that converters of families since 2025 write besides."""
    if architecture == "exaone4" and config["sliding_window"]:
        is_sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        return {"attention.sliding_window_pattern": is_sliding}
    if architecture == "minimax-m2":
        sizes = {"expert_feed_forward_length": config["intermediate_size"]}
        return {**sizes, "expert_gating_func": 2, "rope.dimension_count": config["rotary_dim"]}
    if architecture == "glm4moe":
        return {
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
            "expert_gating_func": 2,
        }
    if architecture == "ernie4_5-moe":
        return {
            "expert_count": config["moe_num_experts"],
            "expert_used_count": config["moe_k"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_shared_count": config["moe_num_shared_experts"],
            "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
        }
    if architecture == "hunyuan-moe":
        return {
            "expert_used_count": config["moe_topk"][0],
            "expert_shared_count": 1,
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_feed_forward_length": config["intermediate_size"],
        }
    return {}


def _deepseek(config: dict[str, Any]) -> dict[str, Any]:
    is_v3 = config["model_type"] == "deepseek_v3"
    rope, keys, rank = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["kv_lora_rank"]
    groups = is_v3 or config.get("topk_method") == "group_limited_greedy"
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": keys + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] if is_v3 else False,
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_group_count": config["n_group"] if groups else None,
        "expert_group_used_count": config["topk_group"] if groups else None,
    }


def _rope(config: dict[str, Any], head_dim: int) -> tuple[dict[str, Any], Tensors]:
    parameters = config.get("rope_parameters") or {}
    rope = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention")
    partial = rope.get("partial_rotary_factor", config.get("rotary_pct") or config.get("partial_rotary_factor") or 1.0)
    values = {"rope.freq_base": float(rope.get("rope_theta", 10000.0)), "rope.dimension_count": int(head_dim * partial)}
    if local and local["rope_theta"] != rope["rope_theta"]:
        values["rope.freq_base_swa"] = float(local["rope_theta"])
    kind = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings")
    if kind == "longrope":
        factors = {f"rope_factors_{name}.weight": np.float32(rope[f"{name}_factor"]) for name in ("long", "short")}
        scale = config["max_position_embeddings"] / original
        attention = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        return {
            **values,
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": attention,
        }, factors
    if kind != "default":
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = original
        if rope.get("mscale_all_dim"):
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return values, {}
