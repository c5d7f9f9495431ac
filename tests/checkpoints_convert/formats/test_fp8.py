import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.fp8 import fbgemm_fp8, fp8, modelopt
from tests.checkpoints_convert.formats import encoders

BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}


def weight(outputs=40, inputs=80):
    return np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)


def test_blocks_whose_edge_is_cut_off():
    tensors, expected = encoders.float8(weight(), block=(16, 32), suffix="weight_scale_inv")
    found = encoders.read(fp8(BLOCKS), tensors, (40, 80))
    assert np.array_equal(encoders.dense(found), expected)  # scale_inv multiplies
    assert (found.scheme.block, found.scheme.activations) == ((32, 16), None)
    assert found.scales.shape == (3, 3)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv", "qscale_weight", "scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_under_each_of_its_names(suffix, shape):
    tensors, expected = encoders.float8(weight(), suffix=suffix)
    tensors[suffix] = tensors[suffix].reshape(shape)
    found = encoders.read(fp8({"quant_method": "fp8"}), tensors, (40, 80))
    assert np.array_equal(encoders.dense(found), expected)
    assert (found.scheme.block, found.scheme.activations) == ((80, 40), "fp8")


@pytest.mark.parametrize("name", ["activation_scale", "input_scale"])
def test_static_scales_of_activations_are_accepted_with_a_note(name):
    tensors, expected = encoders.float8(weight())
    tensors[name] = np.array([0.5], np.float32)
    headers = {suffix: (encoders.DTYPE_NAMES[array.dtype.name], array.shape) for suffix, array in tensors.items()}
    reader = fp8({"activation_scheme": "static"}).reader("layer", (40, 80), headers, "Linear")
    assert name in reader.suffixes
    assert "activations are not applied" in reader.notes[0]
    found = reader.read(tensors)
    assert np.array_equal(encoders.dense(found), expected)
    assert found.scheme.activations is None


@pytest.mark.parametrize("stored", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_scales_stored_as_exponents(stored):
    tensors, _ = encoders.float8(weight(), block=(16, 32), suffix="weight_scale_inv")
    exponents = np.random.default_rng(1).integers(120, 130, (3, 3)).astype(np.uint8)
    tensors["weight_scale_inv"] = exponents.view(stored)
    found = encoders.read(fp8({**BLOCKS, "scale_fmt": "ue8m0"}), tensors, (40, 80))
    spread = np.repeat(np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 16, 0), 32, 1)[:40, :80]
    assert np.array_equal(encoders.dense(found), tensors["weight"].astype(np.float32) * spread)
    exponents[1, 1] = 255
    with pytest.raises(FormatError, match="1 of 9 scales are NaN"):
        encoders.read(fp8(BLOCKS), tensors, (40, 80))


def test_fbgemm_has_a_scale_for_every_output():
    tensors, expected = encoders.float8(weight(), block=(1, 80))
    found = encoders.read(fbgemm_fp8({"activation_scale_ub": 1200.0}), tensors, (40, 80))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.scheme.block == (80, 1)


def test_modelopt():
    tensors, expected = encoders.float8(weight())
    tensors["weight_scale"] = tensors["weight_scale"].reshape(())
    tensors["input_scale"] = np.array(0.5, np.float32)
    data = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head*"]}}
    assert np.array_equal(encoders.dense(encoders.read(modelopt(data), tensors, (40, 80))), expected)
    with pytest.raises(FormatError, match="the configuration excludes the module"):
        encoders.read(modelopt(data), tensors, (40, 80), "lm_head")


def test_the_configuration_of_minimax_m2():
    published = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    method = fp8(published)
    assert (method.fmt, method.block, method.is_dynamic) == ("e4m3", (128, 128), True)
    tensors, expected = encoders.float8(weight(), block=(128, 128), suffix="weight_scale_inv")
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, (40, 80))), expected)
    assert fp8({**published, "fmt": "float8_e5m2"}).fmt == "e5m2"


def test_e5m2():
    tensors, _ = encoders.float8(weight())
    tensors["weight"] = tensors["weight"].astype(np.float32).astype(ml_dtypes.float8_e5m2)
    found = encoders.read(fp8({"fmt": "e5m2"}), tensors, (40, 80))
    assert np.array_equal(encoders.dense(found), tensors["weight"].astype(np.float32) * tensors["weight_scale"])
    with pytest.raises(FormatError, match="is stored as F8_E5M2, not as F8_E4M3"):
        encoders.read(fp8({}), tensors, (40, 80))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_modules_left_alone_are_recognized_by_their_tensors(dtype):
    assert fp8(BLOCKS).reader("layer", (40, 80), {"weight": (dtype, (40, 80))}, "Linear") is None


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"weight": ("F8_E4M3", (40, 80))}, "is missing"),
        ({"weight": ("F8_E4M3FNUZ", (40, 80))}, "is stored as F8_E4M3FNUZ, not as F8_E4M3"),
        ({"weight": ("U8", (40, 40))}, "is stored as U8, not as F8_E4M3"),
        ({"weight": ("F8_E4M3", (40, 80)), "weight_scale_inv": ("F32", (2, 3))}, r"has shape \[2, 3\], not \[3, 3\]"),
        ({"weight": ("F8_E4M3", (40, 79)), "weight_scale_inv": ("F32", (3, 3))}, r"has shape \[40, 79\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(headers, message):
    with pytest.raises(FormatError, match=message):
        fp8(BLOCKS).reader("layer", (40, 80), headers, "Linear")


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (fp8, {"fmt": "e4m3fnuz"}, "fmt 'e4m3fnuz' is not supported"),
        (fp8, {"activation_scheme": "block"}, "activation_scheme 'block'"),
        (fp8, {"weight_block_size": [128]}, r"weight_block_size must be two positive integers, got \[128\]"),
        (fp8, {"scale_fmt": "int8"}, "scale_fmt 'int8' is not supported"),
        (modelopt, {"quantization": {"quant_algo": "NVFP4_AWQ"}}, "quant_algo 'NVFP4_AWQ' is not supported"),
        (modelopt, {"quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not supported, NVFP4 has groups of 16"),
        (modelopt, {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ' is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(make, data, message):
    with pytest.raises(FormatError, match=message):
        make(data)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("pattern", ["mlp", "model.layers.0.mlp.up_proj", "*.up_proj"])
def test_a_module_that_the_configuration_excludes_is_not_taken(key, pattern):
    tensors, _ = encoders.float8(weight())
    method = fp8({"quant_method": "fp8", key: [pattern, "lm_head"]})
    with pytest.raises(FormatError, match="is stored as F8_E4M3, and the configuration excludes the module"):
        encoders.read(method, tensors, (40, 80), "model.layers.0.mlp.up_proj")
    encoders.read(method, tensors, (40, 80), "model.layers.0.self_attn.q_proj")
    with pytest.raises(FormatError, match=f"{key} must be a list of names"):
        fp8({"quant_method": "fp8", key: "lm_head"})
