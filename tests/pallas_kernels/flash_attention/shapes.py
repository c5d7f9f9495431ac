"""Named calls of flash attention."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention.api import flash_attention


@dataclass(frozen=True)
class FlashShape:
    """One call; `num_keys` None means as many as queries. `offset` and `lengths` have one entry for each row.

    `segments` draws random sorted segments of queries and keys; unless there are as many keys as queries, some queries
    see no key then.
    """

    num_queries: int
    num_keys: int | None = None
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    segments: bool = False
    offset: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    return_lse: bool = True

    @property
    def batch_size(self) -> int:
        return len(self.lengths or self.offset or (0,) * self.batch)

    @property
    def options(self) -> dict[str, Any]:
        """The static keyword arguments of the call."""
        names = ("causal", "window", "soft_cap", "scale", "return_lse")
        return {name: getattr(self, name) for name in names}

    def abstract(self) -> dict[str, Any]:
        """The array arguments as `jax.ShapeDtypeStruct`s."""
        batch, num_keys, dtype = self.batch_size, self.num_keys or self.num_queries, jnp.dtype(self.dtype)
        keys = jax.ShapeDtypeStruct((batch, num_keys, self.heads[1], self.head_dim), dtype)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        arguments: dict[str, Any] = {
            "q": jax.ShapeDtypeStruct((batch, self.num_queries, self.heads[0], self.head_dim), dtype),
            "k": keys,
            "v": keys,
        }
        if self.offset is not None:
            arguments["query_offset"] = ints(batch)
        if self.lengths is not None:
            arguments["kv_lengths"] = ints(batch)
        if self.segments:
            arguments["segment_ids"] = (ints(batch, self.num_queries), ints(batch, num_keys))
        if self.sinks:
            arguments["sinks"] = jax.ShapeDtypeStruct((self.heads[0],), jnp.float32)
        return arguments

    def arguments(self, *, stale: float | None = None) -> dict[str, Any]:
        """Reproducible random array arguments. `stale` replaces the keys and values beyond the lengths."""
        rng = np.random.default_rng(zlib.crc32(repr(self).encode()))

        def draw(array):
            if array.dtype == jnp.int32:
                return jnp.asarray(np.sort(rng.integers(0, 3, array.shape), axis=1), jnp.int32)
            return jnp.asarray(rng.standard_normal(array.shape, np.float32), array.dtype)

        given = {"query_offset": self.offset, "kv_lengths": self.lengths}
        arguments = {
            name: jax.tree.map(draw, array) if given.get(name) is None else jnp.array(given[name], jnp.int32)
            for name, array in self.abstract().items()
        }
        if stale is not None:
            is_stale = jnp.arange(arguments["k"].shape[1]) >= jnp.array(self.lengths)[:, None]
            for name in ("k", "v"):
                arguments[name] = jnp.where(is_stale[..., None, None], stale, arguments[name])
        return arguments

    def call(self, implementation: str | None = None) -> Callable:
        """`flash_attention` as a function of the array arguments."""
        return lambda arguments: flash_attention(**arguments, **self.options, implementation=implementation)


# Small shapes, compared with dense attention: a name for each edge case; features are combined where that hides none.
SMALL = {
    # sizes around the blocks of 16 (xla), 64 (GPU) and 128 (TPU)
    "one_token": FlashShape(1),
    "fifteen": FlashShape(15, heads=(3, 3)),
    "sixteen": FlashShape(16, return_lse=False),
    "not_a_multiple": FlashShape(61, heads=(4, 2), batch=2),
    "three_blocks": FlashShape(130, heads=(1, 1)),
    "blocks_exactly": FlashShape(64, 256, offset=(192,)),
    "more_keys": FlashShape(5, 150, offset=(145, 3)),
    "fewer_keys": FlashShape(40, 10, causal=False),
    "keys_not_a_multiple": FlashShape(20, 131, causal=False, return_lse=False),
    # groups and head dims
    "groups_3": FlashShape(33, heads=(6, 2)),
    "groups_16": FlashShape(33, heads=(16, 1)),
    "heads_16": FlashShape(9, heads=(16, 16)),
    "head_dim_80": FlashShape(33, head_dim=80),
    "head_dim_96": FlashShape(33, head_dim=96, heads=(2, 2)),
    "head_dim_128": FlashShape(33, head_dim=128),
    "head_dim_256": FlashShape(17, head_dim=256),
    # masks and scores
    "full": FlashShape(35, causal=False, scale=0.5),
    "window_1": FlashShape(35, window=1),
    "window_17": FlashShape(150, window=17),
    "window_beyond": FlashShape(35, window=1000),
    "window_past_the_keys": FlashShape(40, 10, window=5),
    "window_decode": FlashShape(1, 160, window=5, offset=(159, 20)),
    "soft_cap": FlashShape(35, soft_cap=2.0, scale=0.5),
    "sinks": FlashShape(35, sinks=True, heads=(4, 2)),
    "sinks_full": FlashShape(35, sinks=True, causal=False, soft_cap=3.0),
    "segments": FlashShape(70, segments=True, batch=2),
    "segments_full": FlashShape(20, 140, segments=True, causal=False),
    "segments_window_sinks": FlashShape(70, segments=True, window=9, sinks=True),
    # ragged rows: offsets, lengths, length 0, lengths at block borders
    "decode": FlashShape(1, 160, heads=(4, 1), offset=(159, 0, 127, 128), lengths=(160, 1, 128, 129)),
    "chunk": FlashShape(8, 64, offset=(0, 10, 40), lengths=(8, 18, 45)),
    "long_chunk": FlashShape(40, 200, offset=(0, 30, 150), lengths=(40, 33, 190)),
    "empty_row": FlashShape(3, 140, offset=(0, 0), lengths=(0, 3)),
    "all_empty": FlashShape(3, 140, offset=(0, 0), lengths=(0, 0), sinks=True),
    "one_key_block": FlashShape(4, 12, offset=(0, 6), lengths=(0, 10)),
    "window_and_lengths": FlashShape(8, 160, window=9, offset=(0, 30, 150), lengths=(8, 38, 154), soft_cap=5.0),
    "full_and_lengths": FlashShape(20, 150, causal=False, offset=(0, 0), lengths=(7, 150)),
    "everything": FlashShape(
        70, 150, heads=(4, 2), batch=2, window=40, soft_cap=4.0, sinks=True, segments=True, offset=(0, 60),
        lengths=(70, 120),
    ),
    # bfloat16
    "bf16": FlashShape(61, dtype="bfloat16"),
    "bf16_head_dim_128": FlashShape(33, 140, heads=(8, 2), head_dim=128, dtype="bfloat16", offset=(100,)),
    "bf16_ragged": FlashShape(8, 160, offset=(0, 10, 140), lengths=(8, 18, 148), dtype="bfloat16"),
    "bf16_everything": FlashShape(
        70, 150, heads=(4, 2), head_dim=128, window=40, soft_cap=4.0, sinks=True, segments=True, offset=(0, 60),
        lengths=(70, 120), dtype="bfloat16",
    ),
}  # fmt: skip

_LLAMA_3_8B = {"heads": (32, 8), "head_dim": 128, "dtype": "bfloat16"}
_QWEN3_0_6B = {"heads": (16, 8), "head_dim": 128, "dtype": "bfloat16"}
_QWEN3_32B = {"heads": (64, 8), "head_dim": 128, "dtype": "bfloat16"}
_GEMMA_2_9B = {"heads": (16, 8), "head_dim": 256, "dtype": "bfloat16", "soft_cap": 50.0}
_GPT_OSS = {"heads": (64, 8), "head_dim": 64, "dtype": "bfloat16", "sinks": True}

# Shapes of real models, for benchmarks and the compilers.
MODELS = {
    "llama_3_8b_prefill": FlashShape(4096, **_LLAMA_3_8B, return_lse=False),
    "llama_3_8b_training": FlashShape(2048, **_LLAMA_3_8B, batch=2, segments=True),
    "llama_3_8b_chunk": FlashShape(
        512, 4096, **_LLAMA_3_8B, offset=(0, 512, 3584), lengths=(512, 1024, 4096), return_lse=False
    ),
    "llama_3_8b_decode": FlashShape(1, 4096, **_LLAMA_3_8B, offset=(99,) * 16, lengths=(100,) * 16, return_lse=False),
    "qwen3_0_6b_prefill": FlashShape(2048, **_QWEN3_0_6B, return_lse=False),
    "qwen3_32b_chunk": FlashShape(256, 8192, **_QWEN3_32B, offset=(4096,), lengths=(4352,)),
    "gemma_2_9b_window": FlashShape(8192, **_GEMMA_2_9B, window=4096, return_lse=False),
    "gpt_oss_window": FlashShape(4096, **_GPT_OSS, window=128, return_lse=False),
}
