"""Tiny checkpoints made without the code under test: names and shapes by hand, files by the safetensors library."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

D, F, V, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 48, 80, 4, 2, 8, 2


@dataclass
class Checkpoint:
    """config.json and tensors in memory; `write` puts them in `directory` as Hugging Face does."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    files: dict[str, str] = field(default_factory=dict)

    def write(self, num_shards: int = 1) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.config))
        for name, text in self.files.items():
            (self.directory / name).write_text(text)
        names = list(self.tensors)
        shards = [names[i::num_shards] for i in range(num_shards)]
        weight_map = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{num_shards:05}.safetensors" if num_shards > 1 else "model.safetensors"
            weight_map |= dict.fromkeys(shard, file)
            save_file({name: self.tensors[name] for name in shard}, self.directory / file, metadata={"format": "pt"})
        if num_shards > 1:
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            (self.directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return self.directory

    @property
    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int8": "I8"}
        return {name: (names[str(array.dtype)], array.shape) for name, array in self.tensors.items()}


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Checkpoint], tmp_path: Path) -> Callable[..., Checkpoint]:
    """checkpoint(architecture, dtype=, tied=, name="source", seed=, **config): in the directory of the test."""

    def make(architecture: str = "LlamaForCausalLM", *, name: str = "source", **options: Any) -> Checkpoint:
        return make_checkpoint(tmp_path / name, architecture, **options)

    return make


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Checkpoint]:
    """make_checkpoint(directory, architecture, dtype="float32", tied=False, seed=0, **config)."""

    def make(
        directory: Path,
        architecture: str = "LlamaForCausalLM",
        *,
        dtype: str = "float32",
        tied: bool = False,
        seed: int = 0,
        **changes: Any,
    ) -> Checkpoint:
        config = {
            "architectures": [architecture],
            "vocab_size": V,
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
            "torch_dtype": dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
        random = np.random.default_rng(seed)
        numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        tensors = {
            name: (random.standard_normal(shape) * 0.1).astype(numpy_dtype)
            for name, shape in _tensor_shapes(architecture, tied)
        }
        return Checkpoint(directory, config, tensors)

    return make


def _tensor_shapes(architecture: str, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (V, D)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (D,)
        for name, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (width * HEAD_DIM, D)
            if architecture == "Qwen2ForCausalLM":
                yield f"{prefix}.self_attn.{name}_proj.bias", (width * HEAD_DIM,)
            if architecture == "Qwen3ForCausalLM" and name != "v":
                yield f"{prefix}.self_attn.{name}_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.o_proj.weight", (D, HEADS * HEAD_DIM)
        yield f"{prefix}.post_attention_layernorm.weight", (D,)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (F, D)
        yield f"{prefix}.mlp.down_proj.weight", (D, F)
    yield "model.norm.weight", (D,)
    if not tied:
        yield "lm_head.weight", (V, D)
