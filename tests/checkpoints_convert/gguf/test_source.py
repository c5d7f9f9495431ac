"""GGUF files opened: the parameters and the configuration of the checkpoint they were made from."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, compare_tensors, convert, load, open_checkpoint
from checkpoints_convert.gguf.blocks import dequantize
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint
from checkpoints_convert.gguf.index import GGUFIndex
from jaxinfer.models import ModelConfig
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.gguf.gguf_models import ARCHITECTURES, metadata_of, side_by_side, tensors_of, write_model
from tests.checkpoints_convert.gguf.gguf_writer import BLOCKS, Blocks, random_blocks, write, write_split


@pytest.fixture
def wide(checkpoint):
    """A model whose rows hold whole blocks of 256."""

    def make(tied: bool = False):
        made = checkpoint(tied=tied, hidden_size=256, intermediate_size=512, head_dim=64)
        random = np.random.default_rng(0)
        shapes = {"q_proj": (256, 256), "k_proj": (128, 256), "v_proj": (128, 256), "o_proj": (256, 256),
                  "gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}  # fmt: skip
        for name, array in made.tensors.items():
            shape = (256,) if array.ndim == 1 else shapes.get(name.split(".")[-2], (80, 256))
            made.tensors[name] = (random.standard_normal(shape) * 0.1).astype(np.float32)
        return made

    return make


def same(config: ModelConfig, reference: ModelConfig) -> bool:
    """But for the window, which a file of the architecture llama does not have, and the name."""
    leave = ("architecture",) if "Mistral" in reference.architecture else ()
    found, wanted = config.to_dict(), reference.to_dict()
    return all(found[name] == wanted[name] for name in wanted if name not in leave)


def equal(params, reference) -> bool:
    return jax.tree.structure(params) == jax.tree.structure(reference) and jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and bool(jnp.array_equal(a, b)), params, reference)
    )


def quantized(checkpoint, kind: str, random) -> tuple[dict, dict]:
    """The tensors with every matrix in random blocks, and the float32 weights that they stand for, by HF's names."""
    tensors, dense = {}, {}
    for name, array in checkpoint.tensors.items():
        if array.ndim == 1:
            tensors[name], dense[name] = array, array
            continue
        tensors[name] = blocks = random_blocks(kind, array.shape, random)
        dense[name] = dequantize(kind, blocks.raw)
    return tensors, dense


def permuted(checkpoint, tensors: dict) -> dict:
    """Random blocks stand for the stored rows: of Llama's queries and keys, those in the file's order."""
    config = checkpoint.config
    of_raw = {name: value.raw if isinstance(value, Blocks) else value for name, value in tensors.items()}
    found = tensors_of(config, of_raw)
    kinds = {tensor.kind for tensor in tensors.values() if isinstance(tensor, Blocks)}
    kind = kinds.pop()
    return {name: Blocks(kind, value) if value.dtype == np.uint8 else value for name, value in found.items()}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, "float32") for architecture in ARCHITECTURES),
        ("LlamaForCausalLM", "bfloat16"),
        ("LlamaForCausalLM", "float16"),
        *(
            pytest.param(architecture, dtype, marks=pytest.mark.slow)
            for architecture in ARCHITECTURES
            if architecture != "LlamaForCausalLM"
            for dtype in ("float16", "bfloat16")
        ),
    ],
)
def test_a_file_has_the_parameters_of_its_source(checkpoint, tmp_path, architecture, dtype):
    source = checkpoint(architecture, dtype=dtype, sliding_window=None if "Mistral" in architecture else 16)
    path = write_model(tmp_path / "model.gguf", source)
    (config, params), (wanted_config, wanted) = load(path), load(source.write())
    assert same(config, wanted_config)
    assert config.dtype == dtype
    assert equal(params, wanted)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_tied_embeddings_and_a_folder_with_one_file(checkpoint, tmp_path, architecture):
    source = checkpoint(architecture, tied=True)
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_model(folder / "model.gguf", source)
    (folder / "config.json").write_text("{}")  # as repositories of GGUF files often have
    (config, params), (wanted_config, wanted) = load(folder), load(source.write())
    assert config.tie_word_embeddings
    assert same(config, wanted_config)
    assert equal(params, wanted)


