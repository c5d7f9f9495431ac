"""Logits and log-probabilities that equal, bit for bit, those of an engine in deterministic mode: for trainers.

A trainer that computes the log-probabilities of an engine's tokens anew gets other numbers than the engine reported,
since its products have other shapes. Here tokens go through the model as they do in the engine: in passes of as many
rows, over pages. Gradients are those of the ordinary forward pass at the same parameters, and of the experts that the
tokens went to: they differ from the values' own by rounding alone, and need memory for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import abstract_paged_cache, abstract_state_cache, attend_ragged, attend_without_cache, stored_dtype
from jaxinfer.models import ModelConfig, Params, bind, check_taps, collect, compute_dtype
from jaxinfer.models.attend import Replay
from jaxinfer.quantization.on_device import why_not_packing
from jaxinfer.quantization.tree import is_weight, weights
from jaxinfer.sampling import exact
from pallas_kernels.paged_attention import platform_layout
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    States = dict[str, Array]

# A cache of these holds what the model computed, or rounds it in a way that has a gradient.
_KV_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class FixedShape:
    """Sizes of a deterministic engine on which its numbers depend; `of` reads an engine's.

    Attributes:
      num_rows: tokens of every pass, padding included.
      head_rows: rows of every product with the output layer.
      page_size: tokens of a page. kv_dtype: the stored type of keys and values, as the engine's option of that name.

    Raises ValueError for sizes below 1, and for a `kv_dtype` of fewer than 16 bits, whose scales depend on the pass.
    """

    num_rows: int = 256
    head_rows: int = 16
    page_size: int = 16
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_rows", "head_rows", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_dtype not in _KV_DTYPES:
            known = ", ".join(_KV_DTYPES)
            raise ValueError(f"kv_dtype={self.kv_dtype!r} has no fixed forward pass, which is for one of {known}")

    @classmethod
    def of(cls, spec: Any) -> FixedShape:
        """The sizes of an engine (`llm.engine.spec`). Raises ValueError with what `refusal` says."""
        if (reason := refusal(spec)) is not None:
            raise ValueError(f"there is no fixed forward pass for this engine: {reason}")
        return cls(spec.determinism.num_rows, spec.head_rows, spec.page_size, spec.options.kv_dtype)


def refusal(spec: Any) -> str | None:
    """The reason why no fixed forward pass has an engine's numbers, or None."""
    options = spec.options
    reasons = {
        f"it is not deterministic ({spec.determinism}), open it with deterministic=True": not spec.is_deterministic,
        f"kv_policy={options.kv_policy!r} drops or skips keys": options.kv_policy is not None,
        f"kv_dtype={options.kv_dtype!r} is none of {', '.join(_KV_DTYPES)}": options.kv_dtype not in _KV_DTYPES,
        f"it runs on {spec.num_devices} devices": spec.num_devices > 1,
        "its weights hold adapters, which tokens have or have not": spec.has_adapters,
        f"its passes add vectors (steered_layers={spec.steered_layers})": bool(spec.steered_layers),
    }
    return next((text for text, is_so in reasons.items() if is_so), None)


@dataclass(frozen=True)
class _Static:
    """Static facts of a call: the model, the sizes, tokens of a sequence in a pass, and the taps."""

    config: ModelConfig
    shape: FixedShape
    chunk: int
    taps: tuple[str, ...] = ()


def forward_fixed(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
    *,
    shape: FixedShape | None = None,
    chunk: int | None = None,
    return_routes: bool = False,
) -> Any:
    """float32 logits [B, T, V] of int32 tokens [B, T], with the bits of a deterministic engine of that `shape`: those
    of its decode steps and of its prompts, whatever ran beside them. To be jitted, with `config` and the keywords
    static; `jax.grad` works.

    Args:
      params: plain arrays. lengths: int32 [B], tokens of each sequence, all T by default. Logits behind a sequence's
        end are those of a hidden state of zeros and pass no gradient on.
      shape: of the engine, `FixedShape.of(llm.engine.spec)`.
      chunk: tokens of a sequence in a pass, at most `shape.num_rows`, its default. It changes no bit.
      return_routes: return (logits, routes), with the tokens' experts int32 [B, T, C] by layer ("layers.3.experts").

    A loss needs no [B, T, V]: `logprobs_fixed`. Raises ValueError for shapes that do not fit.
    """
    taps = route_names(config) if return_routes else ()
    static, tokens, lengths = _checked(config, tokens, lengths, shape, chunk, taps)
    hidden, routes = _hidden(static, params, tokens, lengths)
    logits = _with_gradient_of(partial(_logits, static, False), partial(_logits, static, True))(params, hidden)
    return (logits, routes) if return_routes else logits


