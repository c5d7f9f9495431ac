"""Checkpoints of small models with recurrent layers, of random weights and with a tokenizer of bytes."""

from pathlib import Path
from shutil import copyfile

import numpy as np

from tests.checkpoints_convert.family_files import read
from tests.cli.conftest import write_checkpoint

# A gated delta net, Mamba 2, and a short convolution, each beside attention.
FAMILIES = ("qwen3_5", "granite_hybrid_dense", "lfm2")


def write(family: str, directory: Path, scales: dict[str, float] | None = None) -> Path:
    """A checkpoint whose greedy answers vary, in a new folder of that directory; with scales of the cache by name."""
    files, random = read(family), np.random.default_rng(0)
    files.config["eos_token_id"] = None
    for name, tensor in files.tensors.items():
        if tensor.ndim == 1:
            files.tensors[name] = random.uniform(0.5, 1.5, tensor.shape).astype(np.float32)
        else:
            files.tensors[name] = random.normal(0, 2 / np.sqrt(tensor.shape[-1]), tensor.shape).astype(np.float32)
    files.tensors |= {name: np.array([scale], np.float32) for name, scale in (scales or {}).items()}
    path = files.write(directory / family)
    other = write_checkpoint(directory / f"tokenizer of {family}")
    copyfile(other / "tokenizer.json", path / "tokenizer.json")
    return path
