"""Facts of an adapter's folder from its configuration and the header of its tensors, for people; no base is needed."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.adapters.config import MAX_CONFIG_BYTES, AdapterConfig, read_config
from checkpoints_convert.adapters.read import (
    BASE_LAYER,
    KINDS,
    MAX_HEADER_BYTES,
    PREFIX,
    TOKEN_ROWS,
    check_files,
)
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, read_json
from checkpoints_convert.safetensors_files import SafetensorsFile, TensorEntry

_ENDINGS = (*KINDS, TOKEN_ROWS)
_PARTS = {"magnitude": "dora", "bias": "bias"}  # by the kind of a pair's tensor


def is_adapter(folder: Path) -> bool:
    """True for the folder of an adapter, which holds no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).exists()


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Facts as JSON values. Under "refused" is, one sentence each, what keeps every base from serving or merging it.

    Parts are told by the names of tensors, as `adapter_parts` names them: without the base, a module named otherwise
    than usual is taken for a linear layer. Raises CheckpointError for files that cannot be read as JSON and
    safetensors.
    """
    data = read_json(folder / ADAPTER_CONFIG, unique_keys=True, max_bytes=MAX_CONFIG_BYTES)
    refused: list[str] = []
    settings = None
    try:
        settings = read_config(folder / ADAPTER_CONFIG)
    except CheckpointError as error:
        refused += error.problems
    tensors: Mapping[str, TensorEntry] = {}
    try:
        check_files(folder)
    except CheckpointError as error:
        refused += (f"{ADAPTER_WEIGHTS}: {problem}" for problem in error.problems)
    else:
        with SafetensorsFile(folder / ADAPTER_WEIGHTS, max_header_bytes=MAX_HEADER_BYTES) as file:
            tensors = file.tensors
    by_name = {name.removeprefix(PREFIX): entry for name, entry in tensors.items()}
    modules = {_module(name) for name in by_name}
    return {
        "type": data.get("peft_type"),
        "base model": data.get("base_model_name_or_path") or None,
        **_ranks(data, settings, modules),
        "modules": dict(sorted(Counter(name.rpartition(".")[2] for name in modules).items())),
        "parts": _parts(by_name),
        "invocation tokens": data.get("alora_invocation_tokens") or [],
        "tensors": len(tensors),
        "tensor bytes": sum(entry.end - entry.begin for entry in tensors.values()),
        "dtype": ", ".join(sorted({entry.dtype for entry in tensors.values()})) or None,
        "refused": refused,
    }


def _ranks(data: Mapping[str, Any], settings: AdapterConfig | None, modules: set[str]) -> dict[str, Any]:
    """The rank and alpha of the configuration, and the largest and smallest rank and scale of its modules."""
    if settings is None:
        return {"rank": data.get("r"), "alpha": data.get("lora_alpha"), "scales": []}
    pairs = {settings.rank_and_scale(module) for module in modules}
    return {
        "rank": max((rank for rank, _ in pairs), default=settings.rank),
        "alpha": settings.alpha,
        "scales": sorted({scale for _, scale in pairs}),
    }


def _module(name: str) -> str:
    """The module, or the parameter of experts, that a tensor changes."""
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
    module = name.rpartition(".")[0] if ending is None else name.removesuffix(ending)
    while module.endswith(BASE_LAYER):
        module = module.removesuffix(BASE_LAYER)
    return module


def _parts(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Names of `adapter_parts` by those of tensors; "whole NAME" is a saved module that has no such name."""
    parts: set[str] = set()
    num_tokens = 0
    for name, entry in tensors.items():
        last = _module(name).rpartition(".")[2]
        is_head = last in ("lm_head", "embed_out")
        table = "lm_head" if is_head else "embed" if "embed" in last or last == "wte" else None
        kind = next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)
        if name.endswith(TOKEN_ROWS):
            num_tokens = max(num_tokens, *entry.shape[:1])
        elif kind is not None:
            parts |= {part for part in (table, "experts" if ".experts" in name else None, _PARTS.get(kind)) if part}
        elif table is not None:
            parts.add(f"saved_{table}")
        else:
            parts.add("bias" if name.endswith(".bias") else f"whole {last}")
    return [*sorted(parts), *([f"tokens:{num_tokens}"] if num_tokens else [])]
