"""Mixture of experts: the router, and feed-forward layers of many experts, each applied to the tokens routed to it.

Tokens are sorted by expert, and matrix products run over the rows of one expert at a time, in one of five forms:

- "ragged": `jax.lax.ragged_dot`, which XLA:TPU compiles to a kernel that reads each expert once, without extra FLOPs.
  XLA:GPU and XLA:CPU multiply every row by every expert instead: 128 times the FLOPs for Qwen3-30B-A3B and, for 8,192
  rows on a GPU, 4 GiB of temporaries.
- "tiles": a loop over blocks of rows of one expert; 12 to 80 times as fast as "ragged" on a CPU (32 experts of
  512 x 1024, 4 to 512 rows). Used for quantized experts.
- "dense": all experts over all tokens, with weight zero where a token was not routed. For GPUs that decode many
  sequences: every expert is read anyway, and the products take less time than the reads.
- "gathered": one fusion for each product, over blocks of up to 8 rows and the experts that these chose. For GPUs that
  decode with quantized experts: a loop has some ten launches for each block, and writes each expert before it is read.
- "packed": one call of a kernel for the products of all rows, with experts that are packed for a CPU.

A row's result does not depend on the other rows, bit for bit: the block size is a function of the number of tokens.
Shapes use the legend of jaxinfer/README.md, with E experts and C experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.config import MoEConfig
from jaxinfer.quantization.adapted import AdaptedExperts, base_of
from jaxinfer.quantization.matmul import Weight, matmul, matmul_experts, matmul_gathered
from jaxinfer.quantization.packed import PackedArray
from jaxinfer.quantization.tree import is_weight
from pallas_kernels.platform import current_platform
from pallas_kernels.quantized_matmul import GATHERED_ROWS, take_expert

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

FORMS = ("ragged", "tiles", "dense", "gathered", "packed")
MIN_TILE, MAX_TILE = 8, 128
# Up to about this many rows per expert, a GPU is bound by memory bandwidth.
_DENSE_TOKENS = 256
# Rows of all experts, and of one, up to which blocks of `GATHERED_ROWS` multiply by gathered experts. These products do
# not use the tensor cores of a GPU.
_MOST_GATHERED, _MOST_OF_EXPERT = 512, 16

Activation = Callable[[Any, jax.Array], jax.Array]


class Experts(NamedTuple):
    """Weights of all experts: gate and up [E, D, F], down [E, F, D], which may be quantized; biases [E, F], [E, F] and
    [E, D], or None. Experts without a gate have None for it."""

    gate: Weight | None
    up: Weight
    down: Weight
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


class _Order(NamedTuple):
    """Rows sorted by expert; rows without an expert are last.

    Attributes:
      token: int32[M], token of each row. row: int32[T, C], row of each (token, choice).
      counts, starts: int32[E], number of rows and first row of each expert.
    """

    token: jax.Array
    row: jax.Array
    counts: jax.Array
    starts: jax.Array


def run_experts(
    x: Float[Array, "T D"],
    chosen: Int[Array, "T C"],
    weights: Float[Array, "T C"],
    experts: Experts,
    activation: Activation,
    *,
    form: str | None = None,
    over: tuple[Mesh, str] | None = None,
    rows_of_token: int = 1,
) -> Float[Array, "T D"]:
    """The weighted sum of the outputs of each token's experts: [T, D] in x's dtype, summed in float32.

    Args:
      x: [T, D]. chosen: int32 [T, C], distinct experts of each token. weights: float32 [T, C].
      activation: function of gate and up [..., F]; gate is None for experts without one.
      form: see above; None chooses by platform, dtype and number of tokens.
      over: a mesh and its axis over which the experts are sharded. Each device runs its own, and results are summed.
      rows_of_token: how many neighbouring rows are of one token, and so have its adapter.

    Raises:
      ValueError: an unknown form. NotImplementedError: quantized or packed experts in the form "ragged" or "dense".
    """
    adapted, experts = experts, Experts(*map(base_of, experts))
    has_adapters = _has_adapters(adapted)
    stacks = [stack for stack in (experts.gate, experts.up, experts.down) if stack is not None]
    is_quantized = any(map(is_weight, stacks))
    is_packed = all(isinstance(stack, PackedArray) for stack in stacks)
    form = form or ("packed" if is_packed else None)
    if form is None:
        num_tokens, num_choices = chosen.shape
        sizes = num_tokens, num_choices, experts.up.shape[0]
        form = choose_form(current_platform(), *sizes, is_quantized, can_gather=_can_gather(x))
        # These two have no row for each token and expert to which an adapter's product could be added.
        form = "tiles" if has_adapters and form in ("dense", "gathered") else form
    if form not in FORMS:
        raise ValueError(f"form={form!r} is not one of {', '.join(FORMS)}")
    if is_quantized and form not in ("tiles", "gathered", "packed"):
        raise NotImplementedError(f"form={form!r} does not read quantized experts; 'tiles' does")
    if form == "packed" and not is_packed:
        raise NotImplementedError("form='packed' reads packed experts, which these are not all")
    run = partial(_RUN[form], activation)
    adapters: tuple[_Adapters, ...] = ()  # none or one
    if has_adapters:
        if form in ("dense", "gathered"):
            raise NotImplementedError(f"form={form!r} takes no adapters; 'tiles' does")
        ids = _row_adapters(adapted, len(x) // rows_of_token)
        adapters = (_Adapters(Experts(*map(_without_base, adapted)), jnp.repeat(ids, rows_of_token)),)
    if over is None:
        return run(x, chosen, weights, experts, *adapters).astype(x.dtype)
    mesh, axis = over

    def run_local(x, chosen, weights, experts, *adapters):
        count = experts.up.shape[0]
        local = chosen - lax.axis_index(axis) * count
        is_local = (local >= 0) & (local < count)
        partial_sum = run(x, jnp.where(is_local, local, count), jnp.where(is_local, weights, 0), experts, *adapters)
        return lax.psum(partial_sum, axis)

    replicated = PartitionSpec()
    run_sharded = jax.shard_map(
        run_local,
        mesh=mesh,
        in_specs=(
            *(replicated, replicated, replicated, Experts(*(stack_specs(stack, axis) for stack in experts))),
            *(_adapter_specs(own, axis) for own in adapters),
        ),
        out_specs=replicated,
        check_vma=False,  # the initial carry of the loop is the same on all devices
    )
    return run_sharded(x, chosen, weights, experts, *adapters).astype(x.dtype)


def _without_base(stack: Any) -> Any:
    """A stack's adapters alone; None for one without."""
    return replace(stack, base=None, ids=None) if isinstance(stack, AdaptedExperts) else None


