"""Reports what an engine really allocated, compiled and chose, for people and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import compilation_cache, parallel
from jaxinfer.cache import AUTO, is_rotated, is_scaled, kv_dtype_name
from jaxinfer.engine import programs
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.memory import PoolPlan
from jaxinfer.engine.programs import paged, speculative
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.tiers.link_rates import transfer_rule
from jaxinfer.models import ModelConfig
from jaxinfer.models.attend import attention_options
from jaxinfer.models.host_layers import disk_layers, host_rows
from jaxinfer.quantization.reads import MOST_READ, product_use
from jaxinfer.quantization.side_by_side import separate
from jaxinfer.quantization.tree import (
    describe_scheme,
    is_packed,
    is_quantized,
    is_weight,
    num_bytes,
    num_parameters,
    weights,
)
from pallas_kernels.dense_matmul import choose as choose_dense
from pallas_kernels.dense_matmul import make_spec as make_dense_spec
from pallas_kernels.packed_matmul import unsupported as packed_unsupported
from pallas_kernels.paged_attention import BitPages, KernelChoice, PagedSpec, choose, make_spec
from pallas_kernels.paged_attention.layout import key_dtype
from pallas_kernels.recurrence import form as recurrence_form


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


def explain_engine(
    engine: AnyEngine, model: dict[str, Any], sampling: dict[str, Any], loaded_adapters: tuple[int, int] = (0, 0)
) -> Explanation:
    """`model` and `sampling` are facts that the engine does not have; they come first and last. `loaded_adapters`: how
    many there are, and their bytes in the host's memory."""
    first, num_replicas = engine.engines[0], len(engine.engines)
    spec, device = first.spec, first.device
    config, mesh = spec.config, spec.mesh
    return Explanation(
        {
            "model": {
                **model,
                "architecture": config.architecture,
                "parameters": num_parameters(every := spec.base_params),
                "parameter bytes": num_bytes(every),
                **_describe_offload(spec),
                "dtype": str(spec.dtype),
                "layers": config.num_layers,
                "heads (query / key)": _describe_heads(config),
                **_describe_model(config),
                "declared length": config.max_position_embeddings,
            },
            **({} if spec.options.adapter_sizes is None else {"adapters": _describe_adapters(first, *loaded_adapters)}),
            "cache": _describe_cache(first),
            "programs": _describe_programs(spec),
            "kernels": {**_describe_kernels(spec), **_describe_recurrence(spec), **_products(spec)},
            **({} if first.speculation is None else {"speculation": _describe_speculation(first)}),
            "device": {
                "platform": device.platform,
                "kind": device.device_kind,
                "devices used": f"{num_replicas * (1 if mesh is None else mesh.size)} of {jax.device_count()}",
                **_describe_mesh(mesh, num_replicas),
            },
            "sampling": {**sampling, **_describe_processors(spec)},
        }
    )


def _describe_adapters(engine: Engine, num_loaded: int, loaded_bytes: int) -> dict[str, Any]:
    spec, slots = engine.spec, engine.scheduler.adapters
    sizes = spec.options.adapter_sizes
    assert sizes is not None
    return {
        "on the device at once": sizes.num_slots,
        "rank, at most": sizes.max_rank,
        "linear layers": "all" if sizes.modules is None else ", ".join(sizes.modules),
        "other parts": ", ".join(sorted(sizes.parts)) or "none",
        "adapter bytes": spec.adapter_bytes,
        "loaded": num_loaded,
        "loaded, host bytes": loaded_bytes,
        "loaded, at most": spec.options.max_loaded_adapters or "any number",
        **({} if spec.host_adapter_bytes is None else {"host bytes, at most": spec.host_adapter_bytes}),
        "in slots now": ", ".join(adapter.name for adapter in slots.resident) or "none",
        "moves to the device": slots.num_moved,
    }


def _describe_offload(spec: EngineSpec) -> dict[str, Any]:
    """The layers in the host's memory or on the disk, and what each pass over the layers copies or reads."""
    if (disk := disk_layers(spec.params)) is not None:
        return {
            "layers on the disk": f"{len(disk.numbers)} of {spec.config.num_layers}",
            "bytes arriving in a step": disk.num_bytes,
            "bytes for arriving layers": spec.buffer_bytes,
        }
    if not (layers := sorted(host_rows(spec.params))):
        return {}
    return {
        "layers on the host": f"{len(layers)} of {spec.config.num_layers}: {', '.join(map(str, layers))}",
        "host bytes": spec.host_bytes,
        "bytes arriving in a step": spec.arriving_bytes,
        "bytes for arriving layers": spec.buffer_bytes,
    }


