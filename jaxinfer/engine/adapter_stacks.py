"""The low-rank adapters that a model's weights hold on the device: one array for all of them at each weight, so that
another adapter in a slot is other data for the same programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.checks import did_you_mean
from jaxinfer.engine.adapter_slots import AdapterSizes
from jaxinfer.models import ModelConfig, Params, compute_dtype, parameter_shardings
from jaxinfer.models.adapter import Adapter, LowRank, TokenRows
from jaxinfer.models.sharding import adapter_shardings
from jaxinfer.quantization.adapted import AdaptedExperts, AdaptedHeads, AdaptedWeight, AdapterStack
from jaxinfer.quantization.adapted_tables import AdaptedTable, TableStack, TableStacks
from jaxinfer.quantization.side_by_side import join, weight_at
from jaxinfer.quantization.tree import is_weight

WEIGHT, EMBED, HEAD = "weight", "embed", "lm_head"
_RANK = jax.ShapeDtypeStruct((), jnp.int32)
_SHOWN = 3  # names in a message
_BLOCK = 4096  # rows of a table that are made float32 at once
Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """An adapter as it is copied into a slot.

    Attributes:
      fingerprint: of the adapter, by which it is known. stacks: by the name of the weight, arrays as those of its stack
        without the axis of slots, and only as long as the adapter's rank; None for what it does not change.
      rank: the largest one. num_added: tokens that it adds to the vocabulary.
    """

    fingerprint: str
    stacks: Mapping[str, Any]
    rank: int
    num_added: int = 0

    @property
    def depends_on_base(self) -> bool:
        """True if some of its arrays were computed from the base's."""
        parts = [
            part for stack in self.stacks.values() for part in (stack if isinstance(stack, TableStacks) else (stack,))
        ]
        computed = [getattr(part, name, None) for part in parts for name in ("columns", "offset")]
        return any(array is not None for array in computed)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes in the host's memory."""
        return sum(array.nbytes for array in jax.tree.leaves(dict(self.stacks)))


@dataclass(frozen=True)
class _Room:
    """The room of one weight: the type of its leaf, and the shapes of its stack, without the axis of slots."""

    leaf: type
    stack: Any  # of `jax.ShapeDtypeStruct`s


