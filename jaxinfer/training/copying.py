"""Induction heads (copying heads), built into a draft before it is trained.

Generated text repeats itself and its prompt, but a draft of two layers needs long training to learn the two steps of
copying (Elhage et al. 2021, Olsson et al. 2022: induction heads). Their weights are therefore constructed: heads of the
first layer write the codes of the two previous tokens to each position; a head of the second layer attends to positions
with the same two previous tokens as the current one, and writes the code of the token there to the output. All weights
are then trained.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, bind, collect
from jaxinfer.models.rope import inverse_frequencies
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.tree import check_plain
from jaxinfer.training.objectives import attend_by_head

CODE = 18  # dimensions of a token's random code, by which tokens are compared
ADDED_WIDTH = 80  # a constant and four codes are 73; rows stay multiples of 16 floats
ADDED_HEADS = 2
SHARPNESS = 11.0  # of the heads that attend to previous tokens: a neighbour gets e**-16 of the attention
MATCH = 8.0  # score of one token in common, in nats, against random ones below 4


@dataclass(frozen=True)
class _Slots:
    """Places of the added dimensions of the residual stream: a constant, then codes."""

    constant: int
    own: slice
    last: slice
    second_last: slice
    output: slice

    @classmethod
    def after(cls, width: int) -> "_Slots":
        starts = [width + 1 + CODE * i for i in range(4)]
        return cls(width, *(slice(start, start + CODE) for start in starts))


def with_copying(
    config: ModelConfig, params: Params, tokens: np.ndarray, *, gain: float = 6.0, seed: int = 0
) -> tuple[ModelConfig, Params]:
    """The model with copying heads: ADDED_WIDTH wider, with ADDED_HEADS more heads in each layer; float32.

    Args:
      tokens: int32 [B, T], text from which the sizes of hidden states are taken.
      gain: added to the logit of a copied token.

    Its embeddings are not tied, so that a token's code in the input does not add to the token's own logit.

    Raises ValueError for a model in which the heads cannot be built: one layer, biases, norms of queries, or stretched
    or partial rotation.
    """
    _check(config)
    params = unpack_params(params)
    check_plain(params, "adding heads that copy")
    random = np.random.default_rng(seed)
    base = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    width = config.hidden_size + ADDED_WIDTH
    slots = _Slots.after(config.hidden_size)
    codes = random.normal(size=(config.vocab_size, CODE))
    codes *= np.sqrt(CODE) / np.linalg.norm(codes, axis=1, keepdims=True)
    unit = float(_rms(base["embed"].reshape(-1)))  # what stands for 1 in the added dimensions
    sizes = _sizes(config, params, tokens)
    new_sizes = _new_sizes(config, sizes, unit)

    def norm(weight: np.ndarray, index: int, added: float) -> np.ndarray:
        return np.concatenate([weight * new_sizes[index] / sizes[index], np.full(ADDED_WIDTH, added)])

    embed, head = _embeddings(config, base, slots, codes, unit, sizes[0])
    final = norm(base["final_norm"]["weight"], -1, 0.0)
    final[slots.output] = gain * new_sizes[-1] / (CODE * unit)

    layers, added = {}, (0, ADDED_WIDTH)
    for i in range(config.num_layers):
        old = base["layers"][str(i)]
        wide = _widened(config, {name: old["attention"][name]["weight"] for name in old["attention"]})
        if i == 0:
            _look_back(config, wide, slots, unit)
        elif i == 1:
            _match(config, wide, slots, unit, random)
        layers[str(i)] = {
            "attention_norm": {"weight": norm(old["attention_norm"]["weight"], 2 * i, new_sizes[2 * i] / unit)},
            "attention": {name: {"weight": weight} for name, weight in wide.items()},
            "mlp_norm": {"weight": norm(old["mlp_norm"]["weight"], 2 * i + 1, new_sizes[2 * i + 1] / unit)},
            # It reads and writes nothing in the added dimensions.
            "mlp": {
                name: {"weight": np.pad(part["weight"], ((0, 0), added) if name == "down_proj" else (added, (0, 0)))}
                for name, part in old["mlp"].items()
            },
        }
    wide_config = replace(
        config,
        hidden_size=width,
        num_heads=config.num_heads + ADDED_HEADS,
        num_kv_heads=config.num_kv_heads + ADDED_HEADS,
        tie_word_embeddings=False,
        dtype="float32",
    )
    wide_params = {"embed": embed, "lm_head": head, "layers": layers, "final_norm": {"weight": final}}
    return wide_config, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), wide_params)


def _new_sizes(config: ModelConfig, sizes: list[float], unit: float) -> list[float]:
    """Root mean squares of the inputs of the norms, including the added dimensions."""
    # After each sublayer so many added dimensions are in use, the constant, of 2, as four of them.
    num_used = [4 + CODE] + [4 + 3 * CODE] * (2 * config.num_layers - 1) + [4 + 4 * CODE]
    return [
        float(np.sqrt((config.hidden_size * size**2 + count * unit**2) / (config.hidden_size + ADDED_WIDTH)))
        for size, count in zip(sizes, num_used, strict=True)
    ]


def _embeddings(
    config: ModelConfig, base: Params, slots: _Slots, codes: np.ndarray, unit: float, size: float
) -> tuple[np.ndarray, np.ndarray]:
    """The input embedding, each row's old dimensions of root mean square `size`, and the output embedding."""
    # The first norm would scale the constant by each token's own size: all tokens get the same, which it makes of them.
    embed = np.zeros((config.vocab_size, config.hidden_size + ADDED_WIDTH))
    embed[:, : config.hidden_size] = base["embed"] / _rms(base["embed"])[:, None] * size
    embed[:, slots.constant], embed[:, slots.own] = 2 * unit, codes * unit
    head = np.zeros((config.hidden_size + ADDED_WIDTH, config.vocab_size))
    head[: config.hidden_size] = base["embed"].T if config.tie_word_embeddings else base["lm_head"]
    # Of size one, not `unit`: AdamW moves every weight by about the learning rate, so small codes are soon undone.
    head[slots.output] = codes.T
    return embed, head