def _describe_heads(config: ModelConfig) -> str:
    """Numbers and widths, of each kind of layer."""
    kinds = {
        (config.num_kv_heads_of(layer), config.head_dim_of(layer), config.window(layer) is None)
        for layer in config.attention_layers
    }
    if len({kind[:2] for kind in kinds}) == 1:
        return f"{config.num_heads} / {config.num_kv_heads} x {config.head_dim}"
    shown = (
        f"{config.num_heads} / {count} x {width} {'without' if is_full else 'with'} a window"
        for count, width, is_full in sorted(kinds, key=lambda kind: kind[2])
    )
    return "; ".join(shown)


def summarize_engine(engine: AnyEngine) -> str:
    """The model, its size, dtypes, limits and devices in one line."""
    spec, num_replicas = engine.spec, len(engine.engines)
    num_devices = num_replicas * (1 if spec.mesh is None else spec.mesh.size)
    count = num_parameters(spec.base_params)
    parts = [
        f"{spec.config.architecture}, {count / 1e6:,.1f}M parameters, dtype={spec.dtype}",
        f"max_model_len={spec.max_model_len}, max_seqs={spec.max_seqs}, kv_dtype={spec.kv_dtype}",
        f"cache of {(spec.num_pages - 1) * spec.page_size:,} tokens",
        *(f"draft={name!r}" for name in [spec.draft.name] if name),
        f"{num_devices} x {spec.platform}",
    ]
    return ", ".join(parts)


def _describe_mesh(mesh: Mesh | None, num_replicas: int) -> dict[str, Any]:
    """Sizes in bytes are those of one device; pages and slots those of one replica."""
    if mesh is None:
        return {}
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return {"mesh": axes, "replicas": num_replicas, "processes": jax.process_count()}


def _describe_cache(engine: Engine) -> dict[str, Any]:
    spec, memory = engine.spec, engine.runner.memory
    return {
        "kind": spec.options.cache,
        **_describe_stored(engine),
        "max_model_len": spec.max_model_len,
        "max_seqs": spec.max_seqs,
        "page size": spec.page_size,
        "pages": spec.num_pages,
        **_describe_fewer_pages(spec, memory),
        "tokens that fit": (spec.num_pages - 1) * spec.page_size,
        **_bytes_per_token(spec),
        "bytes per page": spec.page_bytes,
        **_describe_policy(spec),
        **_describe_windows(spec),
        "bytes": memory.pool_bytes,
        **_describe_states(engine),
        "sampler bytes": memory.sampler,
        "activation bytes (guess)": memory.activations,
        **({} if memory.available is None else {"bytes available": memory.available}),
        **_pages_in_use(engine),
        "prefix cache": "on" if spec.reuses_prefixes else "off",
        **_describe_host_tier(engine),
        "grammar tables": f"{len(engine.grammars.tables)}, {engine.grammars.tables.num_bytes:,} bytes",
        "bytes for grammars": spec.table_sizes.num_bytes,
    }


def _describe_fewer_pages(spec: EngineSpec, memory: PoolPlan) -> dict[str, Any]:
    if not memory.is_reduced:
        return {}
    reason = "what memory has room for" if spec.options.num_pages is None else "num_pages"
    return {"pages that all slots could use": f"{spec.pool_sizes.default:,}, more than {reason}"}


def _describe_programs(spec: EngineSpec) -> dict[str, Any]:
    return {
        "tokens of a step": ", ".join(str(size) for size in spec.token_buckets),
        "slots of a step": ", ".join(str(size) for size in spec.step_slots),
        "slots of decode": ", ".join(str(size) for size in spec.decode_slots),
        "prompt tokens of a step": spec.prefill_chunk,
        "steps per dispatch": spec.steps_per_dispatch,
        "deterministic": str(spec.determinism),
        **_named_layers(spec),
        **_compiled(paged, ("step", "sample_step", "decode")),
    }


def _named_layers(spec: EngineSpec) -> dict[str, str]:
    """Layers after which requests may add vectors to hidden states, or ask for them."""
    named = {"steered layers": spec.steered_layers, "tapped layers": spec.tapped_layers}
    return {name: ", ".join(map(str, layers)) for name, layers in named.items() if layers}