class AdapterStacks:
    """The stacks of a model's weights. `params` may be abstract, of which nothing can be written."""

    def __init__(self, config: ModelConfig, params: Params, sizes: AdapterSizes, mesh: Mesh | None = None):
        self.config, self.sizes, self.dtype = config, sizes, jnp.dtype(compute_dtype(params))
        self._is_abstract = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
        self._check_added()
        rooms = {_name(path): self._room(path, leaf) for path, leaf in _leaves(params)}
        self.names = frozenset(rooms)  # of all parameters
        self._rooms = {name: room for name, room in rooms.items() if room is not None}
        self._check_rooms()
        stacked = partial(jax.tree.map, lambda of_slot: _stacked(sizes.num_slots, of_slot))
        shapes = {name: stacked(room.stack) for name, room in self._rooms.items()}, stacked(_RANK)
        self._stacks, self._ranks = shapes
        if self._is_abstract:
            return
        placed: dict[str, Any] = {} if mesh is None else {"out_shardings": self._shardings(mesh, shapes[0])}
        self._write = jax.jit(_written, donate_argnums=(0, 1), **placed)
        make = partial(jax.tree.map, lambda of_all: jnp.zeros(of_all.shape, of_all.dtype), shapes)
        self._stacks, self._ranks = jax.jit(make, **placed)() if placed else make()

    def _shardings(self, mesh: Mesh, stacks: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The shardings of all stacks, and of the ranks."""
        plain = {_name(path): sharding for path, sharding in _leaves(parameter_shardings(mesh, self.config))}
        pairs = {name: adapter_shardings(self._rooms[name].leaf, of, plain[name]) for name, of in stacks.items()}
        return {name: own for name, (own, _) in pairs.items()}, next(iter(pairs.values()))[1]

    def _check_added(self) -> None:
        """Raises ValueError for a model whose vocabulary adapters cannot make larger."""
        config, name = self.config, f"max_adapter_tokens={self.sizes.num_added}"
        if not self.sizes.num_added:
            return
        has_more = {"a bias of its head": config.lm_head_bias, "inputs of layers by token": config.layer_inputs}
        for what, is_there in has_more.items():
            if is_there:
                raise ValueError(f"{name}: {config.architecture} has {what}, of which added tokens have none")

    def _check_rooms(self) -> None:
        """Raises ValueError for modules and parts that the model does not have."""
        sizes, architecture = self.sizes, self.config.architecture
        known = {name.rpartition(".")[2] for name in self._rooms}
        for module in sizes.modules or ():
            if module not in known:
                own = sorted({name.rpartition(".")[2] for name in self.names if name.startswith("layers.")})
                nearest = did_you_mean(module, own)
                raise ValueError(f"adapter_modules has {module!r}: {architecture} has no such linear layers{nearest}")
        if sizes.has("experts") and not any(room.leaf is AdaptedExperts for room in self._rooms.values()):
            raise ValueError(f"adapter_parts has 'experts', and {architecture} has none")

    def _room(self, path: Path, weight: Any) -> _Room | None:
        """The room of a parameter; None for one that has none."""
        sizes, shape, float32 = self.sizes, weight.shape, jnp.float32
        rank = sizes.rank_room

        def of(*lengths: int, dtype: Any = self.dtype) -> Any:
            return jax.ShapeDtypeStruct(lengths, dtype)

        if path in ((EMBED,), (HEAD,)):
            return self._table_room(path[0], of)
        if path[0] != "layers" or path[-1] != WEIGHT:
            return None
        is_module = sizes.modules is None or path[-2] in sizes.modules
        by_output = of(*shape[:-2], shape[-1], dtype=float32) if len(shape) > 1 and sizes.has("dora") else None
        if len(shape) == 2 and path[-2].endswith(("_proj", "router")) and is_module:
            offset = of(shape[1], dtype=float32) if sizes.has("bias") else None
            return _Room(AdaptedWeight, AdapterStack(of(rank, shape[0]), of(rank, shape[1]), by_output, offset))
        if path[-2] in ("k_up", "v_up") and is_module:
            pair = of(rank, shape[1]), of(shape[0], rank, shape[2])
            return _Room(AdaptedHeads, AdapterStack(*pair, by_output))
        if len(shape) == 3 and "experts" in path and sizes.has("experts"):
            pair = of(shape[0], rank, shape[1]), of(shape[0], rank, shape[2])
            return _Room(AdaptedExperts, AdapterStack(*pair, by_output))
        return None

    def _table_room(self, name: str, of: Callable[..., Any]) -> _Room | None:
        sizes, config = self.sizes, self.config
        rank, width, count = sizes.rank_room, config.hidden_size, config.vocab_size

        def stack(which: str, a: Any, b: Any) -> TableStack | None:
            columns = of(width if which == EMBED else count, dtype=jnp.float32) if sizes.has("dora") else None
            pair = (a, b, columns) if sizes.has(which) else (None, None, None)
            num_tokens = sizes.num_tokens
            tokens = (of(num_tokens, dtype=jnp.int32), of(num_tokens, width)) if num_tokens else (None, None)
            has_whole = sizes.has(f"saved_{which}")
            whole = (of(count, width), of(dtype=jnp.bool_)) if has_whole else (None, None)
            added = (of(sizes.num_added, width), of(dtype=jnp.int32)) if sizes.num_added else (None, None)
            parts = TableStack(*pair, *tokens, *whole, *added)
            return None if all(part is None for part in parts) else parts

        embed = stack(EMBED, of(count, rank), of(rank, width)) if name == EMBED else None
        has_head = name == HEAD or config.tie_word_embeddings
        head = stack(HEAD, of(rank, width), of(rank, count)) if has_head else None
        if embed is head is None:
            return None
        embed = TableStack() if name == EMBED and embed is None else embed  # which tells a tied embedding from a head
        return _Room(AdaptedTable, TableStacks(embed, head))

    def on(self, params: Params) -> Params:
        """The parameters with the stacks at their weights, as they are now."""

        def adapted(path: Any, leaf: Any) -> Any:
            name = _name(tuple(key.key for key in path))
            room = self._rooms.get(name)
            return leaf if room is None else room.leaf(leaf, self._stacks[name], self._ranks)

        return jax.tree_util.tree_map_with_path(adapted, params, is_leaf=is_weight)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Puts an adapter in the place of what a slot had. `on` has to be called again: the arrays before are gone.

        Tables are as large as the vocabulary: those that it does not change are cleared without a copy.
        """
        rooms = {name: room.stack for name, room in self._rooms.items()}
        if not any(isinstance(stack, TableStacks) for stack in adapter.stacks.values()):
            rooms = {name: stack for name, stack in rooms.items() if not isinstance(stack, TableStacks)}
        arrays = {name: _padded(stack, adapter.stacks.get(name)) for name, stack in rooms.items()}
        written = self._write(self._stacks, self._ranks, np.int32(slot), arrays, np.int32(adapter.rank))
        self._stacks, self._ranks = written

    def close(self) -> None:
        """Frees the arrays' memory."""
        for array in jax.tree.leaves((self._stacks, self._ranks)):
            array.delete()

    def nothing(self) -> list[HostAdapter]:
        """Adapters that change nothing, one for each program that writes."""
        tables = [name for name, room in self._rooms.items() if isinstance(room.stack, TableStacks)]
        stacks = [{}, *([{tables[0]: TableStacks()}] if tables else [])]
        return [HostAdapter("", own, 0) for own in stacks]

    def prepared(self, adapter: Adapter, params: Params, *, what: str) -> HostAdapter:
        """An adapter for these stacks. `params`: of the base, which DoRA and trained biases need; `what` names the
        adapter in messages.

        Raises ValueError, with names and numbers, for an adapter that has no room, or changes what has none.
        """
        check = _Check(self, adapter, what)
        check.rank()
        num_added = check.num_added()
        biases = {name.removesuffix(".bias"): bias for name, bias in adapter.replaced.items() if name.endswith(".bias")}
        if of_tables := sorted({EMBED, HEAD} & biases.keys()):
            check.refuse(f"{of_tables[0]} has a bias, which is not served")
        names = [name for name in dict.fromkeys([*adapter.low_rank, *biases]) if name not in (EMBED, HEAD)]
        stacks = {name: check.stack(name, adapter.low_rank.get(name), biases.get(name), params) for name in names}
        tables: dict[str, TableStacks] = {}
        for which in (EMBED, HEAD):
            if (table := check.table(which, params)) is not None:
                name = EMBED if self.config.tie_word_embeddings else which
                tables[name] = tables.get(name, TableStacks())._replace(**{which: table})
        check.whole_names()
        return HostAdapter(adapter.fingerprint, {**stacks, **tables}, adapter.max_rank, num_added)

    def room_of(self, name: str) -> Any:
        """The shapes of a weight's stack without the axis of slots; None for a weight without room."""
        return room.stack if (room := self._rooms.get(name)) is not None else None


def with_room(config: ModelConfig, params: Params, sizes: AdapterSizes | None, platform: str) -> Params:
    """Abstract parameters with room for adapters, as an engine on a platform has them."""
    if sizes is None:
        return params
    params = join(params) if platform == "gpu" else params
    return AdapterStacks(config, params, sizes).on(params)


def widened(config: ModelConfig, sizes: AdapterSizes | None) -> ModelConfig:
    """The configuration of programs, whose vocabulary has room for the tokens that adapters add."""
    num_added = 0 if sizes is None else sizes.num_added
    return replace(config, vocab_size=config.vocab_size + num_added) if num_added else config


@dataclass(frozen=True)
class _Check:
    """One adapter on its way into `stacks`; `what` names it."""

    stacks: AdapterStacks
    adapter: Adapter
    what: str

    def refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"adapter {self.what}: {reason}")

    def no_room(self, for_what: str, part: str) -> NoReturn:
        self.refuse(f"there is no room for {for_what}: adapter_parts={(part,)!r} makes some")

    def rank(self) -> None:
        if (rank := self.adapter.max_rank) > (room := self.stacks.sizes.max_rank):
            self.refuse(f"its rank is {rank}, and there is room for {room}: max_adapter_rank={rank} makes some")

    def num_added(self) -> int:
        """How many tokens it adds, whose vectors are all there. What it can write it can read."""
        size = self.stacks.config.vocab_size
        num, of_head = (self.adapter.num_added(which, size) for which in (EMBED, HEAD))
        if of_head > num:
            self.refuse(f"{HEAD} has {of_head} added tokens, {EMBED} {num}")
        if num > (room := self.stacks.sizes.num_added):
            self.refuse(f"it adds {num} tokens, and there is room for {room}: max_adapter_tokens={num} makes some")
        if num and self.adapter.invocation_tokens:
            self.refuse(f"it has invocation tokens and adds {num} tokens, which the base cannot read before them")
        return num

    def whole_names(self) -> None:
        """Refuses parameters that stand in place of the base's, but for the embedding, the head and biases."""
        others = [name for name in self.adapter.replaced if name not in (EMBED, HEAD) and not name.endswith(".bias")]
        if others:
            self.refuse(f"it brings {_listed(others)} whole: merge it with jaxinfer convert --merge-lora")

    def stack(self, name: str, pair: LowRank | None, bias: np.ndarray | None, params: Params) -> AdapterStack:
        room: AdapterStack | None = self.stacks.room_of(name)
        if room is None and ".experts." in name:
            self.no_room(f"adapters of experts ({name})", "experts")
        if room is None and name not in self.stacks.names:
            self.refuse(f"the model has no weight {name!r}{did_you_mean(name, list(self.stacks.names))}")
        if room is None:
            modules = self.stacks.sizes.modules
            only = "" if modules is None else f"; adapter_modules={list(modules)}"
            self.refuse(f"there is no room for adapters of {name}{only}")
        if self.adapter.invocation_tokens and len(room.b.shape) > len(room.a.shape):
            self.refuse(
                f"it has invocation tokens and changes {name}, which queries are multiplied by: keys before them "
                f"would change"
            )
        dtype, scale = self.stacks.dtype, np.float32(1.0 if pair is None else pair.scale)
        a = b = columns = offset = None
        if pair is not None:
            a = np.array(np.swapaxes(pair.a, -1, -2), dtype, order="C")
            b = np.ascontiguousarray(scale * pair.b.astype(np.float32), dtype)
            self._check_shapes(name, a, b, room)
        if pair is not None and pair.magnitude is not None:
            if room.columns is None:
                self.no_room("magnitudes (DoRA)", "dora")
            weight = _dense(params, name) + scale * (pair.a.astype(np.float32) @ pair.b.astype(np.float32))
            columns = _columns(pair, np.linalg.norm(weight, axis=-2))
        if pair is not None and pair.bias is not None:
            offset = scale * pair.bias.astype(np.float32)
        if bias is not None:
            own = _parent(params, name).get("bias")
            if own is None:
                self.refuse(f"{name} has a bias, and the base has none")
            if bias.shape != own.shape:
                self.refuse(f"{name} has a bias of shape {list(bias.shape)}, the base's is {list(own.shape)}")
            changed = bias.astype(np.float32) - np.asarray(own, np.float32)
            offset = changed if offset is None else offset + changed
        if offset is not None and room.offset is None:
            if room.b.shape[:-2] or room.a.shape[:-2]:
                self.refuse(f"{name} has biases, which are not served for heads and experts")
            self.no_room("trained biases", "bias")
        self._check_finite(name, {"A": a, "B": b, "magnitudes": columns, "biases": offset})
        return AdapterStack(a, b, columns, offset)

    def table(self, which: str, params: Params) -> TableStack | None:
        """The arrays of changes of the embedding or the head; None for no change."""
        stacks, config = self.stacks, self.stacks.config
        columns = self._columns_of_table(which, params)
        pair, whole, rows, added = self._split(which, columns)
        if pair is whole is rows is added is None:
            return None
        tables: TableStacks | None = stacks.room_of(EMBED if config.tie_word_embeddings else which)
        room: TableStack = (None if tables is None else getattr(tables, which)) or TableStack()
        made: dict[str, Any] = {}
        if added is not None:
            made |= {"added": added.astype(stacks.dtype), "num_added": np.int32(len(added))}
        if pair is not None:
            if room.a is None:
                self.no_room(f"adapters of {which}", which)
            if pair.bias is not None:
                self.refuse(f"{which} has a bias, which is not served for it")
            if columns is not None:
                if room.columns is None:
                    self.no_room(f"magnitudes (DoRA) of {which}", "dora")
                made["columns"] = columns[: room.columns.shape[0]]
            made["a"] = np.array(pair.a if which == EMBED else pair.a.T, stacks.dtype, order="C")
            made["b"] = np.ascontiguousarray(np.float32(pair.scale) * pair.b.astype(np.float32), stacks.dtype)
        if rows is not None:
            if room.tokens is None or len(rows.tokens) > room.tokens.shape[0]:
                self.no_room(f"{len(rows.tokens)} trained tokens", f"tokens:{len(rows.tokens)}")
            made["tokens"] = np.asarray(rows.tokens, np.int32) + 1
            made["rows"] = np.array(rows.rows, stacks.dtype, order="C")
        if whole is not None:
            if room.whole is None:
                self.no_room(f"{which} as a whole", f"saved_{which}")
            if whole.shape != room.whole.shape:
                self.refuse(f"{which} has {whole.shape[0]} tokens, the model {room.whole.shape[0]}")
            made |= {"whole": np.array(whole, stacks.dtype, order="C"), "is_whole": np.True_}
        shorter = {
            "a": 0 if which == HEAD else 1,
            "b": 0,
            "tokens": 0,
            "rows": 0,
            "added": 0,
        }  # the axes of ranks and of tokens
        for name, array in made.items():
            own, given = list(getattr(room, name).shape), list(array.shape)
            if name in shorter:
                given[shorter[name]] = own[shorter[name]]
            if own != given:
                self.refuse(f"{which} has {name} of shape {list(array.shape)}, the model has room for {own}")
        if rows is not None and not 0 <= min(rows.tokens, default=0) <= max(rows.tokens, default=0) < config.vocab_size:
            self.refuse(f"{which} has the trained tokens {rows.tokens}, the vocabulary {config.vocab_size}")
        self._check_finite(which, {name: made.get(name) for name in ("a", "b", "columns", "rows", "whole", "added")})
        return TableStack(**made)

    def _columns_of_table(self, which: str, params: Params) -> np.ndarray | None:
        """The factors less 1 of a table's outputs, with those of added tokens; None for a pair without magnitudes."""
        pair, whole = self.adapter.low_rank.get(which), self.adapter.replaced.get(which)
        if pair is None or pair.magnitude is None:
            return None
        if whole is None:  # a tied head is the embedding
            whole = _dense_table(params, which if which in params else EMBED)
            whole = whole.T if which not in params else whole
        scaled, squares = np.float32(pair.scale) * pair.b.astype(np.float32), np.zeros(pair.b.shape[-1], np.float32)
        if whole.shape != (len(pair.a), pair.b.shape[-1]):
            self.refuse(f"{which} has magnitudes and a pair for {len(pair.a)} by {pair.b.shape[-1]}, not {whole.shape}")
        for start in range(0, len(whole), _BLOCK):  # of which a float32 copy is small
            block = slice(start, start + _BLOCK)
            changed = whole[block].astype(np.float32) + pair.a[block].astype(np.float32) @ scaled
            squares += np.square(changed).sum(axis=0)
        return _columns(pair, np.sqrt(squares))

    def _split(
        self, which: str, columns: np.ndarray | None
    ) -> tuple[LowRank | None, np.ndarray | None, TokenRows | None, np.ndarray | None]:
        """Changes of the base's tokens in the embedding or the head: the pair, the whole table [V, D] and trained
        tokens; and the rows [N, D] of those that are added, as these make them."""
        adapter, size = self.adapter, self.stacks.config.vocab_size
        pair, whole = adapter.low_rank.get(which), adapter.replaced.get(which)
        rows = adapter.token_rows.get(which)
        whole = whole if whole is None or which == EMBED else whole.T
        if not (count := adapter.num_added(which, size)):
            return pair, whole, rows, None
        added, is_there = np.zeros((count, self.stacks.config.hidden_size), np.float32), np.zeros(count, np.bool_)
        if whole is not None and len(whole) > size:
            added[: len(whole) - size], is_there[: len(whole) - size] = whole[size:], True
            whole = whole[:size]
        if pair is not None:
            own, other = (pair.a, pair.b) if which == EMBED else (pair.b.T, pair.a.T)
            if len(own) > size:
                if len(own) != size + count:
                    self.refuse(f"{which} has a pair for {len(own)} tokens, and has {size + count} tokens")
                added += np.float32(pair.scale) * (own[size:].astype(np.float32) @ other.astype(np.float32))
                if columns is not None:
                    added *= 1 + (columns if which == EMBED else columns[size:, None])
                cut = {"a": own[:size]} if which == EMBED else {"b": own[:size].T, "magnitude": None}
                pair = replace(pair, **cut)
        if rows is not None:
            for token, row in zip(rows.tokens, rows.rows, strict=True):
                if token >= size:
                    added[token - size], is_there[token - size] = row, True
            kept = [number for number, token in enumerate(rows.tokens) if token < size]
            rows = TokenRows(tuple(rows.tokens[number] for number in kept), rows.rows[kept]) if kept else None
        if not is_there.all():
            self.refuse(f"{which} has no vector of the added token {size + int(np.argmin(is_there))}")
        return pair, whole, rows, added

    def _check_shapes(self, name: str, a: np.ndarray, b: np.ndarray, room: AdapterStack) -> None:
        """Raises where the arrays are not those of the room, but for ranks."""

        def sides(array: Any) -> tuple[int, ...]:
            return (*array.shape[:-2], array.shape[-1])

        if (sides(a), sides(b)) != (sides(room.a), sides(room.b)):
            self.refuse(
                f"{name} has A and B of {list(sides(a))} and {list(sides(b))}, but for their ranks, not of "
                f"{list(sides(room.a))} and {list(sides(room.b))}"
            )

    def _check_finite(self, name: str, arrays: Mapping[str, np.ndarray | None]) -> None:
        for kind, array in arrays.items():
            if array is not None and (count := int(np.sum(~np.isfinite(array.astype(np.float32))))):
                self.refuse(f"{count} of {array.size} {kind} of {name} are not finite")


