"""Quantized modules and checkpoints next to the libraries that define their formats, in this process.

Needs torch, Transformers, bitsandbytes and compressed-tensors: `make test-oracle`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import load, save_huggingface
from checkpoints_convert.formats.float4 import mxfp4_experts
from checkpoints_convert.huggingface.families import FAMILIES
from jaxinfer.models import ModelConfig, RopeConfig, init_params
from jaxinfer.quantization.rtn import quantize
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.family_files import source_of
from tests.oracle import format_cases

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Asked for by --oracle, they must be there: nothing here is skipped."""
    try:
        import bitsandbytes
        import compressed_tensors
        import torch
        import transformers
    except ImportError as error:
        pytest.fail(f"--oracle needs torch, Transformers, bitsandbytes and compressed-tensors ({error})", pytrace=False)
    torch.set_num_threads(1)
    return bitsandbytes, compressed_tensors, transformers


@pytest.mark.parametrize("seed", [1, 2])
def test_modules(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(format_cases, "FOLDER", tmp_path)
    checked = 0
    for case in format_cases.cases(seed):
        format_cases.assert_equal(format_cases.save(case))
        checked += 1
    print(f"{checked} modules equal their libraries' weights")
    assert checked == 35


@pytest.mark.parametrize("rows", [8, 24])
def test_gpt_oss_experts(rows):
    """MXFP4 against Transformers; gates and ups are in turn in both."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (3, rows, 4, 16)).astype(np.uint8)
    scales = random.integers(110, 140, (3, rows, 4)).astype(np.uint8)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    assert np.array_equal(np.asarray(mxfp4_experts(blocks, scales).dequantize()), expected)


@pytest.mark.parametrize(
    "recipe",
    ["int4-g32", "int4-g32-asym", "int8", "int8-g32", "int3-g32", "w8a8", "fp8", "fp8-tensor", "fp8-block", "w8a8-fp8"],
)
@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
def test_compressed_tensors_opens_what_we_save(recipe, tmp_path):
    """The weights Transformers decompresses are ours; other engines read the same files."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=128, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(rotary_dim=16),
    )  # fmt: skip

    def quantized(path, leaf):
        is_linear = leaf.ndim == 2 and path[0].key == "layers"
        return quantize(leaf, recipe) if is_linear else leaf

    params = jax.tree_util.tree_map_with_path(quantized, init_params(config, jax.random.key(0)))
    save_huggingface(config, params, tmp_path / "saved", dtype="float32")
    assert jax.tree.structure(load(tmp_path / "saved")[1]) == jax.tree.structure(params)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    theirs = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    checked = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        name, transpose = source_of(FAMILIES["LlamaForCausalLM"], tuple(key.key for key in path))
        ours = np.asarray(leaf.dequantize(jnp.float32) if is_quantized(leaf) else leaf)
        assert np.array_equal(ours.T if transpose else ours, theirs[name]), name
        checked += is_quantized(leaf)
    assert checked == 14