def test_a_window_makes_it_mistral(checkpoint, tmp_path):
    source = checkpoint("MistralForCausalLM", sliding_window=16)
    path = write_model(tmp_path / "model.gguf", source)
    assert load(path)[0] == load(source.write())[0]


def test_split_files(checkpoint, tmp_path):
    source = checkpoint("LlamaForCausalLM")
    parts = write_split(
        tmp_path / "m.gguf", metadata_of(source.config), tensors_of(source.config, source.tensors), num_parts=3
    )
    wanted = load(source.write())[1]
    for path in parts:
        assert equal(load(path)[1], wanted)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"the part m-00002-of-00003\.gguf is missing"):
        load(parts[0])


def test_a_folder_with_two_checkpoints_says_so(checkpoint, tmp_path):
    source = checkpoint("LlamaForCausalLM")
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        write_model(folder / name, source)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF checkpoints, a\.gguf, b\.gguf: pass the path of one"):
        load(folder)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BLOCKS)
def test_quantized_weights_stay_exactly_as_they_are(wide, tmp_path, kind):
    source = wide(tied=kind == "Q6_K")
    tensors, _ = quantized(source, kind, np.random.default_rng(0))
    stored = permuted(source, tensors)
    path = write(tmp_path / "model.gguf", metadata_of(source.config), stored)
    config, params = load(path, dtype="float32")
    found = {"embed": params["embed"], "q": params["layers"]["1"]["attention"]["q_proj"]["weight"]}
    found |= {"down": params["layers"]["0"]["mlp"]["down_proj"]["weight"]}
    assert all(is_quantized(leaf) for leaf in found.values())
    embed = dequantize(kind, tensors["model.embed_tokens.weight"].raw)
    # The rows of random blocks are what tensors_of put side by side; loading undoes it.
    q = dequantize(kind, tensors["model.layers.1.self_attn.q_proj.weight"].raw)
    down = dequantize(kind, tensors["model.layers.0.mlp.down_proj.weight"].raw)
    np.testing.assert_array_equal(found["embed"].dequantize(), embed)
    np.testing.assert_array_equal(found["q"].dequantize(), q.T)
    np.testing.assert_array_equal(found["down"].dequantize(), down.T)
    assert config.dtype == "float32"


def test_queries_and_keys_are_put_back_in_order(checkpoint, tmp_path):
    """The inverse of the converter's order is not the order itself: a planted mistake would show."""
    source = checkpoint("LlamaForCausalLM")
    name = "model.layers.0.self_attn.q_proj.weight"
    once = side_by_side(source.tensors[name], 4)
    assert not np.array_equal(once, source.tensors[name])
    assert not np.array_equal(side_by_side(once, 4), source.tensors[name])
    params = load(write_model(tmp_path / "model.gguf", source))[1]
    found = np.asarray(params["layers"]["0"]["attention"]["q_proj"]["weight"])
    np.testing.assert_array_equal(found, source.tensors[name].T)


def test_mixed_types(wide, tmp_path):
    """As Q4_K_M: a type for each tensor, norms in float32; and what is floating point is bfloat16 unless asked."""
    source = wide()
    random = np.random.default_rng(0)
    tensors = tensors_of(source.config, source.tensors)
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q4_K", "output.weight": "Q6_K", "ffn_up": "Q8_0"}
    for name, array in tensors.items():
        for part, kind in kinds.items():
            if part in name and array.ndim == 2:
                tensors[name] = random_blocks(kind, array.shape, random)
    path = write(tmp_path / "model.gguf", metadata_of(source.config), tensors)
    assert load(path)[0].dtype == "bfloat16"
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"].astype(np.float16)
    path = write(tmp_path / "model.gguf", metadata_of(source.config), tensors)
    config, params = load(path)
    assert config.dtype == "float16"
    layer = params["layers"]["0"]
    schemes = {name: layer["mlp"][name]["weight"].scheme for name in ("up_proj", "down_proj")}
    assert (schemes["up_proj"].kind, schemes["down_proj"].kind) == ("int", "affine")
    assert layer["attention"]["v_proj"]["weight"].scheme.block == (16, 1)
    assert layer["attention"]["k_proj"]["weight"].dtype == jnp.float16