def _adapter_specs(adapters: _Adapters, axis: str) -> _Adapters:
    """`PartitionSpec`s that shard the pairs by expert, as the stacks that they belong to."""
    pairs, whole = PartitionSpec(None, axis), PartitionSpec()

    def specs(own: AdaptedExperts | None) -> Any:
        return None if own is None else replace(own, stack=jax.tree.map(lambda _: pairs, own.stack), ranks=whole)

    return _Adapters(Experts(*map(specs, adapters.experts)), whole)  # pyright: ignore[reportArgumentType]


def _has_adapters(experts: Experts) -> bool:
    return any(isinstance(stack, AdaptedExperts) and stack.ids is not None for stack in experts)


def _row_adapters(experts: Experts, num_rows: int) -> jax.Array:
    first = next(stack for stack in experts if isinstance(stack, AdaptedExperts))
    return first.ids_of((num_rows,))


class _Adapters(NamedTuple):
    """Adapters of experts, None for a stack without, and int32 [T] that of each row of x."""

    experts: Experts
    ids: jax.Array

    def added(self, rows: jax.Array, product: jax.Array, stack: Any, base: Experts, *whose: jax.Array) -> jax.Array:
        """The product of rows with the `stack` of `base`, with that of their adapters; `whose` as of
        `AdaptedExperts.add`."""
        own = next(own for own, its in zip(self.experts, base, strict=True) if its is stack)
        return own.add(product, rows, *whose) if isinstance(own, AdaptedExperts) else product


