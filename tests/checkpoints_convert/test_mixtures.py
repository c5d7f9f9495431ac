"""Checkpoints of mixtures of experts: experts one by one or in one tensor, and quantized in both forms."""

import json
import math
import time
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from checkpoints_convert import CheckpointError, abstract
from checkpoints_convert.safetensors_files import DTYPE_BITS, SafetensorsFile
from jaxinfer.quantization import QuantizedArray
from tests.checkpoints_convert.family_files import Files, read
from tests.checkpoints_convert.formats import encoders

Headers = dict[str, tuple[str, tuple[int, ...]]]
EXPERTS = ("layers.1.mlp.experts.gate_proj.weight", "layers.1.mlp.experts.up_proj.weight",
           "layers.1.mlp.experts.down_proj.weight")  # fmt: skip


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def leaves(params) -> dict:
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    return {".".join(key.key for key in path): leaf for path, leaf in found}


def test_experts_are_written_one_by_one_under_the_names_of_the_repositories(tmp_path):
    files = read("mixtral")
    checkpoints_convert.convert(files.write(tmp_path / "fused"), tmp_path / "each", to="huggingface", progress=None)
    each = load_file(tmp_path / "each" / "model.safetensors")
    fused = files.tensors["model.layers.1.mlp.experts.gate_up_proj"]
    size = fused.shape[1] // 2
    for expert in range(4):
        prefix = f"model.layers.1.block_sparse_moe.experts.{expert}"
        np.testing.assert_array_equal(each[f"{prefix}.w1.weight"], fused[expert, :size])
        np.testing.assert_array_equal(each[f"{prefix}.w3.weight"], fused[expert, size:])
        down = files.tensors["model.layers.1.mlp.experts.down_proj"]
        np.testing.assert_array_equal(each[f"{prefix}.w2.weight"], down[expert])
    gate = files.tensors["model.layers.1.mlp.gate.weight"]
    np.testing.assert_array_equal(each["model.layers.1.block_sparse_moe.gate.weight"], gate)


def gpt_oss() -> tuple[Files, dict[str, np.ndarray]]:
    """With MXFP4 experts, and the weights [E, K, N] that they are."""
    files, wanted = read("gpt_oss"), {}
    files.config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.mlp.router"],
    }
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            source = f"model.layers.{layer}.mlp.experts.{name}"
            dense = files.tensors.pop(source)
            experts, inputs, outputs = dense.shape
            numbers = np.random.default_rng(layer)
            blocks = numbers.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            scales = numbers.integers(120, 130, (experts, outputs, inputs // 32), np.uint8)
            files.tensors |= {f"{source}_blocks": blocks, f"{source}_scales": scales}
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, outputs, -1)
            weight = encoders.E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, -1)
            weight = weight.swapaxes(1, 2)
            parts = {"gate_proj": weight[..., ::2], "up_proj": weight[..., 1::2]}
            parts = {"down_proj": weight} if name == "down_proj" else parts
            wanted |= {f"layers.{layer}.mlp.experts.{key}.weight": part for key, part in parts.items()}
    return files, wanted


def test_experts_of_gpt_oss_stay_in_four_bits(tmp_path):
    files, wanted = gpt_oss()
    found = leaves(checkpoints_convert.load(files.write(tmp_path))[1])
    for name, weight in wanted.items():
        assert isinstance(found[name], QuantizedArray)
        np.testing.assert_array_equal(found[name].dequantize(), weight, err_msg=name)
    assert not isinstance(found["layers.0.attention.q_proj.weight"], QuantizedArray)


def test_blocks_of_another_shape_are_refused_by_name(tmp_path):
    files, _ = gpt_oss()
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    files.tensors[name] = files.tensors[name][:, :-1].copy()
    with pytest.raises(CheckpointError, match=f"tensor '{name}'.* has shape"):
        checkpoints_convert.load(files.write(tmp_path))


