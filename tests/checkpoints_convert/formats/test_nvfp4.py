"""NVFP4 in the forms of ModelOpt and compressed-tensors; tests/oracle compares with compressed-tensors itself."""

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.compressed_tensors import compressed_tensors
from checkpoints_convert.formats.fp8 import modelopt
from jaxinfer.quantization import QuantizedArray
from tests.checkpoints_convert.formats import encoders, tiny

SHAPE = (20, 96)
METHODS = {
    True: modelopt(tiny.FORMATS["modelopt-nvfp4"].quantization),
    False: compressed_tensors(tiny.FORMATS["nvfp4"].quantization),
}
WEIGHT, SCALE = {True: "weight", False: "weight_packed"}, {True: "weight_scale_2", False: "weight_global_scale"}
both = pytest.mark.parametrize("is_modelopt", [True, False])


def encoded(is_modelopt):
    weight = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32) * 0.02
    return encoders.nvfp4(weight, is_modelopt=is_modelopt)


@both
def test_the_weight_is_that_of_the_formula(is_modelopt):
    tensors, expected = encoded(is_modelopt)
    found = encoders.read(METHODS[is_modelopt], tensors, SHAPE)
    assert isinstance(found, QuantizedArray)
    assert encoders.dense(found).tobytes() == expected.tobytes()
    assert (found.scheme.kind, found.scheme.bits, found.scheme.block) == ("codebook", 4, (16, 1))
    assert found.num_bytes == 20 * 96 * 6 // 8 + 16 * 4


@both
def test_negative_zero_keeps_its_sign(is_modelopt):
    tensors, _ = encoded(is_modelopt)
    tensors[WEIGHT[is_modelopt]] = np.full((20, 48), 0x08, np.uint8)
    dense = encoders.dense(encoders.read(METHODS[is_modelopt], tensors, SHAPE))
    assert np.signbit(dense[0]).tolist() == [True, False] * 48


def test_the_global_scale_multiplies_in_one_form_and_divides_in_the_other():
    """The largest weight of both forms is 6 * 448 * the tensor's scale, as its quantizer chose it."""
    largest = {}
    for is_modelopt, method in METHODS.items():
        tensors, _ = encoded(is_modelopt)
        largest[is_modelopt] = np.abs(encoders.dense(encoders.read(method, tensors, SHAPE))).max()
    assert largest[True] == pytest.approx(largest[False], rel=1e-6)
    assert 0.01 < largest[True] < 1


@both
@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        ("weight", lambda a: a[:, :-1], r"has shape \[20, 47\], not \[20, 48\]"),
        ("weight", lambda a: a.view(np.int8), "is stored as I8, not as U8"),
        ("scales", lambda a: a[:, :3], r"has shape \[20, 3\], not \[20, 6\]"),
        ("scales", lambda a: a.view(np.uint8), "is stored as U8, not as F8_E4M3"),
        ("scales", None, "is missing"),
        ("whole", lambda a: np.full(2, a), r"has shape \[2\], not \[\] or \[1\]"),
        ("whole", None, "is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(is_modelopt, which, change, message):
    if which == "weight" and is_modelopt and "I8" in message:
        pytest.skip("of ModelOpt's, another type of the weight is that of a dense or FP8 module")
    tensors, _ = encoded(is_modelopt)
    suffix = {"weight": WEIGHT[is_modelopt], "scales": "weight_scale", "whole": SCALE[is_modelopt]}[which]
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(METHODS[is_modelopt], tensors, SHAPE)
    assert error.value.suffix == suffix


@both
def test_inputs_that_are_no_whole_groups_are_refused(is_modelopt):
    headers = {
        WEIGHT[is_modelopt]: ("U8", (4, 20)),
        "weight_scale": ("F8_E4M3", (4, 2)),
        SCALE[is_modelopt]: ("F32", ()),
    }
    with pytest.raises(FormatError, match="groups of 16 inputs, which do not divide 40"):
        METHODS[is_modelopt].reader("layer", (4, 40), headers, "Linear")


def test_a_global_scale_of_zero_is_refused_where_it_divides():
    tensors, _ = encoded(False)
    tensors["weight_global_scale"] = np.zeros(1, np.float32)
    with pytest.raises(FormatError, match="is 0, and scales are divided by it"):
        encoders.read(METHODS[False], tensors, SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 32}, "holds symmetric 4-bit floats in groups of 16"),
        ({"symmetric": False}, "holds symmetric 4-bit floats in groups of 16"),
        ({"type": "int"}, "holds symmetric 4-bit floats in groups of 16"),
    ],
)
def test_other_schemes_in_the_format_are_refused(changes, message):
    data = tiny._compressed("nvfp4-pack-quantized", **{**tiny._NVFP4, **changes})
    with pytest.raises(FormatError, match=message):
        encoders.read(compressed_tensors(data), encoded(False)[0], SHAPE)


def test_the_strategy_in_another_format_is_refused():
    method = compressed_tensors(tiny._compressed("pack-quantized", **{**tiny._NVFP4, "type": "int"}))
    with pytest.raises(FormatError, match="'tensor_group' are not supported outside nvfp4-pack-quantized"):
        encoders.read(method, encoders.packed(np.ones(SHAPE, np.float32), group=16)[0], SHAPE)


def test_activations_of_four_bits_stay_floating_point_and_it_is_said():
    activations = {**tiny._NVFP4, "dynamic": "local"}
    method = compressed_tensors(tiny._compressed("nvfp4-pack-quantized", activations, **tiny._NVFP4))
    tensors, expected = encoded(False)
    tensors["input_global_scale"] = np.ones(1, np.float32)
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, SHAPE)), expected)
    headers = {name: (encoders.DTYPE_NAMES[array.dtype.name], array.shape) for name, array in tensors.items()}
    reader = method.reader("layer", SHAPE, headers, "Linear")
    assert reader is not None
    assert "activations declared as 4-bit float (tensor_group) stay floating-point" in reader.notes[0]


def test_a_module_that_the_configuration_excludes_is_not_taken():
    tensors, _ = encoded(True)
    with pytest.raises(FormatError, match="is stored as U8, and the configuration excludes the module"):
        encoders.read(METHODS[True], tensors, SHAPE, "lm_head")
    assert METHODS[True].reader("lm_head", SHAPE, {"weight": ("BF16", SHAPE)}, "Linear") is None


def test_scales_that_are_nan_are_refused(tmp_path):
    from checkpoints_convert import CheckpointError, load

    checkpoint = tiny.tiny("nvfp4")
    name = next(name for name in checkpoint.tensors if name.endswith("weight_scale"))
    checkpoint.tensors[name] = checkpoint.tensors[name].copy()
    checkpoint.tensors[name].view(np.uint8)[0, 0] = 0x7F
    assert np.isnan(checkpoint.tensors[name].astype(np.float32)[0, 0])
    assert checkpoint.tensors[name].dtype == ml_dtypes.float8_e4m3fn
    with pytest.raises(CheckpointError, match=r"1 of \d+ values are NaN or infinite"):
        load(checkpoint.write(tmp_path / "model"))