def choose_form(
    platform: str, num_tokens: int, num_choices: int, num_experts: int, is_quantized: bool, *, can_gather: bool = True
) -> str:
    """The fastest form, see the module's docstring."""
    num_rows = num_tokens * num_choices
    is_few = num_rows <= min(_MOST_GATHERED, _MOST_OF_EXPERT * num_experts)
    if is_quantized and platform == "gpu" and is_few and can_gather:
        return "gathered"
    if is_quantized or platform == "cpu":
        return "tiles"
    if platform == "tpu":
        return "ragged"
    # With fewer rows than experts, most experts need not be read.
    return "dense" if num_tokens <= _DENSE_TOKENS and num_rows >= num_experts else "tiles"


def _can_gather(x: jax.Array) -> bool:
    """False in float32, where a row's bits must not depend on the number of rows, and for stacks that are sharded: only
    on a GPU of its own a stack lies output by output (`quantization.on_device`), and another is copied first."""
    return x.dtype != jnp.float32 and jax.sharding.get_abstract_mesh().size <= 1


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows per block: a power of two, about the mean number of rows per expert."""
    size = MIN_TILE
    while size < MAX_TILE and size * num_experts < num_rows:
        size *= 2
    return size


def stack_specs(stack: Any, axis: Any) -> Any:
    """`PartitionSpec`s that shard the arrays of a stack by expert; None replicates them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: PartitionSpec() if is_shared(path, leaf) else PartitionSpec(axis), stack
    )


def is_shared(path: Any, leaf: Any) -> bool:
    """True if an array of a quantized stack has no expert axis: a codebook, a table of scales, one permutation."""
    name = getattr(path[-1], "name", None) if path else None
    return name in ("codebook", "table") or (name == "permutation" and leaf.ndim == 1)


