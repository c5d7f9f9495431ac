"""Tiny heads of every kind, and what they draft by the tokens and the target's states alone, without a cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import DraftHeadConfig, MLAConfig, ModelConfig, MoEConfig, init_params
from jaxinfer.models.draft_head import DraftHead
from tests.tiny import TINY

TAPS = (0, 2, 3)  # of a target with three layers: what enters the first and the last layer, and what leaves the last
TOKENS = [token for token in range(TINY.vocab_size) if token % 7 not in (1, 4)]  # of a smaller vocabulary
MASK = TINY.vocab_size - 1
BLOCK = {"block_size": 5, "mask_token": MASK}
SELECTING = {"conv_size": 2, "conv_group": 4, "selector_rank": 6, "selector_top_k": 30}
OWN_HEAD = {"has_lm_head": True, "has_draft_index": True, "vocab_size": len(TOKENS)}
LATENT = MLAConfig(latent_size=16, rope_size=8, nope_size=12, value_size=10)


def markov(kind: str, **more: Any) -> dict[str, Any]:
    return {**BLOCK, "block_size": 4, "drafts_at_root": True, "markov_rank": 6, "markov_kind": kind, **more}


# Of each: what a head has, and what its layers have.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle3": ("eagle3", {}, {}),
    "eagle3 wide": (
        "eagle3",
        {
            "has_embedding": True,
            **OWN_HEAD,
            "tap_norms": "each",
            "returns_normed": True,
            "adds_normed": True,
        },
        {"num_layers": 2, "hidden_size": 40},
    ),
    "eagle3 window": (
        "eagle3",
        {**OWN_HEAD, "tap_norms": "all"},
        {"num_layers": 2, "sliding_windows": (9, None)},
    ),
    "mtp": ("mtp", {"returns_normed": True}, {"is_attention_gated": True, "qk_norm": True}),
    "mtp latent": (
        "mtp",
        {},
        {
            "mla": LATENT,
            "num_kv_heads": 1,
            "head_dim": 24,
            "attention_scale": 20**-0.5,
            "moe": MoEConfig(4, 2, 24, (0,), shared_size=48),
        },
    ),
    "dflash": ("dflash", {**BLOCK, "causal_layers": (1,)}, {"num_layers": 2, "sliding_windows": (None, 11)}),
    "dflash mutual window": ("dflash", BLOCK, {"num_layers": 2, "sliding_windows": (11, None)}),
    "dflash at root": (
        "dflash",
        {**BLOCK, "drafts_at_root": True, **OWN_HEAD},
        {},
    ),
    "dflash2": ("dflash", {**BLOCK, **SELECTING}, {"num_layers": 2}),
    "dflash2 at root": ("dflash", {**BLOCK, **SELECTING, "drafts_at_root": True}, {}),
    "dspark": ("dflash", {**markov("vanilla"), "has_confidence": True}, {}),
    "dspark gated": ("dflash", markov("gated"), {"num_layers": 2}),
    "dspark rnn": (
        "dflash",
        {
            **markov("rnn"),
            "block_size": 5,
            "drafts_at_root": False,
            "has_confidence": True,
            "confidence_has_token": True,
        },
        {},
    ),
    "dspark rnn at root": (
        "dflash",
        {**markov("rnn"), **OWN_HEAD},
        {},
    ),
}


def config_of(name: str, target: ModelConfig = TINY, **more: Any) -> ModelConfig:
    """The configuration of a head for a target, which has the width and the tokens of TINY. Its MLP is wide, so that it
    can be fitted."""
    kind, head, layers = KINDS[name]
    num_taps, taps = (1, ()) if kind == "mtp" else (3, (*TAPS[:1], target.num_layers - 1, target.num_layers))
    own = {"tap_layers": taps, "num_taps": num_taps, "tap_size": target.hidden_size, **head}
    same = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "max_position_embeddings": 512}
    usual = {"num_layers": 1, "intermediate_size": 192, "dtype": target.dtype, **same}
    return replace(TINY, **{**usual, **layers, **more}, draft_head=DraftHeadConfig(kind, **own))


def random_params(config: ModelConfig, seed: int = 7) -> dict[str, Any]:
    """Parameters of which none is zero or one, and the index of `TOKENS`."""
    params = init_params(config, jax.random.key(seed))
    pairs, tree = jax.tree_util.tree_flatten_with_path(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(pairs))

    def drawn(path, leaf, key):
        if leaf.dtype == jnp.int32:
            return jnp.asarray(draft_index(config.vocab_size))
        # By NumPy from here on, which compiles nothing for each shape.
        leaf, noise = np.asarray(leaf), np.asarray(jax.random.normal(key, leaf.shape, leaf.dtype))
        name = jax.tree_util.keystr(path)
        if "norm" in name and leaf.ndim < 3:
            return jnp.asarray(1 + 0.2 * noise)
        # Tables of a few numbers for each token, and other weights large enough to show in the logits.
        is_table = leaf.ndim == 2 and leaf.shape[0] == config.vocab_size
        return jnp.asarray(noise if is_table else leaf + 2 * noise * leaf.shape[-2 if leaf.ndim > 1 else 0] ** -0.5)

    return jax.tree.unflatten(tree, [drawn(path, leaf, key) for (path, leaf), key in zip(pairs, keys, strict=True)])


def draft_index(vocab_size: int) -> np.ndarray:
    """The place of each token in `TOKENS`, or their number."""
    index = np.full((vocab_size,), len(TOKENS), np.int32)
    index[TOKENS] = np.arange(len(TOKENS))
    return index


# Without a cache.


def dense(mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, scale: float | None = None) -> jax.Array:
    """Attention of queries [..., T, Hq, K] to keys [..., S, Hkv, K] that the mask [..., T, S] shows; values may be
    narrower than keys."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = (jnp.repeat(x, groups, axis=-2) for x in (k, v))
    scores = jnp.einsum("...thk,...shk->...hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(mask[..., None, :, :], scores, -1e30), axis=-1)
    return jnp.einsum("...hts,...shk->...thk", weights, v)


class Causal:
    """`attend` of whole sequences [..., T], which keeps the keys and values of each layer."""

    def __init__(self):
        self.stored: dict[int, tuple[jax.Array, jax.Array]] = {}

    def store(self, layer, k, v):
        self.stored[layer] = k, v

    def __call__(self, layer, q, k, v, window, **options):
        self.store(layer, k, v)
        places = jnp.arange(q.shape[-3])
        mask = places <= places[:, None]
        return dense(mask if window is None else mask & (places > places[:, None] - window), q, k, v, **options)


def stored(head: DraftHead, tokens: jax.Array, states: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values [T, Hkv, K] of each layer: of a head of pairs those of the first T tokens [T + 1] and states
    [T, D], pair i at position i; of others those of the states."""
    attend, positions = Causal(), jnp.arange(states.shape[0])
    if head.head.is_block:
        head.store_context(states, positions, attend)
    else:
        head.pairs(tokens[1:], states, positions, attend)
    return [attend.stored[layer] for layer in range(head.config.num_layers)]


# The draft token int32[] of a number, from 0, by logits float32[V] and what it carries from draft to draft; and that.
Choose = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def drafts(
    head: DraftHead, tokens: jax.Array, states: jax.Array, root: jax.Array, num_nodes: jax.Array, choose: Choose, carry
):
    """Draft tokens int32 [N - 1] after the root, an int32 position, by the tokens int32 [L] up to it and the states
    [L, D] before it. Those from `num_nodes` - 1 on may be anything; N is the block's nodes, or 5."""
    of_kind = _drafts_of_block if head.head.is_block else _drafts_of_pairs
    return of_kind(head, tokens, states, root, num_nodes, choose, carry)


def _drafts_of_pairs(head, tokens, states, root, num_nodes, choose, carry):
    del num_nodes
    count = 4
    tokens, states = jnp.pad(tokens, (0, count)), jnp.pad(states, ((0, count), (0, 0)))

    def draft(carry, number):
        tokens, states, own = carry
        newest = root - 1 + number  # the pair with the newest token
        hidden, following = head.pairs(tokens[1:], states[:-1], jnp.arange(len(tokens) - 1), Causal())
        token, own = choose(number, head.of_target(head.logits(hidden[newest][None]))[0], own)
        tokens, states = tokens.at[newest + 2].set(token), states.at[newest + 1].set(following[newest])
        return (tokens, states, own), token

    (*_, carry), found = jax.lax.scan(draft, (tokens, states, carry), jnp.arange(count))
    return found, carry


def block_mask(
    head: DraftHeadConfig, layer: int, root: jax.Array, places: jax.Array, length: Any, window: int | None
) -> jax.Array:
    """bool[..., B, L + B]: which of a context's places int32[L], and which tokens of the block, those of a block see
    that begins at `root`, int32 [] or [..., 1, 1], and has `length` tokens."""
    slots, is_causal = jnp.arange(head.block_size), layer in head.causal_layers
    is_before = (places < root) & (slots[:, None] >= 0)
    is_within = jnp.broadcast_to(slots < length, (len(slots), len(slots)))
    if is_causal:
        is_within &= slots <= slots[:, None]
    if window is not None:  # in layers in which tokens see later ones it counts from the root
        is_before &= places > root + (slots[:, None] if is_causal else -1) - window
        is_within &= (slots > slots[:, None] - window) | (not is_causal)
    return jnp.concatenate([is_before, jnp.broadcast_to(is_within, (*is_before.shape[:-1], len(slots)))], axis=-1)


def _drafts_of_block(head, tokens, states, root, num_nodes, choose, carry):
    at_root = head.head.drafts_at_root
    size = head.head.block_size
    count = size - 1 + at_root
    context = stored(head, tokens, states)
    at = root + jnp.arange(size)

    def attend(layer, q, k, v, window, **options):
        mask = block_mask(head.head, layer, root, jnp.arange(len(states)), num_nodes - at_root, window)
        k, v = (jnp.concatenate([old, new[0]]) for old, new in zip(context[layer], (k, v), strict=True))
        return dense(mask, q[0], k, v, **options)[None]

    block = jnp.full((1, size), head.head.mask_token, jnp.int32).at[0, 0].set(tokens[root])
    hidden = head.block(block, at[None], attend)[0]
    markov, newest = head.markov, tokens[root]
    memory = None if markov is None else markov.start(hidden[0])
    if markov is not None and not at_root:  # the first place of a block is the root's, after the root
        memory, _ = markov(memory, markov.embedding(newest, hidden.dtype), hidden[0])

    def draft(carry, number):
        newest, memory, own = carry
        state = hidden[number + 1 - at_root]
        logits = head.logits(state)
        if markov is not None:
            memory, bias = markov(memory, markov.embedding(newest, hidden.dtype), state)
            logits = logits + bias
        if head.selector is not None:
            logits = head.selector(logits, state, newest)
        token, own = choose(number, head.of_target(logits), own)
        return (token, memory, own), token

    (*_, carry), found = jax.lax.scan(draft, (newest, memory, carry), jnp.arange(count))
    return found, carry
