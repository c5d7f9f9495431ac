"""Trees in the forms of other libraries, made of ours: each array as the library's own einsum or converter has it."""

import math

import jax
import ml_dtypes
import numpy as np

from checkpoints_convert import model_config
from jaxinfer.models import abstract_params

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MORE = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama3.1": {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen3-experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], "tie_word_embeddings": True, "num_key_value_heads": 4},
    # Two patterns of windows, and one layer more.
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "num_hidden_layers": 13,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
    },
}


def config_for(name):
    return model_config({**BASE, **MORE[name]})


def numbered(config, seed=0):
    """Parameters of NumPy arrays, no two numbers alike."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: random.normal(0, 0.1, leaf.shape).astype(np.float32), abstract_params(config))


def nested(arrays):
    """A nested dict from names with dots, whose numbers are integers, as in an `nnx.State`."""
    tree = {}
    for name, array in arrays.items():
        *path, last = [int(part) if part.isdecimal() else part for part in name.split(".")]
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


def tunix(config, params):
    """`tunix.models.llama3`, `qwen2` and `qwen3`: einsums 'BTD,DNH->BTNH' and 'BTNH,NHD->BTD'."""
    D, K = config.hidden_size, config.head_dim
    theirs = {"embedder.input_embedding": params["embed"], "final_norm.w": params["final_norm"]["weight"]}
    if "lm_head" in params:
        theirs["lm_head.w"] = params["lm_head"]
    for number, layer in params["layers"].items():
        attention, mlp, prefix = layer["attention"], layer["mlp"], f"layers.{number}"
        theirs[f"{prefix}.input_layernorm.w"] = layer["attention_norm"]["weight"]
        theirs[f"{prefix}.post_attention_layernorm.w"] = layer["mlp_norm"]["weight"]
        for name in ("q_proj", "k_proj", "v_proj"):
            theirs[f"{prefix}.attn.{name}.w"] = attention[name]["weight"].reshape(D, -1, K)
            if "bias" in attention[name]:
                theirs[f"{prefix}.attn.{name[0]}_bias"] = attention[name]["bias"]
        theirs[f"{prefix}.attn.o_proj.w"] = attention["o_proj"]["weight"].reshape(-1, K, D)
        for name in ("q_norm", "k_norm"):
            if name in attention:
                theirs[f"{prefix}.attn.{name}.w"] = attention[name]["weight"]
        experts = mlp.get("experts")
        for name in ("gate_proj", "up_proj", "down_proj"):
            end, stack = ("", experts) if experts else (".kernel", mlp)
            theirs[f"{prefix}.mlp.{name}{end}"] = stack[name]["weight"]
        if experts:
            theirs[f"{prefix}.mlp.router.kernel"] = mlp["router"]["weight"]
    return nested(theirs)


def gemma(config, params, *, linen=False, transposed=True):
    """flax/examples/gemma and `tunix.models.gemma3`, or the Linen form: einsums 'BTD,NDH->BTNH', 'BSD,CKDH->CBSKH',
    'BTNH,NHD->BTD' and '...F,NHF->...NH' (`transposed`) or '...F,NFH->...NH'."""
    D, K = config.hidden_size, config.head_dim
    theirs = {"embedder.input_embedding": params["embed"], "final_norm.scale": params["final_norm"]["weight"]}

    def heads_first(weight):
        return np.stack(np.split(weight, weight.shape[1] // K, axis=1))

    for number, layer in params["layers"].items():
        attention, mlp = layer["attention"], layer["mlp"]
        prefix = f"layer_{number}" if linen else f"layers.{number}"
        norms = {"attention_norm": "pre_attention_norm", "mlp_norm": "pre_ffw_norm"}
        norms |= {"attention_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
        theirs |= {f"{prefix}.{norms[name]}.scale": layer[name]["weight"] for name in norms if name in layer}
        q, k, v = (heads_first(attention[name]["weight"]) for name in ("q_proj", "k_proj", "v_proj"))
        if len(q) == len(k):
            theirs[f"{prefix}.attn.qkv_einsum.w"] = np.stack([q, k, v])
        else:
            theirs[f"{prefix}.attn.q_einsum.w"] = q
            theirs[f"{prefix}.attn.kv_einsum.w"] = np.stack([k, v])
        theirs[f"{prefix}.attn.attn_vec_einsum.w"] = attention["o_proj"]["weight"].reshape(-1, K, D)
        for own, name in {"q_norm": "_query_norm", "k_norm": "_key_norm"}.items():
            if own in attention:
                theirs[f"{prefix}.attn.{name}.scale"] = attention[own]["weight"]
        gate, up, down = (mlp[name]["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        if linen:
            theirs[f"{prefix}.mlp.gating_einsum"] = np.stack([gate.T, up.T] if transposed else [gate, up])
            theirs[f"{prefix}.mlp.linear"] = down
        else:
            theirs |= {f"{prefix}.mlp.{name}.kernel": mlp[name]["weight"] for name in mlp}
    return nested(theirs)


def gemma_linen(config, params):
    return {"params": gemma(config, params, linen=True)}


def gemma_checkpoint(config, params):
    """The keys of its checkpoints."""
    flat = {}
    for name, node in gemma(config, params, linen=True, transposed=False).items():
        for below, leaf in node.items():
            inner = {below: leaf} if not isinstance(leaf, dict) else leaf
            for last, array in inner.items():
                if below == "mlp":
                    flat[f"transformer/{name}/mlp/{last}"] = {"w": array}
                elif isinstance(leaf, dict):
                    flat.setdefault(f"transformer/{name}/{below}", {})[last] = array
                else:
                    flat.setdefault(f"transformer/{name}", {})[last] = array
    return flat


def maxtext(config, params, *, scanned=True):
    """MaxText's `param_mapping.py` from Hugging Face's [out, in]: reshape_kernel, adjust_rope, scale_query_layer,
    scale_rmsnorm and pad_and_scale_embedding, in its words."""
    D, K = config.hidden_size, config.head_dim
    is_llama, is_gemma = config.architecture == "LlamaForCausalLM", config.architecture == "Gemma3ForCausalLM"

    def reshape_kernel(hf, shape):
        return hf.T.reshape(shape)

    def adjust_rope(arr):
        half = arr.shape[-1] // 2
        return np.stack([arr[..., :half], arr[..., half:]], axis=-1).reshape(arr.shape)

    def scale_rmsnorm(hf):
        return hf + 1 if is_gemma else hf

    def layer_of(layer):
        attention, mlp, arrays = layer["attention"], layer["mlp"], {}
        for own, name in {"q_proj": "query", "k_proj": "key", "v_proj": "value"}.items():
            kernel = reshape_kernel(attention[own]["weight"].T, (D, -1, K))
            if is_llama and own != "v_proj" and config.rope.kind == "llama3":
                kernel = adjust_rope(kernel)
            if is_llama and own == "q_proj":
                kernel = kernel * np.float32(1 / np.sqrt(K))
            arrays[f"self_attention.{name}.kernel"] = kernel
        arrays["self_attention.out.kernel"] = reshape_kernel(attention["o_proj"]["weight"].T, (-1, K, D))
        for own, name in {"q_norm": "query_norm", "k_norm": "key_norm"}.items():
            if own in attention:
                arrays[f"self_attention.{name}.scale"] = scale_rmsnorm(attention[own]["weight"])
        names = {"attention_norm": "pre_self_attention_layer_norm", "mlp_norm": "post_self_attention_layer_norm"}
        if is_gemma:
            names = {"attention_norm": "pre_self_attention_norm", "attention_post_norm": "post_self_attention_norm"}
            names |= {"mlp_norm": "pre_ffw_norm", "mlp_post_norm": "post_ffw_norm"}
        arrays |= {f"{name}.scale": scale_rmsnorm(layer[own]["weight"]) for own, name in names.items()}
        inner = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
        if "experts" in mlp:
            arrays["moe_block.gate.kernel"] = mlp["router"]["weight"]
            arrays |= {f"moe_block.{name}": mlp["experts"][own]["weight"] for own, name in inner.items()}
        else:
            arrays |= {f"mlp.{name}.kernel": mlp[own]["weight"] for own, name in inner.items()}
        return arrays

    scale = np.float32(ml_dtypes.bfloat16(math.sqrt(D))) if is_gemma else np.float32(1)
    theirs = {"token_embedder.embedding": params["embed"] * scale}
    theirs["decoder.decoder_norm.scale"] = scale_rmsnorm(params["final_norm"]["weight"])
    if "lm_head" in params:
        theirs["decoder.logits_dense.kernel"] = params["lm_head"]
    layers = [layer_of(params["layers"][str(number)]) for number in range(config.num_layers)]
    if not scanned:
        for number, arrays in enumerate(layers):
            theirs |= {f"decoder.layers_{number}.{name}": array for name, array in arrays.items()}
    elif not is_gemma:
        theirs |= {f"decoder.layers.{name}": np.stack([own[name] for own in layers], axis=1) for name in layers[0]}
    else:
        whole = len(layers) - len(layers) % 6
        for place in range(6):
            own = layers[place:whole:6]
            stacks = {name: np.stack([arrays[name] for arrays in own], axis=1) for name in own[0]}
            theirs |= {f"decoder.layers.layers_{place}.{name}": stack for name, stack in stacks.items()}
        for place, arrays in enumerate(layers[whole:]):
            theirs |= {f"decoder.layers_remainder.layers_{place}.{name}": array for name, array in arrays.items()}
    return {"params": {"params": nested(theirs)}}


def maxtext_unscanned(config, params):
    return {"params": maxtext(config, params, scanned=False)["params"]}


FORMS = {
    "Tunix": (tunix, ("llama", "qwen2", "qwen3", "qwen3-experts")),
    "Gemma": (gemma, ("gemma", "gemma3")),
    "Gemma in Linen": (gemma_linen, ("gemma", "gemma3")),
    "Gemma's checkpoints": (gemma_checkpoint, ("gemma", "gemma3")),
    "MaxText": (maxtext, ("llama", "llama3.1", "qwen3", "qwen3-experts", "gemma3")),
    "MaxText, not scanned": (maxtext_unscanned, ("llama3.1", "qwen3-experts", "gemma3")),
}
CASES = [(form, name) for form, (_, names) in FORMS.items() for name in names]
