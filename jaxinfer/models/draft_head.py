"""Trained heads that draft for a target: their layers, and what is before and after them.

A head reads hidden states of the target. Heads of kinds "eagle3" (Li et al. 2025, EAGLE-3, section 3) and "mtp"
(DeepSeek-V3, section 2.2) pair a state with the token after it, and what comes out predicts the next token and is the
next state. Those of kind "dflash" (arXiv 2602.06036) compute a block: the newest token and masks, which attend to keys
of the target's states and to each other. DFlash 2 adds convolutions along the block and a selector among the best
tokens, DSpark (arXiv 2607.05147) a Markov head and a confidence. Shapes use the legend of jaxinfer/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.attend import Attend
from jaxinfer.models.basic import Linear, Norm, hidden_norm, logits_at, normal, scaled_logits
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.draft_head_config import DraftHeadConfig
from jaxinfer.models.hidden import summed
from jaxinfer.models.layers import MLP, Attention, DecoderLayer
from jaxinfer.models.rope import Positions
from jaxinfer.quantization.matmul import matmul, rows

_NOT_CHOSEN = 1e4  # what logits of tokens that a selector leaves out are lower by


def of(config: ModelConfig) -> DraftHeadConfig:
    """The head of a configuration that has one."""
    if config.draft_head is None:
        raise ValueError(f"{config.architecture} is no head that drafts")
    return config.draft_head


class PairLayer(nnx.Module):
    """EAGLE-3's first layer: attention of the token's embedding and the state side by side, added to the state."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None):
        self.token_norm, self.state_norm = hidden_norm(config, dtype), hidden_norm(config, dtype)
        inputs = 2 * config.hidden_size
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs, inputs=inputs)
        self.mlp_norm, self.mlp = hidden_norm(config, dtype), MLP(config, dtype=dtype, rngs=rngs)
        self.adds_normed = of(config).adds_normed

    def __call__(self, tokens: jax.Array, states: jax.Array, positions: Positions, attend: Attend) -> jax.Array:
        """Hidden states [..., D] of embeddings and states [..., D]."""
        pairs, read = self.joined(tokens, states)
        with jax.named_scope("attention"):
            x = (read if self.adds_normed else states) + self.attention(pairs, positions, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))

    def joined(self, tokens: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The input of attention [..., 2 D], and the normed states."""
        read = self.state_norm(states)
        return jnp.concatenate([self.token_norm(tokens), read], axis=-1), read


class BlockConv(nnx.Module):
    """Convolutions along a block before and after attention or an MLP, whose kernels depend on the token (DFlash 2).

    Channels of a group share what depends on the token. The initial values change nothing.
    """

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        head, width = of(config), config.hidden_size
        self.size, self.group = head.conv_size, head.conv_group
        base = np.zeros((2, self.size, width), dtype)
        base[:, 0] = 1
        self.base = nnx.Param(base, axes=(None, None, "hidden"))
        outputs = 2 * self.size * (width // self.group)
        self.kernel_proj = Linear(width, outputs, ("hidden", None), bias=False, dtype=dtype, rngs=rngs)

    def before(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The input [S, B, D] of attention or the MLP, of x [S, B, D], and the kernels of `after`, [S, B, size,
        groups]."""
        kernels = self.kernel_proj(x).reshape(*x.shape[:-1], 2, self.size, -1)
        return self._convolved(x, 0, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def after(self, x: jax.Array, kernels: jax.Array) -> jax.Array:
        """The convolution [S, B, D] of what they return."""
        return self._convolved(x, 1, kernels)

    def _convolved(self, x: jax.Array, number: int, kernels: jax.Array) -> jax.Array:
        total, length = jnp.zeros_like(x), x.shape[1]
        for tap in range(min(self.size, length)):
            shifted = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, :length]
            own = jnp.repeat(kernels[..., tap, :], self.group, axis=-1)
            total += shifted * (self.base[...][number, tap] + own)
        return total


class BlockLayer(nnx.Module):
    """A layer of a head that drafts blocks."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None):
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.attention_norm, self.mlp_norm = hidden_norm(config, dtype), hidden_norm(config, dtype)
        self.attention, self.mlp = Attention(config, layer, **kwargs), MLP(config, **kwargs)
        has_conv = of(config).conv_size > 0
        self.attention_conv = BlockConv(config, **kwargs) if has_conv else None
        self.mlp_conv = BlockConv(config, **kwargs) if has_conv else None

    def __call__(self, x: jax.Array, positions: Positions, attend: Attend) -> jax.Array:
        """Hidden states [S, B, D] of blocks."""
        attention = partial(self.attention, positions=positions, attend=attend)
        x = x + self._around(self.attention_conv, attention, self.attention_norm(x))
        return x + self._around(self.mlp_conv, self.mlp, self.mlp_norm(x))

    def _around(self, conv: BlockConv | None, inner: Any, x: jax.Array) -> jax.Array:
        if conv is None:
            return inner(x)
        read, kernels = conv.before(x)
        return conv.after(inner(read), kernels)


def layer_kind(config: ModelConfig, layer: int) -> type[nnx.Module]:
    """The module of a layer."""
    kind = of(config).kind
    if kind == "eagle3" and layer == 0:
        return PairLayer
    return BlockLayer if kind == "dflash" else DecoderLayer


class Selector(nnx.Module):
    """Scores of tokens by the one before and the state between (DFlash 2)."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        rank, table = of(config).selector_rank, (config.vocab_size, of(config).selector_rank)
        self.before = nnx.Param(normal(rngs, table, dtype), axes=("vocab", None))
        self.after = nnx.Param(normal(rngs, table, dtype), axes=("vocab", None))
        self.state_proj = Linear(config.hidden_size, rank, ("hidden", None), bias=False, dtype=dtype, rngs=rngs)
        self.top_k = of(config).selector_top_k

    def __call__(self, logits: jax.Array, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """Logits [..., V] in which the best tokens have their scores added, and the others come after them."""
        best, ids = jax.lax.top_k(logits, self.top_k)
        context = rows(self.before.get_value(), tokens, states.dtype) * self.state_proj(states)
        scores = jnp.sum(context[..., None, :] * rows(self.after.get_value(), ids, states.dtype), axis=-1)
        others = logits - _NOT_CHOSEN
        return jnp.put_along_axis(others, ids, best + scores.astype(logits.dtype), axis=-1, inplace=False)


class Markov(nnx.Module):
    """A bias of logits by the token before, through few dimensions (DSpark), of kind `MarkovKind`."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        head, width = of(config), config.hidden_size
        rank, self.kind = head.markov_rank, head.markov_kind
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.embed = nnx.Param(normal(rngs, (config.vocab_size, rank), dtype), axes=("vocab", None))
        self.out_proj = Linear(rank, head.vocab_size or config.vocab_size, (None, "vocab"), bias=False, **kwargs)
        is_gated, is_rnn = self.kind == "gated", self.kind == "rnn"
        self.gate_proj = Linear(width + rank, rank, ("hidden", None), bias=True, **kwargs) if is_gated else None
        joint = partial(Linear, width + 2 * rank, 3 * rank, ("hidden", None), bias=True, **kwargs)
        self.joint_proj = joint() if is_rnn else None
        self.rank = rank

    def embedding(self, tokens: jax.Array, dtype) -> jax.Array:
        """[..., R] of tokens [...]."""
        return rows(self.embed.get_value(), tokens, dtype)

    def start(self, states: jax.Array) -> jax.Array:
        """The state before a block: zeros [..., R]."""
        return jnp.zeros((*states.shape[:-1], self.rank), states.dtype)

    def __call__(self, state: jax.Array, before: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next state, and biases [..., V] of logits, by embeddings [..., R] of the tokens before and hidden states
        [..., D]."""
        if self.gate_proj is not None:
            gate = jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, before], axis=-1)))
            return state, self.out_proj(gate * before)
        if self.joint_proj is None:
            return state, self.out_proj(before)
        joint = self.joint_proj(jnp.concatenate([state, before, hidden], axis=-1))
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), self.out_proj(jnp.tanh(out))


