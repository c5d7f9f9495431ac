"""An adapter merged into the parameters of its base model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from checkpoints_convert.adapters.adapter import Adapter, LowRank
from checkpoints_convert.adapters.modules import EMBEDDING, HEAD
from checkpoints_convert.checkpoint import ParamPath, check_finite, insert, param_shapes
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.host_arrays import count_nonfinite
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray


def merged(config: ModelConfig, params: Params, adapter: Adapter) -> tuple[ModelConfig, Params]:
    """The base model with the adapter added, computed in float32 and rounded to the dtype of each parameter.

    W + scale * A B of plain pairs; of DoRA m (W + scale * A B) / ||W + scale * A B||, the lengths being of the columns
    of [in, out] (Liu et al. 2024, arXiv 2402.09353, equation 5).

    Args:
      params: dense, of any kind of array; not donated, and its leaves are used where the adapter changes nothing.

    Returns:
      The configuration, which differs where tokens were added, and where embedding and head are no longer tied; and the
      parameters, of which those that changed are NumPy arrays.

    Raises CheckpointError for an adapter that changes quantized weights, is no adapter of this model, changes only some
    of the tokens of a text (aLoRA), or makes values that are not finite.
    """
    if adapter.invocation_tokens:
        raise CheckpointError(
            "the adapter", f"cannot be merged: it begins with the invocation tokens {list(adapter.invocation_tokens)}"
        )
    leaves = {tuple(key.key for key in path): leaf for path, leaf in _leaves(params)}
    changed = _Changed(leaves)
    tables = {EMBEDDING, HEAD} & (adapter.replaced.keys() | adapter.low_rank.keys() | adapter.token_rows.keys())
    is_tied = config.tie_word_embeddings and bool(tables)
    if is_tied:
        changed.add_head()
    for name, array in adapter.replaced.items():
        changed.replace(name, array)
    for name, pair in adapter.low_rank.items():
        changed.add(name, pair)
    for name, rows in adapter.token_rows.items():
        changed.set_rows(name, rows.tokens, rows.rows)
    after = changed.leaves
    if is_tied:
        embed, head = after[(EMBEDDING,)], after.pop((HEAD,))
        if not np.array_equal(np.asarray(embed).T, np.asarray(head)):
            config = replace(config, tie_word_embeddings=False)
            after[(HEAD,)] = head
    if (EMBEDDING,) in after:
        config = replace(config, vocab_size=after[(EMBEDDING,)].shape[0])
    _check_shapes(config, after)
    result: dict[str, Any] = {}
    for path, leaf in after.items():
        insert(result, path, leaf)
    return config, result


def _leaves(params: Params) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: not isinstance(node, dict))


class _Changed:
    """Parameters that are replaced one by one."""

    def __init__(self, leaves: Mapping[ParamPath, Any]):
        self.leaves = dict(leaves)

    def add_head(self) -> None:
        """Gives a model with tied embeddings a head of its own, a view of the embedding if it is a host array."""
        embed = self.leaves[(EMBEDDING,)]
        self.leaves[(HEAD,)] = embed if isinstance(embed, QuantizedArray) else embed.T

    def replace(self, name: str, array: np.ndarray) -> None:
        path = self._path(name)
        self._put(path, name, np.asarray(array, np.float32))

    def add(self, name: str, pair: LowRank) -> None:
        path = self._path(name)
        self._put(path, name, _with_pair(self._dense(path, name), pair))
        if pair.bias is not None:
            bias = (*path[:-1], "bias")
            if path[-1] != "weight" or bias not in self.leaves:
                raise CheckpointError("the adapter", f"cannot be merged: {name!r} has a bias, and the base has none")
            changed = self._dense(bias, f"{name}.bias") + np.float32(pair.scale) * pair.bias.astype(np.float32)
            self._put(bias, f"{name}.bias", changed)

    def set_rows(self, name: str, tokens: tuple[int, ...], rows: np.ndarray) -> None:
        path = self._path(name)
        table = np.array(self._dense(path, name))
        vectors = table.T if name == HEAD else table
        if max(tokens) >= len(vectors):
            raise CheckpointError(
                "the adapter", f"cannot be merged: it has the token {max(tokens)}, {name!r} has {len(vectors)}"
            )
        vectors[list(tokens)] = rows.astype(np.float32)
        self._put(path, name, table)

    def _path(self, name: str) -> ParamPath:
        path = tuple(name.split("."))
        path = path if path in self.leaves else (*path, "weight")
        if path not in self.leaves:
            raise CheckpointError("the adapter", f"cannot be merged: the model has no parameter {name!r}")
        return path

    def _dense(self, path: ParamPath, name: str) -> np.ndarray:
        leaf = self.leaves[path]
        if isinstance(leaf, QuantizedArray):
            raise CheckpointError("the adapter", f"cannot be merged: {name!r} of the base is quantized")
        return np.asarray(leaf).astype(np.float32)

    def _put(self, path: ParamPath, name: str, array: np.ndarray) -> None:
        before = self.leaves[path]
        if isinstance(before, QuantizedArray):
            raise CheckpointError("the adapter", f"cannot be merged: {name!r} of the base is quantized")
        with np.errstate(over="ignore"):
            array = array.astype(before.dtype)
        check_finite("the merged model", name, count_nonfinite(array), array.size)
        self.leaves[path] = array


def _with_pair(weight: np.ndarray, pair: LowRank) -> np.ndarray:
    """float32 [..., in, out] of a weight and its pair."""
    change = pair.a.astype(np.float32) @ pair.b.astype(np.float32)
    if weight.shape != change.shape:
        raise CheckpointError("the adapter", f"cannot be merged: a change {change.shape} of a weight {weight.shape}")
    weight = weight + np.float32(pair.scale) * change
    if pair.magnitude is None:
        return weight
    lengths = np.linalg.norm(weight, axis=-2)
    with np.errstate(divide="ignore", invalid="ignore"):  # columns of zeros are told as values that are not finite
        return weight * (pair.magnitude.astype(np.float32) / lengths)[..., None, :]


def _check_shapes(config: ModelConfig, leaves: Mapping[ParamPath, Any]) -> None:
    shapes = param_shapes(config)
    for path, leaf in leaves.items():
        if tuple(leaf.shape) != (wanted := shapes.get(path)):
            name, shape = ".".join(path), tuple(leaf.shape)
            raise CheckpointError(
                "the adapter", f"cannot be merged: {name!r} would have the shape {shape}, not {wanted}"
            )