def _check(config: ModelConfig) -> None:
    reasons = {
        f"{config.num_layers} layer: two are needed": config.num_layers < 2,
        "query heads that share key heads": config.num_heads != config.num_kv_heads,
        "biases": config.qkv_bias or config.output_bias or config.mlp_bias,
        "norms of queries and keys": config.qk_norm,
        "clipped queries, keys and values": config.qkv_clip is not None,
        f"norms of kind {config.norm} in a {config.block} block": (config.norm, config.block) != ("rms", "pre_norm"),
        "an MLP without gate": not config.is_mlp_gated,
        "a position embedding": config.has_position_embedding,
        "layers without rotation": not all(config.rotated_layers),
        "scores of its own scale or cap": config.attention_scale is not None or config.attention_softcap is not None,
        "multipliers": {config.embedding_multiplier, config.residual_multiplier, config.logit_scale} != {1.0},
        "capped logits": config.logit_softcap is not None,
        f"rope of kind {config.rope.kind}": config.rope.kind != "default",
        f"{config.rope.rotary_dim} rotated dimensions of {config.head_dim}": config.rope.rotary_dim != config.head_dim,
        f"heads of {config.head_dim} dimensions, below {2 * CODE}": config.head_dim < 2 * CODE,
        "a mixture of experts": config.moe is not None,
        "latent attention or sinks": config.mla is not None or config.has_sinks,
        "windows": any(window is not None for window in config.sliding_windows),
    }
    problems = [reason for reason, is_so in reasons.items() if is_so]
    if problems:
        raise ValueError(f"copying heads cannot be built into a draft with {', '.join(problems)}")


def _look_back(config: ModelConfig, weights: dict[str, np.ndarray], slots: _Slots, unit: float) -> None:
    """Two heads that attend to the tokens 1 and 2 positions before, and write their codes.

    Queries and keys are constants; rotation makes their product largest at the distance by which the key was turned.
    """
    half = config.head_dim // 2
    frequencies, _ = inverse_frequencies(config.rope)
    pairs = np.arange(min(12, half))  # the fastest, which tell neighbours apart
    for number, (distance, slot) in enumerate(((1, slots.last), (2, slots.second_last))):
        at = (config.num_heads + number) * config.head_dim
        size = SHARPNESS / 2  # the constant is 2
        angles = distance * np.asarray(frequencies)[pairs]
        weights["q_proj"][slots.constant, at + pairs] = size
        weights["k_proj"][slots.constant, at + pairs] = size * np.cos(angles)
        weights["k_proj"][slots.constant, at + half + pairs] = size * np.sin(angles)
        weights["v_proj"][slots.own, at : at + CODE] = np.eye(CODE)
        weights["o_proj"][at : at + CODE, slot] = np.eye(CODE) * unit


def _match(
    config: ModelConfig, weights: dict[str, np.ndarray], slots: _Slots, unit: float, random: np.random.Generator
) -> None:
    """A head that attends to positions whose two previous tokens are the last two, and writes the code of their token.

    The codes lie in the slowest pairs of the rotation, so that a match weighs much the same near and far.
    """
    half, at = config.head_dim // 2, config.num_heads * config.head_dim
    size = np.sqrt(MATCH * np.sqrt(config.head_dim) / CODE)
    slowest, slower = np.arange(half - CODE // 2, half), np.arange(half - CODE, half - CODE // 2)
    for pairs, query, key in ((slowest, slots.own, slots.last), (slower, slots.last, slots.second_last)):
        columns = np.concatenate([at + pairs, at + half + pairs])
        weights["q_proj"][np.arange(query.start, query.stop), columns] = size
        weights["k_proj"][np.arange(key.start, key.stop), columns] = size
    weights["v_proj"][slots.own, at : at + CODE] = np.eye(CODE)
    weights["o_proj"][at : at + CODE, slots.output] = np.eye(CODE) * unit
    # The other dimensions of the head have values but no output yet.
    rest = slice(at + CODE, at + config.head_dim)
    weights["v_proj"][: config.hidden_size, rest] = 0.05 * random.normal(
        size=(config.hidden_size, config.head_dim - CODE)
    )


def _widened(config: ModelConfig, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The projections for a wider residual stream with more heads, padded with zeros."""
    more = ADDED_HEADS * config.head_dim
    return {
        name: np.pad(weight, ((0, more), (0, ADDED_WIDTH)) if name == "o_proj" else ((0, ADDED_WIDTH), (0, more)))
        for name, weight in weights.items()
    }


def _sizes(config: ModelConfig, params: Params, tokens: np.ndarray) -> list[float]:
    """Median root mean squares of the inputs of the norms: two in each layer, then the final one."""
    names = ["embed", *(f"layers.{i}.{part}" for i in range(config.num_layers) for part in ("attention", "mlp"))]
    outputs, tap = collect(names)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    bind(config, params)(jnp.asarray(tokens), positions, attend_by_head, tap)
    states = np.cumsum([np.asarray(outputs[name], np.float32) for name in names], axis=0)
    return [float(np.median(_rms(state))) for state in states]


def _rms(values: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(np.square(values), axis=-1))
