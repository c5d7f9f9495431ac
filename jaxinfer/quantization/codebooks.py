"""Codebooks of NF4, FP4 and MXFP4 (16 values), and of nested scales (256 values)."""

import numpy as np

# Dettmers et al. 2023 (QLoRA), appendix E: quantiles of a normal distribution, including 0, -1 and 1. By code.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_FP4_MAGNITUDES = np.array([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], np.float32)
# bitsandbytes' FP4: a sign and one of eight magnitudes, in the order of its codes, not of their size.
FP4 = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES]) / np.float32(12)
_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
# OCP Microscaling formats 1.0, section 5.3.3: FP4 E2M1, by code.
E2M1 = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])


def dynamic_map() -> np.ndarray:
    """Dynamic tree quantization (Dettmers et al. 2021, 8-bit optimizers, section 2.1): float32 [256], ascending in [-1,
    1].

    For i = 0..6 and either sign, 2^i values in the decade that ends at 10^(i-6); also 0 and 1.
    """
    magnitudes = []
    for exponent in range(7):
        ends = np.linspace(0.1, 1, 2**exponent + 1, dtype=np.float32)
        magnitudes.append((ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - 6)))
    steps = np.concatenate(magnitudes)
    return np.sort(np.concatenate([-steps, [0.0], steps, [1.0]])).astype(np.float32)
