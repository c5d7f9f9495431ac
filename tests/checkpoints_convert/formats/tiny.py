"""Tiny Llama checkpoints in every format, through the encoders: the files, and the float32 weights they stand for."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints_convert.formats import encoders

D, F, V, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 128, 80, 4, 2, 16, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Format:
    """quantization: what config.json says. encode: a weight [N, K] to tensors and the weight they stand for."""

    quantization: dict[str, Any]
    encode: Callable[[np.ndarray], encoders.Encoded]


def _compressed(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _act_order(weight: np.ndarray) -> np.ndarray:
    return np.random.default_rng(weight.shape[1]).permutation(weight.shape[1]) // 32


def _gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **changes}


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}

FORMATS: dict[str, Format] = {
    "gptq-v1": Format(_gptq(), encoders.gptq),
    "gptq-v2-3bit": Format(
        _gptq(bits=3, checkpoint_format="gptq_v2"), lambda weight: encoders.gptq(weight, bits=3, version=2)
    ),
    "gptq-8bit": Format(_gptq(bits=8, group_size=-1), lambda weight: encoders.gptq(weight, bits=8, group=-1)),
    "gptq-act-order": Format(
        _gptq(desc_act=True), lambda weight: encoders.gptq(weight, g_idx=_act_order(weight))
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, encoders.awq),
    "auto-round": Format(
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
        encoders.awq,
    ),
    "nf4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, encoders.bitsandbytes4),
    "nf4-nested": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        lambda weight: encoders.bitsandbytes4(weight, nested=True),
    ),
    "fp4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda weight: encoders.bitsandbytes4(weight, kind="fp4"),
    ),
    "bitsandbytes-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, encoders.bitsandbytes8),
    "packed": Format(_compressed("pack-quantized", **_INT4), encoders.packed),
    "packed-asym": Format(
        _compressed("pack-quantized", **{**_INT4, "symmetric": False}),
        lambda weight: encoders.packed(weight, symmetric=False),
    ),
    "w8a8": Format(_compressed("int-quantized", {**_TOKEN, "type": "int"}, **_INT8), encoders.int8),
    "fp8-dynamic": Format(
        _compressed("float-quantized", {**_TOKEN, "type": "float"}, **_FP8),
        lambda weight: encoders.float8(weight, block=(1, weight.shape[1])),
    ),
    "fp8-block": Format(
        {"quant_method": "fp8", "weight_block_size": [48, 32], "modules_to_not_convert": ["lm_head"]},
        lambda weight: encoders.float8(weight, block=(48, 32), suffix="weight_scale_inv"),
    ),
    "nvfp4": Format(_compressed("nvfp4-pack-quantized", **_NVFP4), encoders.nvfp4),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        lambda weight: encoders.nvfp4(weight, is_modelopt=True),
    ),
    "fbgemm-fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda weight: encoders.float8(weight, block=(1, weight.shape[1])),
    ),
}  # fmt: skip
# A symmetric and an asymmetric packing, a permutation, a codebook, blocks, and activations that are quantized too; of a
# test that runs for each of these, --slow runs the others.
_REPRESENTATIVE = ("gptq-act-order", "awq", "nf4-nested", "packed-asym", "w8a8", "fp8-block", "nvfp4")
SOME_FORMATS = [pytest.param(name, marks=() if name in _REPRESENTATIVE else pytest.mark.slow) for name in FORMATS]


@dataclass
class Tiny:
    """tensors: of the file. weights: float32 [N, K] or [D] by the names of an unquantized checkpoint."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]

    def write(self, directory: Path, *, has_config: bool = True) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        config = dict(self.config)
        if not has_config:
            del config["quantization_config"]
        (directory / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def tiny(name: str, seed: int = 0) -> Tiny:
    """A checkpoint whose attention and feed-forward weights are quantized."""
    form = FORMATS[name]
    random = np.random.default_rng(seed)
    tensors, weights = {}, {}
    for tensor, shape in _shapes():
        weight = (random.standard_normal(shape) * 0.1).astype(np.float32)
        if tensor.endswith("_proj.weight"):
            module = tensor.removesuffix(".weight")
            parts, weight = form.encode(weight)
            tensors |= {f"{module}.{suffix}": array for suffix, array in parts.items()}
        else:
            tensors[tensor] = weight
        weights[tensor] = weight
    return Tiny({**CONFIG, "quantization_config": copy.deepcopy(form.quantization)}, tensors, weights)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (V, D)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (D,)
        for name, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (width * HEAD_DIM, D)
        yield f"{prefix}.self_attn.o_proj.weight", (D, HEADS * HEAD_DIM)
        yield f"{prefix}.post_attention_layernorm.weight", (D,)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (F, D)
        yield f"{prefix}.mlp.down_proj.weight", (D, F)
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)


def by_stored_name(params: Any) -> dict[str, Any]:
    """Leaves of loaded parameters under the names of the tensors they come from, and whether as the transpose."""
    import jax

    from checkpoints_convert.huggingface.families import FAMILIES
    from jaxinfer.quantization.tree import is_quantized
    from tests.checkpoints_convert.family_files import source_of

    family = FAMILIES["LlamaForCausalLM"]
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    return {
        name: (leaf, transpose)
        for path, leaf in leaves
        for name, transpose in [source_of(family, tuple(key.key for key in path))]
    }


def assert_weights(params: Any, weights: dict[str, np.ndarray]) -> None:
    """Every parameter, dequantized, has the bits of the format's formula."""
    found = by_stored_name(params)
    assert set(found) == set(weights)
    for name, (leaf, transpose) in found.items():
        array = np.asarray(leaf.dequantize() if hasattr(leaf, "dequantize") else leaf)
        assert np.array_equal(array.T if transpose else array, weights[name]), name
