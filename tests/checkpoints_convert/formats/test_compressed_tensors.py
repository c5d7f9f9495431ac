import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.compressed_tensors import compressed_tensors
from tests.checkpoints_convert.formats import encoders


def weight(outputs=20, inputs=96):
    return np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)


def group(targets=("Linear",), form=None, activations=None, **weights):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    return {"targets": list(targets), "weights": weights, "input_activations": activations, "format": form}


def config(form="pack-quantized", ignore=(), groups=None, **weights):
    groups = groups or {"group_0": group(**weights)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": list(ignore)}


@pytest.mark.matrix
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed(bits, is_old, symmetric):
    """The second dimension tells the dense stream from words of whole values, until 2025 for 3, 5, 6 and 7 bits."""
    tensors, expected = encoders.packed(weight(), bits=bits, symmetric=symmetric, is_old=is_old)
    found = encoders.read(compressed_tensors(config(num_bits=bits, symmetric=symmetric)), tensors, (20, 96))
    assert np.array_equal(encoders.dense(found), expected)
    assert (found.zeros is None) == symmetric


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_scales_keep_their_dtype(dtype):
    tensors, expected = encoders.packed(weight(), dtype=dtype)
    found = encoders.read(compressed_tensors(config()), tensors, (20, 96))
    assert found.scales.dtype == dtype
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize(("strategy", "block"), [("channel", (96, 1)), ("group", (40, 1)), ("tensor", (96, 20))])
def test_strategies(strategy, block):
    size = {"group": 40}.get(strategy, -1)
    tensors, expected = encoders.packed(weight(), bits=8, group=size)
    if strategy == "tensor":
        tensors["weight_scale"] = tensors["weight_scale"][:1, 0]
        expected = expected / encoders.packed(weight(), bits=8, group=-1)[0]["weight_scale"] * tensors["weight_scale"]
    data = config(num_bits=8, strategy=strategy, group_size=40 if strategy == "group" else None)
    found = encoders.read(compressed_tensors(data), tensors, (20, 96))
    assert found.scheme.block == block
    if strategy == "tensor":
        assert np.allclose(encoders.dense(found), expected, rtol=1e-6)
    else:
        assert np.array_equal(encoders.dense(found), expected)


def test_zeros_of_older_files_are_not_packed():
    tensors, expected = encoders.packed(weight(), symmetric=False)
    _, _, zeros = encoders.quantize(weight(), encoders.groups_of(96, 32), 4, False, np.float32)
    tensors["weight_zero_point"] = (zeros - 8).astype(np.int8)
    found = encoders.read(compressed_tensors(config(symmetric=False)), tensors, (20, 96))
    assert np.array_equal(encoders.dense(found), expected)


def test_act_order_by_group():
    g_idx = np.random.default_rng(1).permutation(96) // 32
    tensors, expected = encoders.packed(weight(), g_idx=g_idx)
    found = encoders.read(compressed_tensors(config(actorder="group")), tensors, (20, 96))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.permutation is not None
    tensors["weight_g_idx"][5] = 3
    with pytest.raises(FormatError, match=r"1 of 96 values such as 3 are not in \[0, 2\]"):
        encoders.read(compressed_tensors(config()), tensors, (20, 96))


def test_act_order_that_was_never_set():
    tensors, expected = encoders.packed(weight())
    tensors["weight_g_idx"] = np.full(96, -1, np.int32)
    found = encoders.read(compressed_tensors(config(actorder="group")), tensors, (20, 96))
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}])
def test_int8(per_tensor, form, activations):
    tensors, expected = encoders.int8(weight(), per_tensor=per_tensor)
    strategy = "tensor" if per_tensor else "channel"
    groups = {"g": group(num_bits=8, strategy=strategy, group_size=None, activations=activations)}
    found = encoders.read(compressed_tensors(config(form, groups=groups)), tensors, (20, 96))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.scheme.activations == ("int8" if activations else None)


