"""Checkpoints with the names, shapes and configurations that Transformers gives each family, read off the golden files
of tests/oracle; their weights are numbers that tell every value from every other, so that a wrong index shows."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoints_convert.huggingface.family import Family

GOLDEN = sorted((Path(__file__).parent.parent / "oracle" / "golden" / "families").glob("*.safetensors"))


@dataclass
class Files:
    """A checkpoint in memory."""

    config: dict
    tensors: dict[str, np.ndarray] = field(repr=False)

    def write(self, directory: Path, shards: list[list[str]] | None = None) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        shards = [list(self.tensors)] if shards is None else shards
        weight_map = {}
        for number, names in enumerate(shards, start=1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys(names, file)
            save_file({name: self.tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        if len(shards) > 1:
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory

    def renamed(self, rename) -> "Files":
        return replace(self, tensors={rename(name): tensor for name, tensor in self.tensors.items()})


def read(name: str, kind: str | None = None) -> Files:
    with safe_open(next(path for path in GOLDEN if path.stem == name), "numpy") as file:
        made = json.loads(file.metadata()["made"])
    kind = kind or next(iter(made["shapes"]))
    tensors, first = {}, 1
    for tensor, shape in made["shapes"][kind].items():
        size = math.prod(shape)
        # Integers below 2**24 are exact in float32, and each occurs once.
        tensors[tensor] = np.arange(first, first + size, dtype=np.float32).reshape(shape)
        first += size
    assert first < 2**24
    return Files(made["configs"][kind], tensors)


def one_by_one(files: Files) -> Files:
    """Mixtral's experts as its repository has them: a tensor for each matrix of each."""
    tensors = {}
    for name, array in files.tensors.items():
        if "experts" not in name:
            tensors[name] = array
            continue
        prefix = name.replace("mlp.experts", "block_sparse_moe.experts").rsplit(".", 1)[0]
        for number, expert in enumerate(array):
            halves = {"w2": expert} if "down" in name else dict(zip(("w1", "w3"), np.split(expert, 2), strict=True))
            tensors |= {f"{prefix}.{number}.{key}.weight": part for key, part in halves.items()}
    return Files(files.config, {name.replace("mlp.gate.", "block_sparse_moe.gate."): x for name, x in tensors.items()})


def flat(params) -> dict[str, np.ndarray]:
    return {
        ".".join(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def source_of(family: Family, path: tuple[str, ...]) -> tuple[str, bool]:
    """The name of the tensor of a parameter, and whether it is stored transposed. Raises KeyError if it is fused."""
    wanted = ".".join("{layer}" if key.isdigit() else key for key in path)
    rule = {rule.targets[0]: rule for rule in reversed(family.tensors) if len(rule.targets) == 1}[wanted]
    return rule.source.format(layer=next((key for key in path if key.isdigit()), "")), rule.transpose