def logprobs_fixed(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
    *,
    shape: FixedShape | None = None,
    chunk: int | None = None,
    return_routes: bool = False,
) -> Any:
    """float32 [B, T], the log-probability of each token given those before it, with the bits that a deterministic
    engine reports as `logprobs`, `prompt_logprobs` and `llm.score`; 0 for the first token and behind a sequence's end.

    Arguments as of `forward_fixed`. Logits exist for `shape.head_rows` positions at a time.
    """
    taps = route_names(config) if return_routes else ()
    static, tokens, lengths = _checked(config, tokens, lengths, shape, chunk, taps)
    hidden, routes = _hidden(static, params, tokens, lengths)
    following = jnp.roll(tokens, -1, axis=1)
    values = _with_gradient_of(partial(_token_logprobs, static, False), partial(_token_logprobs, static, True))
    logprobs = values(params, hidden, following)
    places = jnp.arange(tokens.shape[1])
    logprobs = jnp.where((places > 0) & (places < lengths[:, None]), jnp.roll(logprobs, 1, axis=1), 0)
    return (logprobs, routes) if return_routes else logprobs


def states_fixed(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    taps: tuple[str, ...],
    *,
    shape: FixedShape | None = None,
    chunk: int | None = None,
) -> States:
    """Hidden states [B, T, D] by the names of `taps` (`models.tap_names`), and experts int32 [B, T, C], with a
    deterministic engine's bits; without gradients. Arguments as of `forward_fixed`."""
    static, tokens, lengths = _checked(config, tokens, None, shape, chunk, check_taps(config, taps))
    return _fixed_hidden(static, params, tokens, lengths)[1]


def route_names(config: ModelConfig) -> tuple[str, ...]:
    """The taps of all layers' experts."""
    return tuple(f"layers.{i}.experts" for i in range(config.num_layers) if config.experts_of(i) is not None)


