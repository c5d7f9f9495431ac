"""LoRA adapters in PEFT's form: read for a base model, written, and merged into its parameters."""

from checkpoints_convert.adapters.checkpoint import MergedCheckpoint, open_merged
from checkpoints_convert.adapters.facts import adapter_facts, is_adapter
from checkpoints_convert.adapters.merge import merged
from checkpoints_convert.adapters.read import read_adapter
from checkpoints_convert.adapters.save import save_adapter
from jaxinfer.models.adapter import Adapter, LowRank, TokenRows

__all__ = [
    "Adapter",
    "LowRank",
    "MergedCheckpoint",
    "TokenRows",
    "adapter_facts",
    "is_adapter",
    "merged",
    "open_merged",
    "read_adapter",
    "save_adapter",
]
