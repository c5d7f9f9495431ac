"""Layers that stay in a checkpoint's files change no token, and take the memory of a few layers, not of the model."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import host_layers
from jaxinfer.models.disk_layers import DISK_LAYERS, DiskLayers, LayerReader
from jaxinfer.quantization.tree import num_bytes
from tests.checkpoints_convert.gguf.gguf_models import write_random_llama
from tests.pallas_kernels.quick import quick
from tests.tiny import OPTIONS

ROOT = Path(__file__).parents[2]
# The third is longer than a chunk; together they are a batch.
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [number % 97 for number in range(45)]]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=10, temperature=0.8, seed=3),
    SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """GGUF files of random weights, by the type of their blocks."""
    folder = tmp_path_factory.mktemp("disk")
    return lambda kind: write_random_llama(folder / f"{kind}.gguf", kind)


def answers(path, **options):
    with LLM(path, **OPTIONS, **options) as llm:
        found = [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        return [one.token_ids for one in found], llm.fingerprint(), llm.engine.spec, str(llm.explain())


@pytest.mark.parametrize("kind", quick(["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"], "Q4_K"))
def test_the_tokens_are_those_of_loaded_weights(path_of, kind):
    path = path_of(kind)
    expected, fingerprint, whole, _ = answers(path)
    found, same, spec, text = answers(path, offload="disk")
    assert len({tuple(one) for one in expected}) == 3
    assert all(len(set(one)) > 4 for one in expected)  # the check could fail: answers vary
    assert (found, same) == (expected, fingerprint)
    disk = spec.params[DISK_LAYERS]
    assert disk.num_bytes == sum(
        num_bytes(matrix) for layer in whole.params["layers"].values() for matrix in _matrices(layer)
    ) or kind != "Q4_K"
    assert max(leaf.ndim for leaf in jax.tree.leaves(spec.params["layers"])) == 1
    assert "layers on the disk        4 of 4" in text
    assert f"bytes arriving in a step  {disk.num_bytes:,}" in text


def _matrices(layer):
    return [leaf for leaf in jax.tree.leaves(host_layers.split(layer)[1])]
