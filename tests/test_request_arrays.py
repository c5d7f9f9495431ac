"""Arrays that requests give by name: declarations, checks, and the rows of slots."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.engine.programs.paged import write_arrays
from jaxinfer.request_arrays import RequestArray, check_arrays, default_rows, row_of, shared

SPECS = {
    "bias": RequestArray((4,)),
    "limit": RequestArray((), "int32", 7),
    "on": RequestArray((2,), bool, [True, False]),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "default", "told"),
    [
        ((0,), "float32", 0, "positive integers"),
        ((-1, 2), "float32", 0, "positive integers"),
        ("3", "float32", 0, "positive integers"),
        ((2,), "float64", 0, "one of float32"),
        ((2,), "nothing", 0, "one of float32"),
        ((2,), "float32", [1.0, 2.0, 3.0], r"shape \[3\]"),
        ((2,), "int32", 0.5, "dtype float64"),
        ((2,), "float32", float("nan"), "NaN"),
    ],
)
def test_declarations_that_cannot_be_are_refused(shape, dtype, default, told):
    with pytest.raises(ValueError, match=told):
        RequestArray(shape, dtype, default)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bais": np.zeros(4, np.float32)}, "did you mean 'bias'"),
        ({"bias": np.zeros(5, np.float32)}, r"shape \[5\], and is declared with \[4\]"),
        ({"bias": np.zeros(4)}, "dtype float64"),
        ({"bias": np.zeros(4, np.int32)}, "dtype int32"),
        ({"bias": [0, 1, float("nan"), 0]}, r"NaN at \[2\]"),
        ({"bias": [0, 1, 1e300, 0]}, "too large for float32"),
        ({"bias": ["a"] * 4}, "dtype"),
        ({"bias": [[1], [2, 3]]}, "no array of numbers"),
        ({"limit": 2**40}, "too large for int32"),
        ({"limit": 1.5}, "dtype float64"),
        ({"limit": True}, None),
        ({"on": [1, 0]}, "dtype int64"),
    ],
)
def test_arrays_of_requests_are_checked(given, told):
    if told is None:
        assert check_arrays(SPECS, given, "processors")["limit"] == 1
        return
    with pytest.raises(ValueError, match=told):
        check_arrays(SPECS, given, "processors")


def test_what_is_no_mapping_is_refused_and_nothing_may_be_given():
    with pytest.raises(TypeError, match="mapping"):
        check_arrays(SPECS, [1.0], "processors")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="declared by processors: none is"):
        check_arrays({}, {"bias": 1.0}, "processors")
    assert check_arrays({}, None, "processors") == {}


def test_an_array_is_copied_so_that_its_owner_may_change_it():
    given = np.zeros(4, np.float32)
    checked = check_arrays(SPECS, {"bias": given}, "processors")["bias"]
    given[0] = 1
    assert checked[0] == 0
    assert not checked.flags.writeable
    allowed = check_arrays(SPECS, {"bias": [0, 1, -np.inf, 0]}, "processors")["bias"]
    assert allowed.dtype == np.float32
    assert allowed[2] == -np.inf


def test_an_array_for_many_requests_is_copied_once():
    given = {"bias": np.zeros(4, np.float32), "limit": 3}
    each = [check_arrays(SPECS, shared(given), "processors")["bias"] for _ in range(2)]
    assert each[0] is not each[1]  # two calls
    for_all = shared(given)
    own = [check_arrays(SPECS, for_all, "processors")["bias"] for _ in range(2)]
    assert own[0] is own[1] is for_all["bias"]
    given["bias"][0] = 1
    assert own[0][0] == 0


def test_a_slot_gets_its_arrays_and_the_defaults_of_others_by_one_program():
    arrays = jax.device_put(default_rows(SPECS, 3), may_alias=False)
    expected = default_rows(SPECS, 3)
    program: Any = write_arrays
    before = program._cache_size()
    for slot, given in ((1, {"bias": [1, 2, 3, 4], "limit": 9}), (2, {"on": [False, True]}), (1, {"limit": 3})):
        row = row_of(SPECS, check_arrays(SPECS, given, "processors"))
        old = arrays
        arrays = write_arrays(None, arrays, np.int32(slot), row)
        assert all(leaf.is_deleted() for leaf in old.values())  # donated
        for name in SPECS:
            expected[name][slot] = given.get(name, SPECS[name].default)
            np.testing.assert_array_equal(arrays[name], expected[name])
    assert program._cache_size() == before + 1  # nothing compiles for a request