def _checked(
    config: ModelConfig,
    tokens: jax.Array,
    lengths: jax.Array | None,
    shape: FixedShape | None,
    chunk: int | None,
    taps: tuple[str, ...],
) -> tuple[_Static, jax.Array, jax.Array]:
    shape, tokens = shape or FixedShape(), jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens are int32 [B, T] with at least one token, got {tokens.shape}")
    batch, length = tokens.shape
    lengths = jnp.full(batch, length, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths are int32 [{batch}], one for each sequence, got {lengths.shape}")
    if chunk is not None and not 1 <= chunk <= shape.num_rows:
        raise ValueError(f"chunk={chunk} is not between 1 and the {shape.num_rows} rows of a pass")
    return _Static(config, shape, min(chunk or shape.num_rows, length), taps), tokens, lengths


def _with_gradient_of(value: Callable[..., Any], ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the values of `value` and the gradients of `ordinary`, which computes the same up to rounding."""

    @jax.custom_vjp
    def function(*arguments: Any) -> Any:
        return value(*arguments)

    def forward(params: Params, *arguments: Any) -> Any:
        _check_plain(params)
        return value(params, *arguments), (params, *arguments)

    def backward(arguments: Any, cotangents: Any) -> Any:
        return jax.vjp(ordinary, *arguments)[1](cotangents)

    function.defvjp(forward, backward)
    return function


def _check_plain(params: Params) -> None:
    if any(is_weight(leaf) for leaf in weights(params)):
        raise ValueError(
            "gradients need plain arrays, and these parameters hold quantized or packed weights: "
            "quantization.on_device.dequantize_params makes plain ones"
        )


# The values: passes of one shape.


def _hidden(
    static: _Static, params: Params, tokens: jax.Array, lengths: jax.Array
) -> tuple[Float[Array, "B T D"], States]:
    """Final hidden states, zeros behind a sequence's end, and the routes if `taps` name them."""
    routed = replace(static, taps=route_names(static.config))

    @jax.custom_vjp
    def function(params: Params, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, States]:
        return _fixed_hidden(static, params, tokens, lengths)

    def forward(params: Params, tokens: jax.Array, lengths: jax.Array) -> Any:
        _check_plain(params)
        hidden, states = _fixed_hidden(routed, params, tokens, lengths)
        return (hidden, states if static.taps else {}), (params, tokens, lengths, states)

    def backward(given: Any, cotangents: Any) -> Any:
        params, *others = given
        _, pull = jax.vjp(lambda params: _ordinary_hidden(static.config, params, *others), params)
        return *pull(cotangents[0]), None, None

    function.defvjp(forward, backward)
    return function(params, tokens, lengths)


def _fixed_hidden(
    static: _Static, params: Params, tokens: jax.Array, lengths: jax.Array
) -> tuple[Float[Array, "B T D"], States]:
    """As `_hidden`, of which this is the value: groups of sequences that fit into a pass, one after another."""
    (batch, length), chunk = tokens.shape, static.chunk
    size, num_passes = min(batch, static.shape.num_rows // chunk), -(-length // chunk)
    padded = jnp.pad(tokens, ((0, -batch % size), (0, num_passes * chunk - length)))
    groups = (
        padded.reshape(-1, size, num_passes, chunk).swapaxes(1, 2),
        jnp.pad(lengths, (0, -batch % size)).reshape(-1, size),
    )

    def joined(states: jax.Array) -> jax.Array:  # [groups, passes, size, chunk, ...]
        states = states.swapaxes(1, 2).reshape(-1, num_passes * chunk, *states.shape[4:])
        return states[:batch, :length]

    hidden, states = jax.tree.map(joined, lax.map(lambda group: _passes(static, params, *group), groups))
    return _masked(hidden, lengths), states


def _masked(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(hidden.shape[1])[:, None] < lengths[:, None, None], hidden, 0)


def _passes(static: _Static, params: Params, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, States]:
    """Final hidden states [N, S, C, D] of tokens [N, S, C]: N passes over C tokens of each of S sequences."""
    config, shape = static.config, static.shape
    num_passes, size, chunk = tokens.shape
    decoder, dtype = bind(config, params), compute_dtype(params)
    num_pages = -(-num_passes * chunk // shape.page_size)
    stored = stored_dtype(shape.kv_dtype, dtype)
    layout = platform_layout(current_platform(), stored, has_values=config.caches_values)
    cache = abstract_paged_cache(config, 1 + size * num_pages, shape.page_size, stored, layout)
    cache = replace(cache, states=abstract_state_cache(config, size, dtype))
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    table = 1 + jnp.arange(size * num_pages, dtype=jnp.int32).reshape(size, num_pages)
    first_rows = jnp.arange(size, dtype=jnp.int32) * chunk
    padding = shape.num_rows - size * chunk

    def one_pass(cache: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, States]]:
        number, tokens = given
        start = number * chunk
        counts = jnp.clip(lengths - start, 0, chunk)
        ends = jnp.where(counts > 0, start + counts, 0)
        attend = attend_ragged(cache, (table,), first_rows, counts, ends, is_uniform=True)
        positions = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32), tokens.shape)
        token_rows, position_rows = (jnp.pad(x.reshape(-1), (0, padding)) for x in (tokens, positions))
        tapped, tap = collect(static.taps)
        hidden = decoder(token_rows, position_rows, attend, tap if static.taps else None)
        own = jax.tree.map(lambda x: x[: size * chunk].reshape(size, chunk, *x.shape[1:]), (hidden, tapped))
        return attend.cache, own

    return lax.scan(one_pass, cache, (jnp.arange(num_passes, dtype=jnp.int32), tokens))[1]


def _over_rows(size: int, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`function` of blocks of `size` positions of arrays [B, T, ...]."""
    batch, length = arrays[0].shape[:2]

    def blocks(x: jax.Array) -> jax.Array:
        x = x.reshape(batch * length, *x.shape[2:])
        return jnp.pad(x, ((0, -len(x) % size), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

    out = lax.map(lambda given: function(*given), tuple(map(blocks, arrays)))
    return out.reshape(-1, *out.shape[2:])[: batch * length].reshape(batch, length, *out.shape[2:])


def _of_engine(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The model as an engine multiplies by its output layer: a CPU packs a tied embedding output by output, which is
    the order of sums of a matrix [D, V] and not of [V, D]."""
    is_packed = why_not_packing(compute_dtype(params)) is None and not is_weight(params["embed"])
    if not (config.tie_word_embeddings and is_packed):
        return config, params
    return replace(config, tie_word_embeddings=False), {**params, "lm_head": params["embed"].T}


def _logits(static: _Static, is_ordinary: bool, params: Params, hidden: jax.Array) -> jax.Array:
    config, params = (static.config, params) if is_ordinary else _of_engine(static.config, params)

    def block(rows: jax.Array) -> jax.Array:
        return bind(config, params).logits(rows)

    return _over_rows(static.shape.head_rows, jax.checkpoint(block) if is_ordinary else block, hidden)


def _token_logprobs(
    static: _Static, is_ordinary: bool, params: Params, hidden: jax.Array, targets: jax.Array
) -> jax.Array:
    """float32 [B, T], of the target after each hidden state. The engine's sum over the vocabulary, in integers, has no
    gradient; the ordinary one does."""
    config, log_softmax = static.config, partial(jax.nn.log_softmax, axis=-1)
    if not is_ordinary:
        (config, params), log_softmax = _of_engine(config, params), exact.log_softmax

    def block(rows: jax.Array, targets: jax.Array) -> jax.Array:
        logprobs = log_softmax(bind(config, params).logits(rows))
        return jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]

    return _over_rows(static.shape.head_rows, jax.checkpoint(block) if is_ordinary else block, hidden, targets)


# The gradients: the ordinary forward pass.


def _ordinary_hidden(
    config: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array, routes: States
) -> Float[Array, "B T D"]:
    """Final hidden states without a cache, of the same experts; a layer at a time is kept for gradients."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    tap = Replay(routes) if routes else None
    hidden = bind(config, params)(tokens, positions, attend_without_cache, tap, recomputes=True)
    return _masked(hidden, lengths)
