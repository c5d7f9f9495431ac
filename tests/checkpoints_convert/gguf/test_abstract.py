"""The shapes of a GGUF file's parameters, from its header."""

import jax
import numpy as np
import pytest

from checkpoints_convert import abstract, load
from checkpoints_convert.gguf.file import GGUFFile
from tests.checkpoints_convert.gguf.gguf_models import metadata_of
from tests.checkpoints_convert.gguf.gguf_writer import write
from tests.checkpoints_convert.gguf.test_source import permuted, quantized, wide  # noqa: F401


def shapes(params):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), params)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "requantize"), [("Q4_K", None), ("Q8_0", None), ("Q6_K", "int8"), ("Q5_1", "dense")])
def test_shapes_are_those_of_the_loaded_file(wide, kind, requantize, tmp_path, monkeypatch):  # noqa: F811
    made = wide()
    tensors, _ = quantized(made, kind, np.random.default_rng(1))
    file = write(tmp_path / "model.gguf", metadata_of(made.config), permuted(made, tensors))
    config, params = load(file, requantize=requantize)
    monkeypatch.setattr(GGUFFile, "read_into", None)
    found_config, found = abstract(file, requantize=requantize)
    assert found_config == config
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert shapes(found) == shapes(params)
