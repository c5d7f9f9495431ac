"""What an engine really allocated, compiled and chose, for people and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import compilation_cache
from jaxinfer.cache import AUTO, is_scaled, kv_dtype_name
from jaxinfer.engine import contiguous_programs, paged_programs, programs, speculative_programs
from jaxinfer.engine.contiguous import ContiguousEngine
from jaxinfer.engine.paged import PagedEngine
from jaxinfer.engine.replicas import Replicas
from jaxinfer.engine.speculation import Speculation
from jaxinfer.models import ModelConfig
from jaxinfer.models.layers import attention_options
from jaxinfer.quantization.tree import describe_scheme, is_quantized, num_bytes, num_parameters, weights
from jaxinfer.speculative import ModelDraft, draft_name
from pallas_kernels.flash_attention import explain
from pallas_kernels.paged_attention import BitPages, KernelChoice, PagedSpec, Pages, choose, make_spec
from pallas_kernels.quantized_matmul import form
from pallas_kernels.quantized_matmul import make_spec as make_matmul_spec

Engine = PagedEngine | Replicas | ContiguousEngine


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


def explain_engine(engine: Engine, model: dict[str, Any], sampling: dict[str, Any]) -> Explanation:
    """`model` and `sampling` are what the caller knows beyond the engine; they come first and last."""
    config, num_replicas = engine.config, 1
    if isinstance(engine, Replicas):
        engine, num_replicas = engine.engines[0], len(engine.engines)
    describe = _describe_paged(engine) if isinstance(engine, PagedEngine) else _describe_contiguous(engine)
    params = jax.tree.unflatten(engine.model.structure, engine.weights)
    mesh = engine.placement.mesh if isinstance(engine, PagedEngine) else None
    device = engine.weights[0].addressable_shards[0].device
    return Explanation(
        {
            "model": {
                **model,
                "architecture": config.architecture,
                "parameters": num_parameters(params),
                "parameter bytes": num_bytes(params),
                "dtype": str(engine.dtype),
                "layers": config.num_layers,
                "heads (query / key)": f"{config.num_heads} / {config.num_kv_heads} x {config.head_dim}",
                **_describe_model(config),
                "declared length": config.max_position_embeddings,
            },
            **describe,
            "device": {
                "platform": device.platform,
                "kind": device.device_kind,
                "devices used": f"{num_replicas * (1 if mesh is None else mesh.size)} of {jax.device_count()}",
                **_describe_mesh(mesh, num_replicas),
            },
            "sampling": sampling,
        }
    )


def _describe_mesh(mesh: Mesh | None, num_replicas: int) -> dict[str, Any]:
    """Sizes in bytes are those of one device; pages and slots those of one replica."""
    if mesh is None:
        return {}
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return {"mesh": axes, "replicas": num_replicas, "processes": jax.process_count()}


def _describe_paged(engine: PagedEngine) -> dict[str, dict[str, Any]]:
    options, memory, page_size = engine.options, engine.memory, engine.page_size
    slots, tokens = options.max_seqs, options.token_buckets[-1]
    pages_per_sequence = -(-options.max_model_len // page_size)
    kernels = {}
    for name, num_tokens, longest in (("decode", slots, 1), ("prompt", tokens, tokens)):
        spec = _paged_spec(engine, num_tokens, pages_per_sequence, longest, name == "prompt" and options.deterministic)
        kernels |= _chosen(name, "paged_attention", choose(spec))
    available = {} if memory.available is None else {"bytes available": memory.available}
    return {
        "cache": {
            "kind": "paged",
            **_describe_stored(engine, engine.abstract_pages, options.kv_dtype),
            "max_model_len": options.max_model_len,
            "max_seqs": options.max_seqs,
            "page size": page_size,
            "pages": memory.num_pages,
            "tokens that fit": (memory.num_pages - 1) * page_size,
            **_bytes_per_token(engine.abstract_pages, engine.config.num_layers, page_size),
            "bytes per page": memory.page_bytes,
            "bytes": memory.pool_bytes,
            "sampler bytes": memory.sampler,
            "activation bytes (guess)": memory.activations,
            **available,
            "pages in use / idle": f"{engine.scheduler.pool.num_owned} / {engine.scheduler.pool.num_idle}",
            "prefix cache": "on" if options.prefix_cache else "off",
        },
        "programs": {
            "tokens of a step": ", ".join(str(size) for size in options.token_buckets),
            "slots of a step": ", ".join(str(size) for size in options.step_slots),
            "slots of decode": ", ".join(str(size) for size in options.decode_slots),
            "prompt tokens of a step": options.chunk,
            "steps per dispatch": 1 if options.deterministic else options.steps_per_dispatch,
            "deterministic": options.deterministic,
            **_compiled(paged_programs, ("step", "decode")),
        },
        "kernels": {**kernels, **_products(engine)},
        **({} if engine.speculation is None else {"speculation": _describe_speculation(engine.speculation)}),
    }


def _describe_speculation(speculation: Speculation) -> dict[str, Any]:
    settings, draft, stats = speculation.settings, speculation.draft, speculation.stats
    model = {}
    if isinstance(draft, ModelDraft):
        model = {
            "layers": draft.config.num_layers,
            "parameter bytes": speculation.weight_bytes,
            **({"float32 copies": str(draft.copies)} if draft.copies is not None else {}),
            "bytes per page (in the page's)": speculation.page_bytes,
            "cache dtype": kv_dtype_name(speculation.kv_dtype),
        }
    lengths = ", ".join(str(tree.depth) for tree in settings.trees)
    drafted = f"a tree of widths {settings.tree}" if settings.tree is not None else f"{lengths} tokens"
    return {
        "draft": draft_name(draft),
        **model,
        "drafted in a round": f"{drafted}{', adaptive' if settings.is_adaptive else ''}",
        "rounds per dispatch": speculation.max_rounds,
        "acceptance": settings.acceptance,
        "drafted / accepted tokens": f"{stats.proposed} / {stats.accepted}",
        **_compiled(speculative_programs, ("speculate",)),
    }


def _describe_contiguous(engine: ContiguousEngine) -> dict[str, dict[str, Any]]:
    options = engine.options
    kernels = {}
    for name, batch, tokens in (("decode", options.slot_buckets[-1], 1), ("prompt", 1, engine.chunks[-1])):
        kernels |= _chosen(name, "flash_attention", _contiguous_choice(engine, batch, tokens))
    return {
        "cache": {
            "kind": "contiguous",
            **_describe_stored(engine, engine.abstract_cache.layers[0], options.kv_dtype),
            "max_model_len": options.max_model_len,
            "max_seqs": options.max_seqs,
            **_bytes_per_token(engine.abstract_cache.layers[0], engine.config.num_layers, options.max_model_len),
            "bytes at most": engine.cache_bytes(),
            "slots allocated": engine.num_slots,
        },
        "programs": {
            "prompt chunks": ", ".join(str(size) for size in engine.chunks),
            "slot buckets": ", ".join(str(size) for size in options.slot_buckets),
            "steps per dispatch": options.steps_per_dispatch,
            **_compiled(contiguous_programs, ("prefill", "decode")),
        },
        "kernels": {**kernels, **_products(engine)},
    }


def _describe_stored(engine: Engine, pages: Pages, asked: str) -> dict[str, str]:
    """What keys and values are stored as, and how."""
    dtype, name = engine.kv_dtype, kv_dtype_name(engine.kv_dtype)
    facts = {"dtype": name if asked != AUTO else f"{name} (auto: what the model computes in)"}
    if isinstance(pages, BitPages):
        facts["stored as"] = f"its bits, {pages.k.dtype}: XLA:CPU would convert a whole cache of {dtype} each step"
    if dtype == "int8":
        facts["scales"] = "float32, one for each token and head"
    elif is_scaled(dtype):
        facts["scales"] = "none: values beyond the largest are clipped"
        if engine.kv_scales is not None:
            facts["scales"] = "the checkpoint's, one for each layer and head"
    if dtype != engine.dtype.name and isinstance(engine, ContiguousEngine):
        facts["read"] = f"a layer's rows at a time, converted to {engine.dtype}"
    return facts


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    """What the family's layers are, where it is not what Llama's are."""
    windows = [window for window in config.sliding_windows if window is not None]
    facts: dict[str, Any] = {}
    if config.rope_of(0) is None and not any(config.rotated_layers):
        facts["positions"] = "learned" if config.has_position_embedding else "none"
    else:
        facts |= {"rope": config.rope.kind, "rope theta": config.rope.theta}
        if config.rope.sequence_length is not None:
            facts["rope made for length"] = config.rope.sequence_length
        if config.local_rope is not None:
            facts["rope of layers with a window"] = f"{config.local_rope.kind}, theta {config.local_rope.theta}"
        if not all(config.rotated_layers):
            facts["layers without rope"] = sum(not is_rotated for is_rotated in config.rotated_layers)
    if windows:
        sizes = " and ".join(map(str, sorted(set(windows))))
        facts["layers with a window"] = f"{len(windows)} of {config.num_layers}, {sizes} tokens"
    facts["block"] = f"{config.block}, norms of kind {config.norm}"
    facts["MLP"] = f"{config.activation}{', gated' if config.is_mlp_gated else ''}"
    if config.moe is not None:
        facts["experts"] = (
            f"{config.moe.num_experts_per_token} of {config.moe.num_experts}, {config.moe.expert_size} wide, in "
            f"{len(config.moe.layers)} of {config.num_layers} layers"
        )
        if config.moe.shared_size:
            facts["  beside them"] = f"an MLP of {config.moe.shared_size} for all tokens"
    if config.mla is not None:
        facts["latent attention"] = (
            f"{config.mla.latent_size} + {config.mla.rope_size} numbers cached a token and layer"
        )
    if config.has_sinks:
        facts["attention sinks"] = "one a head"
    for name in ("attention_scale", "attention_softcap", "logit_softcap"):
        if getattr(config, name) is not None:
            facts[name.replace("_", " ")] = getattr(config, name)
    return facts


def _bytes_per_token(pages: Pages, num_layers: int, num_tokens: int) -> dict[str, int]:
    """What a token takes in all layers, padding of the layout included, from one layer's pages of `num_tokens`."""
    sizes = {"values": 0, "scales": 0}
    for leaf in jax.tree.leaves(pages):  # only scales have three axes
        sizes["scales" if leaf.ndim == 3 else "values"] += leaf.size // leaf.shape[0] * leaf.dtype.itemsize
    sizes = {name: num_layers * size // num_tokens for name, size in sizes.items()}
    scales = {"  of these scales": sizes["scales"]} if sizes["scales"] else {}
    return {"bytes per token": sum(sizes.values()), **scales}


def _paged_spec(engine: PagedEngine, num_tokens: int, pages: int, longest: int, is_uniform: bool) -> PagedSpec:
    config = engine.config
    q = jax.ShapeDtypeStruct((num_tokens, config.num_heads, config.head_dim), engine.dtype)
    kv = jax.ShapeDtypeStruct((num_tokens, config.num_kv_heads, config.head_dim), engine.dtype)
    table = jax.ShapeDtypeStruct((engine.options.max_seqs, pages), jnp.int32)
    one_layer = engine.abstract_pages
    options = attention_options(config)
    values = kv if config.mla is None else jax.ShapeDtypeStruct((*kv.shape[:2], config.mla.latent_size), kv.dtype)
    return make_spec(q, kv, values, one_layer, table, max_query_length=longest, is_uniform=is_uniform, **options)


def _contiguous_choice(engine: ContiguousEngine, batch: int, tokens: int) -> KernelChoice:
    config = engine.config
    cached = (batch, engine.options.max_model_len, config.num_kv_heads, config.head_dim)
    shape = (batch, tokens, config.num_heads, config.head_dim)
    q, kv = (jax.ShapeDtypeStruct(dims, engine.dtype) for dims in (shape, cached))
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return explain(q, kv, kv, query_offset=lengths, kv_lengths=lengths, **attention_options(config))


def _chosen(name: str, kernel: str, choice: KernelChoice) -> dict[str, str]:
    """The implementation, and why no other was taken."""
    others = {f"  {name} not {other}": why for other, why in choice.reasons.items() if other != "reference"}
    return {f"{name} attention": f"{kernel}, {choice.implementation}", **others}


def num_compiled(module: Any, name: str) -> int:
    """How many times this process has compiled a module's program, or found it in the compilation cache."""
    return getattr(module, name)._cache_size()


def _compiled(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    counts = [f"{name} {num_compiled(module, name)}" for name in names]
    counts.append(f"score {num_compiled(programs, 'score')}")
    return {
        "compiled in this process": ", ".join(counts),
        "compilation cache": str(compilation_cache.folder() or "off"),
    }


def _products(engine: Engine) -> dict[str, str]:
    precision = ", highest precision" if engine.dtype == "float32" else ""
    params = jax.tree.unflatten(engine.model.structure, engine.weights)
    return {"matrix products": f"XLA, {engine.dtype}{precision}", **_quantized_products(engine, params)}


def _quantized_products(engine: Engine, params: Any) -> dict[str, str]:
    """How products with each scheme's weights are computed, for one slot that decodes and for all."""
    facts: dict[str, None] = {}
    for leaf in weights(params):
        if not is_quantized(leaf):
            continue
        forms = []
        for rows in (1, engine.options.max_seqs):
            x = jax.ShapeDtypeStruct((rows, leaf.shape[-2]), engine.dtype)
            values = jax.ShapeDtypeStruct(leaf.shape[-2:], leaf.values.dtype)
            scheme = leaf.scheme
            spec = make_matmul_spec(
                x,
                values,
                leaf.zeros,
                leaf.codebook,
                leaf.minima,
                block=scheme.block,
                activations=scheme.activations,
            )
            forms.append(form(spec))
        shown = forms[0] if forms[0] == forms[1] else f"{forms[0]} (one row); {forms[1]}"
        facts[f"by {describe_scheme(leaf)}: {shown}"] = None
    return {"quantized products": "; ".join(facts)} if facts else {}


def _readable(name: str, value: Any) -> str:
    if "bytes" in name and isinstance(value, int):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
