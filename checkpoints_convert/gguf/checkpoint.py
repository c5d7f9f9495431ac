"""A GGUF checkpoint opened for reading, and planned: which tensors every parameter is read from, by names and shapes.

Names are those of gguf-py's constants.py. One table serves all architectures, since the configuration decides which
parameters a model has.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
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
    param_shapes,
    size_of,
)
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG
from checkpoints_convert.gguf.architectures import Architecture
from checkpoints_convert.gguf.blocks import FLOATS, abstract_leaf, dequantize, quantized_leaf
from checkpoints_convert.gguf.config import architecture_of, huggingface_config
from checkpoints_convert.gguf.file import GGUFTensorEntry
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.gguf.tokenizer import end_token_ids, token_id, tokenizer_files
from checkpoints_convert.host_arrays import aligned, empty_aligned
from checkpoints_convert.huggingface.config import model_config
from checkpoints_convert.huggingface.rules import (
    INDEX,
    ParameterPlan,
    TensorGroup,
    TensorPlacement,
    TensorRule,
    layout,
    linear,
    norm,
)
from jaxinfer.checks import did_you_mean
from jaxinfer.models import ModelConfig
from jaxinfer.quantization import RECIPES, QuantizedArray, quantize, recipe


@dataclass(frozen=True)
class GGUFTensorPlan(ParameterPlan):
    """A parameter that is read from the tensors of a GGUF file.

    Attributes:
      sources: the tensor that holds it, or those that are stacked along its first axis. entry: of the first.
    """

    sources: tuple[str, ...]
    entry: GGUFTensorEntry

    @property
    def stays_quantized(self) -> bool:
        """True for weights of linear layers and embeddings that are stored quantized."""
        is_product = self.target[-1] == "weight" and self.target[-2].endswith("_proj")
        return self.entry.kind.is_quantized and (is_product or self.target in (("embed",), ("lm_head",)))


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

    quantization = "gguf"

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
            return cut_parts(self._dense(plan, self.dense_dtype(path)), parts)
        return self._requantized(plan) if self.is_requantized(plan) else self._leaf(plan)

    def stored_dtype(self, path: ParamPath) -> str | None:
        plan = self._plan_of[path]
        return None if plan.placement.add else _DTYPES.get(plan.entry.kind.name)

    def quantized(self) -> dict[ParamPath, str]:
        return {plan.target: plan.sources[0] for plan in self.plans if plan.stays_quantized}

    def param_bytes(self, path: ParamPath) -> int:
        return self.abstract_param(path).num_bytes if path in self._quantized else super().param_bytes(path)

    def abstract_param(self, path: ParamPath) -> Any:
        """Abstract arrays of what `read_param` returns; `jax.ShapeDtypeStruct` if it is dense."""
        plan = self._plan_of[path]
        if path not in self._quantized:
            return jax.ShapeDtypeStruct(plan.shape, numpy_dtype(self.dense_dtype(path)))
        if self.is_requantized(plan):
            make = partial(quantize, how=recipe(self.requantize or ""), scale_dtype=self.config.dtype)
            return jax.eval_shape(make, jax.ShapeDtypeStruct(plan.shape, jnp.float32))
        return abstract_leaf(plan.entry.kind, plan.shape, transpose=plan.placement.transpose)

    def host_bytes(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> int:
        """Those of whole parameters, whatever parts are read; twice for a stack and the matrices in it."""
        plan = self._plan_of[path]
        size = int(np.prod(plan.shape, dtype=np.int64))
        is_copied = len(plan.shape) > 2 or (plan.placement.outputs is not None and not plan.placement.transpose)
        if path not in self._quantized:
            itemsize = numpy_dtype(self.dense_dtype(path)).itemsize
            return itemsize * (size * (2 if is_copied else 1) + sum(map(size_of, parts)))
        if self.is_requantized(plan):  # the weight, the rounded weight and their difference, in float32
            return 3 * 4 * size + self.param_bytes(path)
        # A 4-bit value takes a byte on the host.
        arrays = jax.tree.leaves(self.abstract_param(path))
        return sum(array.size * array.dtype.itemsize for array in arrays) * (2 if is_copied else 1)

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
        """True if a quantized parameter is rounded to the recipe `requantize`."""
        return self.requantize is not None and plan.target[0] == "layers" and plan.entry.kind.name not in _PLAIN

    def _leaf(self, plan: GGUFTensorPlan) -> QuantizedArray:
        matrices = [self._leaf_of(plan, *place) for place in _matrices(plan)]
        leaf = matrices[0]
        if len(plan.shape) > 2:  # a codebook is that of the type, one for all
            plain = [replace(matrix, codebook=None) for matrix in matrices]
            leaf = jax.tree.map(lambda *parts: np.stack(parts), *plain)
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
        rounded = quantize(weight, self.requantize or "", scale_dtype=self.config.dtype)
        norm = float(jnp.linalg.norm(weight.reshape(-1)))
        error = float(jnp.linalg.norm((rounded.dequantize() - weight).reshape(-1)))
        self.requantize_errors[".".join(plan.target)] = error / norm if norm else 0.0
        return jax.tree.map(np.asarray, rounded)


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


_LAYER, _TARGET = "blk.{layer}", "layers.{layer}"
_QKV = tuple(f"{_TARGET}.attention.{name}" for name in ("q_proj", "k_proj", "v_proj"))
_GATE, _UP, _DOWN = (f"{_TARGET}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
_TWO_NORMS = ("block", "parallel_two_norms")
# Factors of the rotation, which config.json has, or which no implementation uses beside others.
_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NUM_HINTS, _NUM_COMPARED = 20, 500  # nearest names are looked up for so many problems, among so many names


def plan_tensors(index: GGUFIndex, architecture: Architecture, config: ModelConfig) -> list[GGUFTensorPlan]:
    """The plans of all parameters, in the order of computation.

    Raises CheckpointError for parameters without a tensor, tensors that are not used, and shapes that do not fit, all
    at once, each with the nearest name.
    """
    of_target = layout(rules(architecture.adds_one), config, architecture.pairs_neighbours).of_target
    plans, problems, missing = [], [], []
    used: set[str] = {*_NOT_PARAMETERS}
    for target, shape in param_shapes(config).items():
        placed = [(group, group.placement_of(target)) for group in of_target[target]]
        present = [pair for pair in placed if all(name in index.tensors for name in pair[0].sources)]
        if not present:
            missing.append((placed[0][0].sources[0], placed[0][1].stored))
            continue
        group, placement = next((pair for pair in present if not _misshapen(index, *pair)), present[0])
        used.update(group.sources)
        problems += [
            f"tensor {name!r} has shape {list(index.tensors[name].shape)}, the metadata make it"
            f" {list(placement.stored)}"
            for name in _misshapen(index, group, placement)
        ]
        kinds = sorted({index.tensors[name].kind.name for name in group.sources})
        first = group.sources[0]
        if len(kinds) > 1:
            problems.append(f"tensor {first!r} and those stacked with it are stored as {' and '.join(kinds)}")
        plans.append(GGUFTensorPlan(placement, shape, tuple(group.sources), index.tensors[first]))
    extra = [name for name in index.tensors if name not in used]
    if architecture.has_later_layers:
        layers = ((name, re.match(r"blk\.(\d{1,6})\.", name)) for name in extra)
        extra = [name for name, match in layers if match is None or int(match[1]) < config.num_layers]
    problems += _unmatched(missing, extra)
    if problems:
        raise CheckpointError(index.path, *problems)
    return plans


def _misshapen(index: GGUFIndex, group: TensorGroup, placement: TensorPlacement) -> list[str]:
    """Tensors of a group with another shape than the wanted one; a single row may be stored as a vector."""
    wanted = placement.stored
    allowed = (wanted, wanted[1:]) if len(wanted) == 2 and wanted[0] == 1 else (wanted,)
    return [name for name in group.sources if index.tensors[name].shape not in allowed]


def _unmatched(missing: list[tuple[str, tuple[int, ...]]], extra: list[str]) -> list[str]:
    names = [name for name, _ in missing][:_NUM_COMPARED]
    problems = []
    for number, (name, shape) in enumerate(missing):
        near = did_you_mean(name, extra[:_NUM_COMPARED], cutoff=0.8) if number < _NUM_HINTS else ""
        problems.append(f"tensor {name!r} {list(shape)} is missing{near}")
    for number, name in enumerate(extra):
        near = did_you_mean(name, names, cutoff=0.8) if number < _NUM_HINTS else ""
        problems.append(f"tensor {name!r} is not of this model{near}")
    return problems


_ATTENTION, _MLP = f"{_TARGET}.attention", f"{_TARGET}.mlp"
_LATENT_ATTENTION = (
    *linear(f"{_LAYER}.attn_q_a", f"{_ATTENTION}.q_a_proj"),
    *norm(f"{_LAYER}.attn_q_a_norm", f"{_ATTENTION}.q_a_norm"),
    *linear(f"{_LAYER}.attn_q_b", f"{_ATTENTION}.q_b_proj"),
    *linear(f"{_LAYER}.attn_kv_a_mqa", f"{_ATTENTION}.kv_a_proj"),
    *norm(f"{_LAYER}.attn_kv_a_norm", f"{_ATTENTION}.kv_a_norm"),
    # Files of 2025 and later have the two halves apart, [heads, latent, keys] and [heads, values, latent].
    TensorRule(f"{_LAYER}.attn_k_b.weight", (f"{_ATTENTION}.k_up.weight",)),
    TensorRule(f"{_LAYER}.attn_v_b.weight", (f"{_ATTENTION}.v_up.weight",), transpose=True),
    TensorRule(
        f"{_LAYER}.attn_kv_b.weight",
        (f"{_ATTENTION}.k_up.weight", f"{_ATTENTION}.v_up.weight"),
        transpose=True,
        stack="num_heads",
    ),
)
_EXPERTS = (
    *linear(f"{_LAYER}.ffn_gate_inp", f"{_MLP}.router"),
    TensorRule(f"{_LAYER}.exp_probs_b.bias", (f"{_MLP}.router.correction",)),
    *(
        rule
        for name in ("gate", "up", "down")
        for rule in (
            *linear(f"{_LAYER}.ffn_{name}_exps", f"{_MLP}.experts.{name}_proj"),
            TensorRule(f"{_LAYER}.ffn_{name}.{INDEX}.weight", (f"{_MLP}.experts.{name}_proj.weight",), transpose=True),
            *linear(f"{_LAYER}.ffn_{name}_shexp", f"{_MLP}.shared.{name}_proj"),
        )
    ),
    TensorRule(f"{_LAYER}.ffn_gate_inp_shexp.weight", (f"{_MLP}.shared_gate",), transpose=True),
)


@lru_cache(maxsize=2)
def rules(adds_one: bool) -> tuple[TensorRule, ...]:
    """The rules of all architectures; the first one of a parameter is that of the tensor that is written."""
    add = {"add": -1.0} if adds_one else {}
    return (
        TensorRule("token_embd.weight", ("embed",)),
        TensorRule("position_embd.weight", ("position_embed",)),
        # Falcon's attention reads attn_norm_2 where there is one, and its MLP attn_norm.
        *norm(f"{_LAYER}.attn_norm_2", f"{_TARGET}.attention_norm", when=_TWO_NORMS),
        *norm(f"{_LAYER}.attn_norm", f"{_TARGET}.attention_norm", **add),
        *linear(f"{_LAYER}.attn_q", _QKV[0], is_rotated=True),
        *linear(f"{_LAYER}.attn_k", _QKV[1], is_rotated=True),
        *linear(f"{_LAYER}.attn_v", _QKV[2]),
        *linear(f"{_LAYER}.attn_qkv", *_QKV),
        *linear(f"{_LAYER}.attn_output", f"{_TARGET}.attention.o_proj"),
        *norm(f"{_LAYER}.attn_q_norm", f"{_TARGET}.attention.q_norm", is_rotated=True, **add),
        *norm(f"{_LAYER}.attn_k_norm", f"{_TARGET}.attention.k_norm", is_rotated=True, **add),
        *norm(f"{_LAYER}.post_attention_norm", f"{_TARGET}.attention_post_norm", **add),
        *norm(f"{_LAYER}.ffn_norm", f"{_TARGET}.mlp_norm", **add),
        *norm(f"{_LAYER}.attn_norm", f"{_TARGET}.mlp_norm", when=_TWO_NORMS),
        *norm(f"{_LAYER}.post_attention_norm", f"{_TARGET}.mlp_norm", when=("block", "pre_norm")),  # gpt-oss's name
        TensorRule(f"{_LAYER}.attn_sinks.weight", (f"{_TARGET}.attention.sinks",)),
        *_LATENT_ATTENTION,
        *_EXPERTS,
        *linear(f"{_LAYER}.ffn_gate", _GATE),
        *linear(f"{_LAYER}.ffn_up", _UP),
        *linear(f"{_LAYER}.ffn_up", _GATE, _UP),
        *linear(f"{_LAYER}.ffn_down", _DOWN),
        *norm(f"{_LAYER}.post_ffw_norm", f"{_TARGET}.mlp_post_norm", **add),
        *norm("output_norm", "final_norm", **add),
        TensorRule("output.weight", ("lm_head",), transpose=True),
        TensorRule("output.bias", ("lm_head_bias",)),
    )
