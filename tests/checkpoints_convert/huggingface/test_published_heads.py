"""Draft heads with the configurations, tensor names and shapes of published repositories; their files are headers."""

import json
import struct
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import pytest

import checkpoints_convert
from jaxinfer.models import tap_names_of

_BYTES = {"BF16": 2, "F16": 2, "I64": 8, "BOOL": 1}


@dataclass(frozen=True, eq=False)
class Published:
    """A repository: its config.json, the shapes of its tensors, and what is to be read.

    Attributes:
      depth: layers of the target. taps: its layers whose outputs enter. size: parameters without the index of a smaller
        vocabulary. head: fields of `DraftHeadConfig`. config_fields: fields of `ModelConfig`.
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    depth: int
    taps: tuple[int, ...]
    size: int
    head: dict[str, Any] = field(default_factory=dict)
    config_fields: dict[str, Any] = field(default_factory=dict)


def _bf16(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def _layer(prefix, width, inner, q, kv, inputs=None, head_dim=None):
    """Of a decoder layer; `inputs` of its attention, `head_dim` where queries and keys have norms."""
    inputs = inputs or width
    shapes = {
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (width, q),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if head_dim is not None:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _eagle3(prefix, width, inner, q, kv, draft_vocab_size, vocab_size):
    shapes = _layer(prefix, width, inner, q, kv, inputs=2 * width)
    shapes |= {f"{prefix}.hidden_norm.weight": (width,), "fc.weight": (width, 3 * width), "norm.weight": (width,)}
    shapes |= {"lm_head.weight": (draft_vocab_size, width)}
    return _bf16(shapes) | {"d2t": ("I64", (draft_vocab_size,)), "t2d": ("BOOL", (vocab_size,))}


def _dflash(width, inner, q, kv, num_layers, num_taps):
    shapes = {"fc.weight": (width, num_taps * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(num_layers):
        shapes |= _layer(f"layers.{layer}", width, inner, q, kv, head_dim=128)
    return _bf16(shapes)


_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_SIZE = 4096 * (3 * 4096 + 32000 + 4) + 8192 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
_QWEN_35 = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "num_target_layers": 41,
}


def _block_size_of(width, inner, q, kv, num_layers, num_taps):
    layer = width * (2 * q + 2 * kv + 3 * inner + 2) + 2 * 128
    return num_layers * layer + num_taps * width * width + 2 * width


HEADS = {
    "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B": Published(
        {
            **_LLAMA_8B,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": 32000,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "float16",
            "pretraining_tp": 1,
            "use_cache": True,
        },
        _eagle3("midlayer", 4096, 14336, 4096, 1024, 32000, 128256),
        32,
        (1, 15, 28),
        _LLAMA_SIZE,
        {"kind": "eagle3", "vocab_size": 32000, "has_lm_head": True, "has_embedding": False},
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": Published(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1.0.dev42",
            "draft_vocab_size": 32000,
            "norm_before_residual": False,
            "target_hidden_size": None,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": 3,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {
                    "name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
                    "architectures": ["LlamaForCausalLM"],
                },
            },
            "transformer_layer_config": {
                **_LLAMA_8B,
                "model_type": "llama",
                "num_hidden_layers": 1,
                "head_dim": 128,
                "hidden_act": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                "rope_scaling": _LLAMA_ROPE,
            },
            "torch_dtype": "bfloat16",
            "transformers_version": "4.53.2",
        },
        _eagle3("layers.0", 4096, 14336, 4096, 1024, 32000, 128256) | _bf16({"embed_tokens.weight": (128256, 4096)}),
        32,
        (1, 15, 28),
        _LLAMA_SIZE + 4096 * 128256,
        {"kind": "eagle3", "vocab_size": 32000, "has_lm_head": True, "has_embedding": True},
    ),
    "z-lab/Qwen3-4B-DFlash-b16": Published(
        {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "block_size": 16,
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_target_layers": 36,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "dtype": "bfloat16",
        },
        _dflash(2560, 9728, 4096, 1024, 5, 5),
        36,
        (1, 9, 17, 25, 33),
        _block_size_of(2560, 9728, 4096, 1024, 5, 5),
        {"kind": "dflash", "block_size": 16, "mask_token": 151669, "causal_layers": ()},
    ),
    # Two revisions of one repository: the later one has the block's size and the rotary base elsewhere.
    "DFlash of Qwen3.5-35B-A3B, May": Published(
        {
            **_QWEN_35,
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "rope_theta": 10_000_000.0,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
            "layer_types": ["full_attention"] * 8,
        },
        _dflash(2048, 6144, 4096, 512, 8, 5),
        41,
        (1, 10, 19, 28, 37),
        _block_size_of(2048, 6144, 4096, 512, 8, 5),
        {"kind": "dflash", "block_size": 16, "mask_token": 248070},
    ),
    "DFlash of Qwen3.5-35B-A3B, June": Published(
        {
            **_QWEN_35,
            "num_hidden_layers": 6,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            },
            "rope_parameters": {"rope_theta": 10_000_000.0, "rope_type": "default"},
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        },
        _dflash(2048, 6144, 4096, 1024, 6, 8),
        41,
        (1, 6, 11, 16, 22, 27, 32, 37),
        _block_size_of(2048, 6144, 4096, 1024, 6, 8),
        {"kind": "dflash", "block_size": 16, "mask_token": 248077},
        {"sliding_windows": (4096,) * 5 + (None,)},
    ),
}


def write_header(folder: Path, published: Published) -> None:
    """The files, without the bytes of tensors: a header, and a hole."""
    entries, end = {}, 0
    for name, (dtype, shape) in published.tensors.items():
        start, end = end, end + _BYTES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    (folder / "config.json").write_text(json.dumps(published.config))


@pytest.mark.parametrize("name", HEADS)
def test_published_heads_are_read(tmp_path, name):
    published = HEADS[name]
    write_header(tmp_path, published)
    assert checkpoints_convert.is_head_folder(tmp_path)
    config, shapes = checkpoints_convert.abstract(tmp_path)
    assert tap_names_of(config.draft_head, published.depth) == tuple(
        f"layers.{layer}.residual" for layer in published.taps
    )
    assert config.draft_head == replace(config.draft_head, **published.head)
    assert config == replace(config, **published.config_fields)
    rotary = published.config.get("transformer_layer_config", published.config)
    base = rotary.get("rope_theta") or rotary["rope_parameters"]["rope_theta"]
    assert config.rope.theta == base
    sizes = {name: sum(prod(leaf.shape) for leaf in jax.tree.leaves(part)) for name, part in shapes.items()}
    index = sizes.pop("draft_index", None)
    assert index == (config.vocab_size if config.draft_head.has_draft_index else None)
    assert sum(sizes.values()) == published.size


@pytest.mark.parametrize("name", HEADS)
def test_a_tensor_of_another_shape_is_refused(tmp_path, name):
    published = HEADS[name]
    other = dict(published.tensors)
    dtype, (outputs, inputs) = other["fc.weight"]
    other["fc.weight"] = dtype, (outputs, inputs - 1)
    write_header(tmp_path, replace(published, tensors=other))
    with pytest.raises(checkpoints_convert.CheckpointError, match=r"fc\.weight"):
        checkpoints_convert.abstract(tmp_path)