def deepseek_fp8(tmp_path: Path, **changes) -> tuple[Files, dict[str, np.ndarray]]:
    """DeepSeek-V3 as it is published: experts, latent attention and all in FP8 blocks, here of 16 x 16."""
    checkpoints_convert.convert(
        read("deepseek_v3").write(tmp_path / "fused"), tmp_path / "each", to="huggingface", progress=None
    )
    tensors = load_file(tmp_path / "each" / "model.safetensors")
    wanted = {}
    for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj_with" in name]:
        encoded, wanted[name] = encoders.float8(
            random(*tensors.pop(name).shape), block=(16, 16), suffix="weight_scale_inv"
        )
        tensors |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in encoded.items()}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    files = Files({**read("deepseek_v3").config, "quantization_config": quantization}, tensors)
    return files, wanted


def test_deepseek_in_fp8_opens_with_its_experts_stacked(tmp_path):
    files, wanted = deepseek_fp8(tmp_path)
    found = leaves(checkpoints_convert.load(files.write(tmp_path / "fp8"), dtype="float32")[1])
    for name in EXPERTS:
        assert isinstance(found[name], QuantizedArray)
        module = name.removeprefix("layers.1.mlp.experts.")
        stored = [wanted[f"model.layers.1.mlp.experts.{expert}.{module}"].T for expert in range(8)]
        np.testing.assert_array_equal(found[name].dequantize(), np.stack(stored))
    # Of the matrix that makes keys and values the heads are apart, and dense.
    heads = wanted["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 12 + 10, -1).swapaxes(1, 2)
    np.testing.assert_array_equal(found["layers.0.attention.k_up.weight"], heads[..., :12])
    np.testing.assert_array_equal(found["layers.0.attention.v_up.weight"], heads[..., 12:])


@pytest.mark.parametrize("model", ["gpt_oss", "deepseek"])
def test_config_json_alone_has_the_shapes_of_quantized_experts(tmp_path, model):
    folder = (gpt_oss()[0] if model == "gpt_oss" else deepseek_fp8(tmp_path)[0]).write(tmp_path / model)
    whole = abstract(folder)
    (folder / "model.safetensors").unlink()
    assert abstract(folder) == whole


def gpt_oss_20b(num_layers: int) -> Headers:
    """Headers of the first layers of gpt-oss-20b."""
    experts, hidden, inner, head_dim = 32, 2880, 2880, 64
    headers: Headers = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (201_088, hidden)))
    headers["model.norm.weight"] = ("BF16", (hidden,))
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
        for name, heads in (("q", 64), ("k", 8), ("v", 8)):
            shapes[f"self_attn.{name}_proj.weight"] = (heads * head_dim, hidden)
            shapes[f"self_attn.{name}_proj.bias"] = (heads * head_dim,)
        shapes |= {"self_attn.o_proj.weight": (hidden, 64 * head_dim), "self_attn.o_proj.bias": (hidden,)}
        shapes |= {"self_attn.sinks": (64,), "mlp.router.weight": (experts, hidden), "mlp.router.bias": (experts,)}
        for name, outputs in (("gate_up_proj", 2 * inner), ("down_proj", hidden)):
            stored = (experts, outputs, 2880 // 32)
            shapes[f"mlp.experts.{name}_bias"] = (experts, outputs)
            headers[f"{prefix}.mlp.experts.{name}_blocks"] = ("U8", (*stored, 16))
            headers[f"{prefix}.mlp.experts.{name}_scales"] = ("U8", stored)
        headers |= {f"{prefix}.{name}": ("BF16", shape) for name, shape in shapes.items()}
    return headers


def sparse_gpt_oss(directory: Path, num_layers: int) -> Headers:
    """Writes a checkpoint of the first layers of gpt-oss-20b whose tensors are a hole."""
    config = {
        **read("gpt_oss").config,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_hidden_layers": num_layers,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    headers = gpt_oss_20b(num_layers)
    write_sparse(directory / "model.safetensors", headers)
    return headers


def test_shapes_of_gpt_oss_20b_need_no_memory_for_its_experts(tmp_path, monkeypatch):
    headers = sparse_gpt_oss(tmp_path, num_layers := 2)
    monkeypatch.setattr(SafetensorsFile, "read_into", None)  # whoever reads a weight fails
    tracemalloc.start()
    try:
        found = abstract(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 * 2**20  # the unpacked experts of a layer have 760 MiB
    stored = sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in headers.values())
    # In memory an exponent is a bfloat16, and each of three weights of a layer has a codebook.
    exponents = num_layers * 32 * 3 * 2880 * 2880 // 32
    held = sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(found[1]))
    assert held == stored + exponents + num_layers * 3 * 64
    (tmp_path / "model.safetensors").unlink()
    assert abstract(tmp_path) == found


@pytest.mark.slow
def test_shapes_of_gpt_oss_20b_take_two_seconds(tmp_path):
    sparse_gpt_oss(tmp_path, 24)
    start = time.process_time()
    abstract(tmp_path)
    seconds = time.process_time() - start
    print(f"gpt-oss-20b, 13 GiB: {seconds:.1f} s of CPU")
    assert seconds < 5


def write_sparse(file: Path, headers: Headers) -> None:
    """A safetensors file whose tensors are a hole."""
    header, end = {}, 0
    for name, (dtype, shape) in headers.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + end)


