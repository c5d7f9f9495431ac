"""GPTQ packings against a bit-by-bit encoder, and every way their files are known to differ."""

import logging

import numpy as np
import pytest

from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.gptq import gptq
from tests.checkpoints_convert.formats import encoders


def weight(outputs=16, inputs=96, seed=0):
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)


def config(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **changes}


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 40, -1])
def test_every_width_version_and_group(bits, version, symmetric, group):
    w = weight()
    zeros = None
    if not symmetric:  # a zero of 0 is a trap of its own, below
        count = -(-96 // (96 if group == -1 else group))
        zeros = np.random.default_rng(1).integers(1, 2**bits, (16, count))
    tensors, expected = encoders.gptq(w, bits=bits, version=version, symmetric=symmetric, group=group, zeros=zeros)
    method = gptq(
        config(bits=bits, sym=symmetric, group_size=group, checkpoint_format=["", "gptq", "gptq_v2"][version])
    )
    found = encoders.read(method, tensors, w.shape)
    assert np.array_equal(encoders.dense(found), expected)
    assert found.scales.dtype == np.float16
    assert (found.zeros is None) == symmetric
    assert found.permutation is None
    assert found.scheme.block == (96 if group == -1 else group, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("declared", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("stored", [1, 2])
def test_symmetric_zeros_tell_the_version_whatever_is_declared(bits, declared, stored, caplog):
    """Qwen3.5-27B-GPTQ-Int4 declares gptq and stores 8."""
    tensors, expected = encoders.gptq(weight(), bits=bits, version=stored)
    if bits == 4:
        assert np.unique(tensors["qzeros"].view(np.uint32)).tolist() == [0x77777777 if stored == 1 else 0x88888888]
    data = config(bits=bits, checkpoint_format=declared)
    del data["sym"]  # absent means symmetric
    assert np.array_equal(encoders.dense(encoders.read(gptq(data), tensors, (16, 96))), expected)
    assert not caplog.records


def test_other_zeros_of_a_symmetric_file_follow_the_declaration_with_a_warning(caplog):
    zeros = np.full((16, 3), 8)
    zeros[3, 1] = 5
    tensors, expected = encoders.gptq(weight(), zeros=zeros)
    with caplog.at_level(logging.WARNING):
        found = encoders.read(gptq(config()), tensors, (16, 96), "model.layers.0.mlp.up_proj")
    assert np.array_equal(encoders.dense(found), expected)
    assert "model.layers.0.mlp.up_proj: sym is true, and the stored zeros are neither all 7 nor all 8" in caplog.text


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_subtracted_by_gptqmodel_borrow_and_come_back(bits):
    """A zero of 0 borrows from its neighbour; adding to the whole word undoes it. Zeros 0 and 2^bits - 1 included."""
    rng, top = np.random.default_rng(2), 2**bits - 1
    zeros = rng.choice([0, 1, top], (16, 3))
    zeros[:, 0] = 0
    tensors, expected = encoders.gptq(weight(), bits=bits, version=2, symmetric=False, zeros=zeros)
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    tensors["qzeros"] = (tensors["qzeros"].view(np.uint32) - ones).view(np.int32)
    method = gptq(config(bits=bits, sym=False, meta={"quantizer": ["gptqmodel:1.4.2"]}))
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, (16, 96))), expected)