class Ends(nnx.Module):
    """The parameters of a head beside its layers, with those that it takes from its target.

    `draft_index` has for each token of the target its place in a smaller vocabulary, or that vocabulary's size.
    """

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        head, width = of(config), config.hidden_size
        kwargs = {"dtype": dtype, "rngs": rngs}
        vocab = normal(rngs, (config.vocab_size, width), dtype) if head.has_embedding else None
        self.embed = None if vocab is None else nnx.Param(vocab, axes=("vocab", "hidden"))
        reads_taps, is_mtp = head.kind != "mtp", head.kind == "mtp"
        taps = head.num_taps * head.tap_size
        project = partial(Linear, bias=False, **kwargs)
        self.taps_proj = project(taps, width, (None, "hidden")) if reads_taps else None
        is_each, is_all = head.tap_norms == "each", head.tap_norms == "all"
        self.tap_norms = _norm(config, (head.num_taps, head.tap_size), dtype) if is_each else None
        self.joined_tap_norm = _norm(config, (taps,), dtype) if is_all else None
        self.context_norm = hidden_norm(config, dtype) if head.is_block else None
        self.token_norm = hidden_norm(config, dtype) if is_mtp else None
        self.state_norm = hidden_norm(config, dtype) if is_mtp else None
        self.pair_proj = project(2 * width, width, (None, "hidden")) if is_mtp else None
        self.final_norm = hidden_norm(config, dtype)
        has_lm_head = head.has_lm_head and not config.tie_word_embeddings
        size = width, head.vocab_size or config.vocab_size
        self.lm_head = nnx.Param(normal(rngs, size, dtype), axes=("hidden", "vocab")) if has_lm_head else None
        index = np.zeros((config.vocab_size,), np.int32) if head.has_draft_index else None
        self.draft_index = None if index is None else nnx.Param(index, axes=(None,))
        self.selector = Selector(config, **kwargs) if head.selector_rank else None
        self.markov = Markov(config, **kwargs) if head.markov_rank else None
        inputs = width + head.markov_rank * head.confidence_has_token
        confidence = partial(Linear, inputs, 1, ("hidden", None), bias=True, **kwargs)
        self.confidence_proj = confidence() if head.has_confidence else None
        self.config, self.dtype = config, jnp.dtype(dtype)