def test_an_expert_that_is_not_quantized_beside_others_is_refused_by_name(tmp_path):
    files, wanted = deepseek_fp8(tmp_path)
    module = "model.layers.1.mlp.experts.3.up_proj"
    del files.tensors[f"{module}.weight_scale_inv"]
    files.tensors[f"{module}.weight"] = wanted[f"{module}.weight"]
    with pytest.raises(CheckpointError, match=f"module '{module}' is not quantized"):
        checkpoints_convert.load(files.write(tmp_path / "fp8"))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["int4-g32", "fp8"])
def test_quantized_experts_come_back_from_what_is_written(tmp_path, recipe):
    from checkpoints_convert.huggingface.save import save_huggingface
    from jaxinfer.quantization import quantize_params

    config, params = checkpoints_convert.load(read("qwen3_moe").write(tmp_path / "source"))
    params = quantize_params(params, recipe)
    assert isinstance(leaves(params)[EXPERTS[0]], QuantizedArray)
    assert not isinstance(leaves(params)["layers.1.mlp.router.weight"], QuantizedArray)
    again, found = checkpoints_convert.load(save_huggingface(config, params, tmp_path / "saved", "auto"))
    assert again == config
    for name, leaf in leaves(params).items():
        if isinstance(leaf, QuantizedArray):
            np.testing.assert_array_equal(leaves(found)[name].dequantize(), leaf.dequantize(), err_msg=name)
    assert leaves(found).keys() == leaves(params).keys()


def test_layers_of_multi_token_prediction_are_not_read(tmp_path):
    files = read("deepseek_v3")
    files.tensors["model.layers.2.eh_proj.weight"] = random(64, 128)
    checkpoints_convert.load(files.write(tmp_path / "later"))
    files.tensors["model.layers.1.eh_proj.weight"] = random(64, 128)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.eh_proj\.weight' .* is not of this model"):
        checkpoints_convert.load(files.write(tmp_path / "extra"))


def test_a_correction_stays_float32_in_a_model_of_bfloat16(tmp_path):
    config, params = checkpoints_convert.load(read("deepseek_v3").write(tmp_path / "source"), dtype="bfloat16")
    assert (config.dtype, params["layers"]["1"]["mlp"]["router"]["correction"].dtype) == ("bfloat16", np.float32)
    checkpoints_convert.convert(tmp_path / "source", tmp_path / "native", dtype="bfloat16", progress=None)
    _, found = checkpoints_convert.load(tmp_path / "native")
    for name, leaf in leaves(found).items():
        assert leaf.dtype == leaves(params)[name].dtype
        np.testing.assert_array_equal(leaf, leaves(params)[name])
