"""A digest of a model that does not depend on where it runs: on one device, or sharded and padded for a mesh."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

_NUM_SAMPLED = 16  # values of each of three rows of each array
_PROBE = "Ünïcode, 12345  spaces\n\ttabs; <|endoftext|> 你好"


def model_fingerprint(llm: Any, params: Any) -> str:
    """SHA-256 of an `LLM`'s configuration and tokenizer, and each name, shape, dtype and some values of `params`.

    The first values of three rows of each array distinguish checkpoints of one architecture without reading all
    weights. If a mesh repeats heads or pads, only the values of the model's own rows and columns are taken.
    """
    import jax
    import numpy as np

    from jaxinfer.models import compute_dtype
    from jaxinfer.models.host_layers import all_layers, disk_layers
    from jaxinfer.parallel import hosts
    from jaxinfer.quantization.on_device import unpacked
    from jaxinfer.quantization.side_by_side import weight_at
    from jaxinfer.quantization.tree import is_packed, is_quantized, is_weight

    digest = hashlib.sha256()
    engine, fit = llm.engine, llm.fit
    config = llm.config if fit is None else fit.own_config(llm.config)
    digest.update(repr((config, sorted(llm.eos_token_ids), llm.max_model_len)).encode())
    if llm.steering is not None:
        digest.update(f"steering={llm.steering.fingerprint}".encode())
    for part in _of_engine(engine, fit):
        digest.update(part)
    samples: list[_Sample] = []
    reader = None if (disk := disk_layers(params)) is None else disk.reader
    every = all_layers(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(every, is_leaf=is_weight):
        keys = tuple(key.key for key in path)
        leaf = weight_at(every, keys)
        if is_read := reader is not None and reader.takes(keys):
            leaf = jax.tree.map(jax.device_put, reader.weight(keys))  # pyright: ignore[reportOptionalMemberAccess]
        elif is_packed(leaf):  # the same weights, packed or not
            leaf, is_read = unpacked(leaf, compute_dtype(params)), True
        places = (None,) * leaf.ndim if fit is None else fit.places(keys, leaf.shape)
        name = jax.tree_util.keystr(path)
        shape = tuple(size if where is None else len(where) for size, where in zip(leaf.shape, places, strict=True))
        if is_quantized(leaf):
            scheme, rows = leaf.scheme, min(leaf.scheme.block[0], shape[-2])
            # Outputs that share a scale have one each where some were padded.
            scheme = (scheme.kind, scheme.bits, scheme.activations, rows)
            digest.update(f"{name} {shape} {leaf.values.dtype} {scheme}".encode())
            of_leaf = [*_quantized_samples(leaf, shape, places)]
        elif is_weight(leaf):  # of a type that only its products know
            digest.update(f"{name} {shape} {jax.tree.structure(leaf)}".encode())
            arrays = jax.tree.leaves(leaf)
            of_leaf = [part for array in arrays for part in _samples(array, array.shape, (None,) * array.ndim, (1, 1))]
        else:
            digest.update(f"{name} {shape} {leaf.dtype}".encode())
            of_leaf = [*_samples(leaf, shape, places, (1, 1))]
        if is_read:  # so that one parameter at a time is in memory
            of_leaf = [replace(sample, array=np.asarray(sample.array[sample.index]), index=()) for sample in of_leaf]
        samples += of_leaf
    # On several hosts, each host's values are fetched in one exchange.
    if llm.mesh is not None:
        fetched = hosts.fetch(hosts.current(), [(sample.array, [sample.index]) for sample in samples])
        parts = [part for (part,) in fetched]
    else:
        parts = [np.asarray(sample.array[sample.index]) for sample in samples]
    for sample, part in zip(samples, parts, strict=True):
        digest.update(np.asarray(part if sample.chosen is None else part[..., sample.chosen]).tobytes())
    if (tokenizer := llm.tokenizer) is not None:
        facts = (tokenizer.token_map_digest(), tokenizer.chat_template, tokenizer.encode(_PROBE))
        digest.update(repr(facts).encode())
    return digest.hexdigest()


def _of_engine(engine: Any, fit: Any) -> Iterator[bytes]:
    """Options that change tokens."""
    import jax
    import numpy as np

    from jaxinfer.quantization.on_device import rounds_activations

    spec = engine.spec
    if spec.kv_dtype != spec.dtype.name:  # the cache rounds
        yield f"kv_dtype={spec.kv_dtype}".encode()
        for scales in jax.tree.leaves(engine.kv_scales):
            yield np.asarray(scales if fit is None else fit.own_kv_scales(scales)).tobytes()
    if spec.options.kv_policy is not None:  # what tokens attend to
        yield f"kv_policy={spec.policy!r}".encode()
    if rounds_activations(spec.params):
        yield b"activations=int8"
    if spec.processors is not None:
        yield f"processors={spec.processors.fingerprints}".encode()


@dataclass(frozen=True)
class _Sample:
    """Values of an array: those of an index that ends in a slice, and of these the `chosen` ones; None is all."""

    array: Any
    index: tuple[int | slice, ...]
    chosen: Any


def _samples(array: Any, shape: tuple[int, ...], places: tuple[Any, ...], block: tuple[int, int]) -> Iterator[_Sample]:
    """Samples of an array that has an entry for each block of a parameter of this shape."""
    if not shape:
        yield _Sample(array, (), None)
        return
    rows = [()] if len(shape) == 1 else [(row,) for row in (0, shape[-2] // 2, shape[-2] - 1)]
    columns = [_place(places[-1], column) // block[1] for column in range(min(_NUM_SAMPLED, shape[-1]))]
    first = min(columns, default=0)
    span, chosen = slice(first, max(columns, default=-1) + 1), [column - first for column in columns]
    leading = tuple(_place(where, 0) for where in places[:-2])
    for row in rows:
        yield _Sample(array, (*leading, *(_place(places[-2], index) // block[0] for index in row), span), chosen)


def _quantized_samples(leaf: Any, shape: tuple[int, ...], places: tuple[Any, ...]) -> Iterator[_Sample]:
    import jax.numpy as jnp

    from jaxinfer.quantization import NestedScales

    if isinstance(leaf.scales, NestedScales):  # a mesh keeps them as plain ones where it pads
        leaf = replace(leaf, scales=leaf.scales.dequantize())
    yield from _samples(leaf.values, shape, places, (1, 1))
    for numbers in (leaf.scales, leaf.zeros, leaf.minima):
        if numbers is not None:
            numbers = jnp.where(numbers == 0, jnp.zeros_like(numbers), numbers)  # packed ones have no -0
            yield from _samples(numbers, shape, places, leaf.scheme.block)
    if leaf.codebook is not None:
        yield from _samples(leaf.codebook, leaf.codebook.shape, (None,), (1, 1))
    if leaf.permutation is not None:  # inputs are padded at their end only
        inputs = (*leaf.permutation.shape[:-1], shape[-2])
        yield from _samples(leaf.permutation, inputs, (None,) * len(inputs), (1, 1))


def _place(where: Any, index: int) -> int:
    return index if where is None else int(where[index])