def program_facts(engine: AnyEngine) -> dict[str, str | int | bool | None]:
    """Facts of an engine's programs that change the bits of numbers, and so may change which of two nearly equally
    probable tokens is chosen."""
    first = engine.engines[0]
    spec, device = first.spec, first.device
    chosen = {**_describe_kernels(spec), **_describe_recurrence(spec), **_products(spec)}
    reasons = ("  ", "weight bytes")  # why it is no other kernel, and sizes
    kernels = {name: value for name, value in chosen.items() if not name.startswith(reasons)}
    mesh = None if spec.mesh is None else ", ".join(f"{name} {size}" for name, size in spec.mesh.shape.items())
    return {
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "mesh": mesh,
        "dtype": str(spec.dtype),
        "kv_dtype": kv_dtype_name(spec.kv_dtype),
        "deterministic": spec.is_deterministic,
        **_named_layers(spec),
        "page_size": spec.page_size,
        "acceptance": spec.options.acceptance if spec.trees else "exact",
        "kernels": "; ".join(f"{name}: {value}" for name, value in kernels.items()),
        **_describe_processors(spec),
    }


def _describe_processors(spec: EngineSpec) -> dict[str, str]:
    """The functions of users in the chain of the sampler, with their hashes."""
    if spec.processors is None:
        return {}
    hashes = spec.processors.fingerprints
    return {"processors": ", ".join(f"{name} {fingerprint[:16]}" for name, fingerprint in hashes.items())}


def _describe_kernels(spec: EngineSpec) -> dict[str, str]:
    kernels, tokens = {}, spec.token_buckets[-1]
    if spec.config.mla is not None and spec.config.mla.has_indexer:
        return {f"{name} attention": "attend_to_chosen, xla" for name in ("decode", "prompt")}
    for name, num_tokens, longest in (("decode", spec.max_seqs, 1), ("prompt", tokens, tokens)):
        is_uniform = name == "prompt" and spec.is_deterministic
        kernels |= _chosen(name, "paged_attention", choose(_paged_spec(spec, num_tokens, longest, is_uniform)))
    return kernels


def _describe_recurrence(spec: EngineSpec) -> dict[str, str]:
    """The pass of a decode step over the states of all slots, of each kind of layer that has some."""
    layers = (spec.config.recurrent_of(layer) for layer in spec.config.recurrent_layers)
    shapes = {layer.state_shape for layer in layers if layer is not None and layer.state_shape is not None}
    forms = {recurrence_form((spec.max_seqs, *shape), spec.platform) for shape in shapes}
    return {"decode recurrence": "; ".join(sorted(forms))} if forms else {}


def _describe_speculation(engine: Engine) -> dict[str, Any]:
    spec, draft, stats = engine.spec, engine.spec.draft, engine.speculation_stats
    if stats is None:
        return {}
    model = {}
    for config, _ in draft.own:
        model = {
            "layers": config.num_layers,
            "parameter bytes": num_bytes(spec.placed_draft),
            **draft.describe_own(),
            "draft bytes per page (included in bytes per page)": num_bytes(spec.cache_of_draft.layers)
            // spec.num_pages,
            "cache dtype": kv_dtype_name(spec.draft_kv_dtype),
        }
    options = spec.options
    lengths = ", ".join(str(tree.depth) for tree in spec.trees)
    drafted = f"a tree of widths {options.draft_tree}" if options.draft_tree is not None else f"{lengths} tokens"
    return {
        "draft": draft.name,
        **model,
        "drafted in a round": f"{drafted}{', adaptive' if options.is_adaptive else ''}",
        "rounds per dispatch": spec.max_rounds,
        "acceptance": options.acceptance,
        "drafted / accepted tokens": f"{stats.proposed} / {stats.accepted}",
        **_compiled(speculative, ("speculate",)),
    }


def _describe_stored(engine: Engine) -> dict[str, str]:
    """The stored type of keys and values, and their scales."""
    spec = engine.spec
    dtype, name = spec.kv_dtype, kv_dtype_name(spec.kv_dtype)
    facts = {"dtype": name if spec.options.kv_dtype != AUTO else f"{name} (auto: what the model computes in)"}
    if isinstance(spec.pages, BitPages):
        facts["stored as"] = f"its bits, {spec.pages.k.dtype}: XLA:CPU would convert a whole cache of {dtype} each step"
    if dtype == "int8" or is_rotated(dtype):
        facts["scales"] = "float32, one for each token and head"
    if is_rotated(dtype):
        what = "keys and values" if key_dtype(dtype) == "int4" else "values, and int8 keys"
        facts["4 bits"] = f"rotated {what}, in the 16 levels of a normal distribution, two a byte"
    if is_scaled(dtype):
        facts["scales"] = "none: values beyond the largest are clipped"
        if engine.kv_scales is not None:
            facts["scales"] = "the checkpoint's, one for each layer and head"
    return facts


