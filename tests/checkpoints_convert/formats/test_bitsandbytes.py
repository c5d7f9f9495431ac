import json

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.bitsandbytes import bitsandbytes
from jaxinfer.quantization import NestedScales
from tests.checkpoints_convert.formats import encoders

METHOD = bitsandbytes({})


def weight(outputs=12, inputs=128):
    return np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)


def state_of(tensors):
    return next(suffix for suffix in tensors if "quant_state" in suffix)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_four_bits(kind, nested, size):
    tensors, expected = encoders.bitsandbytes4(weight(), kind=kind, nested=nested, size=size)
    found = encoders.read(METHOD, tensors, (12, 128))
    assert np.array_equal(encoders.dense(found), expected)
    assert isinstance(found.scales, NestedScales) == nested
    assert found.scheme.block == (size, 1)
    assert np.array_equal(found.codebook, encoders.NF4 if kind == "nf4" else encoders.FP4)


def test_the_first_value_is_in_the_high_bits():
    tensors, _ = encoders.bitsandbytes4(weight())
    tensors["weight"] = np.full_like(tensors["weight"], 0x0F)
    found = encoders.dense(encoders.read(METHOD, tensors, (12, 128)))
    assert (found[:, 0::2] < 0).all()
    assert (found[:, 1::2] > 0).all()


def test_the_table_is_the_files():
    tensors, _ = encoders.bitsandbytes4(weight())
    tensors["weight.quant_map"] = tensors["weight.quant_map"] * np.float32(0.5)
    _, expected = encoders.bitsandbytes4(weight())
    assert np.array_equal(encoders.dense(encoders.read(METHOD, tensors, (12, 128))), expected * np.float32(0.5))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(12, 96), (7, 33)])
def test_blocks_that_run_over_rows_make_a_dense_weight_and_a_note(shape, nested):
    tensors, expected = encoders.bitsandbytes4(weight(*shape), nested=nested)
    headers = {suffix: (encoders.DTYPE_NAMES[array.dtype.name], array.shape) for suffix, array in tensors.items()}
    reader = METHOD.reader("layer", shape, headers, "Linear")
    found = reader.read(tensors)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found.T, expected)
    assert reader.notes[0].startswith(f"rows of {shape[1]} values are not whole blocks of 64")


@pytest.mark.parametrize("storage", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_bytes_stored_under_another_dtype(storage):
    tensors, expected = encoders.bitsandbytes4(weight())
    tensors["weight"] = tensors["weight"].reshape(-1).view(storage)[:, None]
    headers = {suffix: (encoders.DTYPE_NAMES[array.dtype.name], array.shape) for suffix, array in tensors.items()}
    reader = METHOD.reader("layer", (12, 128), headers, "Linear")
    assert reader.raw == {"weight"}  # what looks like NaN is none
    assert np.array_equal(encoders.dense(reader.read(tensors)), expected)


def test_int8():
    tensors, expected = encoders.bitsandbytes8(weight())
    found = encoders.read(METHOD, tensors, (12, 128))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.scheme.block == (128, 1)
    tensors["weight_format"] = np.array(2, np.uint8)
    with pytest.raises(FormatError, match="is 2: only 0, rows as they are"):
        encoders.read(METHOD, tensors, (12, 128))


def test_modules_left_alone_are_recognized_by_their_tensors():
    assert METHOD.reader("layer", (12, 128), {"weight": ("BF16", (12, 128))}, "Linear") is None


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight", lambda a: a[:-1], r"has shape \[767, 1\], not \[768, 1\]"),
        ("weight.absmax", lambda a: a[:-1], "has 23 values, no block size makes that of 1536"),
        ("weight.absmax", None, "is missing"),
        ("weight.quant_map", lambda a: a[:8], r"has shape \[8\], not \[16\]"),
        ("weight.nested_absmax", lambda a: a[:-1], "has 1 values for 24 absmax in blocks of 16"),
        ("weight.nested_quant_map", lambda a: a[:-1], r"has shape \[255\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(suffix, change, message):
    tensors, _ = encoders.bitsandbytes4(weight(), nested=suffix != "weight.absmax" or change is None)
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(METHOD, tensors, (12, 128))
    assert error.value.suffix == suffix


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [128, 12]}, r"says shape \[128, 12\], config.json makes it \[12, 128\]"),
        ({"blocksize": 128}, "says blocksize 128, of 1536 values there are 24 absmax"),
        ({"blocksize": "64"}, "says blocksize '64'"),
        ({"quant_type": "fp4"}, "says quant_type 'fp4'"),
        ({"nested_offset": None}, "says nested_offset None"),
    ],
)
def test_states_that_do_not_fit_are_refused(changes, message):
    tensors, _ = encoders.bitsandbytes4(weight(), nested=True)
    name = state_of(tensors)
    state = json.loads(tensors[name].tobytes()) | changes
    tensors[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(METHOD, tensors, (12, 128))
    assert error.value.suffix == name


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff"])
def test_a_state_that_is_no_json_is_refused(raw):
    tensors, _ = encoders.bitsandbytes4(weight())
    tensors[state_of(tensors)] = np.frombuffer(raw, np.uint8)
    with pytest.raises(FormatError, match="JSON"):
        encoders.read(METHOD, tensors, (12, 128))


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"weight.quant_state.bitsandbytes__af4": ("U8", (80,))}, "is not one of bitsandbytes__nf4, bitsandbytes__fp4"),
        ({"weight_quant_state": ("U8", (80,))}, "GPTQModel's naming"),
        ({"weight": ("U8", (768, 1))}, "is stored as U8 with neither a quant_state nor SCB"),
        ({"weight": ("I8", (12, 128)), "SCB": ("F32", (13,))}, r"has shape \[13\], not \[12\]"),
    ],
)
def test_what_is_not_read_is_refused_by_name(headers, message):
    with pytest.raises(FormatError, match=message):
        METHOD.reader("layer", (12, 128), headers, "Linear")
