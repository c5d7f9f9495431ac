"""Packed weights of every kind of codes, scales and offsets, for tests."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.packed_matmul import PackedArrays, PackedForm, dequantize, pack

K, N = 264, 100  # no whole step of a rounded group, no whole panel


def _codes(bits: int, inputs: int, outputs: int, seed: int) -> np.ndarray:
    low = -(2 ** (bits - 1))
    codes = np.random.default_rng(seed).integers(low, -low, (inputs, outputs)).astype(np.int8)
    return codes.astype(ml_dtypes.int4) if bits == 4 else codes


def _numbers(inputs: int, group: int, outputs: int, seed: int, dtype: Any = np.float16) -> np.ndarray:
    shape = -(-inputs // group), outputs
    return (np.random.default_rng(seed).uniform(0.001, 0.01, shape)).astype(dtype).astype(np.float32)


def _super_scales(inputs: int, group: int, outputs: int, seed: int) -> np.ndarray:
    """Products of float16 and of integers to 63, as a K-quant has them."""
    rng = np.random.default_rng(seed)
    inner = rng.integers(1, 64, (-(-inputs // group), outputs))
    inner[:: 256 // group] = 63
    outer = _numbers(inputs, 256, outputs, seed + 1)
    return (inner * np.repeat(outer, 256 // group, 0)[: len(inner)]).astype(np.float32)


CODEBOOK = np.sort(np.random.default_rng(7).standard_normal(16)).astype(np.float32)


def make(name: str, inputs: int = K, outputs: int = N, *, activations: str | None = None):
    """The form and the arrays of a packed weight, and the float64 weight [inputs, outputs]."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "int4": lambda: {"values": _codes(4, inputs, outputs, 0), "scales": _numbers(inputs, inputs, outputs, 1)},
        "int8": lambda: {
            "values": _codes(8, inputs, outputs, 0),
            "scales": _numbers(inputs, inputs, outputs, 1, np.float32),
        },
        "int4-g32": lambda: {"values": _codes(4, inputs, outputs, 0), "scales": _numbers(inputs, 32, outputs, 1)},
        "int4-g128-asym": lambda: {
            "values": _codes(4, inputs, outputs, 0),
            "scales": _numbers(inputs, 128, outputs, 1, ml_dtypes.bfloat16),
            "zeros": _codes(8, -(-inputs // 128), outputs, 2) // np.int8(16),
        },
        "int8-g32": lambda: {"values": _codes(8, inputs, outputs, 0), "scales": _numbers(inputs, 32, outputs, 1)},
        "int8-asym": lambda: {
            "values": _codes(8, inputs, outputs, 0),
            "scales": _numbers(inputs, inputs, outputs, 1),
            "zeros": np.full((1, outputs), -128, np.int8),
        },
        "q4_1": lambda: {
            "values": _codes(4, inputs, outputs, 0),
            "scales": _numbers(inputs, 32, outputs, 1),
            "minima": -_numbers(inputs, 32, outputs, 2),
        },
        "q4_k": lambda: {
            "values": _codes(4, inputs, outputs, 0),
            "scales": _super_scales(inputs, 32, outputs, 1),
            "minima": -_super_scales(inputs, 32, outputs, 3),
        },
        "q6_k": lambda: {"values": _codes(6, inputs, outputs, 0), "scales": _super_scales(inputs, 16, outputs, 1)},
        "nf4": lambda: {
            "values": _codes(4, inputs, outputs, 0),
            "scales": _numbers(inputs, 64, outputs, 1, np.float32),
            "codebook": CODEBOOK,
        },
        "mxfp4": lambda: {
            "values": _codes(4, inputs, outputs, 0),
            "scales": np.exp2(np.round(np.log2(_numbers(inputs, 32, outputs, 1)))).astype(np.float32),
            "codebook": CODEBOOK,
        },
        **{
            name: lambda dtype=dtype: {
                "values": np.random.default_rng(0).standard_normal((inputs, outputs)).astype(dtype),
                "scales": _numbers(inputs, inputs, outputs, 1),
            }
            for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2))
        },
        **{
            name: lambda dtype=dtype: {
                "values": np.random.default_rng(0).standard_normal((inputs, outputs)).astype(dtype)
            }
            for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32))
        },
    }
    arrays = kinds[name]()
    groups = 1 if "scales" not in arrays else len(arrays["scales"])
    group = inputs if groups == 1 else {"q6_k": 16, "nf4": 64, "int4-g128-asym": 128}.get(name, 32)
    form, packed = pack(arrays.pop("values"), **arrays, block=(group, 1), activations=activations)
    packed = PackedArrays(*map(jnp.asarray, packed))
    return form, packed, np.asarray(dequantize(form, packed), np.float64)


NAMES = (
    *("int4", "int8", "int4-g32", "int4-g128-asym", "int8-g32", "int8-asym", "q4_1", "q4_k", "q6_k"),
    *("nf4", "mxfp4", "e4m3", "e5m2", "bfloat16", "float16", "float32"),
)
INTEGERS = NAMES[:9]
Weight = tuple[PackedForm, PackedArrays]
