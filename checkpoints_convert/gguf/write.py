"""Writing a GGUF file of a checkpoint, weights rounded to one of ggml's types.

The header has the keys of the model's architecture, as llama.cpp's converter writes them. It is written first and read
back with the reader of this package, over a file of the final size: what GGUF cannot say of a model is an error before
any weight is read. Then one tensor at a time is read, rounded and written.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkpoints_convert.checkpoint import Checkpoint, ParamPath
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.architectures import ARCHITECTURES
from checkpoints_convert.gguf.blocks import TYPE_NAMES, TYPES, BlockType, dequantize
from checkpoints_convert.gguf.checkpoint import plan_tensors, rules
from checkpoints_convert.gguf.config import LLAMA3, huggingface_config, llama3_divisors
from checkpoints_convert.gguf.describe_tokenizer import tokenizer_metadata
from checkpoints_convert.gguf.encode import encode
from checkpoints_convert.gguf.index import SUFFIX, GGUFIndex
from checkpoints_convert.gguf.tokenizer import convert_tokenizer, end_token_ids
from checkpoints_convert.huggingface.config import huggingface_config as config_json
from checkpoints_convert.huggingface.config import model_config
from checkpoints_convert.huggingface.rules import TensorGroup, layout
from checkpoints_convert.staging import check_free_space
from jaxinfer.files import atomic_writer
from jaxinfer.models import ModelConfig

# Architectures of config.json with their name in GGUF; tests compare the logits of each with llama.cpp's.
WRITTEN = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
ALIGNMENT = 32
# Types of a whole file, with llama.cpp's number for `general.file_type` (llama.h, llama_ftype).
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_K": 14}
_NUMBER_OF = {name: number for number, name in TYPE_NAMES.items()}
_VALUES = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_ITEMS = {"float32": 6, "int32": 5}


@dataclass(frozen=True)
class GGUFReport:
    """Attributes:
    num_bytes: of the file. kinds: number of tensors by type.
    errors: relative error (root of the mean square) of each quantized tensor, by name.
    notes: sentences on tensors of another type, and on parts that the file lacks.
    """

    num_bytes: int
    kinds: dict[str, int]
    errors: dict[str, float]
    notes: tuple[str, ...]


def save_gguf(
    source: Checkpoint,
    destination: Path,
    kind: str,
    *,
    importance: Mapping[str, np.ndarray] | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda name: None,
) -> GGUFReport:
    """Writes `destination`, a .gguf file, which appears when it is complete.

    Linear layers' weights are stored as `kind`; embedding and head too, but in Q8_0 where it is a 4-bit one; norms,
    biases and routers in float32. Rows that are no whole blocks of a type get Q8_0 or F16, with a note.

    Args:
      source: of floating-point weights. kind: one of `FILE_TYPES`.
      importance: weights of the rounding error, float32 [inputs] or [experts, inputs], by tensor, as `read_imatrix`
        returns them; for Q4_0 and Q4_K.
      report: called with the name of each tensor that is written.

    Raises CheckpointError for a family or a setting that GGUF cannot express, quantized weights, a destination that
    exists (unless `overwrite`) or has too little space, and importances that do not fit the model.
    """
    if kind not in FILE_TYPES:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(FILE_TYPES)}")
    _check_destination(source, destination, overwrite=overwrite)
    metadata, extra = metadata_of(source.config, source.directory)
    entry = ARCHITECTURES[WRITTEN[source.config.architecture]]
    groups = layout(rules(entry.adds_one), source.config, entry.pairs_neighbours).tensor_groups
    plans, notes = _plan(groups, kind)
    weighted = _check_importance(importance, plans, source.directory)
    shapes = {name: (TYPES["F32"], array.shape) for name, array in extra.items()}
    shapes |= {plan.name: (plan.kind, plan.shape) for plan in plans}
    general = {"general.name": source.directory.name, "general.file_type": FILE_TYPES[kind]}
    offsets, size = _offsets(shapes)
    tokenizer, reason = _tokenizer(source, destination)
    if reason is not None:
        notes.append(f"llama.cpp takes token ids only, no text: {reason}")
    front = header({**metadata, **general, **tokenizer}, shapes, offsets)
    check_free_space(destination, len(front) + size)
    errors: dict[str, float] = {}
    with atomic_writer(destination) as file:
        file.write(front)
        file.truncate(len(front) + size)
        for name, array in extra.items():
            _put(file, len(front) + offsets[name], array)
        file.flush()
        notes += _check_header(Path(file.name), source)
        for plan in plans:
            weights = _read(source, plan.group)
            raw = _encoded(plan, weights, weighted.get(plan.name), destination)
            if plan.kind.is_quantized:
                errors[plan.name] = _error(plan.kind.name, raw, weights)
            _put(file, len(front) + offsets[plan.name], raw)
            report(plan.name)
    kinds = Counter(of_type.name for of_type, _ in shapes.values())
    return GGUFReport(len(front) + size, dict(kinds), errors, tuple(notes))


@dataclass(frozen=True)
class _TensorToWrite:
    name: str
    group: TensorGroup
    kind: BlockType
    shape: tuple[int, ...]


def _check_destination(source: Checkpoint, destination: Path, *, overwrite: bool) -> None:
    if destination.suffix != SUFFIX:
        raise CheckpointError(destination, f"must be a file whose name ends in {SUFFIX}")
    if destination.is_dir():
        raise CheckpointError(destination, "is a directory")
    if destination.exists() and not overwrite:
        raise CheckpointError(destination, "exists: choose another destination, or replace it with --overwrite")
    if not destination.parent.is_dir():
        raise CheckpointError(destination.parent, "is no directory")
    if (tensors := list(source.quantized().values())) and not source.is_dequantized:
        raise CheckpointError(source.directory, f"tensor {tensors[0]!r} is quantized already: use the original")


def _plan(groups: tuple[TensorGroup, ...], kind: str) -> tuple[list[_TensorToWrite], list[str]]:
    """The tensors to write, in order, and notes on those of another type than `kind`."""
    plans, others = [], dict[str, list[str]]()
    for group in groups:
        shape = group.placements[0].stored
        wanted = _wanted(group.placements[0].target, len(shape), kind)
        chosen = next(name for name in (wanted, "Q8_0", "F16") if shape[-1] % TYPES[name].block_size == 0)
        if chosen != wanted:
            others.setdefault(chosen, []).append(f"{group.sources[0]} with rows of {shape[-1]}")
        plans.append(_TensorToWrite(group.sources[0], group, TYPES[chosen], shape))
    notes = [
        f"{len(names)} tensors are {chosen}, since their rows are no whole blocks of {kind}: {names[0]}"
        + (" and others" if len(names) > 1 else "")
        for chosen, names in others.items()
    ]
    return plans, notes


def _wanted(target: ParamPath, num_axes: int, kind: str) -> str:
    if target in (("embed",), ("lm_head",)):
        return "Q8_0" if kind.startswith("Q4") else kind
    is_product = target[-1] == "weight" and target[-2].endswith("_proj")
    return kind if is_product and num_axes > 1 else "F32"


def _check_importance(
    importance: Mapping[str, np.ndarray] | None, plans: list[_TensorToWrite], where: Path
) -> dict[str, np.ndarray]:
    """The weights of the error of each 4-bit tensor, [experts or 1, inputs]. Raises CheckpointError for tensors without
    one, and for shapes that do not fit."""
    if importance is None:
        return {}
    weights, problems = {}, []
    for plan in plans:
        if not plan.kind.name.startswith("Q4"):
            continue
        stacks = math.prod(plan.shape[:-2])
        array = importance.get(plan.name)
        if array is None:
            problems.append(f"the imatrix has no tensor {plan.name!r}")
        elif array.reshape(-1, array.shape[-1]).shape != (stacks, plan.shape[-1]):
            wanted = [stacks, plan.shape[-1]]
            problems.append(f"the imatrix has {list(array.shape)} numbers for {plan.name!r}, not {wanted}")
        else:
            weights[plan.name] = array.reshape(stacks, -1)
    if problems:
        raise CheckpointError(where, *problems)
    return weights


def _tokenizer(source: Checkpoint, destination: Path) -> tuple[dict[str, Any], str | None]:
    files, ends = source.companions(), source.eos_token_ids
    ids = {"bos_token_id": source.bos_token_id}
    ids |= dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False))

    def read_back(keys: dict[str, Any]) -> Any:
        """tokenizer.json as the reader rebuilds it, from a file without tensors."""
        name = {"general.architecture": WRITTEN[source.config.architecture]}
        temporary = destination.with_name(f".{destination.name}.tokenizer.part")
        try:
            temporary.write_bytes(header({**name, **keys}, {}, {}))
            with GGUFIndex(temporary) as index:
                return json.loads(convert_tokenizer(index)["tokenizer.json"])
        finally:
            temporary.unlink(missing_ok=True)

    return tokenizer_metadata(files, source.config.vocab_size, ids, read_back)


def metadata_of(config: ModelConfig, where: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and values, and further tensors in float32. Raises CheckpointError for a family that is not written and for
    a window, which llama.cpp does not apply in these architectures."""
    if config.architecture not in WRITTEN:
        raise CheckpointError(
            where, f"{config.architecture} is not written as GGUF; the architectures that are: {', '.join(WRITTEN)}"
        )
    name, values = WRITTEN[config.architecture], config_json(config)
    if any(window is not None for window in config.sliding_windows):
        raise CheckpointError(where, f"has a sliding window, which llama.cpp's {name!r} does not have")
    head_dim = config.head_dim
    metadata: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(values["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "expert_count": values.get("num_experts") or values.get("num_local_experts"),
        "expert_used_count": values.get("num_experts_per_tok"),
        "expert_feed_forward_length": values.get("moe_intermediate_size"),
    }
    rope, tensors = _rope(values, head_dim, where)
    keyed = {f"{name}.{key}": value for key, value in (metadata | rope).items() if value is not None}
    return {"general.architecture": name, "general.quantization_version": 2, **keyed}, tensors


def _rope(values: Mapping[str, Any], head_dim: int, where: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    theta = float(values.get("rope_theta") or 10000.0)
    metadata: dict[str, Any] = {"rope.freq_base": theta}
    scaling = values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "default")
    if kind == "llama3" and all(scaling[name] == value for name, value in LLAMA3.items()):
        divisors = llama3_divisors(theta, head_dim, float(scaling["factor"]))
        return metadata, {"rope_freqs.weight": divisors.astype(np.float32)}
    if kind in ("linear", "yarn"):
        original = scaling.get("original_max_position_embeddings")
        keys = {"type": kind, "factor": float(scaling["factor"]), "original_context_length": original}
        return metadata | {f"rope.scaling.{name}": value for name, value in keys.items() if value is not None}, {}
    if kind != "default":
        raise CheckpointError(where, f"rope_scaling {scaling} is not written as GGUF")
    return metadata, {}


def _check_header(path: Path, source: Checkpoint) -> list[str]:
    """Raises CheckpointError unless a file without weights is the model's; returns a note on ends that it lacks."""
    with GGUFIndex(path) as index:
        check_reads_back(index, source.config, source.directory)
        plan_tensors(index, ARCHITECTURES[WRITTEN[source.config.architecture]], source.config)
        lost = sorted(set(source.eos_token_ids) - set(end_token_ids(index)))
    return [f"the tokens {lost} end an answer in the source, GGUF has no key for them"] if lost else []


def check_reads_back(index: GGUFIndex, config: ModelConfig, where: Path) -> None:
    """Raises CheckpointError with the differing fields unless `index`, read as a file, gives back `config`. `index`
    needs the tensors' names and shapes only."""
    read_back = model_config(huggingface_config(index), index.path)
    if config.architecture in WRITTEN and WRITTEN.get(read_back.architecture) == WRITTEN[config.architecture]:
        read_back = replace(read_back, architecture=config.architecture)
    read_back = replace(read_back, dtype=config.dtype)
    differing = [
        f"{field.name} {getattr(config, field.name)!r} would be read as {getattr(read_back, field.name)!r}"
        for field in fields(ModelConfig)
        if getattr(read_back, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise CheckpointError(where, *(f"GGUF cannot say it: {difference}" for difference in differing))


def _read(source: Checkpoint, group: TensorGroup) -> np.ndarray:
    """float32 of a stored tensor."""
    arrays = []
    for placement in group.placements:
        leaf = source.read_leaf(placement.target)
        assert isinstance(leaf, np.ndarray)
        arrays.append(leaf.astype(np.float32))
    (array,) = group.assemble(arrays).values()
    return array


def _encoded(plan: _TensorToWrite, array: np.ndarray, importance: np.ndarray | None, where: Path) -> np.ndarray:
    try:
        if importance is None:
            return encode(plan.kind.name, array.reshape(-1, array.shape[-1]))
        stacks = array.reshape(len(importance), -1, array.shape[-1])
        return np.concatenate([encode(plan.kind.name, *pair) for pair in zip(stacks, importance, strict=True)])
    except ValueError as error:
        raise CheckpointError(where, f"tensor {plan.name!r}: {error}") from None


def _error(kind: str, raw: np.ndarray, array: np.ndarray) -> float:
    weights = array.reshape(-1, array.shape[-1])
    norm = float(np.linalg.norm(weights))
    return float(np.linalg.norm(dequantize(kind, raw) - weights)) / norm if norm else 0.0


def _put(file: BinaryIO, position: int, array: np.ndarray) -> None:
    file.seek(position)
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


Shapes = Mapping[str, tuple[BlockType, tuple[int, ...]]]


def _offsets(shapes: Shapes) -> tuple[dict[str, int], int]:
    """The position at which each tensor begins, and the bytes of all of them."""
    offsets, position = {}, 0
    for name, (kind, shape) in shapes.items():
        offsets[name] = position
        size = math.prod(shape) // kind.block_size * kind.block_bytes
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, position


def header(metadata: Mapping[str, Any], shapes: Shapes, offsets: Mapping[str, int]) -> bytes:
    """The bytes of a file before its tensors (ggml, docs/gguf.md, version 3), padded to the alignment."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    for name, (kind, shape) in shapes.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        parts += [_string(name), dims, struct.pack("<IQ", _NUMBER_OF[kind.name], offsets[name])]
    front = b"".join(parts)
    return front + bytes(-len(front) % ALIGNMENT)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A type and a value: a boolean, an integer, a float, a string, or a list of strings or an array of numbers."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _ITEMS[value.dtype.name], value.size) + value.tobytes()
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    number, form = _VALUES[type(value)]
    return struct.pack("<I", number) + struct.pack(form, value)