def _describe_model(config: ModelConfig) -> dict[str, Any]:
    """How the family's layers differ from Llama's."""
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
    if config.attention_chunk is not None:
        facts["attention chunk"] = f"{config.attention_chunk} tokens; sequences lie within one"
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
        if config.mla.has_indexer:
            facts["  indexer"] = (
                f"chooses {config.mla.index_topk} tokens a query with {config.mla.index_heads} heads; "
                f"{config.mla.index_size} more numbers cached a token and layer"
            )
    if config.has_sinks:
        facts["attention sinks"] = "one a head"
    for name in ("attention_scale", "attention_softcap", "logit_softcap"):
        if getattr(config, name) is not None:
            facts[name.replace("_", " ")] = getattr(config, name)
    return facts


def _describe_policy(spec: EngineSpec) -> dict[str, Any]:
    text = spec.policy.describe(spec.config)
    return {} if text is None else {"policy": text}


def _describe_windows(spec: EngineSpec) -> dict[str, Any]:
    """The pools beside that of layers without a window, and what a sequence of the greatest length takes in all."""
    if len(spec.groups) == 1 and spec.windows == (None,):
        return {}
    facts = {}
    for group in spec.groups:
        if group.window is not None or group is not spec.groups[0]:
            layers = f"{len(group.layers)} layers, {group.num_pages:,} pages of {group.page_bytes:,} bytes"
            facts[f"pages of {group.name}"] = layers
    return {**facts, "bytes of a full sequence": spec.pool_sizes.sequence_bytes}


def _describe_states(engine: Engine) -> dict[str, Any]:
    """Bytes that recurrent layers take, and how many states are kept for prefix reuse."""
    facts: dict[str, Any] = {}
    if engine.runner.memory.states:
        facts["state bytes"] = engine.runner.memory.states
    if engine.spec.has_states:
        facts["saved states"] = engine.spec.num_saved_states
    for pool in engine.scheduler.saved.pools:
        facts["  in use"] = pool.num_idle + pool.num_owned
    return facts


def _describe_host_tier(engine: Engine) -> dict[str, Any]:
    """Host memory for cached beginnings, and whether it is faster to read them than to compute them."""
    tier, rule = engine.scheduler.tier, engine.runner.host_rule
    if not tier:
        return {} if rule is None else {"host cache": f"none, by host_cache_gib='auto': {rule}"}
    if rule is None:
        rule = f"{transfer_rule(engine.spec, engine.device)} (host_cache_gib is a number: used in any case)"
    names = [group.name for group in engine.spec.groups] + ["saved states"] * (engine.spec.num_saved_states > 0)
    pools = zip(tier.pools, names, strict=True)
    return {
        "host cache bytes": tier.num_bytes,
        "host cache bytes in use": tier.used_bytes,
        "host pages in use": "; ".join(f"{pool.num_used} of {pool.num_pages} ({name})" for pool, name in pools),
        "host cache": str(rule),
        **({} if engine.prefix_store is None else {"prefix store": str(engine.prefix_store.files.folder)}),
    }


def _pages_in_use(engine: Engine) -> dict[str, str]:
    facts = {}
    for group, pool in zip(engine.spec.groups, engine.scheduler.pools.all, strict=True):
        name = "" if group is engine.spec.groups[0] else f", {group.name}"
        facts[f"pages in use / idle{name}"] = f"{pool.num_owned} / {pool.num_idle}"
    return facts


