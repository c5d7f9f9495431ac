"""A tiny Llama in every format, through the whole loader, the native store, compressed-tensors and the engine."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxinfer
from checkpoints_convert import (
    CheckpointError,
    compare_tensors,
    convert,
    kv_scales,
    load,
    save_huggingface,
    verify_against,
)
from checkpoints_convert.formats.kv_scales import LayerKVScales
from jaxinfer.loading import load_model
from jaxinfer.models import bind
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import is_quantized
from pallas_kernels.flash_attention import flash_attention
from tests.checkpoints_convert.formats import encoders, tiny

UP = "model.layers.1.mlp.up_proj"
WITHOUT_COMPRESSED_TENSORS = ("nf4", "nf4-nested", "fp4", "nvfp4", "modelopt-nvfp4")


def leaves(params):
    return jax.tree_util.tree_leaves_with_path(params)


def assert_identical(params, others):
    """Asserts that trees are equal: schemes, dtypes and bytes."""
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for (path, leaf), (_, other) in zip(leaves(params), leaves(others), strict=True):
        assert (leaf.dtype, np.asarray(leaf).tobytes()) == (other.dtype, np.asarray(other).tobytes()), path


@pytest.mark.matrix
@pytest.mark.parametrize("name", tiny.FORMATS)
def test_parameters_are_the_formulas_bit_for_bit(name, tmp_path):
    checkpoint = tiny.tiny(name)
    config, params = load(checkpoint.write(tmp_path / name))
    assert config.dtype == "float32"
    tiny.assert_weights(params, checkpoint.weights)
    assert sum(is_quantized(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_quantized)) == 7 * tiny.LAYERS


@pytest.mark.matrix
@pytest.mark.parametrize("name", tiny.SOME_FORMATS)
def test_round_trips(name, tmp_path):
    """Native, verified; from there compressed-tensors, which the reader opens as the same tree."""
    checkpoint = tiny.tiny(name)
    source = checkpoint.write(tmp_path / "source")
    _, params = load(source)
    convert(source, tmp_path / "native", progress=None)
    assert compare_tensors(tmp_path / "native", source) == []
    _, native = load(tmp_path / "native", verify=True)
    assert_identical(params, native)
    if name in WITHOUT_COMPRESSED_TENSORS:
        with pytest.raises(CheckpointError, match=r"parameter 'layers\.0\.attention\..*: .* the native form can"):
            convert(tmp_path / "native", tmp_path / "huggingface", to="huggingface", progress=None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "source"]
        return
    convert(tmp_path / "native", tmp_path / "huggingface", to="huggingface", progress=None)
    written = json.loads((tmp_path / "huggingface/config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    assert written["eos_token_id"] == 2
    _, reopened = load(tmp_path / "huggingface")
    assert_identical(params, reopened)
    assert compare_tensors(tmp_path / "huggingface", source) == []


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gptq-act-order", "nf4-nested", "packed-asym", "w8a8", "fp8-block"])
def test_dense_parameters_are_cast_and_quantized_ones_are_not(name, tmp_path):
    directory = tiny.tiny(name).write(tmp_path / name)
    _, exact = load(directory)
    config, cast = load(directory, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    for (leaf, _), (other, _) in zip(
        tiny.by_stored_name(exact).values(), tiny.by_stored_name(cast).values(), strict=True
    ):
        if isinstance(leaf, QuantizedArray):
            assert_identical(leaf, other)
        else:
            assert other.dtype == jax.numpy.bfloat16


def dense_twin(checkpoint, directory):
    """Asserts that weights are equal in float32."""
    return tiny.Tiny(tiny.CONFIG, checkpoint.weights, checkpoint.weights).write(directory)


def greedy(directory, prompt, num_tokens):
    """The most likely tokens, by a forward pass over all for each."""
    config, params = load(directory)

    @jax.jit
    def logits(tokens):
        def attend(layer, q, k, v, window):
            return flash_attention(q, k, v, window=window)

        model = bind(config, params)
        return model.logits(model(tokens[None], jnp.arange(len(tokens))[None], attend)[0])

    tokens = list(prompt)
    for _ in range(num_tokens):
        padded = jnp.array(tokens + [0] * (len(prompt) + num_tokens - len(tokens)))
        tokens.append(int(logits(padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_the_engine_runs_what_it_opens(tmp_path):
    """LLM("folder-with-gptq"): its greedy tokens are those of the same weights in float32."""
    checkpoint = tiny.tiny("gptq-act-order")
    directory = checkpoint.write(tmp_path / "gptq")
    prompt, params = [5, 17, 33, 2, 61, 7], jaxinfer.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with jaxinfer.LLM(str(directory), max_model_len=32, max_seqs=1, deterministic=True) as llm:
        answer = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    assert list(answer) == greedy(dense_twin(checkpoint, tmp_path / "dense"), prompt, 8)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("awq", 1e-4),
        pytest.param("packed-asym", 1e-4, marks=pytest.mark.slow),
        pytest.param("fp8-block", 1e-4, marks=pytest.mark.slow),
        ("w8a8", 0.1),
    ],
)
def test_forward_passes(name, tolerance, tmp_path):
    """`jaxinfer verify --against`; activations of w8a8 are rounded too."""
    checkpoint = tiny.tiny(name)
    report = verify_against(
        checkpoint.write(tmp_path / name), dense_twin(checkpoint, tmp_path / "dense"), token_ids=range(40)
    )
    assert report.max_logit_difference < tolerance


def test_side_files_of_older_repositories(tmp_path):
    checkpoint = tiny.tiny("gptq-v1")
    directory = checkpoint.write(tmp_path / "old", has_config=False)
    settings = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (directory / "quantize_config.json").write_text(json.dumps(settings))
    tiny.assert_weights(load(directory)[1], checkpoint.weights)
    convert(directory, tmp_path / "new", to="huggingface", progress=None)
    assert not (tmp_path / "new/quantize_config.json").exists()


def test_an_interrupted_conversion_goes_on(tmp_path, monkeypatch):
    checkpoint = tiny.tiny("packed-asym")
    source = checkpoint.write(tmp_path / "source")

    def stop(unit, done, total):
        if unit.startswith("layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "native", progress=stop)
    report = convert(source, tmp_path / "native", progress=None)
    assert report.num_resumed_units == 2
    assert_identical(load(source)[1], load(tmp_path / "native")[1])


def test_a_bias_of_zeros_that_the_model_lacks(tmp_path):
    """Files of the first GPTQ tools have one for every layer."""
    checkpoint = tiny.tiny("gptq-v1")
    checkpoint.tensors[f"{UP}.bias"] = np.zeros(tiny.F, np.float16)
    tiny.assert_weights(load(checkpoint.write(tmp_path / "zeros"))[1], checkpoint.weights)
    checkpoint.tensors[f"{UP}.bias"][3] = 1
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*up_proj\.bias': 1 of 128 values"):
        load(checkpoint.write(tmp_path / "ones"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("gptq-v1", encoders.gptq),
        ("nf4", encoders.bitsandbytes4),
        ("fp8-block", lambda weight: encoders.float8(weight, block=(48, 32), suffix="weight_scale_inv")),
    ],
)
def test_a_quantized_head_beside_tied_embeddings_is_used(name, encode, tmp_path, caplog):
    checkpoint = tiny.tiny(name)
    parts, weight = encode(checkpoint.weights["lm_head.weight"])
    checkpoint.config["quantization_config"].pop("modules_to_not_convert", None)
    del checkpoint.tensors["lm_head.weight"]
    checkpoint.tensors |= {f"lm_head.{suffix}": part for suffix, part in parts.items()}
    checkpoint.weights["lm_head.weight"] = weight
    checkpoint.config["tie_word_embeddings"] = True
    config, params = load(checkpoint.write(tmp_path / "head"))
    assert not config.tie_word_embeddings
    said = ("the head is quantized by itself", "lm_head.weight differs from the embedding; using both")
    assert any(words in caplog.text for words in said)
    tiny.assert_weights(params, checkpoint.weights)


@pytest.mark.parametrize(
    ("name", "field"), [("awq", "modules_to_not_convert"), ("bitsandbytes-int8", "llm_int8_skip_modules")]
)
def test_modules_left_alone_stay_dense(name, field, tmp_path):
    """Their tensors say so; a list that names them changes nothing."""
    checkpoint = tiny.tiny(name)
    checkpoint.config["quantization_config"][field] = ["up_proj"]
    for layer in range(tiny.LAYERS):
        module = f"model.layers.{layer}.mlp.up_proj"
        for tensor in [tensor for tensor in checkpoint.tensors if tensor.startswith(module + ".")]:
            del checkpoint.tensors[tensor]
        checkpoint.tensors[f"{module}.weight"] = checkpoint.weights[f"{module}.weight"]
    _, params = load(checkpoint.write(tmp_path / "some"))
    mlp = params["layers"]["1"]["mlp"]
    assert (is_quantized(mlp["up_proj"]["weight"]), is_quantized(mlp["down_proj"]["weight"])) == (False, True)
    tiny.assert_weights(params, checkpoint.weights)


def test_an_embedding_with_a_scale_for_each_row(tmp_path):
    checkpoint = tiny.tiny("packed")
    parts, weight = encoders.packed(checkpoint.weights["model.embed_tokens.weight"], bits=8, group=-1)
    del checkpoint.tensors["model.embed_tokens.weight"]
    checkpoint.tensors |= {f"model.embed_tokens.{suffix}": part for suffix, part in parts.items()}
    checkpoint.weights["model.embed_tokens.weight"] = weight
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    checkpoint.config["quantization_config"]["config_groups"]["rows"] = {"targets": ["Embedding"], "weights": scheme}
    config, params = load(checkpoint.write(tmp_path / "rows"))
    assert params["embed"].scheme.block == (1, tiny.D)
    tiny.assert_weights(params, checkpoint.weights)
    save_huggingface(config, params, tmp_path / "saved", dtype="auto")
    assert_identical(params, load(tmp_path / "saved")[1])


@pytest.mark.parametrize("block", [None, (16, 32)], ids=["tensor", "blocks"])
def test_an_embedding_of_few_scales_has_one_for_each_row_or_is_refused(block, tmp_path):
    checkpoint = tiny.tiny("fp8-dynamic")
    name = "model.embed_tokens"
    parts, weight = encoders.float8(checkpoint.weights[f"{name}.weight"], block=block)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor" if block is None else "block"}
    scheme["block_structure"] = block and list(block)
    checkpoint.config["quantization_config"]["config_groups"]["rows"] = {"targets": ["Embedding"], "weights": scheme}
    checkpoint.tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    checkpoint.weights[f"{name}.weight"] = weight
    source = checkpoint.write(tmp_path / "source")
    if block is not None:
        with pytest.raises(
            CheckpointError, match=r"safetensors: module 'model.embed_tokens' is an embedding: blocks of"
        ):
            load(source)
        return
    _, params = load(source)
    assert params["embed"].scheme.block == (1, tiny.D)
    tiny.assert_weights(params, checkpoint.weights)


@pytest.mark.parametrize(
    ("scheme", "name"), [("awq", "awq_marlin"), ("gptq-act-order", "gptq"), ("packed", "compressed-tensors")]
)
def test_the_format_may_be_named_and_another_one_is_an_error(scheme, name, tmp_path):
    source = tiny.tiny(scheme).write(tmp_path / "source")
    load_model(source, dtype="float32", quantization=name)
    with pytest.raises(ValueError, match=r"quantization='fp8' is not what .*: its files are in the format"):
        load_model(source, dtype="float32", quantization="fp8")


def test_a_model_of_several_dtypes_opens_in_the_one_that_is_asked_for(tmp_path):
    checkpoint = tiny.tiny("packed")
    del checkpoint.config["torch_dtype"]
    norm = "model.norm.weight"
    checkpoint.tensors[norm] = checkpoint.tensors[norm].astype(ml_dtypes.bfloat16)
    source = checkpoint.write(tmp_path / "source")
    assert load_model(source, dtype="float32").config.dtype == "float32"
    with pytest.raises(CheckpointError, match="choose one of float32, bfloat16, float16"):
        load(source)


@pytest.mark.parametrize(
    "scheme", [{"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "float", "symmetric": False}]
)
def test_scales_of_other_caches_are_not_applied_and_said_so(scheme, tmp_path, caplog):
    checkpoint = tiny.tiny("packed")
    checkpoint.config["quantization_config"]["kv_cache_scheme"] = scheme
    for layer in range(tiny.LAYERS):
        for side in "kv":
            checkpoint.tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = np.ones(1, np.float32)
    source = checkpoint.write(tmp_path / "source")
    assert kv_scales(source) == ()
    assert "is not supported, its scales are not applied" in caplog.text


def test_what_is_not_applied_is_said_once(tmp_path, caplog):
    checkpoint = tiny.tiny("fp8-block")
    load_model(checkpoint.write(tmp_path / "source"), dtype="float32")
    assert caplog.text.count("activations are not quantized: the products of these layers are floating-point") == 1


def test_rows_that_are_not_whole_blocks_stay_dense_and_say_so(tmp_path, caplog):
    checkpoint = tiny.tiny("nf4")
    parts, weight = encoders.bitsandbytes4(checkpoint.weights[f"{UP}.weight"], size=128)
    checkpoint.tensors |= {f"{UP}.{suffix}": part for suffix, part in parts.items()}
    checkpoint.weights[f"{UP}.weight"] = weight
    _, params = load(checkpoint.write(tmp_path / "nf4"))
    assert not isinstance(params["layers"]["1"]["mlp"]["up_proj"]["weight"], QuantizedArray)
    assert "rows of 64 values are not whole blocks of 128: such weights are dequantized" in caplog.text
    tiny.assert_weights(params, checkpoint.weights)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scales_of_the_cache_are_kept(dtype, tmp_path):
    checkpoint = tiny.tiny("packed")
    for layer in range(tiny.LAYERS):
        prefix = f"model.layers.{layer}.self_attn"
        checkpoint.tensors[f"{prefix}.k_scale"] = np.array([0.5 + layer], dtype)
        checkpoint.tensors[f"{prefix}.v_scale"] = np.array([0.25, 2], dtype)
    source = checkpoint.write(tmp_path / "source")
    expected = (LayerKVScales((0.5,), (0.25, 2.0)), LayerKVScales((1.5,), (0.25, 2.0)))
    assert kv_scales(source) == expected
    tiny.assert_weights(load(source)[1], checkpoint.weights)
    convert(source, tmp_path / "native", progress=None)
    assert kv_scales(tmp_path / "native") == expected
    convert(tmp_path / "native", tmp_path / "back", to="huggingface", progress=None)
    assert kv_scales(tmp_path / "back") == expected


def spoil(checkpoint, suffix, change):
    checkpoint.tensors[f"{UP}.{suffix}"] = change(checkpoint.tensors[f"{UP}.{suffix}"].copy())


def set_to(value, *index):
    def change(array):
        array[index] = value
        return array

    return change


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("gptq-v1", "qweight", lambda a: a[:-1], r"qweight' \(model\.safetensors\) has shape \[7, 128\]"),
        ("gptq-v1", "scales", set_to(np.nan, 0, 3), r"scales': 1 of 256 values are NaN or infinite"),
        ("gptq-act-order", "g_idx", set_to(9, 5), r"g_idx' 1 of 64 values such as 9 are not in \[0, 1\]"),
        ("awq", "qzeros", lambda a: a[:1], r"qzeros' \(model\.safetensors\) has shape \[1, 16\], not \[2, 16\]"),
        ("awq", "scales", set_to(np.inf, 1, 1), r"scales': 1 of 256 values are NaN or infinite"),
        ("nf4", "weight", lambda a: a[:-2], r"weight' \(model\.safetensors\) has shape \[4094, 1\], not \[4096, 1\]"),
        ("nf4", "weight.absmax", set_to(np.nan, 7), r"weight\.absmax': 1 of 128 values are NaN"),
        ("nf4-nested", "weight.nested_absmax", set_to(np.nan, 0), r"weight\.nested_absmax': 1 of 8 values are NaN"),
        ("bitsandbytes-int8", "SCB", set_to(np.nan, 0), r"SCB': 1 of 128 values are NaN"),
        ("packed", "weight_packed", lambda a: a[:, 1:].copy(), r"weight_packed' .* has shape \[128, 7\]"),
        ("packed", "weight_scale", set_to(np.nan, 0), r"weight_scale': 2 of 256 values are NaN"),
        ("fp8-dynamic", "weight", set_to(np.nan, 3, 4), r"weight': 1 of 8192 values are NaN"),
        ("fp8-block", "weight_scale_inv", lambda a: a[:2], r"has shape \[2, 2\], not \[3, 2\]"),
        ("fp8-block", "weight_scale_inv", set_to(np.inf, 0, 0), r"weight_scale_inv': 1 of 6 values are NaN"),
    ],
)  # fmt: skip
def test_bad_input_names_file_tensor_and_reason_and_writes_nothing(name, suffix, change, message, tmp_path):
    checkpoint = tiny.tiny(name)
    spoil(checkpoint, suffix, change)
    source = checkpoint.write(tmp_path / "source")
    pattern = rf"model\.layers\.1\.mlp\.up_proj\.{message}" if "'" in message.split(":")[0] else message
    with pytest.raises(CheckpointError, match=pattern) as error:
        load(source)
    assert "model.safetensors" in str(error.value)
    assert f"{UP}.{suffix}" in str(error.value)
    for form in ("native", "huggingface"):
        with pytest.raises(CheckpointError):
            convert(source, tmp_path / form, to=form, progress=None)
        assert not (tmp_path / form).exists()


def test_a_truncated_file_is_refused(tmp_path):
    source = tiny.tiny("gptq-v1").write(tmp_path / "source")
    raw = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(raw[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(source)


def test_a_wrong_group_size_is_refused_for_every_module(tmp_path):
    checkpoint = tiny.tiny("gptq-v1")
    checkpoint.config["quantization_config"] = {**checkpoint.config["quantization_config"], "group_size": 16}
    with pytest.raises(CheckpointError, match=r"14 problems"):
        load(checkpoint.write(tmp_path / "source"))


@pytest.mark.parametrize("method", ["hqq", "quark", "exl2"])
def test_unknown_methods_are_refused_by_name(method, tmp_path):
    checkpoint = tiny.tiny("gptq-v1")
    checkpoint.config["quantization_config"] = {"quant_method": method}
    with pytest.raises(CheckpointError, match=f"quant_method '{method}' is not supported"):
        load(checkpoint.write(tmp_path / "source"))


def test_tensors_no_format_knows_are_refused(tmp_path):
    checkpoint = tiny.tiny("gptq-v1")
    checkpoint.tensors[f"{UP}.perm"] = np.arange(4, dtype=np.int32)
    with pytest.raises(CheckpointError, match=rf"tensor '{UP}\.perm' \[4\] is not of this model"):
        load(checkpoint.write(tmp_path / "source"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("field", "value"),
    [("parts", {"values": ["int8", [64, 128]]}), ("scheme", {"block": [16, 1]}), ("scheme", {"kind": "codebook"})],
)
def test_a_native_checkpoint_that_is_not_what_it_says_is_refused(field, value, tmp_path):
    convert(tiny.tiny("packed").write(tmp_path / "source"), tmp_path / "native", progress=None)
    path = tmp_path / "native/jaxinfer_config.json"
    data = json.loads(path.read_text())
    data["quantized"]["layers.0.mlp.up_proj.weight"][field] |= value
    text = json.dumps(data)
    path.write_text(text.ljust(path.stat().st_size))  # sizes are compared, even without checksums
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        load(tmp_path / "native", verify=False)
