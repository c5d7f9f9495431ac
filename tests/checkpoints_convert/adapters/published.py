"""Adapters in PEFT's form for tiny base models, and what they make of a base's published tensors, in NumPy.

Written from PEFT's documentation of its formats and from the papers' formulas, in the names and shapes of published
tensors [out, in]: none of our names, shapes or rules occur.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import checkpoints_convert
from jaxinfer.models import ModelConfig
from tests.checkpoints_convert.family_files import Files, flat, one_by_one, read

PREFIX = "base_model.model."


def base_files(name: str) -> Files:
    """A tiny model of a family, with random weights."""
    apart = name == "mixtral_apart"
    files = read("mixtral" if apart else name)
    files = one_by_one(files) if apart else files
    if name.startswith("gemma"):  # its embeddings are tied, as in repositories
        files.config["tie_word_embeddings"] = True
        del files.tensors["lm_head.weight"]
    random = np.random.default_rng(7)
    tensors = {key: random.normal(0, 0.1, x.shape).astype(np.float32) for key, x in files.tensors.items()}
    return Files(files.config, tensors)


@cache
def base_config(name: str) -> ModelConfig:
    return checkpoints_convert.model_config(base_files(name).config)


def loaded(files: Files, folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Configuration and parameters by name, as host arrays."""
    config, params = checkpoints_convert.load(files.write(folder), progress=False)
    return config, flat(params)


@dataclass
class PeftFolder:
    """`adapter_config.json` and tensors, under the names without the prefix."""

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **self.config}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {PREFIX + name: np.ascontiguousarray(x) for name, x in self.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata=self.metadata)
        return folder

    def add(self, module: str, inputs: int, outputs: int, rank: int = 4, *, dora: bool = False, seed: int = 0) -> None:
        """Adds the pair of a Linear of those sizes."""
        random = np.random.default_rng([seed, *module.encode()])
        self.tensors[f"{module}.lora_A.weight"] = random.standard_normal((rank, inputs)).astype(np.float32)
        self.tensors[f"{module}.lora_B.weight"] = random.standard_normal((outputs, rank)).astype(np.float32)
        if dora:
            self.tensors[f"{module}.lora_magnitude_vector"] = random.uniform(1, 2, outputs).astype(np.float32)


def change(folder: PeftFolder, module: str, weight: np.ndarray, scale: float) -> np.ndarray:
    """W + scale B A, or m (W + scale B A) / |W + scale B A| with the lengths of the rows of [out, in] (DoRA)."""
    a, b = (folder.tensors[f"{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    new = weight + scale * b @ a
    magnitude = folder.tensors.get(f"{module}.lora_magnitude_vector")
    if magnitude is not None:
        new *= magnitude[:, None] / np.sqrt((new**2).sum(axis=1, keepdims=True))
    return new


def linears(files: Files, *ends: str) -> list[str]:
    """Modules with a weight of two axes whose names have these ends."""
    names = [name.removesuffix(".weight") for name, x in files.tensors.items() if x.ndim == 2]
    return [name for name in names if name.endswith(ends)]


def plain(name: str, *ends: str, dora: bool = False, **config: Any) -> tuple[Files, PeftFolder]:
    """A base and an adapter of its Linears with these ends."""
    files = base_files(name)
    folder = PeftFolder({"target_modules": list(ends), "use_dora": dora, **config})
    for module in linears(files, *ends):
        outputs, inputs = files.tensors[f"{module}.weight"].shape
        folder.add(module, inputs, outputs, dora=dora)
    return files, folder
