"""Heads whose last layer is fitted to what a target continued with: they are right often, and wrong often."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, bind_draft_head
from jaxinfer.models.draft_head import DraftHead
from jaxinfer.speculative import HeadDraft, head_for
from tests.speculative import tiny_heads
from tests.speculative.tiny_heads import KINDS, TOKENS, config_of, random_params

Model = tuple[ModelConfig, Any]
LENGTH = 128  # tokens of the longest sequence


class Heads(dict):
    """Heads for a target by name, fitted when first used to what it continued prompts with. `llm` runs it now."""

    def __init__(self, llm, target: Model, texts: Sequence[tuple[list[int], list[int]]]):
        self.target, self._texts = target, texts
        last = f"layers.{target[0].num_layers - 1}.residual"
        names = {name for kind in KINDS for name in (*head_for(config_of(kind, target[0]), target[0])[1], last)}
        self._states = [states_of(llm, [*prompt, *answer], sorted(names)) for prompt, answer in texts]

    def __missing__(self, name: str) -> Model:
        self[name] = fitted(self.target, name, self._texts, self._states)
        return self[name]


def states_of(llm, tokens: Sequence[int], taps: Sequence[str]) -> dict[str, np.ndarray]:
    """Hidden states [T, D] of a sequence, by name."""
    return llm.engine.runner.hidden_states(list(tokens), tuple(taps))


def fitted(target: Model, name: str, texts: Sequence[tuple[list[int], list[int]]], states: Sequence[Any]) -> Model:
    """A head for a target: the last matrix of its last layer has what comes nearest to the hidden states that the
    target had in the answers of texts, given as (prompt, answer); its other weights are random."""
    config, taps = head_for(config_of(name, target[0]), target[0])
    params = _with_targets_head(config, random_params(config), target)
    last = f"layers.{target[0].num_layers - 1}.residual"
    tokens = np.zeros((len(texts), LENGTH), np.int32)
    is_fitted = np.zeros((len(texts), LENGTH), bool)
    tapped = {name: np.zeros((len(texts), LENGTH, target[0].hidden_size), np.float32) for name in (*taps, last)}
    for row, ((prompt, answer), states_of_text) in enumerate(zip(texts, states, strict=True)):
        whole = [*prompt, *answer]
        tokens[row, : len(whole)] = whole
        is_fitted[row, len(prompt) : len(whole)] = True
        for name, array in tapped.items():
            array[row, : len(whole)] = states_of_text[name]
    wanted = jnp.asarray(tapped[last])
    if (missing := config.hidden_size - wanted.shape[-1]) > 0:
        wanted = jnp.pad(wanted, ((0, 0), (0, 0), (0, missing)))
    return config, _solved(config, params, target, tokens, [tapped[name] for name in taps], wanted, is_fitted)


def _with_targets_head(config: ModelConfig, params: Any, target: Model) -> Any:
    """States of the head are to be those of the target: its last norm and, of a head with logits of its own, these are
    the target's, and the projection of tapped states gives the last one, nearly."""
    width, own = target[0].hidden_size, config.hidden_size
    target_params, params = jax.tree.map(np.asarray, (target[1], params))  # NumPy compiles nothing for each shape
    norm = target_params["final_norm"]["weight"]
    params = {**params, "final_norm": {"weight": np.pad(norm, (0, own - width), constant_values=1)}}
    if "taps_proj" in params:
        weight = 0.05 * params["taps_proj"]["weight"]
        weight[-width:, :width] += np.eye(width, dtype=weight.dtype)
        params["taps_proj"] = {"weight": weight}
    if "lm_head" in params:
        head = target_params.get("lm_head")
        head = target_params["embed"].T if head is None else head
        head = np.pad(head, ((0, own - width), (0, 0))) * (own / width) ** -0.5
        params["lm_head"] = head if config.draft_head.vocab_size is None else head[:, np.array(TOKENS)]
    for name in ("selector", "markov"):  # enough to change some drafts
        if name in params:
            params[name] = jax.tree.map(lambda leaf: 0.3 * leaf, params[name])
    layers = jax.tree_util.tree_map_with_path(_of_layers, params["layers"])
    return jax.tree.map(jnp.asarray, {**params, "layers": layers})


