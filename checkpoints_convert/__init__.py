"""Files in, (ModelConfig, params) out: Hugging Face, GGUF and native checkpoints, read, converted and verified.

Nothing here unpickles or runs code from a checkpoint, and nothing touches the network except `resolve` of a hub id, and
what is read from a URL that it was given.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints_convert import files
from checkpoints_convert.abstract import abstract, abstract_of
from checkpoints_convert.checkpoint import Checkpoint
from checkpoints_convert.convert import ConvertReport, convert
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.formats import LayerKVScales
from checkpoints_convert.gguf.index import GGUFIndex, find_gguf
from checkpoints_convert.gguf.tokenizer import end_token_ids, token_id
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.config import huggingface_config, model_config
from checkpoints_convert.huggingface.save import save_huggingface
from checkpoints_convert.known_hashes import FilesReport, verify_files
from checkpoints_convert.load import (
    HostPlan,
    LoadPlan,
    kv_scales,
    load,
    load_params,
    load_plan,
    open_checkpoint,
    tokenizer_files,
)
from checkpoints_convert.manifest import verify_manifest
from checkpoints_convert.plan import QuantizedPlan, TensorPlan, plan
from checkpoints_convert.verify import TensorDifference, VerifyReport, compare_tensors, verify_against

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConvertReport",
    "FilesReport",
    "HostPlan",
    "LayerKVScales",
    "LoadPlan",
    "QuantizedPlan",
    "TensorDifference",
    "TensorPlan",
    "VerifyReport",
    "abstract",
    "abstract_of",
    "compare_tensors",
    "convert",
    "huggingface_config",
    "kv_scales",
    "load",
    "load_params",
    "load_plan",
    "model_config",
    "open_checkpoint",
    "plan",
    "resolve",
    "save_huggingface",
    "tokenizer_files",
    "verify_against",
    "verify_files",
    "verify_manifest",
]


def __getattr__(name: str) -> Callable[[str | Path], Any]:
    """Functions of a path that are attributes of an open checkpoint, deprecated."""
    if name not in ("bos_token_id", "eos_token_ids", "generation_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"checkpoints_convert.{name}(path) is deprecated: use open_checkpoint(path).{name}",
        DeprecationWarning,
        stacklevel=2,
    )

    def read(path: str | Path) -> Any:
        if (file := find_gguf(Path(path))) is None:
            return getattr(files, name)(path)
        with GGUFIndex(file) as index:
            return {
                "bos_token_id": lambda: token_id(index, "bos_token_id"),
                "eos_token_ids": lambda: end_token_ids(index),
                "generation_config": dict,
            }[name]()

    return read
