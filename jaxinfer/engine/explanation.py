"""What an engine really allocated, compiled and chose, for people and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import compilation_cache
from jaxinfer.engine import programs
from jaxinfer.engine.contiguous import ContiguousEngine
from pallas_kernels.flash_attention import explain


@dataclass(frozen=True)
class Explanation:
    """Facts by group; `str()` is a table, `to_dict()` is JSON-ready. Sizes are bytes, lengths are tokens."""

    groups: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)["groups"]

    def __str__(self) -> str:
        lines = []
        for group, facts in self.groups.items():
            lines.append(group)
            lines += [f"  {name:<26}{_readable(name, value)}" for name, value in facts.items()]
        return "\n".join(lines)


def explain_engine(engine: ContiguousEngine, model: dict[str, Any], sampling: dict[str, Any]) -> Explanation:
    """`model` and `sampling` are what the caller knows beyond the engine; they come first and last."""
    config, options = engine.config, engine.options
    leaves = engine.weights
    device = next(iter(leaves[0].devices()))
    rope = {"rope": config.rope.kind, "rope theta": config.rope.theta}
    if config.rope.sequence_length is not None:
        rope["rope made for length"] = config.rope.sequence_length
    return Explanation(
        {
            "model": {
                **model,
                "architecture": config.architecture,
                "parameters": sum(leaf.size for leaf in leaves),
                "parameter bytes": sum(leaf.nbytes for leaf in leaves),
                "dtype": str(engine.dtype),
                "layers": config.num_layers,
                "heads (query / key)": f"{config.num_heads} / {config.num_kv_heads} x {config.head_dim}",
                **rope,
                "declared length": config.max_position_embeddings,
            },
            "cache": {
                "kind": "contiguous",
                "dtype": str(engine.dtype),
                "max_model_len": options.max_model_len,
                "max_num_seqs": options.max_num_seqs,
                "bytes per token": engine.cache_bytes() // (options.max_model_len * options.max_num_seqs),
                "bytes at most": engine.cache_bytes(),
                "slots allocated": engine.num_slots,
            },
            "programs": {
                "prompt chunks": ", ".join(str(size) for size in engine.chunks),
                "slot buckets": ", ".join(str(size) for size in options.slot_buckets),
                "compiled in this process": ", ".join(
                    f"{name} {getattr(programs, name)._cache_size()}" for name in ("prefill", "decode", "score")
                ),
                "steps per dispatch": options.steps_per_dispatch,
                "compilation cache": str(compilation_cache.folder() or "off"),
            },
            "kernels": {
                **_attention(engine),
                "matrix products": f"XLA, {engine.dtype}"
                + (", highest precision" if engine.dtype == "float32" else ""),
            },
            "device": {
                "platform": device.platform,
                "kind": device.device_kind,
                "devices used": f"1 of {jax.device_count()}",
            },
            "sampling": sampling,
        }
    )


def _attention(engine: ContiguousEngine) -> dict[str, str]:
    """The kernel of decode and of a prompt chunk, and why no other was taken."""
    config, facts = engine.config, {}
    rows = engine.options.slot_buckets[-1]
    for name, batch, tokens in (("decode", rows, 1), ("prompt", 1, engine.chunks[-1])):
        shape = (batch, tokens, config.num_heads, config.head_dim)
        cached = (batch, engine.options.max_model_len, config.num_kv_heads, config.head_dim)
        q, kv = (jax.ShapeDtypeStruct(dims, engine.dtype) for dims in (shape, cached))
        lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
        choice = explain(q, kv, kv, query_offset=lengths, kv_lengths=lengths)
        facts[f"{name} attention"] = f"flash_attention, {choice.implementation}"
        facts |= {f"  {name} not {other}": reason for other, reason in choice.reasons.items() if other != "reference"}
    return facts


def _readable(name: str, value: Any) -> str:
    if "bytes" in name and isinstance(value, int):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
