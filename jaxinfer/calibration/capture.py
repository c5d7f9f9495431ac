"""One decoder layer at a time: its output, and statistics of the inputs of its linear layers.

An expert's statistics are over the tokens that the router sends to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import getitem
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.cache import attend_without_cache
from jaxinfer.models import ModelConfig, Params, abstract_params, bind_layer
from jaxinfer.models.attend import LayerView, Tap
from jaxinfer.models.basic import Linear
from jaxinfer.models.experts import tile_rows
from jaxinfer.models.layers import DecoderLayer
from jaxinfer.models.moe import Router, SparseMoE
from jaxinfer.models.rope import Positions
from jaxinfer.quantization.matmul import matmul


class InputStatistics(NamedTuple):
    """Sums over the tokens that a linear layer saw; float32. Of a stack of experts all have a leading axis [E].

    Attributes:
      hessian: [K, K], the sum of x x^T. absolute: [K], the sum of |x|. largest: [K], the largest |x|.
      num_tokens: how many.
    """

    hessian: jax.Array
    absolute: jax.Array
    largest: jax.Array
    num_tokens: jax.Array

    def __add__(self, other: "InputStatistics") -> "InputStatistics":  # type: ignore[override]
        return InputStatistics(
            self.hessian + other.hessian,
            self.absolute + other.absolute,
            jnp.maximum(self.largest, other.largest),
            self.num_tokens + other.num_tokens,
        )

    @property
    def mean_absolute(self) -> jax.Array:
        return self.absolute / self.num_tokens


def experts_at_once(name: str, width: int, memory: int) -> int:
    """How many Hessians [width, width] of experts `memory` bytes hold. Raises ValueError if not even one fits."""
    size = 4 * width * width
    if size > memory:
        raise ValueError(
            f"{name}: the float32 Hessian of one expert's {width} inputs takes {size:,} bytes, and expert_memory is "
            f"{memory:,}"
        )
    return memory // size


def sum_over_experts(
    mlp: SparseMoE, rows: jax.Array, chosen: jax.Array, first: jax.Array, total: InputStatistics, *, is_inner: bool
) -> InputStatistics:
    """The statistics `total`, of the experts from `first` on, with these tokens added.

    Tokens are sorted by expert and taken a block of one expert at a time, as where experts run, so that the work grows
    with the experts of a token and not with those of the layer. A block's size is independent of how many experts
    `total` is of, and so are the sums.

    Args:
      rows: [T, D], what the router reads. chosen: int32 [T, C], the experts of each.
      is_inner: of what down_proj reads instead, the activation of the expert's gate and up.
    """
    count, experts = total.num_tokens.shape[0], mlp.experts()
    local = (chosen - first).reshape(-1)
    local = jnp.where((local >= 0) & (local < count), local, count)
    counts = jnp.zeros(count, jnp.int32).at[local].add(1, mode="drop")
    starts = jnp.cumsum(counts) - counts
    size = tile_rows(chosen.size, experts.up.shape[0])
    tokens = jnp.pad(jnp.argsort(local, stable=True) // chosen.shape[1], (0, size))
    ends = jnp.cumsum(-(-counts // size))

    def inner(block: jax.Array, expert: jax.Array) -> jax.Array:
        def project(stack, bias):
            output = matmul(block, lax.dynamic_index_in_dim(stack, expert, keepdims=False))
            return output if bias is None else output + bias[expert]

        gate = None if experts.gate is None else project(experts.gate, experts.gate_bias)
        return mlp.activation(gate, project(experts.up, experts.up_bias))

    def one(index: jax.Array, total: InputStatistics) -> InputStatistics:
        expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        row = (index - jnp.where(expert == 0, 0, ends[expert - 1])) * size
        block = rows[lax.dynamic_slice_in_dim(tokens, starts[expert] + row, size)]
        if is_inner:
            block = inner(block, first + expert)
        block = jnp.where((row + jnp.arange(size) < counts[expert])[:, None], block, 0)
        sizes = jnp.abs(block)
        return InputStatistics(
            total.hessian.at[expert].add(jnp.matmul(block.T, block, precision=lax.Precision.HIGHEST)),
            total.absolute.at[expert].add(sizes.sum(0)),
            total.largest.at[expert].max(sizes.max(0)),
            total.num_tokens,
        )

    sums = lax.fori_loop(0, ends[-1], one, total)
    return sums._replace(num_tokens=total.num_tokens + counts)


# Linear layers whose inputs are costly to compute: attention, and the MLP's activation.
KEPT = ("attention.o_proj", "mlp.down_proj")
KEPT_BYTES = 2**30  # of kept inputs on the host
ROUTER = "mlp.router"
STACKS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
_CHOSEN = "mlp.router.chosen"


class KeptInputs:
    """Inputs of the linear layers `KEPT` of one decoder layer, by chunk of the text, so that they are computed once.

    At most `KEPT_BYTES`. They are valid only for the parameters that computed them: what comes before such a linear
    layer must not change afterwards.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, list[np.ndarray]] = {}

    def lacks(self, name: str, params: Params, num_tokens: int) -> bool:
        """Tells whether the inputs of the linear layer are to be kept, and are not yet."""
        if name not in KEPT or name in self._inputs:
            return False
        weight: Any = reduce(getitem, [*name.split("."), "weight"], params)
        width = weight.shape[-2]
        held = sum(array.nbytes for arrays in self._inputs.values() for array in arrays)
        return held + 4 * width * num_tokens <= KEPT_BYTES

    def add(self, name: str, inputs: list[np.ndarray]) -> None:
        self._inputs[name] = inputs

    def of_chunk(self, number: int) -> dict[str, np.ndarray]:
        """By name of the linear layer."""
        return {name: arrays[number] for name, arrays in self._inputs.items()}