def test_zeros_overwritten_by_autogptq_are_refused():
    """zeros -= 1 in unsigned numbers: 0 becomes all ones, and the shifted word loses every zero above."""
    zeros = np.full((16, 3), 5)
    zeros[2, 1] = 0
    tensors, _ = encoders.gptq(weight(), symmetric=False, zeros=zeros)
    words = np.zeros((3, 2), np.uint32)
    for group in range(3):
        for n in range(16):
            words[group, n // 8] |= np.uint32((((int(zeros[n, group]) - 1) % 2**32) << (4 * (n % 8))) % 2**32)
    tensors["qzeros"] = words.view(np.int32)
    with pytest.raises(FormatError, match="5 zeros of 0 were packed as -1") as error:
        encoders.read(gptq(config(sym=False)), tensors, (16, 96))
    assert error.value.suffix == "qzeros"


def test_a_zero_of_0_in_the_highest_bits_of_a_word_overwrites_nothing():
    zeros = np.full((16, 3), 5)
    zeros[7, 1] = 0
    tensors, expected = encoders.gptq(weight(), symmetric=False, zeros=zeros)
    assert np.array_equal(encoders.dense(encoders.read(gptq(config(sym=False)), tensors, (16, 96))), expected)


@pytest.mark.parametrize("bits", [3, 4])
def test_act_order_becomes_a_permutation(bits):
    g_idx = np.random.default_rng(3).permutation(96) // 32
    tensors, expected = encoders.gptq(weight(), bits=bits, g_idx=g_idx)
    found = encoders.read(gptq(config(bits=bits, desc_act=True)), tensors, (16, 96))
    assert np.array_equal(encoders.dense(found), expected)
    assert found.permutation.dtype == np.int32
    x = np.random.default_rng(4).standard_normal(96).astype(np.float32)
    values = np.asarray(found.values).astype(np.float32) * np.repeat(found.scales.astype(np.float32), 32, 0)
    assert np.allclose(x[found.permutation] @ values, x @ expected.T, rtol=1e-5, atol=1e-5)


def test_act_order_with_a_short_last_group():
    g_idx = np.random.default_rng(5).permutation(96) // 40
    tensors, expected = encoders.gptq(weight(), g_idx=g_idx)
    found = encoders.read(gptq(config(desc_act=True, group_size=40)), tensors, (16, 96))
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize("how", ["missing", "zero"])
def test_without_act_order_groups_need_not_be_stored(how):
    tensors, expected = encoders.gptq(weight())
    if how == "missing":
        del tensors["g_idx"]
    else:
        tensors["g_idx"][:] = 0
    assert np.array_equal(encoders.dense(encoders.read(gptq(config()), tensors, (16, 96))), expected)
    with pytest.raises(FormatError, match=r"is missing, and desc_act|is all zero, and desc_act") as error:
        encoders.read(gptq(config(desc_act=True)), tensors, (16, 96))
    assert error.value.suffix == "g_idx"


def test_act_order_in_one_group_needs_no_permutation():
    tensors, expected = encoders.gptq(weight(), group=-1)
    found = encoders.read(gptq(config(desc_act=True, group_size=-1)), tensors, (16, 96))
    assert found.permutation is None
    assert np.array_equal(encoders.dense(found), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"1 of 96 values such as 3 are not in \[0, 2\]"),
        (-1, r"1 of 96 values such as -1 are not in \[0, 2\]"),
        (1, r"puts 31 inputs in group 0, the group size 32 makes it 32"),
    ],
)
def test_groups_that_cannot_be_are_refused(value, message):
    tensors, _ = encoders.gptq(weight())
    tensors["g_idx"][0] = value
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(gptq(config()), tensors, (16, 96))
    assert error.value.suffix == "g_idx"


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("qweight", lambda a: a[:-1], r"has shape \[11, 16\], not \[12, 16\]"),
        ("qweight", lambda a: a.astype(np.int64), "is stored as I64, not as I32"),
        ("qzeros", lambda a: a[:, :1], r"has shape \[3, 1\], not \[3, 2\]"),
        ("scales", lambda a: a[:2], r"has shape \[2, 16\], not \[3, 16\]"),
        ("scales", lambda a: a.astype(np.int32), "is stored as I32, not as F32 or F16 or BF16"),
        ("g_idx", lambda a: a[:-1], r"has shape \[95\], not \[96\]"),
        ("qzeros", None, "is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(suffix, change, message):
    tensors, _ = encoders.gptq(weight())
    if change is None:
        del tensors[suffix]
    else:
        tensors[suffix] = change(tensors[suffix])
    with pytest.raises(FormatError, match=message) as error:
        encoders.read(gptq(config()), tensors, (16, 96))
    assert error.value.suffix == suffix


def test_a_wrong_group_size_is_refused():
    tensors, _ = encoders.gptq(weight())
    with pytest.raises(FormatError, match=r"not \[2, 2\]"):
        encoders.read(gptq(config(group_size=64)), tensors, (16, 96))


def test_dynamic_gives_modules_bits_of_their_own():
    dynamic = {"-:.*skipped": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 48}, r".*\.up_proj": {"sym": False}}
    method = gptq(config(dynamic=dynamic))
    tensors, expected = encoders.gptq(weight(), bits=8, group=48)
    found = encoders.read(method, tensors, (16, 96), "model.layers.0.mlp.down_proj")
    assert np.array_equal(encoders.dense(found), expected)
    tensors, expected = encoders.gptq(weight())
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, (16, 96), "model.layers.0.mlp.gate")), expected)
    assert method.reader("layer.skipped", (16, 96), {"weight": ("F16", (16, 96))}, "Linear") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits 5 is not supported, 2, 3, 4, 8 are"),
        ({"bits": None}, "bits must be a positive integer"),
        ({"group_size": 0}, "group_size must be a positive integer or -1, got 0"),
        ({"sym": "yes"}, "sym must be true or false"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "'gptq' contradicts format 'gptq_v2'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported, gptq and gptq_v2 are"),
        ({"format": "gptq_p"}, "checkpoint_format 'gptq_p' is not supported"),
        ({"is_marlin_format": True}, "Marlin"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported"),
        ({"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
        ({"dynamic": [1]}, "dynamic must map patterns to fields"),
        ({"dynamic": {"(": {"bits": 8}}}, r"the pattern '\(' is not a regular expression"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, message):
    with pytest.raises(FormatError, match=message):
        gptq(config(**changes))


def test_synonyms_of_older_files():
    tensors, expected = encoders.gptq(weight())
    method = gptq({"w_bit": 4, "q_group_size": 32})
    assert np.array_equal(encoders.dense(encoders.read(method, tensors, (16, 96))), expected)