def _sort(chosen: jax.Array, num_experts: int) -> _Order:
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    row = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype), unique_indices=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    return _Order(order // chosen.shape[1], row.reshape(chosen.shape), counts, jnp.cumsum(counts) - counts)


def _combine(rows: jax.Array, order: _Order, weights: jax.Array) -> jax.Array:
    """The weighted sum float32 [T, D] of the sorted rows' outputs [M, D]. Rows without an expert are unspecified; their
    weight is 0."""
    weighted = jnp.where(weights[..., None] == 0, 0, rows[order.row].astype(jnp.float32) * weights[..., None])
    return weighted.sum(1)


def _feed_forward(activation: Activation, x: jax.Array, experts: Experts, product: Callable, bias: Callable):
    """down(activation(gate(x), up(x))), with the product and bias functions of the form."""
    gate = None if experts.gate is None else bias(product(x, experts.gate), experts.gate_bias)
    up = bias(product(x, experts.up), experts.up_bias)
    return bias(product(activation(gate, up), experts.down), experts.down_bias)


def _ragged(
    activation: Activation, x, chosen, weights, experts: Experts, adapters: _Adapters | None = None
) -> jax.Array:
    order = _sort(chosen, experts.up.shape[0])
    expert = jnp.sort(chosen.reshape(-1))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(rows, stack):
        out = lax.ragged_dot(rows, stack, order.counts, precision=precision, preferred_element_type=rows.dtype)
        return out if adapters is None else adapters.added(rows, out, stack, experts, adapters.ids[order.token], expert)

    def bias(rows, biases):
        return rows if biases is None else rows + biases.at[expert].get(mode="clip").astype(rows.dtype)

    return _combine(_feed_forward(activation, x[order.token], experts, product, bias), order, weights)


def _packed(activation: Activation, x, chosen, weights, experts: Any, adapters: _Adapters | None = None) -> jax.Array:
    order, expert = _sort(chosen, experts.up.shape[0]), jnp.sort(chosen.reshape(-1))

    def product(rows, *stacks):
        products = matmul_experts(rows, stacks, order.counts, expert)
        if adapters is None:
            return products
        pairs, ids = zip(products, stacks, strict=True), adapters.ids[order.token]
        return [adapters.added(rows, one, stack, experts, ids, expert) for one, stack in pairs]

    def bias(rows, biases):
        return rows if biases is None else rows + biases.at[expert].get(mode="clip").astype(rows.dtype)

    rows = x[order.token]
    if experts.gate is None:
        gate, (up,) = None, product(rows, experts.up)
    else:
        gate, up = product(rows, experts.gate, experts.up)
        gate = bias(gate, experts.gate_bias)
    (down,) = product(activation(gate, bias(up, experts.up_bias)), experts.down)
    return _combine(bias(down, experts.down_bias), order, weights)


def _tiles(
    activation: Activation, x, chosen, weights, experts: Experts, adapters: _Adapters | None = None
) -> jax.Array:
    order = _sort(chosen, experts.up.shape[0])
    if adapters is None:
        return _combine(_tiled(activation, x, experts, order), order, weights)
    return _combine(_run_tiles(activation, x, experts, order, adapters), order, weights)


def _run_tiles(
    activation: Activation, x: jax.Array, experts: Experts, order: _Order, adapters: _Adapters | None = None
) -> jax.Array:
    """The outputs [M, D] of the sorted rows, and further ones that are unspecified."""
    tiles = _Tiles.of(order)

    def run_block(index, out):
        expert, row, own_tokens, _ = tiles.at(index)

        def added(rows, product, stack):
            if adapters is None:
                return product
            return adapters.added(rows, product, stack, experts, adapters.ids[own_tokens], expert)

        result = _feed_tile(activation, x[own_tokens], experts, partial(_of_expert, expert=expert), added)
        return lax.dynamic_update_slice_in_dim(out, result, row, axis=0)

    out = jnp.zeros((order.token.size + tiles.size, experts.down.shape[-1]), x.dtype)
    # Blocks are written in order: the next one overwrites the rows beyond a block's expert.
    return lax.fori_loop(0, tiles.ends[-1], run_block, out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(activation: Activation, x: jax.Array, experts: Experts, order: _Order) -> jax.Array:
    """`_run_tiles` with a gradient: JAX differentiates no loop whose length is not known when it is traced."""
    return _run_tiles(activation, x, experts, order)


def _tiled_forward(activation: Activation, x: jax.Array, experts: Experts, order: _Order):
    return _run_tiles(activation, x, experts, order), (x, experts, order)


def _tiled_backward(activation: Activation, operands: tuple[jax.Array, Experts, _Order], d_out: jax.Array):
    """Blocks of rows once more, each with the gradient of its products, summed in float32."""
    x, experts, order = operands
    if any(map(is_weight, experts)):
        raise NotImplementedError("quantized and packed experts have no gradient: give plain ones (dequantize_params)")
    tiles = _Tiles.of(order)

    def run_block(index, carry):
        d_x, d_experts = carry
        expert, row, own_tokens, is_own = tiles.at(index)

        def feed(rows, own):
            return _feed_tile(activation, rows, own, lambda stack: stack, lambda rows, product, stack: product)

        _, pull = jax.vjp(feed, x[own_tokens], _of_expert(experts, expert))
        d_block, d_own = pull(jnp.where(is_own[:, None], lax.dynamic_slice_in_dim(d_out, row, tiles.size), 0))
        d_x = d_x.at[own_tokens].add(d_block.astype(jnp.float32))
        return d_x, jax.tree.map(lambda sums, new: sums.at[expert].add(new.astype(jnp.float32)), d_experts, d_own)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (x, experts))
    sums = lax.fori_loop(0, tiles.ends[-1], run_block, zeros)
    return *jax.tree.map(lambda leaf, total: total.astype(leaf.dtype), (x, experts), sums), None


_tiled.defvjp(_tiled_forward, _tiled_backward)


class _Tiles(NamedTuple):
    """Blocks of `size` sorted rows of one expert; `ends` int32 [E] is the number of blocks up to each expert's last,
    and `tokens` the token of each row, padded by a block."""

    order: _Order
    tokens: jax.Array
    ends: jax.Array
    size: int

    @classmethod
    def of(cls, order: _Order) -> _Tiles:
        size = tile_rows(order.token.size, order.counts.size)
        return cls(order, jnp.pad(order.token, (0, size)), jnp.cumsum(-(-order.counts // size)), size)

    def at(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The expert of a block, its first row, the tokens int32 [size] of its rows, and which of these are its."""
        order = self.order
        expert = jnp.searchsorted(self.ends, index, side="right").astype(jnp.int32)
        first = jnp.where(expert == 0, 0, self.ends[expert - 1])
        row = order.starts[expert] + (index - first) * self.size
        is_own = row + jnp.arange(self.size) < order.starts[expert] + order.counts[expert]
        return expert, row, lax.dynamic_slice_in_dim(self.tokens, row, self.size), is_own


def _feed_tile(activation: Activation, rows: jax.Array, experts: Experts, own: Callable, added: Callable) -> jax.Array:
    """The outputs of rows of one expert, whose part of a stack `own` takes; `added` adds what adapters do."""

    def product(rows, stack):
        return added(rows, matmul(rows, own(stack)), stack)

    def bias(rows, biases):
        return rows if biases is None else rows + own(biases).astype(rows.dtype)

    return _feed_forward(activation, rows, experts, product, bias)


def _gathered(activation: Activation, x, chosen, weights, experts: Experts) -> jax.Array:
    num_experts, num_rows = experts.up.shape[0], chosen.size
    order = _sort(chosen, num_experts)
    size = gathered_rows(len(x))
    blocks = -(-order.counts // size)
    ends = jnp.cumsum(blocks)
    # Blocks beyond the last one are it again: its expert is in the cache.
    index = jnp.minimum(jnp.arange(most_blocks(num_rows, num_experts, size)), ends[-1] - 1)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_experts - 1).astype(jnp.int32)
    first = order.starts[expert] + (index - ends[expert] + blocks[expert]) * size
    tokens = order.token.at[first[:, None] + jnp.arange(size)].get(mode="clip")

    def product(rows, stack):
        return matmul_gathered(rows, stack, expert)

    def bias(rows, biases):
        return rows if biases is None else rows + biases[expert][:, None].astype(rows.dtype)

    out = _feed_forward(activation, x[tokens], experts, product, bias)
    own = jnp.minimum(jnp.sort(chosen.reshape(-1)), num_experts - 1)
    place = (ends - blocks)[own] * size + jnp.arange(num_rows) - order.starts[own]
    out = out.reshape(-1, out.shape[-1]).at[place].get(mode="clip")
    return _combine(out, order, weights)


def gathered_rows(num_tokens: int) -> int:
    """Rows of a block: a power of two. An expert has at most one row of each token."""
    return min(1 << (num_tokens - 1).bit_length(), GATHERED_ROWS)


def most_blocks(num_rows: int, num_experts: int, size: int) -> int:
    """Blocks of `size` rows, however rows are distributed over experts."""
    return min(num_rows, (num_rows + min(num_experts, num_rows) * (size - 1)) // size)


def _of_expert(stack: Any, expert: jax.Array) -> Any:
    """One expert's weights of a stack."""
    lies_by_output = current_platform() == "gpu" and is_weight(stack) and jax.sharding.get_abstract_mesh().size <= 1

    def take(path: Any, leaf: Any) -> Any:
        if lies_by_output and getattr(path[-1], "name", None) in ("values", "scales", "zeros", "minima"):
            return take_expert(leaf, expert)
        return leaf if is_shared(path, leaf) else lax.dynamic_index_in_dim(leaf, expert, keepdims=False)

    return jax.tree_util.tree_map_with_path(take, stack)


def _dense(activation: Activation, x, chosen, weights, experts: Experts) -> jax.Array:
    num_experts = experts.up.shape[0]
    # [E, T], zero where a token is not routed to an expert
    gates = jnp.zeros((num_experts, x.shape[0]), jnp.float32)
    gates = gates.at[chosen, jnp.arange(x.shape[0])[:, None]].add(weights, mode="drop")
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def inner(stack, biases):
        out = jnp.einsum("tk,ekn->etn", x, stack, precision=precision, preferred_element_type=x.dtype)
        return out if biases is None else out + biases[:, None].astype(out.dtype)

    gate = None if experts.gate is None else inner(experts.gate, experts.gate_bias)
    rows = activation(gate, inner(experts.up, experts.up_bias)).astype(jnp.float32)
    rows = jnp.where(gates[..., None] == 0, 0, rows * gates[..., None]).astype(x.dtype)
    # One product over experts and their inner width: outputs of each expert, which are the widest, are not written.
    out = jnp.einsum("etn,enk->tk", rows, experts.down, precision=precision, preferred_element_type=jnp.float32)
    if experts.down_bias is not None:
        biases = experts.down_bias.astype(jnp.float32)
        out = out + jnp.einsum("et,ek->tk", gates, biases, precision=lax.Precision.HIGHEST)
    return out


_RUN = {"ragged": _ragged, "tiles": _tiles, "dense": _dense, "gathered": _gathered, "packed": _packed}


def route(
    moe: MoEConfig,
    logits: Float[Array, "T E"],
    correction: Float[Array, " E"] | None = None,
    chosen: Int[Array, "T C"] | None = None,
) -> tuple[Int[Array, "T C"], Float[Array, "T C"]]:
    """The experts of each token, int32 [T, C], best first, and their weights, float32 [T, C].

    logits: float32 [T, E]. correction: float32 [E], see `MoEConfig.has_correction_bias`. Of equal scores, the expert
    with the lower index is chosen. `chosen`: the experts, where they are given, as in a pass that replays another's. A
    NaN logit makes weights NaN.
    """
    if moe.scoring in ("softmax_of_chosen", "sigmoid_of_chosen"):
        if chosen is None:
            best, chosen = lax.top_k(logits, moe.num_experts_per_token)
        else:
            best = jnp.take_along_axis(logits, chosen, axis=-1)
        best = jax.nn.softmax(best, axis=-1) if moe.scoring == "softmax_of_chosen" else jax.nn.sigmoid(best)
        return chosen, best * moe.scale
    if moe.scoring == "sparsemixer":
        chosen, weights = _sparsemixer(logits, moe.jitter, chosen)
        return chosen, weights * moe.scale
    scores = jax.nn.sigmoid(logits) if moe.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    if chosen is None:
        choice = scores if correction is None else scores + correction
        if moe.num_groups > 1:
            choice = _within_groups(moe, choice)
        _, chosen = lax.top_k(choice, moe.num_experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen, weights * moe.scale


def _sparsemixer(logits: jax.Array, jitter: float, chosen: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """SparseMixer-v2 without sampling (Liu et al. 2024, GRIN): the two best experts, each with its softmax over the
    experts whose logits are near its own; the second's is taken without the first."""
    chosen = lax.top_k(logits, 2)[1] if chosen is None else chosen

    def weight(candidates: jax.Array, expert: jax.Array) -> jax.Array:
        best = jnp.take_along_axis(candidates, expert, axis=-1)
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        near = jax.nn.softmax(jnp.where(is_far, -jnp.inf, candidates), axis=-1)
        return jnp.take_along_axis(near, expert, axis=-1)

    first, second = chosen[..., :1], chosen[..., 1:]
    others = jnp.where(jnp.arange(logits.shape[-1]) == first, -jnp.inf, logits)
    return chosen, jnp.concatenate([weight(logits, first), weight(others, second)], axis=-1)


def _within_groups(moe: MoEConfig, choice: jax.Array) -> jax.Array:
    """The scores, with -inf for experts outside the best groups."""
    grouped = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
    if moe.group_score == "max":
        group_scores = grouped.max(-1)
    else:
        group_scores = lax.top_k(grouped, 2)[0].sum(-1)
    _, best = lax.top_k(group_scores, moe.num_chosen_groups)
    is_chosen = (jnp.arange(moe.num_groups) == best[..., None]).any(-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(choice.shape)