def _written(stacks: Any, ranks: jax.Array, slot: jax.Array, arrays: Any, rank: jax.Array) -> Any:
    def of_weight(stack: Any, given: Any) -> Any:
        return jax.tree.map(lambda array, own: array.at[slot].set(own), stack, given)

    own = {name: of_weight(stacks[name], given) for name, given in arrays.items()}
    cleared = {name: _cleared(stack, slot) for name, stack in stacks.items() if name not in own}
    return {name: (own | cleared)[name] for name in stacks}, ranks.at[slot].set(rank)


def _cleared(tables: TableStacks, slot: jax.Array) -> TableStacks:
    """Tables that a slot does not change: a pair with zeros in its smaller half, no tokens, and nothing whole."""

    def without(stack: TableStack | None, *names: str) -> TableStack | None:
        if stack is None:
            return None
        given = {name: getattr(stack, name) for name in (*names, "columns", "tokens", "is_whole", "num_added")}
        return stack._replace(
            **{name: of.at[slot].set(jnp.zeros((), of.dtype)) for name, of in given.items() if of is not None}
        )

    return TableStacks(without(tables.embed, "b"), without(tables.lm_head, "a"))


def _stacked(num_slots: int, of_slot: Any) -> Any:
    return jax.ShapeDtypeStruct((num_slots, *of_slot.shape), of_slot.dtype)