@dataclass(frozen=True)
class LayerProgram:
    """The jitted programs of one decoder layer, shared by all layers of its kind.

    A linear layer is named by its path in the layer, such as "mlp.up_proj".

    Attributes:
      groups: names of the linear layers that read the same input, in the order of computation.
    """

    config: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "LayerProgram":
        """The programs of layer number `layer`."""
        # A model with that layer alone and a vocabulary of one token.
        return cls(replace(config.with_layers([layer]), vocab_size=1, tie_word_embeddings=True))

    def forward(
        self, params: Params, x: jax.Array | np.ndarray, given: Mapping[str, np.ndarray] | None = None
    ) -> jax.Array:
        """Hidden states [B, T, D] after the layer, from those before it. `given`: inputs of linear layers, by name,
        which are then not computed."""
        return _programs(self.config).forward(params, x, dict(given or {}))

    def statistics(
        self,
        params: Params,
        chunks: Sequence[jax.Array | np.ndarray],
        names: tuple[str, ...],
        kept: KeptInputs | None = None,
    ) -> InputStatistics:
        """Statistics of the input that linear layers share, or of `ROUTER`, over hidden states [B, T, D].

        kept: inputs that are not computed; those of `names` are added to it.
        """
        collect = _programs(self.config).statistics
        num_tokens = sum(chunk.shape[0] * chunk.shape[1] for chunk in chunks)
        keeps = kept is not None and kept.lacks(names[0], params, num_tokens)
        total, inputs = None, []
        for number, chunk in enumerate(chunks):
            given = {} if kept is None else kept.of_chunk(number)
            total, read = collect(params, chunk, names[0], total, given, keeps=keeps)
            if read is not None:
                inputs.append(np.asarray(read))
        if total is None:
            raise ValueError("no hidden states to take statistics of")
        if kept is not None and keeps:
            kept.add(names[0], inputs)
        return total

    def expert_statistics(
        self,
        params: Params,
        chunks: Sequence[jax.Array | np.ndarray],
        name: str,
        memory: int,
        kept: KeptInputs | None = None,
    ) -> Iterator[InputStatistics]:
        """Statistics of the inputs of each expert in the stack `name`: the tokens routed to it or, for down_proj, the
        outputs of its gate and up projections for them.

        The layer runs over the text once for each block of experts whose Hessians fit in `memory` bytes; the results do
        not depend on the blocks. `kept`: inputs that are not computed. Raises ValueError if the Hessian of one expert
        does not fit.
        """
        moe = self.config.experts_of(0)
        if moe is None:
            raise ValueError(f"{name}: the layer has no experts")
        width = self.config.hidden_size if name != STACKS[-1] else moe.expert_size
        count = min(experts_at_once(name, width, memory), moe.num_experts)
        collect = _programs(self.config).expert_statistics
        for first in range(0, moe.num_experts, count):
            shapes = (count, width, width), (count, width), (count, width), (count,)
            total = InputStatistics(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
            for number, chunk in enumerate(chunks):
                given = {} if kept is None else kept.of_chunk(number)
                total = collect(params, chunk, jnp.int32(first), total, given, is_inner=name == STACKS[-1])
            for number in range(min(count, moe.num_experts - first)):
                yield InputStatistics(*(part[number] for part in total))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return _programs(self.config).groups

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the projections of all experts, in the order of computation."""
        return tuple(name for names in self.stack_groups for name in names)

    @property
    def stack_groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the projections of all experts, grouped by input."""
        inward = STACKS[:2] if self.config.is_mlp_gated else STACKS[1:2]
        return (inward, STACKS[2:]) if self.config.experts_of(0) is not None else ()


class _Programs(NamedTuple):
    groups: tuple[tuple[str, ...], ...]
    forward: Callable[..., jax.Array]
    statistics: Callable[..., tuple[InputStatistics, jax.Array | None]]
    expert_statistics: Callable[..., InputStatistics]


class _InputRecorder(nnx.Module):
    """Replaces a linear layer and records its input, or has a given one instead: what computes the input is then not
    used, and the compiler leaves it out."""

    def __init__(self, linear: Linear, name: str, inputs: dict[str, jax.Array], given: jax.Array | None):
        self._linear = linear
        self._record = lambda x: inputs.__setitem__(name, x)
        self._input = lambda x: x if given is None else given

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self._input(x)
        self._record(x)
        return self._linear(x)


class _RoutedRecorder(nnx.Module):
    """Replaces a router, and records its input and the experts that it chose."""

    def __init__(self, router: Router, inputs: dict[str, jax.Array]):
        self._router = router
        self._record = lambda x, chosen: inputs.update({ROUTER: x, _CHOSEN: chosen})

    def __call__(self, x: jax.Array, tap: Tap | None = None) -> tuple[jax.Array, jax.Array]:
        chosen, weights = self._router(x, tap)
        self._record(x, chosen)
        return chosen, weights


_Given = Mapping[str, jax.Array]  # inputs of linear layers that are not computed, by name


def _record(layer: DecoderLayer, given: _Given) -> dict[str, jax.Array]:
    """A dict that has the inputs of the layer's modules, by name, once the layer has run."""
    inputs: dict[str, jax.Array] = {}
    for path, linear in list(nnx.iter_modules(layer)):
        if isinstance(linear, Linear):
            parent = layer
            for part in path[:-1]:
                parent = getattr(parent, str(part))
            name = ".".join(map(str, path))
            setattr(parent, str(path[-1]), _InputRecorder(linear, name, inputs, given.get(name)))
    if isinstance(layer.mlp, SparseMoE):
        setattr(layer.mlp, "router", _RoutedRecorder(layer.mlp.router, inputs))  # noqa: B010
    return inputs


@lru_cache(maxsize=8)
def _programs(config: ModelConfig) -> _Programs:
    def layer_of(params: Params) -> DecoderLayer:
        return bind_layer(config, 0, params)

    def run(layer: DecoderLayer, x: jax.Array) -> jax.Array:
        positions = Positions(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
        return layer(x, positions, LayerView(attend_without_cache, 0))

    def inputs(layer: DecoderLayer, x: jax.Array, given: _Given) -> dict[str, jax.Array]:
        recorded = _record(layer, given)
        run(layer, x)
        return recorded

    def forward(params: Params, x: jax.Array, given: _Given) -> jax.Array:
        layer = layer_of(params)
        _record(layer, given)
        return run(layer, x)

    def statistics(
        params: Params, x: jax.Array, name: str, total: InputStatistics | None, given: _Given, *, keeps: bool
    ) -> tuple[InputStatistics, jax.Array | None]:
        read = inputs(layer_of(params), x, given)[name]
        rows = read.astype(jnp.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        sizes = jnp.abs(rows)
        hessian = jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST)
        sums = InputStatistics(hessian, sizes.sum(0), sizes.max(0), jnp.float32(len(rows)))
        return sums if total is None else total + sums, read if keeps else None

    def expert_statistics(
        params: Params, x: jax.Array, first: jax.Array, total: InputStatistics, given: _Given, *, is_inner: bool
    ) -> InputStatistics:
        layer = layer_of(params)
        recorded = inputs(layer, x, given)
        rows, mlp = recorded[ROUTER].astype(jnp.float32), cast(SparseMoE, layer.mlp)
        return sum_over_experts(mlp, rows, recorded[_CHOSEN], first, total, is_inner=is_inner)

    groups: dict[int, list[str]] = {}

    def find_groups(params: Params, x: jax.Array) -> None:
        recorded = inputs(layer_of(params), x, {})  # all alive at once, so that no two objects have the same id
        for name, value in recorded.items():
            if name in (ROUTER, _CHOSEN):
                continue
            groups.setdefault(id(value), []).append(name)

    width = jax.ShapeDtypeStruct((1, 2, config.hidden_size), jnp.float32)
    jax.eval_shape(find_groups, abstract_params(config)["layers"]["0"], width)
    return _Programs(
        tuple(map(tuple, groups.values())),
        jax.jit(forward),
        jax.jit(statistics, static_argnames=("name", "keeps"), donate_argnames="total"),
        jax.jit(expert_statistics, static_argnames="is_inner", donate_argnames="total"),
    )
