"""Errors relative to a norm, and how large those of a dtype may be: kernels against float64."""

import numpy as np

# The largest relative error of one rounding; of float32, which is rounded at every addition of a sum, 32 of them.
# Results that are rounded once, of terms that were rounded once, err by 0.4 and 0.4 of it in relative norm, together by
# 0.6: the errors of terms are independent, so that those of a sum grow as its own norm does, however long it is.
ROUNDING = {"float32": 2**-19, "float16": 2**-11, "bfloat16": 2**-8}


def relative_errors(found, exact) -> np.ndarray:
    """The norm of the error of each row (first axis) over that of the exact row; 0 where both are zero."""
    exact = np.asarray(exact, np.float64).reshape(len(exact), -1)
    found = np.asarray(found, np.float64).reshape(exact.shape)
    errors, norms = np.linalg.norm(found - exact, axis=1), np.linalg.norm(exact, axis=1)
    return np.divide(errors, norms, out=np.where(errors == 0, 0.0, np.inf), where=norms > 0)


def assert_near(found, exact, dtype: str, roundings: float = 1.0) -> None:
    """Every row of `found` is within some roundings of `dtype` of the exact one, in relative norm; a NaN is not."""
    errors = relative_errors(found, exact)
    largest = errors.max(initial=0.0)
    print(f"relative error {largest:.2e}, {largest / ROUNDING[dtype]:.2f} roundings of {dtype}")
    assert (errors <= roundings * ROUNDING[dtype]).all(), f"{largest:.3e} is more than {roundings} roundings of {dtype}"
