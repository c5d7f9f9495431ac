"""An adapter merged into the parameters of its base model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from checkpoints_convert.adapters.modules import EMBEDDING, HEAD
from checkpoints_convert.checkpoint import ParamPath, check_finite, insert, param_shapes
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.host_arrays import count_nonfinite
from jaxinfer.models import ModelConfig, Params
from jaxinfer.models.adapter import Adapter, LowRank
from jaxinfer.quantization.tree import is_weight

EMBEDDING_PATH, HEAD_PATH = (EMBEDDING,), (HEAD,)


def merged(config: ModelConfig, params: Params, adapter: Adapter) -> tuple[ModelConfig, Params]:
    """The base model with the adapter added, computed in float32 and rounded to the dtype of each parameter.

    W + scale * A B of plain pairs; of DoRA m (W + scale * A B) / ||W + scale * A B||, the lengths being of the columns
    of [in, out] (Liu et al. 2024, arXiv 2402.09353, equation 5).

    Args:
      params: of any kind of array; not donated, and its leaves are used where the adapter changes nothing.

    Returns:
      The configuration, which differs where tokens were added, and where embedding and head are no longer tied; and the
      parameters, of which those that changed are NumPy arrays.

    Raises CheckpointError for an adapter that changes quantized weights, is no adapter of this model, changes only some
    of the tokens of a text (aLoRA), or makes values that are not finite.
    """
    leaves = {tuple(key.key for key in path): leaf for path, leaf in _leaves(params)}

    def dense(path: ParamPath) -> Any:
        if is_weight(leaves[path]):
            raise _refusal(f"{_name(path)!r} of the base is quantized or packed: dequantize_params(params) first")
        return leaves[path]

    merge = Merge(config, adapter, dense)
    is_untied = config.tie_word_embeddings and not merge.config.tie_word_embeddings
    result: dict[str, Any] = {}
    for path in (*leaves, *([HEAD_PATH] if is_untied else [])):
        if merge.changes(path):
            leaf = rounded(merge.read(path), dense(merge.source_of(path)).dtype, path)
        else:
            leaf = leaves[path] if path in leaves else dense(EMBEDDING_PATH).T
        insert(result, path, leaf)
    return merge.config, result


class Merge:
    """A merged model whose parameters are computed one at a time.

    Attributes:
      config: of the merged model; it differs from the base's as that of `merged`.
    """

    def __init__(self, config: ModelConfig, adapter: Adapter, dense: Callable[[ParamPath], Any]):
        """`dense(path)` gives a parameter of the base as an array. None is read here.

        Raises CheckpointError for an adapter of some tokens of a text (aLoRA), or of another model's shapes.
        """
        if adapter.invocation_tokens:
            raise _refusal(f"it begins with the invocation tokens {list(adapter.invocation_tokens)}")
        self._dense = dense
        self._base_shapes = param_shapes(config)
        is_tied = config.tie_word_embeddings and _is_tied(adapter)
        vocab_size = adapter.vocab_size or config.vocab_size
        self.config = replace(config, vocab_size=vocab_size, tie_word_embeddings=is_tied)
        self._shapes = param_shapes(self.config)
        # A tied head is the embedding, whose changes are the same.
        skipped = {HEAD} if is_tied else set()
        self._replaced = {self._path(name): array for name, array in adapter.replaced.items() if name not in skipped}
        self._pairs = {self._path(name): pair for name, pair in adapter.low_rank.items()}
        self._rows = {self._path(name): rows for name, rows in adapter.token_rows.items() if name not in skipped}
        self._biases = {self._bias_path(path): pair for path, pair in self._pairs.items() if pair.bias is not None}
        self._check_shapes()

    def changes(self, path: ParamPath) -> bool:
        """True for a parameter whose values are not the base's, those of its embedding for a head that was tied."""
        return any(path in changed for changed in (self._replaced, self._pairs, self._rows, self._biases))

    @property
    def num_changed(self) -> int:
        """Number of parameters that `changes` is true for."""
        return sum(map(self.changes, self._shapes))

    def source_of(self, path: ParamPath) -> ParamPath:
        """The base's parameter in whose place one stands: the embedding, of a head that was tied."""
        return path if path in self._base_shapes else EMBEDDING_PATH

    def read(self, path: ParamPath) -> np.ndarray:
        """A parameter of the merged model: float32 if the adapter changes it, else the base's array."""
        if not self.changes(path):
            return self._base(path)
        array = np.asarray(self._replaced[path] if path in self._replaced else self._base(path), np.float32)
        if (pair := self._pairs.get(path)) is not None:
            array = _with_pair(array, pair)
        if (pair := self._biases.get(path)) is not None and pair.bias is not None:
            array = array + np.float32(pair.scale) * pair.bias.astype(np.float32)
        if (rows := self._rows.get(path)) is not None:
            array = np.array(array)
            (array.T if path == HEAD_PATH else array)[list(rows.tokens)] = rows.rows
        return array

    def _base(self, path: ParamPath) -> np.ndarray:
        array = np.asarray(self._dense(self.source_of(path)))
        return array if path in self._base_shapes else array.T

    def _path(self, name: str) -> ParamPath:
        path = tuple(name.split("."))
        path = path if path in self._shapes else (*path, "weight")
        if path not in self._shapes:
            raise _refusal(f"the model has no parameter {name!r}")
        return path

    def _bias_path(self, path: ParamPath) -> ParamPath:
        bias = (*path[:-1], "bias")
        if path[-1] != "weight" or bias not in self._shapes:
            raise _refusal(f"{_name(path)!r} has a bias, and the base has none")
        return bias

    def _check_shapes(self) -> None:
        """Raises CheckpointError for parameters that would not have the shapes of the merged model."""
        for path, wanted in self._shapes.items():
            own = self._base_shapes[self.source_of(path)]
            own = own if path in self._base_shapes else own[::-1]
            shape = self._replaced[path].shape if path in self._replaced else own
            if shape != wanted:
                raise _refusal(f"{'.'.join(path)!r} would have the shape {shape}, not {wanted}")
            pair = self._pairs.get(path)
            if pair is not None and (change := (*pair.b.shape[:-2], pair.a.shape[-2], pair.b.shape[-1])) != wanted:
                raise _refusal(f"{_name(path)!r} has a change {change} of a weight {wanted}")
        for path, rows in self._rows.items():
            if (last := max(rows.tokens, default=0)) >= self.config.vocab_size:
                raise _refusal(f"it has the token {last}, {_name(path)!r} has {self.config.vocab_size}")
            if rows.rows.shape[1] != self.config.hidden_size:
                raise _refusal(f"{_name(path)!r} has rows of shape {rows.rows.shape}")


