import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.formats.float4 import mxfp4_experts, mxfp4_weight
from checkpoints_convert.formats.module import FormatError
from tests.checkpoints_convert.formats import encoders


def experts(rows, inputs=64, num=2):
    rng = np.random.default_rng(0)
    parts = [encoders.mxfp4(rng.standard_normal((rows, inputs)).astype(np.float32)) for _ in range(num)]
    packed, exponents, expected = (np.stack(part) for part in zip(*parts, strict=True))
    return packed.reshape(num, rows, inputs // 32, 16), exponents, expected


def test_experts():
    blocks, scales, expected = experts(12)
    found = mxfp4_experts(blocks, scales)
    assert np.array_equal(np.asarray(found.dequantize()), expected.swapaxes(1, 2))
    assert (found.values.dtype, found.scales.dtype) == (ml_dtypes.int4, ml_dtypes.bfloat16)
    assert found.shape == (2, 64, 12)


def test_every_exponent_is_a_power_of_two():
    exponents = np.arange(1, 255, dtype=np.uint8)[:, None]
    found = mxfp4_weight(np.full((254, 16), 0x22, np.uint8), exponents)  # code 2 is 1.0
    assert found.scales.astype(np.float32)[0].tolist() == [2.0 ** (e - 127) for e in range(1, 255)]
    subnormal = mxfp4_weight(np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.uint8))
    assert subnormal.scales.astype(np.float32).item() == 2.0**-127


def test_negative_zero_keeps_its_sign():
    found = mxfp4_weight(np.full((1, 16), 0x08, np.uint8), np.full((1, 1), 127, np.uint8))
    signs = np.signbit(np.asarray(found.dequantize()))[:, 0]
    assert signs.tolist() == [True, False] * 16


def test_what_does_not_fit_is_refused():
    blocks, scales, _ = experts(12)
    bad = scales.copy()
    bad[1, 3, 0] = 255
    with pytest.raises(FormatError, match="1 of 48 scales are NaN"):
        mxfp4_experts(blocks, bad)
    with pytest.raises(FormatError, match="are not of one weight"):
        mxfp4_experts(blocks[:, :-1], scales)
    with pytest.raises(FormatError, match="do not fit 48 inputs in blocks of 32"):
        mxfp4_weight(np.zeros((1, 24), np.uint8), np.zeros((1, 1), np.uint8))