def _bytes_per_token(spec: EngineSpec) -> dict[str, int]:
    """Cache bytes of a token in all layers, padding of the layout included; layers with a window hold it while it is
    inside."""
    kept = spec.policy.leaves_name
    sizes = {"values": 0, "scales": 0, kept: 0}
    for pages, own in zip(spec.cache.bare.layers, spec.cache.leaves, strict=True):
        sizes[kept] += sum(num_bytes(leaf) // leaf.shape[0] for leaf in jax.tree.leaves(own))
        for leaf in jax.tree.leaves(pages):  # only scales have three axes
            sizes["scales" if leaf.ndim == 3 else "values"] += leaf.size // leaf.shape[0] * leaf.dtype.itemsize
    sizes = {name: size // spec.page_size for name, size in sizes.items()}
    others = {f"  of these {name}": sizes[name] for name in ("scales", kept) if sizes[name]}
    return {"bytes per token": sum(sizes.values()), **others}


def _paged_spec(spec: EngineSpec, num_tokens: int, longest: int, is_uniform: bool) -> PagedSpec:
    config = spec.config
    layer = config.cached_layers[0]
    head_dim, num_kv_heads = config.head_dim_of(layer), config.num_kv_heads_of(layer)
    q = jax.ShapeDtypeStruct((num_tokens, config.num_heads, head_dim), spec.dtype)
    kv = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), spec.dtype)
    shape = spec.policy.ragged_shape(num_tokens, spec.max_seqs, spec.pages_per_sequence, is_step=longest > 1)
    table = jax.ShapeDtypeStruct(shape, jnp.int32)
    options: dict[str, Any] = {**attention_options(config), "is_uniform": is_uniform}
    options["num_parts"] = 1 if spec.mesh is None else parallel.axis_size(spec.mesh, "tokens")
    values = kv if config.mla is None else jax.ShapeDtypeStruct((*kv.shape[:2], config.mla.latent_size), kv.dtype)
    return make_spec(q, kv, values, spec.pages, table, max_query_length=longest, **options)


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


def _products(spec: EngineSpec) -> dict[str, str]:
    precision = ", highest precision" if spec.dtype == "float32" else ""
    names = set()
    for leaf in weights(separate(spec.base_params)) if spec.mesh is None else ():
        if not is_weight(leaf) and leaf.ndim == 2:
            x = jax.ShapeDtypeStruct((1, leaf.shape[0]), spec.dtype)
            names.add(choose_dense(make_dense_spec(x, leaf)).implementation)
    others = {**_quantized_products(spec), **_packed_products(spec)}
    if "packed products" in others and not names:
        return others
    shown = " and ".join(sorted(names)) or "xla"
    return {"matrix products": f"{shown}, {spec.dtype}{precision}", **others}


def _packed_products(spec: EngineSpec) -> dict[str, str]:
    """How products with weights that are packed for a CPU are computed."""
    facts: dict[str, None] = {}
    for leaf in weights(spec.base_params):
        if is_packed(leaf):
            name = leaf.form.codes if leaf.scheme is None else describe_scheme(leaf)
            rounded = leaf.form.activations
            how = "float32 activations" if rounded is None else f"activations rounded to {rounded}"
            reason = packed_unsupported(spec.platform)
            facts[f"by {name}: {'numba_cpu' if reason is None else 'xla'}, {how}"] = None
    return {"packed products": "; ".join(facts)} if facts else {}


def _quantized_products(spec: EngineSpec) -> dict[str, Any]:
    """How products with each scheme's weights are computed, for one slot that decodes and for all, and the bytes of
    weights that a step of all slots reads beside those stored; a warning names weights that are read more often."""
    products: dict[str, None] = {}
    stored, read, wasteful = 0, 0, {}
    is_tied = spec.config.tie_word_embeddings
    for path, leaf in jax.tree_util.tree_leaves_with_path(separate(spec.base_params), is_leaf=is_weight):
        names = [str(getattr(key, "key", key)) for key in path]
        is_head = is_tied and names == ["embed"]
        if leaf.ndim < 2 or (names[0] in ("embed", "position_embed", "layer_embed") and not is_head):
            continue
        if spec.mesh is not None and not is_weight(leaf):
            continue
        try:
            single, every = (product_use(leaf, rows, spec.dtype, is_transposed=is_head) for rows in (1, spec.max_seqs))
        except ValueError:
            continue  # a vector for each of several parts is no matrix of inputs and outputs
        stored, read = stored + every.stored_bytes, read + every.read_bytes
        if every.is_wasteful:
            kind = ".".join("*" if name.isdigit() else name for name in names)
            wasteful[kind] = f"{kind} ({every.read_bytes / every.stored_bytes:.1f}x: {every.form})"
        if is_quantized(leaf):
            shown = single.form if single.form == every.form else f"{single.form} (one row); {every.form}"
            products[f"by {describe_scheme(leaf)}{', tied head' if is_head else ''}: {shown}"] = None
    facts: dict[str, Any] = {"quantized products": "; ".join(products)} if products else {}
    facts["weight bytes of a step"] = read
    facts["  the least"] = f"{stored:,} ({read / max(stored, 1):.2f}x)"
    if read > MOST_READ * stored:
        facts["  warning"] = f"a step reads more than {MOST_READ} of the weights' bytes: {'; '.join(wasteful.values())}"
    return facts


def _readable(name: str, value: Any) -> str:
    if "bytes" in name and isinstance(value, int):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