def rounded(array: np.ndarray, dtype: Any, path: ParamPath) -> np.ndarray:
    """A merged parameter in a dtype. Raises CheckpointError for values that are not finite in it."""
    with np.errstate(over="ignore"):
        array = array.astype(dtype, copy=False)
    check_finite("the merged model", _name(path), count_nonfinite(array), array.size)
    return array


def _leaves(params: Params) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: not isinstance(node, dict))


def _name(path: ParamPath) -> str:
    return ".".join(path).removesuffix(".weight")


def _refusal(reason: str) -> CheckpointError:
    return CheckpointError("the adapter", f"cannot be merged: {reason}")


def _is_tied(adapter: Adapter) -> bool:
    """True if an adapter of a base with tied embeddings changes both tables alike, or none."""
    if {EMBEDDING, HEAD} & adapter.low_rank.keys():  # in a pair, the tables have other sides
        return False
    embedding, head = (adapter.replaced.get(name) for name in (EMBEDDING, HEAD))
    if not (embedding is head is None or (embedding is not None and head is not None and _equal(embedding.T, head))):
        return False
    rows, of_head = (adapter.token_rows.get(name) for name in (EMBEDDING, HEAD))
    if rows is None or of_head is None:
        return rows is of_head
    return rows is of_head or (rows.tokens == of_head.tokens and _equal(rows.rows, of_head.rows))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


def _with_pair(weight: np.ndarray, pair: LowRank) -> np.ndarray:
    """float32 [..., in, out] of a weight and its pair."""
    change = pair.a.astype(np.float32) @ pair.b.astype(np.float32)
    weight = weight + np.float32(pair.scale) * change
    if pair.magnitude is None:
        return weight
    lengths = np.linalg.norm(weight, axis=-2)
    with np.errstate(divide="ignore", invalid="ignore"):  # columns of zeros are told as values that are not finite
        return weight * (pair.magnitude.astype(np.float32) / lengths)[..., None, :]
