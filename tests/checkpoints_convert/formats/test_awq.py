import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.gptq import awq
from tests.checkpoints_convert.formats import encoders


def weight(outputs=24, inputs=96):
    return np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)


def config(**changes):
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **changes}


@pytest.mark.parametrize("group", [32, 40, -1])
def test_the_interleaved_layout(group):
    tensors, expected = encoders.awq(weight(), group=group)
    found = encoders.read(awq(config(group_size=group)), tensors, (24, 96))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.zeros.dtype == np.int8
    assert found.scales.dtype == np.float16


def test_order_of_a_word():
    """Nibble i of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    tensors = {
        "qweight": np.array([[0x75316420]], np.uint32).view(np.int32),
        "qzeros": np.zeros((1, 1), np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    assert encoders.dense(encoders.read(awq(config()), tensors, (8, 1)))[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("zero", [0, 15])
def test_zeros_are_stored_as_they_are(zero):
    tensors, _ = encoders.awq(weight())
    nibbles = int("".join([f"{zero:x}"] * 8), 16)
    tensors["qzeros"] = np.full_like(tensors["qzeros"], np.uint32(nibbles).view(np.int32))
    found = encoders.read(awq(config()), tensors, (24, 96))
    assert (found.zeros == zero - 8).all()


def test_zeros_in_the_middle_are_none():
    tensors, _ = encoders.awq(weight())
    tensors["qzeros"] = np.full_like(tensors["qzeros"], np.uint32(0x88888888).view(np.int32))
    assert encoders.read(awq(config()), tensors, (24, 96)).zeros is None


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("qweight", lambda a: a[:-1], r"has shape \[95, 3\], not \[96, 3\]"),
        ("qzeros", lambda a: a[:-1], r"has shape \[2, 3\], not \[3, 3\]"),
        ("scales", lambda a: a[:, :-1], r"has shape \[3, 23\], not \[3, 24\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(suffix, change, message):
    tensors, _ = encoders.awq(weight())
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(awq(config()), tensors, (24, 96))
    assert error.value.suffix == suffix


def test_outputs_that_fill_no_word_are_refused():
    headers = {"qweight": ("I32", (96, 3))}
    with pytest.raises(FormatError, match="20 outputs, not a multiple of the 8"):
        awq(config()).reader("layer", (20, 96), headers, "Linear")


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "marlin", "exllama", "ipex", "GEMV"])
def test_other_layouts_are_refused_by_name(version):
    with pytest.raises(FormatError, match=f"version '{version.lower()}' is not supported, only 'gemm' is"):
        awq(config(version=version))


def test_upper_case_and_synonyms_of_older_files():
    tensors, expected = encoders.awq(weight())
    method = awq({"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"})
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, (24, 96))), expected)


@pytest.mark.parametrize(
    ("changes", "message"), [({"bits": 8}, "bits 8 is not supported"), ({"zero_point": False}, "zero_point false")]
)
def test_what_gemm_does_not_hold_is_refused(changes, message):
    with pytest.raises(FormatError, match=message):
        awq(config(**changes))
