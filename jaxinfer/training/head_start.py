"""The start of a head's training: its configuration, and parameters that are taken from its target."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import DraftHeadConfig, ModelConfig, Params, init_params
from jaxinfer.quantization.on_device import dequantize_params
from jaxinfer.training.distill import as_llama

ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel"}
NUM_TAPS = 3
_NOISE = 0.1  # of random weights beside copied ones, of those of a random start
_GATED = ("silu", "gelu", "gelu_tanh")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """States of a target that a head reads: those that EAGLE-3's published code does, or of a target with few layers a
    third, two thirds and all of them."""
    if num_layers >= 4 * NUM_TAPS:
        return 2, num_layers // 2, num_layers - 3
    return tuple(max(1, round(num_layers * part / NUM_TAPS)) for part in range(1, NUM_TAPS + 1))


def head_config(
    target: ModelConfig,
    kind: str,
    *,
    vocab_size: int | None = None,
    num_layers: int = 1,
    taps: tuple[int, ...] = (),
    block_size: int = 0,
    mask_token: int = -1,
) -> ModelConfig:
    """A head for a target, in float32: of kind "eagle3" a Llama's layer, of kind "dflash" layers with norms of queries
    and keys. `vocab_size` is that of a smaller vocabulary.

    Raises ValueError for another kind, or taps that the target does not have, with the layers that it has.
    """
    if kind not in ARCHITECTURES:
        raise ValueError(f"kind={kind!r} is none of {', '.join(ARCHITECTURES)}")
    taps = taps or default_taps(target.num_layers)
    if not all(0 <= tap <= target.num_layers for tap in taps):
        raise ValueError(f"taps={','.join(map(str, taps))}: the target has states 0 to {target.num_layers}")
    base, is_block = as_llama(target), kind == "dflash"
    latent = target.mla is not None
    num_heads = max(1, target.hidden_size // base.head_dim) if latent else target.num_heads
    head = DraftHeadConfig(
        "dflash" if is_block else "eagle3",
        tap_layers=taps,
        num_taps=len(taps),
        tap_size=target.hidden_size,
        vocab_size=vocab_size,
        has_lm_head=not is_block or vocab_size is not None,
        has_draft_index=vocab_size is not None,
        block_size=block_size if is_block else 0,
        mask_token=mask_token if is_block else -1,
    )
    return replace(
        base,
        architecture=ARCHITECTURES[kind],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if latent else target.num_kv_heads,
        qk_norm=is_block,
        activation=target.activation if target.activation in _GATED else "silu",
        embedding_multiplier=target.embedding_multiplier if is_block else 1.0,
        tie_word_embeddings=False,
        dtype="float32",
        draft_head=head,
    )


def initial_params(
    target: ModelConfig,
    target_params: Params,
    config: ModelConfig,
    tokens: np.ndarray | None,
    key: jax.Array,
    *,
    copies: bool,
) -> Params:
    """The parameters of a head before training, float32, of the dense ones of its target.

    The head's logits are the target's for its `tokens`, and its states are those of the last tap. With `copies`, its
    layers are copies of the target's last ones where the shapes are equal; attention that reads a token beside a state
    gets the weights for the state.
    """
    params = init_params(config, key, dtype="float32")
    width = target.hidden_size
    weight = _NOISE * params["taps_proj"]["weight"]
    params["taps_proj"]["weight"] = weight.at[-width:].add(jnp.eye(width))
    if (norm := _norm_weight(target, target_params["final_norm"])) is not None:
        params["final_norm"]["weight"] = norm
    if "lm_head" in params:
        head = target_params["embed"].T if target.tie_word_embeddings else target_params["lm_head"]
        head = head[:, : target.vocab_size]
        params["lm_head"] = jnp.asarray(head if tokens is None else head[:, tokens], jnp.float32)
    for number, layer in params["layers"].items() if copies else ():
        source = target_params["layers"][str(max(0, target.num_layers - config.num_layers + int(number)))]
        norm = _norm_weight(target, source.get("attention_norm", {}))
        params["layers"][number] = _copied(layer, source, target, norm)
        if "context_norm" in params and number == "0" and norm is not None:
            params["context_norm"]["weight"] = norm
    return jax.tree.map(jnp.array, params)  # training donates them, and neither the target's nor one of them twice


def with_embedding(config: ModelConfig, params: Params, target_params: Params) -> tuple[ModelConfig, Params]:
    """A head with a copy of its target's embedding, for files that are to hold one."""
    if config.draft_head is None:
        raise ValueError(f"{config.architecture} is no head that drafts")
    own = dequantize_params({name: target_params[name] for name in ("embed", "final_norm")})
    head = replace(config.draft_head, has_embedding=True)
    embed = jnp.asarray(own["embed"][: config.vocab_size], jnp.float32)
    return replace(config, draft_head=head), {**params, "embed": embed}


def _copied(layer: Params, source: Params, target: ModelConfig, norm: jax.Array | None) -> Params:
    """A layer with the weights of the target's where they have the same shape, or that of the part for states."""

    def copy(path: Any, leaf: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        if names[0] in ("state_norm", "attention_norm"):
            return leaf if norm is None else norm
        if names[0] == "mlp_norm":
            weight = _norm_weight(target, source.get("mlp_norm", {}))
            return leaf if weight is None else weight
        weight = _at(source, names)
        if weight is None or weight.ndim != leaf.ndim:
            return leaf
        if weight.shape == leaf.shape:
            return jnp.asarray(weight, jnp.float32)
        half = (leaf.shape[0] // 2, *leaf.shape[1:])
        if names[0] == "attention" and weight.shape == half:
            return jnp.concatenate([_NOISE * leaf[: half[0]], jnp.asarray(weight, jnp.float32)])
        return leaf

    return jax.tree_util.tree_map_with_path(copy, layer)


def _at(tree: Any, names: list[str]) -> Any:
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _norm_weight(target: ModelConfig, norm: Mapping[str, Any]) -> jax.Array | None:
    """The weight of a target's norm as that of a head's, if it is one over the root mean square."""
    if "weight" not in norm or not target.norm.startswith("rms"):
        return None
    return jnp.asarray(norm["weight"], jnp.float32) + (target.norm == "rms_zero_centred")
