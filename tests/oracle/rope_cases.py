"""Rotations as published models configure them: Transformers' fields and ours, side by side.

`make_golden.py` writes what Transformers computes for each to golden/rope.json; tests/models/test_rope.py reads it.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeCase:
    """`parameters` and `max_position_embeddings` are Transformers' fields, `ours` those of `RopeConfig`.

    `sequence_length` is the longest position plus 1 of the forward pass, where the formula depends on it.
    """

    name: str
    head_dim: int
    parameters: dict[str, Any]
    ours: dict[str, Any]
    max_position_embeddings: int = 8192
    sequence_length: int | None = None


def _case(name: str, head_dim: int, theta: float, parameters: dict, ours: dict | None = None, **rest: Any) -> RopeCase:
    parameters = {"rope_theta": theta, **parameters}
    ours = {"kind": parameters["rope_type"], "theta": theta, "rotary_dim": head_dim, **(ours or {})}
    return RopeCase(name, head_dim, parameters, ours, **rest)


def _yarn(name: str, theta: float, original: int, head_dim: int = 64, **options: Any) -> RopeCase:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": original, **options}
    return _case(name, head_dim, theta, parameters, {"original_length": original, **options})


def _llama3(name: str, factor: float) -> RopeCase:
    options = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = {"rope_type": "llama3", "original_max_position_embeddings": 8192, **options}
    return _case(name, 128, 500000.0, parameters, {"original_length": 8192, **options})


def _dynamic(name: str, sequence_length: int | None) -> RopeCase:
    return _case(
        name,
        128,
        10000.0,
        {"rope_type": "dynamic", "factor": 2.0},
        {"factor": 2.0, "original_length": 2048, "sequence_length": sequence_length},
        max_position_embeddings=2048,
        sequence_length=sequence_length,
    )


def _longrope(name: str, sequence_length: int | None, **options: Any) -> RopeCase:
    factors = {
        "short_factor": [1.0 + 0.03 * i for i in range(48)],
        "long_factor": [1.0 + 1.2 * i for i in range(48)],
        **options,
    }
    return _case(
        name,
        96,
        10000.0,
        {"rope_type": "longrope", "original_max_position_embeddings": 4096, **factors},
        {"factor": 32.0, "original_length": 4096, "sequence_length": sequence_length, **factors},
        max_position_embeddings=131072,
        sequence_length=sequence_length,
    )


CASES = (
    _case("default", 128, 10000.0, {"rope_type": "default"}),
    _case("default_theta_1e6", 64, 1e6, {"rope_type": "default"}),
    _case("linear", 128, 1e6, {"rope_type": "linear", "factor": 8.0}, {"factor": 8.0}),
    _case(
        "linear_half_rotated",
        128,
        10000.0,
        {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
        {"factor": 4.0, "rotary_dim": 64},
    ),
    _dynamic("dynamic", None),
    _dynamic("dynamic_short", 100),
    _dynamic("dynamic_long", 7000),
    _llama3("llama_3.1", 8.0),
    _llama3("llama_3.2", 32.0),
    _yarn("yarn_qwen2.5", 1e6, 32768, head_dim=128, factor=4.0),
    _yarn("yarn_deepseek", 10000.0, 4096, factor=40.0, mscale=1.0, mscale_all_dim=1.0),
    _yarn("yarn_two_mscales", 10000.0, 4096, factor=40.0, mscale=1.0, mscale_all_dim=0.707),
    _yarn("yarn_one_mscale", 10000.0, 4096, factor=40.0, mscale=0.707),
    _yarn("yarn_gpt_oss", 150000.0, 4096, factor=32.0, truncate=False),
    _yarn("yarn_betas", 10000.0, 2048, factor=8.0, beta_fast=16.0, beta_slow=2.0),
    _yarn("yarn_equal_betas", 10000.0, 2048, factor=8.0, beta_fast=4.0, beta_slow=4.0, truncate=False),
    _yarn("yarn_attention_factor", 10000.0, 2048, factor=8.0, attention_factor=0.9),
    _yarn("yarn_factor_1", 10000.0, 2048, factor=1.0),
    _longrope("longrope_short", None),
    _longrope("longrope_at_the_original_length", 4096),
    _longrope("longrope_long", 4097),
    _longrope("longrope_attention_factor", 9000, attention_factor=1.25),
)
