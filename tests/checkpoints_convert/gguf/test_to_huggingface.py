"""Every type of GGUF as a Hugging Face checkpoint: the same values, or an error that names the option for them."""

import jax
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, convert, load
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of, write_random_llama
from tests.checkpoints_convert.gguf.gguf_writer import NUMBERS, Blocks, random_blocks, write

HAVE_A_FORM = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4")
OPTION = r"requantize='dense' \(--requantize dense\) writes floating-point weights"


def values(path):
    """float32 values of all parameters."""
    params = load(path, dtype="float32")[1]
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return [np.asarray(leaf.dequantize() if is_quantized(leaf) else leaf) for leaf in leaves]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", NUMBERS)
def test_every_type(tmp_path, kind):
    path = write_random_llama(tmp_path / "model.gguf", kind, num_layers=1)
    options = {"to": "huggingface", "dtype": "float32", "progress": None}
    if kind in HAVE_A_FORM:
        convert(path, tmp_path / "hf", **options)
        assert_same(values(tmp_path / "hf"), values(path))
    else:
        with pytest.raises(CheckpointError, match=OPTION):
            convert(path, tmp_path / "hf", **options)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
    convert(path, tmp_path / "dense", requantize="dense", **options)
    assert_same(values(tmp_path / "dense"), values(path))


def test_a_mixture_is_refused_before_a_weight_is_read(checkpoint, tmp_path):
    """Files of types that have a form but for the last layer's, as llama.cpp mixes them."""
    source = checkpoint(hidden_size=256, intermediate_size=256, head_dim=64)
    random, tensors = np.random.default_rng(0), dict[str, np.ndarray | Blocks]()
    for name, tensor in tensors_of(source.config, source.tensors).items():
        kind = "Q5_1" if name == "blk.1.ffn_down.weight" else "Q8_0"
        shape = (*tensor.shape[:-1], 256) if len(tensor.shape) > 1 else (256,)
        rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}.get(name.split(".")[-2])
        rows = rows or (256 if ".ffn_" in name else shape[0])
        tensors[name] = np.ones(256, np.float32) if len(shape) == 1 else random_blocks(kind, (rows, 256), random)
    path = write(tmp_path / "model.gguf", metadata_of(source.config), tensors)
    read: list[str] = []
    with pytest.raises(CheckpointError, match=rf"'layers\.1\.mlp\.down_proj\.weight': minima .*{OPTION}"):
        convert(path, tmp_path / "hf", to="huggingface", progress=lambda name, done, total: read.append(name))
    assert read == []
    tensors["token_embd.weight"] = random_blocks("Q4_1", (80, 256), random)
    write(path, metadata_of(source.config), tensors)
    with pytest.raises(CheckpointError, match=rf"'embed': minima .*{OPTION}"):  # which no recipe rounds
        convert(path, tmp_path / "hf", to="huggingface", requantize="int8", progress=None)