@pytest.mark.slow
def test_requantizing_says_how_much_was_lost(wide, tmp_path, caplog):
    source = wide()
    tensors, _ = quantized(source, "Q4_K", np.random.default_rng(0))
    stored = permuted(source, tensors)
    stored["blk.0.ffn_up.weight"] = random_blocks("Q8_0", (512, 256), np.random.default_rng(1))
    path = write(tmp_path / "model.gguf", metadata_of(source.config), stored)
    exact = load(path, dtype="float32")[1]["layers"]
    layers = load(path, dtype="float32", requantize="int4-g128")[1]["layers"]
    down, wanted = (found["1"]["mlp"]["down_proj"]["weight"] for found in (layers, exact))
    assert (down.scheme.kind, down.scheme.block) == ("int", (128, 1))
    error = jnp.linalg.norm(down.dequantize() - wanted.dequantize()) / jnp.linalg.norm(wanted.dequantize())
    assert 0.01 < error < 0.3
    assert layers["0"]["mlp"]["up_proj"]["weight"].scheme.bits == 8  # Q8_0 is plain integers already
    assert "13 weights rounded to int4-g128: relative error" in caplog.text
    report = convert(path, tmp_path / "out", dtype="float32", requantize="int4-g128", progress=None)
    assert np.isclose(report.requantize_errors["layers.1.mlp.down_proj.weight"], float(error), rtol=1e-5)
    dense = load(path, dtype="float32", requantize="dense")[1]["layers"]
    assert not any(map(is_quantized, jax.tree.leaves(dense, is_leaf=is_quantized)))
    np.testing.assert_array_equal(dense["1"]["mlp"]["down_proj"]["weight"], wanted.dequantize())


def test_what_requantize_takes(checkpoint, tmp_path):
    source = checkpoint("LlamaForCausalLM")
    path = write_model(tmp_path / "model.gguf", source)
    with pytest.raises(ValueError, match="requantize='int5' is not 'dense' or one of"):
        load(path, requantize="int5")
    with pytest.raises(ValueError, match=r"requantize='dense' is for GGUF files, and .* is not one"):
        load(source.write(), requantize="dense")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", [pytest.param("Q8_0", marks=pytest.mark.slow), "Q4_K"])