def _of_layers(path: Any, leaf: np.ndarray) -> np.ndarray:
    """What is added to the states is small, and what the last matrix reads is far from linear."""
    names = [key.key for key in path]
    if leaf.ndim < 2 or names[-2] in ("q_proj", "k_proj", "gate_proj", "up_proj"):
        return leaf
    leaf = 0.2 * leaf
    if "base" in names:
        leaf[:, 0] += leaf.dtype.type(0.8)
    return leaf


class _NoNorm:
    """In place of the last norm, so that what comes out is linear in the last matrix."""

    def __init__(self, norm: Any):
        self.weight = norm.weight

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def _solved(config, params, target, tokens, taps, wanted, is_fitted) -> Any:
    """The parameters with the last matrix that has the smallest relative errors, by conjugate gradients."""
    ((whole_config, whole),) = HeadDraft("head", config, params, ()).models(*target)
    path = ("layers", str(config.num_layers - 1), "mlp", *(("shared",) if config.moe else ()), "down_proj", "weight")
    # Each token of the answers is a root, or the last of a prompt.
    rows, places = np.nonzero(is_fitted)
    roots = np.stack([rows, places - 1], axis=1).astype(np.int32)
    weight = _solve(whole_config, path, whole, tokens, taps, wanted, is_fitted, roots)
    return _with_leaf(params, path, weight)


def _with_leaf(tree: Any, path: tuple[str, ...], leaf: Any) -> Any:
    return {**tree, path[0]: _with_leaf(tree[path[0]], path[1:], leaf)} if path else leaf


@partial(jax.jit, static_argnums=(0, 1))
def _solve(config, path, params, tokens, taps, wanted, is_fitted, roots):
    head = bind_draft_head(config, params)
    if head.head.is_block:  # slot j of a block predicts the token j places after the root, or one more
        after = jnp.arange(head.head.block_size) + head.head.drafts_at_root
        rows, places = jnp.broadcast_arrays(roots[:, :1], roots[:, 1:] + after)
        places = jnp.where(after > 0, places, 0)
    else:
        rows, places = jnp.indices((len(tokens), LENGTH - 1)) + jnp.array([0, 2])[:, None, None]
    is_used = is_fitted.at[rows, places].get(mode="fill", fill_value=False)
    wanted = wanted.at[rows, places - 1].get(mode="clip")
    sizes = is_used[..., None] / jnp.maximum(jnp.mean(wanted**2, axis=-1, keepdims=True), 1e-6)

    def outputs(weight):
        head = bind_draft_head(config, _with_leaf(params, path, weight))
        object.__setattr__(head._ends, "final_norm", _NoNorm(head._ends.final_norm))
        states = head.states(taps)
        if head.head.is_block:
            return _block_outputs(head, tokens, states, roots)
        positions = jnp.broadcast_to(jnp.arange(LENGTH - 1), rows.shape)
        return head.pairs(tokens[:, 1:], states[:, :-1], positions, tiny_heads.Causal())[0]

    nothing = jnp.zeros_like(_leaf(params, path))
    base, apply = jax.linearize(outputs, nothing)
    transpose = jax.linear_transpose(apply, nothing)

    def normal(weight):
        return transpose(sizes * apply(weight))[0] + 0.01 * weight

    return jax.scipy.sparse.linalg.cg(normal, transpose(sizes * (wanted - base))[0], maxiter=60)[0]


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    return _leaf(tree[path[0]], path[1:]) if path else tree


def _block_outputs(head: DraftHead, tokens: jax.Array, states: jax.Array, roots: jax.Array) -> jax.Array:
    """Outputs [A, B, D] of blocks at roots [A, 2]: a row and a place of the tokens [N, L]."""
    row, root = roots.T
    context = tiny_heads.Causal()
    head.store_context(states, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), context)
    slots = jnp.arange(head.head.block_size)
    block = jnp.full((len(roots), len(slots)), head.head.mask_token).at[:, 0].set(tokens[row, root])

    def attend(layer, q, k, v, window, **options):
        mask = tiny_heads.block_mask(head.head, layer, root[:, None, None], jnp.arange(LENGTH), len(slots), window)
        k, v = (
            jnp.concatenate([old[row], new], axis=1) for old, new in zip(context.stored[layer], (k, v), strict=True)
        )
        return tiny_heads.dense(mask, q, k, v, **options)

    return head.block(block, root[:, None] + slots, attend)
