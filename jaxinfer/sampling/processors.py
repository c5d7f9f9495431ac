"""Functions of users in the sampler's chain: declared, checked, traced once, and applied to each row by itself.

A function is traced when an engine is made, and every program has that trace: what the function reads of Python later
changes nothing. It is called for one row at a time, under `jax.vmap` or, on a CPU, in a loop, so that no row can depend
on another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jaxinfer.request_arrays import RequestArray

_GIVEN = ("logits", "history")  # by position, so that no array has these names


class TokenHistory(NamedTuple):
    """The tokens so far of S rows, drafted ones included where a draft is made or checked.

    Attributes:
      tokens: int32[S, L], prompt and answer, padded with V, one past the last token: a scatter with mode="drop" drops
        it. L is the engine's `max_model_len`.
      num_prompt, num_output: int32[S], how many of them are the prompt's, and the answer's.
    """

    tokens: jax.Array
    num_prompt: jax.Array
    num_output: jax.Array


@dataclass(frozen=True, eq=False)
class Processor:
    """A function that changes logits before they are sampled from (docs/guides/own_code.md).

    Attributes:
      fn: `fn(logits, history, **arrays)`, of logits float32[rows, V], a `TokenHistory`, and the declared arrays [rows,
        *shape] by name; returns float32[rows, V]. It is traced by JAX. -inf forbids a token; one that is -inf before
        stays so.
      arrays: what each request may give, by the name of a keyword of `fn`.
      name: in messages and fingerprints; by default the function's own.

    Raises TypeError or ValueError for what cannot be one.
    """

    fn: Callable[..., jax.Array]
    arrays: Mapping[str, RequestArray] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"a processor is a function of logits, history and arrays, got {type(self.fn).__name__}")
        name = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        if not isinstance(name, str):
            raise TypeError(f"the name of a processor is a text, got {self.name!r:.60}")
        if not isinstance(self.arrays, Mapping):
            raise TypeError(f"processor {name!r}: arrays must be a mapping, got {type(self.arrays).__name__}")
        for key, declared in self.arrays.items():
            if not isinstance(declared, RequestArray):
                raise TypeError(f"processor {name!r}: array {key!r} must be a RequestArray, got {declared!r:.60}")
            if not (isinstance(key, str) and key.isidentifier()) or key in _GIVEN:
                raise ValueError(f"processor {name!r}: {key!r} cannot be the name of an array")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "arrays", dict(self.arrays))


def as_processors(given: Any) -> tuple[Processor, ...]:
    """Processors from a list of them or of functions. Raises TypeError for anything else, ValueError for two of one
    name or with arrays of one name."""
    if not isinstance(given, Iterable) or isinstance(given, (str, Mapping)):
        raise TypeError(f"processors must be a list of functions, got {given!r:.60}")
    processors = tuple(item if isinstance(item, Processor) else Processor(item) for item in given)
    names: dict[str, None] = {}
    owners: dict[str, str] = {}
    for processor in processors:
        if processor.name in names:
            raise ValueError(f"two processors are named {processor.name!r}: name one, Processor(fn, name=...)")
        names[processor.name] = None
        for name in processor.arrays:
            if name in owners:
                raise ValueError(
                    f"processors {owners[name]!r} and {processor.name!r} both declare an array {name!r}: rename one"
                )
            owners[name] = processor.name
    return processors


class BoundProcessors:
    """Processors as programs take them, a static argument that is hashed by identity.

    Args:
      vocab_size: V, of the logits. length: L, of the tokens of the longest sequence.

    Raises ValueError, with the processor's name, for a function that JAX cannot trace, that has side effects, that is
    another one when it is traced again, or whose result is not float32[rows, V].
    """

    def __init__(self, processors: Sequence[Processor], vocab_size: int, length: int):
        self.length = length
        self.names = tuple(processor.name for processor in processors)
        self.arrays = dict(array for processor in processors for array in processor.arrays.items())
        self._traced = [(tuple(each.arrays), _traced(each, vocab_size, length)) for each in processors]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each function's operations and constants, and of its defaults, by its name."""
        return {
            name: _hash_of(traced, [self.arrays[array].default for array in arrays])
            for name, (arrays, traced) in zip(self.names, self._traced, strict=True)
        }

    def apply(self, logits: jax.Array, history: TokenHistory, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Logits float32[S, V] after all processors, in their order. A token that is -inf before is -inf after. A row
        that a processor gave NaN or +inf is NaN throughout, which `sample` reports."""
        is_forbidden = logits == -jnp.inf
        for names, traced in self._traced:
            row, given = (
                partial(_row, core.jaxpr_as_fun(traced)),
                (logits, history, {name: arrays[name] for name in names}),
            )
            logits = lax.platform_dependent(*given, cpu=partial(_in_turn, row), default=jax.vmap(row))
        logits = jnp.where(is_forbidden, -jnp.inf, logits)
        is_valid = jnp.all(logits < jnp.inf, axis=-1)  # false for NaN too
        return jnp.where(is_valid[:, None], logits, jnp.nan)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["processors"])
@dataclass(frozen=True)
class ProcessorRows:
    """The processors of an engine, and their arrays [S, *shape] by name, of S slots."""

    processors: BoundProcessors
    arrays: dict[str, jax.Array]


def _row(traced: Callable[..., list[jax.Array]], *row: Any) -> jax.Array:
    return traced(*(leaf[None] for leaf in jax.tree.leaves(row)))[0][0]


def _in_turn(row: Callable[..., jax.Array], *rows: Any) -> jax.Array:
    """As `jax.vmap(row)`, with the same bits for any number of rows: XLA:CPU sums several in another order than one."""
    return lax.map(lambda each: row(*each), rows)


def _traced(processor: Processor, vocab_size: int, length: int) -> core.ClosedJaxpr:
    """The trace of a processor over one row, checked."""
    name = f"processor {processor.name!r}"
    row: Any = partial(jax.ShapeDtypeStruct, dtype=np.int32)
    history = TokenHistory(row((1, length)), row((1,)), row((1,)))
    arrays = {key: jax.ShapeDtypeStruct((1, *each.shape), each.dtype) for key, each in processor.arrays.items()}
    given = jax.ShapeDtypeStruct((1, vocab_size), np.float32), history, arrays

    def trace() -> tuple[core.ClosedJaxpr, Any]:
        def run(logits: Any, history: Any, arrays: Any) -> Any:  # a new one each time: JAX keeps traces by function
            return processor.fn(logits, history, **arrays)

        with jax.checking_leaks():
            return jax.make_jaxpr(run, return_shape=True)(*given)

    try:
        (traced, result), (again, _) = trace(), trace()
    except jax.errors.ConcretizationTypeError as error:
        told = "needs a traced value in Python, as an `if`, `int()` or a shape does: use jnp.where or lax"
        raise ValueError(f"{name} {told} ({_first_line(error)})") from error
    except jax.errors.TracerArrayConversionError as error:
        told = "makes a NumPy array of a traced value: use jax.numpy"
        raise ValueError(f"{name} {told} ({_first_line(error)})") from error
    except Exception as error:
        if "Leaked trace" in str(error):
            told = "keeps a traced value beyond the call, as in a list or an attribute: return what it computes"
            raise ValueError(f"{name} {told}") from error
        raise ValueError(f"{name} cannot be traced: {type(error).__name__}: {_first_line(error)}") from error
    effects = [*map(str, traced.effects), *_callbacks(traced)]
    if effects:
        raise ValueError(f"{name} has side effects or calls Python while it runs ({effects[0]:.60}): compute in JAX")
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise ValueError(f"{name} must return logits float32[rows, {vocab_size}], got {type(result).__name__}")
    if (result.shape, result.dtype) != ((1, vocab_size), np.float32):
        told = f"must return float32[rows, {vocab_size}], and returns {result.dtype}{list(result.shape)} for one row"
        raise ValueError(f"{name} {told}")
    if _hash_of(traced) != _hash_of(again):
        told = "is another function when it is traced again: it reads something in Python that changes"
        raise ValueError(f"{name} {told}; give that as an array of the requests")
    return traced


def _nested(trace: Any) -> Iterator[Any]:
    """A trace, and those within its operations."""
    yield trace
    for equation in _equations(trace):
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(part, "jaxpr", part), "eqns"):
                    yield from _nested(part)


def _equations(trace: Any) -> Sequence[Any]:
    return getattr(trace, "jaxpr", trace).eqns


def _callbacks(traced: core.ClosedJaxpr) -> Iterator[str]:
    """Names of the operations of a trace, and of those within, that call Python."""
    names = (equation.primitive.name for trace in _nested(traced) for equation in _equations(trace))
    return (name for name in names if "callback" in name or name == "debug_print")


def _hash_of(traced: core.ClosedJaxpr, values: Sequence[np.ndarray] = ()) -> str:
    """A hash of operations, constants, also those of functions under `jax.jit`, and further arrays."""
    digest = hashlib.sha256(re.sub(r"0x[0-9a-fA-F]+", "0x", str(traced.jaxpr)).encode())
    constants = [constant for trace in _nested(traced) for constant in getattr(trace, "consts", ())]
    for constant in (*map(jnp.asarray, constants), *values):
        is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(constant) if is_key else constant)
        digest.update(f"{array.dtype}{list(array.shape)}".encode() + array.tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
