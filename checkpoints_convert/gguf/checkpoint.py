"""A GGUF checkpoint opened for reading."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.checkpoint import (
    Bounds,
    Checkpoint,
    HostParam,
    ParamPath,
    check_dtype,
    cut_parts,
    digest,
    numpy_dtype,
    size_of,
)
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG
from checkpoints_convert.gguf.blocks import FLOATS, dequantize, leaf_bytes, leaf_host_bytes, quantized_leaf
from checkpoints_convert.gguf.config import architecture_of, huggingface_config
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.tensors import GGUFTensorPlan, plan_tensors
from checkpoints_convert.gguf.tokenizer import end_token_ids, token_id, tokenizer_files
from checkpoints_convert.host_arrays import aligned, empty_aligned
from checkpoints_convert.huggingface.config import model_config
from jaxinfer.quantization import RECIPES, QuantizedArray, quantize, recipe

DENSE = "dense"
# Types that a `QuantizedArray` has exactly, in no more bytes: no recipe is applied to them.
_PLAIN = ("Q8_0", "Q4_0", "MXFP4")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFCheckpoint(Checkpoint):
    """One GGUF file, or the parts of a split one. `plans` has the source tensors of every parameter.

    Attributes:
      requantize: None keeps quantized weights; "dense" dequantizes them; the name of a recipe rounds linear layers'
        weights to it, except those in Q8_0, Q4_0 and MXFP4.

    Raises CheckpointError for files that are malformed or whose tensors do not fit their metadata, before weights are
    read; ValueError for an unknown recipe.
    """

    def __init__(self, path: Path, *, dtype: str = "auto", measure_casts: bool = False, requantize: str | None = None):
        super().__init__(path, measure_casts=measure_casts)
        check_dtype(dtype)
        check_requantize(requantize)
        self.requantize = requantize
        self.index = GGUFIndex(path)
        try:
            self.huggingface_config = huggingface_config(self.index)
            config = model_config(self.huggingface_config, path)
            self.plans = plan_tensors(self.index, architecture_of(self.index), config)
        except BaseException:
            self.index.close()
            raise
        self.config = replace(config, dtype=self._stored_dtype() if dtype == "auto" else dtype)
        self.huggingface_config["torch_dtype"] = self.config.dtype
        self._plan_of = {plan.target: plan for plan in self.plans}
        self._quantized = {plan.target: plan for plan in self.plans if plan.stays_quantized and requantize != DENSE}

    def read_param(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> HostParam:
        """Parameters are read whole before parts are cut, since blocks have values of several parts."""
        plan = self._plan_of[path]
        if path not in self._quantized:
            return cut_parts(self._dense(plan, self.config.dtype), parts)
        return self._requantized(plan) if self.is_requantized(plan) else self._leaf(plan)

    def quantized(self) -> dict[ParamPath, str]:
        return {plan.target: plan.sources[0] for plan in self.plans if plan.stays_quantized}

    def param_bytes(self, path: ParamPath) -> int:
        if path not in self._quantized:
            return super().param_bytes(path)
        plan = self._quantized[path]
        if self.is_requantized(plan):
            make = partial(quantize, how=recipe(self.requantize or ""), scale_dtype=self.config.dtype)
            return jax.eval_shape(make, jax.ShapeDtypeStruct(plan.shape, jnp.float32)).num_bytes
        return leaf_bytes(plan.entry.kind, int(np.prod(plan.shape, dtype=np.int64)))

    def host_bytes(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> int:
        """Those of whole parameters, whatever parts are read; twice for a stack and the matrices in it."""
        plan = self._plan_of[path]
        size = int(np.prod(plan.shape, dtype=np.int64))
        is_copied = len(plan.shape) > 2 or (plan.placement.outputs is not None and not plan.placement.transpose)
        if path not in self._quantized:
            itemsize = numpy_dtype(self.config.dtype).itemsize
            return itemsize * (size * (2 if is_copied else 1) + sum(map(size_of, parts)))
        if self.is_requantized(plan):  # the weight, the rounded weight and their difference, in float32
            return 3 * 4 * size + self.param_bytes(path)
        return leaf_host_bytes(plan.entry.kind, size) * (2 if is_copied else 1)

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return end_token_ids(self.index)

    @property
    def bos_token_id(self) -> int | None:
        return token_id(self.index, "bos_token_id")

    def tokenizer_files(self) -> dict[str, str] | None:
        return tokenizer_files(self.index)

    def companions(self, *, with_tokenizer: bool = True) -> dict[str, Path | str]:
        config = {CONFIG: json.dumps(self.huggingface_config, indent=2) + "\n"}
        return {**config, **(tokenizer_files(self.index) if with_tokenizer else {})}

    def fingerprint(self) -> str:
        return digest("gguf", self.index.fingerprint(), self.config.to_dict(), self.requantize)

    def close(self) -> None:
        super().close()
        self.index.close()

    def _stored_dtype(self) -> str:
        """The dtype of most bytes of dense matrices; bfloat16 if all of them are float32 beside quantized ones, as
        routers are."""
        sizes: Counter[str] = Counter()
        for plan in self.plans:
            if len(plan.shape) > 1 and not plan.entry.kind.is_quantized:
                sizes[_DTYPES[plan.entry.kind.name]] += plan.entry.end - plan.entry.begin
        if any(plan.stays_quantized for plan in self.plans):
            del sizes["float32"]
        return sizes.most_common(1)[0][0] if sizes else "bfloat16"

    def is_requantized(self, plan: GGUFTensorPlan) -> bool:
        """Whether a quantized parameter is rounded to the recipe `requantize`."""
        return self.requantize is not None and plan.target[0] == "layers" and plan.entry.kind.name not in _PLAIN

    def _leaf(self, plan: GGUFTensorPlan) -> QuantizedArray:
        matrices = [self._leaf_of(plan, *place) for place in _matrices(plan)]
        leaf = matrices[0]
        if len(plan.shape) > 2:  # a codebook is that of the type, one for all
            leaf = jax.tree.map(lambda *parts: np.stack(parts), *(replace(one, codebook=None) for one in matrices))
            leaf = replace(leaf, codebook=matrices[0].codebook)
        where, name = self.index.path_of(plan.sources[0]), plan.sources[0]
        numbers = [np.asarray(part) for part in (leaf.scales, leaf.minima) if part is not None]
        num_nonfinite = sum(int(np.count_nonzero(~np.isfinite(part))) for part in numbers)
        if num_nonfinite:
            size = sum(part.size for part in numbers)
            raise CheckpointError(
                where, f"tensor {name!r}: {num_nonfinite} of {size} scales and minima are NaN or infinite"
            )
        return leaf

    def _leaf_of(self, plan: GGUFTensorPlan, name: str, skipped: int, shape: tuple[int, int]) -> QuantizedArray:
        order = None if plan.placement.outputs is None else plan.placement.outputs.index
        num_rows = shape[0] if order is None else len(order)
        rows = partial(self._rows, name, skipped, order)
        transpose = plan.placement.transpose
        return quantized_leaf(plan.entry.kind, rows, num_rows, shape[1], transpose=transpose, executor=self.executor)

    def _rows(self, name: str, skipped: int, order: np.ndarray | None, first: int, last: int) -> np.ndarray:
        """uint8 [last - first, bytes]: rows of a tensor as stored, after so many skipped ones, in an order."""
        if order is None:
            return self.index.read_rows(name, skipped + first, skipped + last)
        chosen = order[first:last]
        begin, end = int(chosen.min()), int(chosen.max()) + 1
        raw = self.index.read_rows(name, skipped + begin, skipped + end)
        return raw if end - begin == len(chosen) and (np.diff(chosen) == 1).all() else raw[chosen - begin]

    def _dense(self, plan: GGUFTensorPlan, dtype: str) -> np.ndarray:
        parts = [self._dense_of(plan, dtype, *place) for place in _matrices(plan)]
        if len(plan.shape) <= 2:
            return parts[0].reshape(plan.shape)
        return np.stack(parts, out=empty_aligned(plan.shape, parts[0].dtype))

    def _dense_of(
        self, plan: GGUFTensorPlan, dtype: str, name: str, skipped: int, shape: tuple[int, int]
    ) -> np.ndarray:
        kind, placement = plan.entry.kind.name, plan.placement
        # Rows of a matrix are its outputs; in a vector, and a matrix that is not transposed, they are the columns.
        order = None if placement.outputs is None else placement.outputs.index
        of_rows = order if placement.transpose else None
        num_rows = shape[0] if of_rows is None else len(of_rows)
        is_exact = kind in FLOATS and not placement.add
        stored = FLOATS[kind] if is_exact else np.dtype(np.float32)
        row_bytes = shape[1] * stored.itemsize

        def read(offset: int, buffer: memoryview) -> None:
            rows = self._rows(name, skipped, of_rows, offset // row_bytes, (offset + len(buffer)) // row_bytes)
            if not is_exact:
                with np.errstate(invalid="ignore", over="ignore"):  # counted by the caller
                    rows = dequantize(kind, rows)
                    rows += np.float32(placement.add)
            buffer[:] = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data

        array = self.host_array(
            read,
            (num_rows, shape[1]),
            stored,
            param=".".join(plan.target),
            name=name,
            where=self.index.path_of(name),
            transpose=placement.transpose,
            dtype=dtype,
        )
        return aligned(array[:, order]) if order is not None and of_rows is None else array

    def _requantized(self, plan: GGUFTensorPlan) -> QuantizedArray:
        weight = jnp.asarray(self._dense(plan, "float32"))
        found = quantize(weight, self.requantize or "", scale_dtype=self.config.dtype)
        norm = float(jnp.linalg.norm(weight.reshape(-1)))
        error = float(jnp.linalg.norm((found.dequantize() - weight).reshape(-1)))
        self.requantize_errors[".".join(plan.target)] = error / norm if norm else 0.0
        return jax.tree.map(np.asarray, found)


def check_requantize(name: str | None) -> None:
    """Raises ValueError for what is neither "dense" nor a recipe."""
    if name not in (None, DENSE, *RECIPES):
        raise ValueError(f"requantize={name!r} is not {DENSE!r} or one of {', '.join(RECIPES)}")


def _matrices(plan: GGUFTensorPlan) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """The stored matrices of a parameter: tensor, rows before, and (rows, columns); of a vector one with one row."""
    for name in plan.sources:
        shape = plan.placement.view or plan.placement.stored
        if len(shape) == 1:
            yield name, 0, (1, shape[0])
            continue
        for number in range(int(np.prod(shape[:-2], dtype=np.int64))):
            yield name, number * shape[-2], (shape[-2], shape[-1])
