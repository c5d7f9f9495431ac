"""Adapters of the tiny model, in folders as PEFT writes them."""

from pathlib import Path

import numpy as np

from checkpoints_convert.adapters import save_adapter
from jaxinfer.models.adapter import Adapter, LowRank
from tests.server.conftest import CONFIG

WIDTH = CONFIG.num_heads * CONFIG.head_dim


def make_adapter(seed: int, rank: int = 4, invocation_tokens: tuple[int, ...] = ()) -> Adapter:
    """One that changes answers."""
    random = np.random.default_rng(seed)
    pairs = {}
    for layer in range(CONFIG.num_layers):
        a = random.standard_normal((CONFIG.hidden_size, rank)).astype(np.float32)
        pairs[f"layers.{layer}.attention.q_proj"] = LowRank(
            a, random.standard_normal((rank, WIDTH)).astype(a.dtype), 2.0
        )
    return Adapter(pairs, invocation_tokens=invocation_tokens)


def write_adapter(folder: Path, seed: int, **more) -> Path:
    return save_adapter(make_adapter(seed, **more), folder, CONFIG)
