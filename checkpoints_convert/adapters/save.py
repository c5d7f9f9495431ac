"""Writing an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from checkpoints_convert.adapters.modules import EMBEDDING, HEAD, BaseModules, Module, join_outputs, name_of
from checkpoints_convert.adapters.read import (
    BASE_FINGERPRINT,
    BASE_LAYER,
    EMBEDDING_PAIR,
    PAIR,
    PREFIX,
    TOKEN_ROWS,
)
from checkpoints_convert.checkpoint import ParamPath, check_finite, param_shapes
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_json
from checkpoints_convert.host_arrays import count_nonfinite
from jaxinfer.files import sync
from jaxinfer.models import ModelConfig
from jaxinfer.models.adapter import Adapter, LowRank


def save_adapter(adapter: Adapter, folder: str | Path, config: ModelConfig, *, overwrite: bool = False) -> Path:
    """Writes an adapter of a base model in PEFT's form.

    `read_adapter` of the folder gives the same adapter, but for the last bit of a scale that no alpha gives, such as
    0.1 with rank 3.

    The configuration is written last: a process that is killed, or a full disk, leaves an earlier adapter or none.

    Args:
      config: of the base model. overwrite: replaces an adapter in the folder.

    Raises CheckpointError for an adapter that is not of this model, or that PEFT's form cannot express: values that are
    not finite, and different A or scales of weights that the base keeps in one tensor.
    """
    folder = Path(folder)
    form = _PeftForm(adapter, config, folder)
    for name, array in form.tensors.items():
        check_finite(folder, name, count_nonfinite(array), array.size)
    if not overwrite and any((folder / name).exists() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        raise CheckpointError(folder, "holds an adapter: choose another folder, or overwrite=True")
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    if adapter.base_fingerprint is not None:
        metadata[BASE_FINGERPRINT] = adapter.base_fingerprint
    path = folder / ADAPTER_WEIGHTS
    partial = path.with_name(f".{path.name}.part")
    try:
        save_file({PREFIX + name: np.ascontiguousarray(x) for name, x in form.tensors.items()}, partial, metadata)
        sync(partial)
        # The tensors of one adapter never lie beside the configuration of another.
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
        partial.replace(path)
    except SafetensorError as error:  # a full disk
        raise CheckpointError(path, f"could not be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    write_json(folder / ADAPTER_CONFIG, form.config())
    return folder


class _PeftForm:
    """The tensors of an adapter by their names, and the fields of its configuration."""

    def __init__(self, adapter: Adapter, config: ModelConfig, where: Path):
        self.adapter, self.where = adapter, where
        self.base = BaseModules(config)
        self.is_tied = config.tie_word_embeddings
        self.tensors: dict[str, np.ndarray] = {}
        self.pairs: dict[str, LowRank] = {}  # by the name of the module or parameter
        self.parameters: list[str] = []
        self.saved: list[str] = []
        self.biases: set[bool] = set()  # True of a module with a pair
        self.token_indices: dict[str, list[int]] = {}
        self._check_shapes(param_shapes(replace(config, tie_word_embeddings=False)))
        self._put_pairs()
        self._put_replaced()
        self._put_rows()

    def config(self) -> dict[str, Any]:
        """The fields of `adapter_config.json`."""
        is_stabilized, alphas = _alphas({name: (pair.rank, pair.scale) for name, pair in self.pairs.items()})
        ranks = {name: pair.rank for name, pair in self.pairs.items()}
        rank, alpha = _commonest(ranks.values(), 8), _commonest(alphas.values(), 8)
        indices: Any = self.token_indices
        if indices.keys() == {self.base.embedding}:
            indices = indices[self.base.embedding]
        some = next(iter(self.pairs.values()), None)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.adapter.base_model,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": {f"^{name}": own for name, own in ranks.items() if own != rank},
            "alpha_pattern": {f"^{name}": own for name, own in alphas.items() if own != alpha},
            "use_rslora": is_stabilized,
            "use_dora": some is not None and some.magnitude is not None,
            "target_modules": sorted(self.pairs.keys() - set(self.parameters)),
            "target_parameters": self.parameters or None,
            "modules_to_save": self.saved or None,
            "trainable_token_indices": indices or None,
            "bias": "none" if not self.biases else "lora_only" if self.biases == {True} else "all",
            "lora_bias": any(pair.bias is not None for pair in self.pairs.values()),
            "lora_dropout": 0.0,
            "fan_in_fan_out": any(
                not module.placements[0].transpose and not module.is_embedding
                for name in self.pairs
                if (module := self.base.modules.get(name))
            ),
            "alora_invocation_tokens": list(self.adapter.invocation_tokens) or None,
        }

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(self.where, text)

    # Pairs.

    def _check_shapes(self, shapes: Mapping[ParamPath, tuple[int, ...]]) -> None:
        """Raises CheckpointError for arrays that do not fit the base. Tables may have more tokens than the base's."""
        own: dict[str, tuple[int, ...]] = {name: array.shape for name, array in self.adapter.replaced.items()}
        for name, rows in self.adapter.token_rows.items():
            if rows.rows.shape[1] != self.base.config.hidden_size:
                raise self._error(f"{len(rows.tokens)} tokens of {name!r} have rows of shape {rows.rows.shape}")
        for name, pair in self.adapter.low_rank.items():
            own[name] = (*pair.b.shape[:-2], pair.a.shape[-2], pair.b.shape[-1])
        for name, shape in own.items():
            path = tuple(name.split("."))
            wanted = shapes.get((*path, "weight")) or shapes.get(path)
            width = {EMBEDDING: slice(1, 2), HEAD: slice(0, 1)}.get(name, slice(None))
            if wanted is None:
                raise self._error(f"the adapter's {name!r} is no parameter of the base model")
            if len(shape) != len(wanted) or shape[width] != wanted[width]:
                raise self._error(
                    f"the adapter's {name!r} is for a parameter of shape {shape}, the base's has {wanted}"
                )

    def _put_pairs(self) -> None:
        left = dict(self.adapter.low_rank)
        for parent, stack in self.base.stacks.items():
            wrapped = [module for module in stack if self._is_in_one(module, left)]
            for depth, module in enumerate(reversed(wrapped)):
                pair = self._joined(module, [left.pop(name_of(placement)) for placement in module.placements])
                self.parameters.append(module.name)
                self.pairs[module.name] = pair
                owner = parent + BASE_LAYER * depth
                count, rank = pair.a.shape[0], pair.rank
                self.tensors[owner + PAIR["a"]] = pair.a.swapaxes(1, 2).reshape(count * rank, -1)
                self.tensors[owner + PAIR["b"]] = pair.b.transpose(2, 1, 0).reshape(-1, rank * count)
        for module in self._modules_of(left):
            pairs = [left[name_of(placement)] for placement in module.placements]
            self._put_pair(module, self._joined(module, [_of_expert(pair, module.number) for pair in pairs]))
        written = {name_of(x) for name in self.pairs if (m := self.base.modules.get(name)) for x in m.placements}
        if lost := sorted(left.keys() - written):
            raise self._error(f"the adapter's {lost[0]!r} is in one tensor of the base with weights that have no pairs")
        if len({pair.magnitude is None for pair in self.pairs.values()}) > 1:
            raise self._error("some pairs have a magnitude, and others have none: PEFT has one use_dora for all")

    def _is_in_one(self, module: Module, left: Mapping[str, LowRank]) -> bool:
        """True for pairs of all experts that PEFT's form of one tensor has, in which they share A."""
        pairs = [left.get(name_of(placement)) for placement in module.placements]
        first = pairs[0]
        if first is None or first.a.ndim != 3:
            return False
        return all(
            pair is not None
            and pair.magnitude is pair.bias is None
            and pair.scale == first.scale
            and (pair.a is first.a or np.array_equal(pair.a, first.a))
            for pair in pairs
        )

    def _modules_of(self, left: Mapping[str, LowRank]) -> Iterator[Module]:
        """The modules all of whose weights have pairs, the first names of each."""
        done: set[tuple[tuple[str, ...], int | None]] = set()
        for module in self.base.modules.values():
            names = tuple(map(name_of, module.placements))
            if (names, module.number) not in done and all(name in left for name in names):
                done.add((names, module.number))
                yield module

    def _joined(self, module: Module, pairs: Sequence[LowRank]) -> LowRank:
        """The pair of a stored weight, of those of our weights in it."""
        first = pairs[0]
        for placement, pair in zip(module.placements, pairs, strict=True):
            if pair.scale != first.scale or not (pair.a is first.a or np.array_equal(pair.a, first.a)):
                one, other = name_of(module.placements[0]), name_of(placement)
                raise self._error(f"{one!r} and {other!r} are one tensor of the base, and have different A or scales")

        def join(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
            rows = [array[..., None, :] for array in arrays if array is not None]
            if not rows:
                return None
            if len(rows) < len(arrays):
                raise self._error(f"{module.name!r} has a magnitude or bias for some of its weights only")
            return join_outputs(module.placements, rows)[0]

        b = join_outputs(module.placements, [pair.b for pair in pairs])
        magnitude, bias = (join([getattr(pair, kind) for pair in pairs]) for kind in ("magnitude", "bias"))
        return LowRank(first.a, b, first.scale, magnitude, bias)

    def _put_pair(self, module: Module, pair: LowRank) -> None:
        self.pairs[module.name] = pair
        endings = EMBEDDING_PAIR if module.is_embedding else PAIR
        arrays = {"a": pair.a.T, "b": pair.b.T, "magnitude": pair.magnitude, "bias": pair.bias}
        for kind, array in arrays.items():
            if array is not None:
                self.tensors[module.name + endings[kind]] = array

    # What stands in place of the base's.

    def _put_replaced(self) -> None:
        left = dict(self.adapter.replaced)
        if self.is_tied and {EMBEDDING, HEAD} <= left.keys() and np.array_equal(left[EMBEDDING].T, left[HEAD]):
            del left[HEAD]
            is_shared = True
        else:
            is_shared = False
        for name, tensor in self.base.tensors.items():
            targets = [".".join(placement.target) for placement in tensor.placements]
            if not targets or tensor.number is not None or not all(target in left for target in targets):
                continue
            arrays = [left.pop(target) for target in targets]
            (array,) = _resized(tensor, arrays) or tensor.group.assemble(arrays).values()
            module, _, kind = name.rpartition(".")
            has_pair = module in self.pairs
            if tensor.is_embedding and self.is_tied and has_pair and not is_shared:
                raise self._error("a tied embedding with a pair is the head's too: both must be replaced by one array")
            self.tensors[f"{module}{BASE_LAYER}.{kind}" if has_pair else name] = array
            if kind == "bias" and f"{module}.weight" not in self.tensors:
                self.biases.add(has_pair)
            elif not has_pair and not (tensor.is_embedding and is_shared):
                self.saved.append(module)
        if left:
            raise self._error(f"the adapter's {sorted(left)[0]!r} is no parameter of the base model")

    def _put_rows(self) -> None:
        rows = dict(self.adapter.token_rows)
        embedding, head = rows.get(EMBEDDING), rows.get(HEAD)
        # PEFT's rows of a tied embedding are the head's too, unless the head has other tokens.
        if self.is_tied and embedding is not None and (head is None or head.tokens == embedding.tokens):
            if head is None or not np.array_equal(head.rows, embedding.rows):
                raise self._error(
                    "rows of a tied embedding are the head's too, which must have the same, or other tokens"
                )
            del rows[HEAD]
        for name, module in ((EMBEDDING, self.base.embedding), (HEAD, self.base.head)):
            if name in rows:
                self.tensors[module + TOKEN_ROWS] = rows[name].rows
                self.token_indices[module] = list(rows[name].tokens)


def _of_expert(pair: LowRank, number: int | None) -> LowRank:
    if number is None:
        return pair
    more = {kind: getattr(pair, kind) for kind in ("magnitude", "bias")}
    own = {kind: None if array is None else array[number] for kind, array in more.items()}
    return LowRank(pair.a[number], pair.b[number], pair.scale, **own)


def _resized(tensor: Module, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray] | None:
    """The stored embedding or head, which may have more tokens than the base's; None for other parameters."""
    if tensor.is_embedding:
        return (arrays[0],)
    return (arrays[0].T,) if tensor.is_head and arrays[0].ndim == 2 else None


def _commonest(values: Any, default: Any) -> Any:
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts else default


def _alphas(pairs: Mapping[str, tuple[int, float]]) -> tuple[bool, dict[str, float]]:
    """True if the scales are alpha / sqrt(r), and the alphas from which a reader computes the same scales again."""
    for is_stabilized in (False, True):
        alphas = {
            name: _alpha(scale, math.sqrt(rank) if is_stabilized else rank) for name, (rank, scale) in pairs.items()
        }
        if all(alpha is not None for alpha in alphas.values()):
            return is_stabilized, {name: alpha for name, alpha in alphas.items() if alpha is not None}
    return False, {name: rank * scale for name, (rank, scale) in pairs.items()}


def _alpha(scale: float, divisor: float) -> float | None:
    """The number that divided by `divisor` is `scale`, a whole one if possible; None if no float does that."""
    near = scale * divisor
    whole = round(near)
    near_by = (math.nextafter(near, direction) for direction in (-math.inf, math.inf))
    return next((alpha for alpha in (whole, near, *near_by) if alpha / divisor == scale), None)