def test_asymmetric_activations_stay_floating_point_with_a_note():
    tensors, expected = encoders.int8(weight())
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}
    groups = {"g": group(num_bits=8, strategy="channel", group_size=None, activations=activations)}
    headers = {suffix: (encoders.DTYPE_NAMES[array.dtype.name], array.shape) for suffix, array in tensors.items()}
    reader = compressed_tensors(config("int-quantized", groups=groups)).reader(
        "layer", weight().shape, headers, "Linear"
    )
    assert reader.notes[0].startswith("activations declared as asymmetric 8-bit int (token) stay floating-point")
    found = reader.read(tensors)
    assert found.scheme.activations is None
    assert np.array_equal(encoders.dense(found), expected)


def test_static_activations_are_accepted_with_a_note():
    tensors, expected = encoders.int8(weight())
    tensors |= {"input_scale": np.ones(1, np.float32), "input_zero_point": np.zeros(1, np.int8)}
    activations = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    groups = {"g": group(num_bits=8, strategy="channel", group_size=None, activations=activations)}
    headers = {suffix: (encoders.DTYPE_NAMES[array.dtype.name], array.shape) for suffix, array in tensors.items()}
    reader = compressed_tensors(config("int-quantized", groups=groups)).reader("layer", (20, 96), headers, "Linear")
    assert reader.notes == ("static scales of activations are not applied: each token has its own",)
    assert np.array_equal(encoders.dense(reader.read(tensors)), expected)


@pytest.mark.parametrize(
    ("strategy", "block", "expected_block"),
    [("tensor", None, (96, 20)), ("channel", (1, 96), (96, 1)), ("block", (8, 32), (32, 8))],
)
@pytest.mark.parametrize("form", ["float-quantized", "naive-quantized"])
def test_float8(strategy, block, expected_block, form):
    tensors, expected = encoders.float8(weight(), block=block)
    structure = [8, 32] if strategy == "block" else None
    groups = {"g": group(type="float", num_bits=8, strategy=strategy, group_size=None, block_structure=structure)}
    found = encoders.read(compressed_tensors(config(form, groups=groups)), tensors, (20, 96))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.scheme.block == expected_block


def test_mxfp4():
    packed, exponents, expected = encoders.mxfp4(weight())
    tensors = {"weight_packed": packed, "weight_scale": exponents}
    groups = {"g": group(type="float")}
    method = compressed_tensors(config("mxfp4-pack-quantized", groups=groups))
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, (20, 96))), expected)
    exponents[0, 0] = 255
    with pytest.raises(FormatError, match="1 of 60 scales are NaN"):
        encoders.read(method, tensors, (20, 96))


def test_a_name_comes_before_a_pattern_and_a_pattern_before_a_class():
    groups = {
        "class": group(["Linear"], num_bits=4),
        "pattern": group(["re:.*down_proj$"], num_bits=8),
        "name": group(["model.layers.1.mlp.down_proj"], num_bits=2),
    }
    method = compressed_tensors(config(groups=groups, ignore=["re:.*lm_head"]))
    for module, bits in (
        ("model.layers.1.mlp.down_proj", 2),
        ("model.layers.0.mlp.down_proj", 8),
        ("model.layers.0.mlp.up_proj", 4),
    ):
        tensors, expected = encoders.packed(weight(), bits=bits)
        found = encoders.read(method, tensors, (20, 96), module)
        assert found.scheme.bits == bits
        assert np.array_equal(encoders.dense(found), expected)


def test_formats_by_group():
    groups = {"a": group(["re:.*a$"], form="pack-quantized"), "b": group(["re:.*b$"], form="int-quantized", num_bits=8,
              strategy="channel", group_size=None)}  # fmt: skip
    method = compressed_tensors(config("mixed-precision", groups=groups))
    for module, (tensors, expected) in {"a": encoders.packed(weight()), "b": encoders.int8(weight())}.items():
        assert np.array_equal(encoders.dense(encoders.read(method, tensors, (20, 96), module)), expected)