def _padded(room: Any, arrays: Any) -> Any:
    """Arrays as long as the room of a slot; zeros where there are none."""
    if room is None:
        return None
    if isinstance(room, tuple):
        given = arrays if arrays is not None else (None,) * len(room)
        return type(room)(*map(_padded, room, given))  # pyright: ignore[reportCallIssue]
    if arrays is not None and arrays.shape == room.shape:
        return arrays
    padded = np.zeros(room.shape, room.dtype)
    if arrays is not None:
        padded[tuple(map(slice, arrays.shape))] = arrays
    return padded


def _leaves(params: Params) -> Iterator[tuple[Path, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
        yield tuple(key.key for key in path), leaf


def _name(path: Path) -> str:
    return ".".join(path[:-1] if path[-1] == WEIGHT else path)


def _parent(params: Params, name: str) -> Any:
    node: Any = params
    for part in name.split("."):
        node = node[part]
    return node


def _dense(params: Params, name: str) -> np.ndarray:
    """float32 [K, N] of a weight of any kind."""
    weight = weight_at(params, [*name.split("."), WEIGHT])
    return np.asarray(weight.dequantize(jnp.float32) if is_weight(weight) else weight, np.float32)


def _dense_table(params: Params, name: str) -> np.ndarray:
    """The embedding [V, D] or the head [D, V], of any kind; in its own dtype where it is an array."""
    table = params[name]
    return np.asarray(table.dequantize(jnp.float32) if is_weight(table) else table)


def _columns(pair: LowRank, lengths: np.ndarray) -> np.ndarray:
    """The magnitudes of a pair over the lengths of the changed weight's columns, less 1."""
    assert pair.magnitude is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        return pair.magnitude.astype(np.float32) / lengths - 1


def _listed(names: Sequence[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
