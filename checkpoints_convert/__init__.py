"""Files in, (ModelConfig, params) out: Hugging Face, GGUF and native checkpoints, read, converted and verified.

Nothing here unpickles or runs code from a checkpoint, and nothing touches the network except `resolve` of a hub id, and
what is read from a URL that it was given.
"""

from checkpoints_convert.abstract import abstract, abstract_of
from checkpoints_convert.checkpoint import Checkpoint
from checkpoints_convert.convert import ConvertReport, convert
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.formats.kv_scales import LayerKVScales
from checkpoints_convert.hub import resolve
from checkpoints_convert.huggingface.config import huggingface_config, is_head_folder, model_config
from checkpoints_convert.huggingface.families_heads import SpeculatorsForm
from checkpoints_convert.huggingface.save import save_huggingface
from checkpoints_convert.known_hashes import FilesReport, verify_files
from checkpoints_convert.load import (
    HostPlan,
    LoadPlan,
    each_param,
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
    "SpeculatorsForm",
    "TensorDifference",
    "TensorPlan",
    "VerifyReport",
    "abstract",
    "abstract_of",
    "compare_tensors",
    "convert",
    "each_param",
    "huggingface_config",
    "is_head_folder",
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