@pytest.mark.parametrize(
    ("module", "ignore", "message"),
    [
        ("lm_head", ["lm_head"], "the configuration ignores it"),
        ("x.other", [], "no group of the configuration targets"),
    ],
)
def test_modules_the_configuration_does_not_quantize(module, ignore, message):
    tensors, _ = encoders.packed(weight())
    method = compressed_tensors(config(ignore=ignore, groups={"g": group(["re:model.*", "lm_head"])}))
    with pytest.raises(FormatError, match=message):
        encoders.read(method, tensors, (20, 96), module)
    assert method.reader(module, (20, 96), {"weight": ("BF16", (20, 96))}, "Linear") is None


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight_packed", lambda a: a[:, :-1], r"has shape \[20, 11\], not \[20, 12\]"),
        ("weight_packed", lambda a: a.astype(np.uint8), "is stored as U8, not as I32"),
        ("weight_scale", lambda a: a[:, :1], r"has shape \[20, 1\], not \[20, 3\]"),
        ("weight_shape", lambda a: a[::-1].copy(), r"says \[96, 20\], config.json makes it \[20, 96\]"),
        ("weight_shape", None, "is missing"),
        ("weight_zero_point", None, "is missing"),
        ("weight_zero_point", lambda a: a[:, :1], r"has shape \[3, 1\], not \[3, 3\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(suffix, change, message):
    tensors, _ = encoders.packed(weight(), symmetric=False)
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(compressed_tensors(config(symmetric=False)), tensors, (20, 96))
    assert error.value.suffix == suffix


def test_zeros_of_a_symmetric_module_must_be_zero():
    tensors, expected = encoders.int8(weight())
    tensors["weight_zero_point"] = np.zeros((20, 1), np.int8)
    data = config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    assert np.array_equal(encoders.dense(encoders.read(compressed_tensors(data), tensors, (20, 96))), expected)
    tensors["weight_zero_point"][3] = 1
    with pytest.raises(FormatError, match="is not zero, and symmetric is true"):
        encoders.read(compressed_tensors(data), tensors, (20, 96))


def test_values_beyond_their_bits_are_refused():
    tensors, _ = encoders.int8(weight())
    data = config("int-quantized", num_bits=4, strategy="channel", group_size=None)
    with pytest.raises(FormatError, match=r"of 1920 values do not fit 4 bits"):
        encoders.read(compressed_tensors(data), tensors, (20, 96))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (config("mxfp6-pack-quantized"), "format 'mxfp6-pack-quantized' is not supported"),
        (config("marlin-24"), "format 'marlin-24' is not supported"),
        (config("sparse-24-bitmask"), "format 'sparse-24-bitmask' is not supported"),
        (config("pack_quantized"), "did you mean 'pack-quantized'"),
        (config(groups={"g": group(form="mxfp8-quantized")}), "format 'mxfp8-quantized' is not supported"),
        (
            {**config(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config format 'sparse-24-bitmask'",
        ),
        ({**config(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
        (config(strategy="attn_head"), "strategy 'attn_head' are not supported"),
        (config(num_bits=9), "weights of 9-bit 'int' are not supported"),
        (config(num_bits=6, type="float"), "weights of 6-bit 'float' are not supported"),
        (config(group_size=None), "group_size must be a positive integer, got None"),
        (config(strategy="block"), "block_structure must be two positive integers, got None"),
        (config(dynamic=True), "weights are dynamic"),
        (config(groups={"g": group(["re:("])}), "is not a regular expression"),
        (config(groups={"W4A16": ["Linear"]}), "config_groups of 'W4A16' must be an object"),
        ({**config(), "ignore": "lm_head"}, "ignore must be a list of names"),
    ],
)
def test_what_is_not_read_is_refused_by_name(data, message):
    with pytest.raises(FormatError, match=message):
        compressed_tensors(data)
