"""Values come back as they were; what cannot be carried, or was not made here, is refused."""

import json
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.lockstep import CLASSES
from jaxinfer.engine.request import CompletionOutput, Logprob
from jaxinfer.parallel.wire import MIN_DEFLATED, Codec, WireError
from jaxinfer.sampling import SamplingParams, SamplingRow, make_batch

CODEC = Codec(CLASSES)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(VALUES)
def test_plain_values_come_back_with_their_types(value):
    found = CODEC.decode(CODEC.encode(value))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", ["int32", "bool", "float32", "uint8", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (MIN_DEFLATED, 2)])
def test_arrays_keep_every_bit(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    found = CODEC.decode(CODEC.encode({"a": array, "b": array.T}))
    for one, expected in ((found["a"], array), (found["b"], array.T)):
        assert one.dtype == expected.dtype
        assert one.shape == expected.shape
        np.testing.assert_array_equal(one, expected)


def test_scalars_infinities_and_dataclasses():
    scalar = CODEC.decode(CODEC.encode(np.int32(7)))
    assert isinstance(scalar, np.int32)
    assert scalar == 7
    assert CODEC.decode(CODEC.encode([math.inf, -math.inf])) == [math.inf, -math.inf]
    answer = CompletionOutput(
        0, "a", [1, 2], seed=3, logprobs=[{1: Logprob(-0.5, 1, "�", b"\xf0"), 5: Logprob(-math.inf, 2)}]
    )
    assert CODEC.decode(CODEC.encode([answer])) == [answer]
    batch = make_batch([SamplingRow(SamplingParams(seed=1, logit_bias={3: 2.0}), seed=1)], 5000)
    message = CODEC.encode(batch)
    assert len(message) < 10_000  # rows over the vocabulary are nearly all zeros
    for name, array in vars(batch).items():
        np.testing.assert_array_equal(getattr(CODEC.decode(message), name), array)


def test_what_is_not_known_is_refused():
    with pytest.raises(WireError, match="Fraction cannot be sent"):
        CODEC.encode(Fraction(1, 2))
    with pytest.raises(WireError, match="object"):
        CODEC.encode(np.array([object()]))
    header = json.dumps({"$": "class", "name": "Popen", "fields": {}}).encode()
    for message in (b"", b"\xff" * 20, len(header).to_bytes(8, "little") + header):
        with pytest.raises(WireError):
            CODEC.decode(message)