def _norm(config: ModelConfig, shape: tuple[int, ...], dtype) -> Norm:
    axes = (None,) * len(shape)
    return Norm(shape, axes, config.norm, eps=config.norm_eps, bias=False, dtype=dtype)


class DraftHead:
    """A head over its parameters, with those that it takes from the target; made while tracing."""

    def __init__(self, config: ModelConfig, ends: Ends, layers: Sequence[Any]):
        self.config, self.head, self._ends, self._layers = config, of(config), ends, layers

    def states(self, taps: Sequence[jax.Array]) -> jax.Array:
        """States [..., D] of the target's tapped ones [..., D'], in the order of `tap_layers`."""
        ends = self._ends
        taps = [tap.astype(ends.dtype) for tap in taps]
        if ends.taps_proj is None:
            return taps[0]
        stacked = jnp.stack(taps, axis=-2)
        if ends.tap_norms is not None:
            stacked = ends.tap_norms(stacked)
        joined = stacked.reshape(*taps[0].shape[:-1], -1)
        if ends.joined_tap_norm is not None:
            joined = ends.joined_tap_norm(joined)
        states = ends.taps_proj(joined)
        return states if ends.context_norm is None else ends.context_norm(states)

    def pairs(
        self, tokens: jax.Array, states: jax.Array, positions: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """The hidden states [..., D] that logits are made of, and the next states [..., D], of int32 tokens [...], the
        states [..., D] before them, and int32 positions [...] of these."""
        at = Positions(positions)
        x = self._paired(tokens, states)
        for number, layer in enumerate(self._layers):
            x = self._run(number, layer, x, states, at, attend)
        normed = self._ends.final_norm(x)
        return normed, normed if self.head.returns_normed else x

    def store_pairs(self, tokens: jax.Array, states: jax.Array, positions: jax.Array, attend: Any) -> None:
        """Stores what `pairs` does, by `attend` and its method `store`: of the last layer nothing else is computed."""
        at = Positions(positions)
        x = self._paired(tokens, states)
        *layers, last = self._layers
        for number, layer in enumerate(layers):
            x = self._run(number, layer, x, states, at, attend)
        read = last.joined(x, states)[0] if isinstance(last, PairLayer) else last.attention_norm(x)
        attend.store(len(layers), *last.attention.keys_and_values(read, at))

    def store_context(self, states: jax.Array, positions: jax.Array, attend: Any) -> None:
        """Stores the states [..., D] of a context at int32 positions [...], by the method `store` of `attend`."""
        at = Positions(positions)
        for number, layer in enumerate(self._layers):
            attend.store(number, *layer.attention.keys_and_values(states, at))

    def block(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states [S, B, D] of blocks of int32 tokens [S, B] at int32 positions [S, B]."""
        x, at = self._embedded(tokens), Positions(positions)
        for number, layer in enumerate(self._layers):
            with jax.named_scope(f"layers.{number}"):
                x = layer(x, at, partial(attend, number))
        return self._ends.final_norm(x)

    @jax.named_scope("logits")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits of its own vocabulary, of hidden states [..., D]."""
        ends, is_tied = self._ends, self.config.tie_word_embeddings
        weight = ends.embed if is_tied else ends.lm_head
        if weight is None:
            raise ValueError("the head has no weights that make logits: the target's were not given")
        size = self.head.vocab_size or self.config.vocab_size
        return matmul(hidden, weight.get_value(), jnp.float32, is_transposed=is_tied)[..., :size]

    def of_target(self, logits: jax.Array) -> jax.Array:
        """Logits [..., V] of the target's tokens, scaled as it scales its own, of those of the head's vocabulary."""
        logits, index = scaled_logits(self.config, logits), self._ends.draft_index
        return logits if index is None else logits_at(logits, index[...])

    @property
    def selector(self) -> Selector | None:
        return self._ends.selector

    @property
    def markov(self) -> Markov | None:
        return self._ends.markov

    def confidence(self, hidden: jax.Array, before: jax.Array | None) -> jax.Array:
        """float32 [...], logits that a token will be accepted, of hidden states [..., D] and embeddings [..., R] of the
        tokens before (`Markov`)."""
        if self._ends.confidence_proj is None:
            raise ValueError("the head has no confidence")
        read = hidden
        if before is not None and self.head.confidence_has_token:
            read = jnp.concatenate([hidden, before], axis=-1)
        return self._ends.confidence_proj(read)[..., 0].astype(jnp.float32)

    def _paired(self, tokens: jax.Array, states: jax.Array) -> jax.Array:
        """The first layer's input beside the states: embeddings, or their projection with the states."""
        ends, x = self._ends, self._embedded(tokens)
        if ends.pair_proj is None or ends.token_norm is None or ends.state_norm is None:
            return x
        return ends.pair_proj(jnp.concatenate([ends.token_norm(x), ends.state_norm(states)], axis=-1))

    def _run(
        self, number: int, layer: Any, x: jax.Array, states: jax.Array, at: Positions, attend: Attend
    ) -> jax.Array:
        with jax.named_scope(f"layers.{number}"):
            own = partial(attend, number)
            return layer(x, states, at, own) if isinstance(layer, PairLayer) else summed(layer.run(x, at, own))

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        if self._ends.embed is None:
            raise ValueError("the head has no embedding: the target's was not given")
        x = rows(self._ends.embed.get_value(), tokens, self._ends.dtype)
        scale = self.config.embedding_multiplier
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