def test_converted_to_the_native_form(wide, tmp_path, kind):
    source = wide()
    tensors, _ = quantized(source, kind, np.random.default_rng(0))
    path = write(tmp_path / "model.gguf", metadata_of(source.config), permuted(source, tensors))
    report = convert(path, tmp_path / "native", progress=None)
    assert not report.requantize_errors
    assert compare_tensors(tmp_path / "native", path) == []
    first, second = load(path), load(tmp_path / "native")
    assert first[0] == second[0]
    assert equal(first[1], second[1])
    assert json.loads((tmp_path / "native" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with open_checkpoint(path) as original, open_checkpoint(tmp_path / "native") as native:
        assert original.eos_token_ids == native.eos_token_ids == (2,)
        assert original.generation_config == native.generation_config == {}


def test_converted_to_hugging_faces_form(wide, tmp_path):
    source = wide()
    plain = write_model(tmp_path / "plain.gguf", source)
    convert(plain, tmp_path / "plain", to="huggingface", progress=None)
    assert equal(load(tmp_path / "plain")[1], load(source.write())[1])
    tensors, _ = quantized(source, "Q4_0", np.random.default_rng(0))
    stored = permuted(source, tensors)
    # An embedding and a head stay floating point in files that other engines open.
    stored |= {name: tensors_of(source.config, source.tensors)[name] for name in ("token_embd.weight", "output.weight")}
    path = write(tmp_path / "model.gguf", metadata_of(source.config), stored)
    convert(path, tmp_path / "hf", to="huggingface", dtype="float32", progress=None)
    first, second = (load(where, dtype="float32")[1] for where in (path, tmp_path / "hf"))
    dequantized = [
        jax.tree.map(lambda leaf: leaf.dequantize() if isinstance(leaf, QuantizedArray) else leaf, params,
                     is_leaf=is_quantized)
        for params in (first, second)
    ]  # fmt: skip
    assert equal(*dequantized)


def test_llama_3s_rotation_is_recognised(checkpoint, tmp_path):
    """A file has a divisor for each frequency; they are those of a published formula."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    source = checkpoint("LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling, head_dim=64)
    inverse = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    wavelengths = 2 * np.pi / inverse
    smooth = (8192 / wavelengths - 1) / 3
    divisors = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 8, 1 / ((1 - smooth) / 8 + smooth)))
    tensors = {name: array for name, array in source.tensors.items() if "attn" not in name}
    shapes = {"q_proj": (256, 32), "k_proj": (128, 32), "v_proj": (128, 32), "o_proj": (32, 256)}
    for layer in range(2):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = np.ones(shape, np.float32)
    source.tensors = tensors
    stored = tensors_of(source.config, tensors) | {"rope_freqs.weight": divisors.astype(np.float32)}
    path = write(tmp_path / "model.gguf", metadata_of(source.config), stored)
    assert load(path)[0].rope == load(source.write())[0].rope
    stored["rope_freqs.weight"] = np.linspace(1, 3, 32, dtype=np.float32)
    rope = load(write(path, metadata_of(source.config), stored))[0].rope
    assert (rope.kind, rope.attention_factor) == ("longrope", 1.0)
    np.testing.assert_allclose(rope.long_factor, np.linspace(1, 3, 32), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "lama"},
            "architecture 'lama' is not supported; `jaxinfer models` lists those",
        ),
        (
            {"llama.block_count": 3},
            r"block_count is 3, but layer 2 has 0 of the file's 21 tensors",
        ),
        ({"llama.block_count": 1}, r"tensor 'blk\.1\.attn_norm\.weight' is not of this model"),
        ({"llama.embedding_length": 64}, "no tensor|has shape"),
        ({"llama.feed_forward_length": 40}, r"'blk\.0\.ffn_gate\.weight' has shape \[48, 32\], the metadata make it"),
        ({"llama.attention.head_count": 2**31}, "is 2147483648, but no tensor has a dimension above 80"),
        ({"llama.block_count": 2**31}, r"block_count is 2147483648, but layer 2 has 0 of the file's 21 tensors"),
        ({"llama.attention.value_length": 4}, "value_length differs from the key length 8"),
        ({"llama.rope.scaling.type": "magic", "llama.rope.scaling.factor": 2.0}, "'magic' is not none, linear or yarn"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "must be a positive number, it is a string of 1 bytes"),
        ({"llama.context_length": [1, 2]}, "an array of 2 items, with values from 1 to 2: layers that differ"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint, tmp_path, change, message):
    path = write_model(tmp_path / "model.gguf", checkpoint("LlamaForCausalLM"), **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert "model.gguf" in str(caught.value)


def test_tensors_that_are_missing_extra_or_broken(checkpoint, tmp_path):
    source = checkpoint("LlamaForCausalLM")
    tensors = tensors_of(source.config, source.tensors)
    tensors["blk.0.attn_kk.weight"] = tensors.pop("blk.0.attn_k.weight")
    path = write(tmp_path / "model.gguf", metadata_of(source.config), tensors)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert caught.value.problems == (
        "tensor 'blk.0.attn_k.weight' [16, 32] is missing: did you mean 'blk.0.attn_kk.weight'?",
        "tensor 'blk.0.attn_kk.weight' is not of this model: did you mean 'blk.0.attn_k.weight'?",
    )
    source.tensors["model.norm.weight"][3] = np.nan
    path = write_model(tmp_path / "nan.gguf", source)
    with pytest.raises(CheckpointError, match=r"nan\.gguf: tensor 'output_norm\.weight': 1 of 32 values are NaN"):
        load(path)


def test_scales_that_are_not_finite(checkpoint, tmp_path):
    source = checkpoint("LlamaForCausalLM")
    tensors = tensors_of(source.config, source.tensors)
    blocks = random_blocks("Q8_0", (48, 32), np.random.default_rng(0))
    blocks.raw[5, :2] = np.array(np.inf, "<f2").reshape(1).view(np.uint8)
    tensors["blk.1.ffn_up.weight"] = blocks
    path = write(tmp_path / "model.gguf", metadata_of(source.config), tensors)
    with pytest.raises(
        CheckpointError, match=r"'blk\.1\.ffn_up\.weight': 1 of 48 scales and minima are NaN or infinite"
    ):
        load(path)


def test_values_too_large_for_the_dtype(checkpoint, tmp_path):
    source = checkpoint("LlamaForCausalLM")
    source.tensors["model.norm.weight"][0] = 1e6
    with pytest.raises(CheckpointError, match="1 of 32 values are too large for float16"):
        load(write_model(tmp_path / "model.gguf", source), dtype="float16")


def test_the_index_reads_rows(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    with GGUFIndex(write(tmp_path / "x.gguf", {}, {"a": array, "b": array.astype(ml_dtypes.bfloat16)})) as index:
        np.testing.assert_array_equal(index.read("a").view(np.float32).reshape(3, 4, 5), array)
        np.testing.assert_array_equal(index.read_rows("a", 4, 8).view(np.float32), array[1])
        assert index.tensors["b"].kind.name == "BF16"


def test_a_file_in_the_destination_is_never_removed(make_checkpoint, tmp_path):
    source = make_checkpoint(tmp_path, "LlamaForCausalLM")
    folder = source.write()
    path = write_model(folder / "model-f32.gguf", source)
    before = {file.name for file in folder.iterdir()}
    for form in ("native", "huggingface"):
        with pytest.raises(CheckpointError, match=r"holds the source .*model-f32\.gguf: name another destination"):
            convert(path, folder, to=form, overwrite=True, progress=None)
    assert {file.name for file in folder.iterdir()} == before


_BYTES = [("Q4_0", None), ("Q4_K", None), ("MXFP4", "dense"), ("Q4_K", "int4-g32")]


@pytest.mark.parametrize(
    ("kind", "requantize"),
    [
        *_BYTES,
        *(
            pytest.param(kind, requantize, marks=pytest.mark.slow)
            for kind in ("Q8_0", "Q4_0", "Q4_K", "MXFP4")
            for requantize in (None, "dense", "int4-g32")
            if (kind, requantize) not in _BYTES
        ),
    ],
)
def test_host_bytes_are_those_held(wide, tmp_path, kind, requantize):
    """The bound on what is read ahead holds for what is read, not for what it becomes on a device."""
    source = wide()
    tensors = tensors_of(source.config, source.tensors)
    tensors["blk.0.ffn_up.weight"] = random_blocks(kind, (512, 256), np.random.default_rng(0))
    path = ("layers", "0", "mlp", "up_proj", "weight")
    num_values = 512 * 256
    file = write(tmp_path / "model.gguf", metadata_of(source.config), tensors)
    with GGUFCheckpoint(file, dtype="float32", requantize=requantize) as opened:
        found = opened.read_param(path)
        declared = opened.host_bytes(path)
        if requantize == "int4-g32" and kind == "Q4_K":
            assert declared >= 3 * 4 * num_values + num_values // 2
        else:
            arrays = jax.tree.leaves(found)
            assert declared == sum(array.nbytes for array in arrays)
        dense = ("layers", "0", "mlp", "gate_proj", "weight")
        half = ((0, 256), (0, 256))
        assert opened.host_bytes(dense, [half]) == 4 * num_values * 3 // 2
