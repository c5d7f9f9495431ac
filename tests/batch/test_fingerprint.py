"""A model's fingerprint: other weights have another, other devices have the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM
from jaxinfer.models import ModelConfig, RopeConfig, init_params

# One key-value head, and a width and a vocabulary that two devices do not divide: all are changed to fit a mesh.
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=65,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    max_position_embeddings=64,
)
FORMATS = (None, "int8", "int4-g32", "nf4")


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def fingerprint(model, **options) -> str:
    with LLM(model, max_seqs=1, max_model_len=32, **options) as llm:
        return llm.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantize", ["int4-g32", *(pytest.param(name, marks=pytest.mark.slow) for name in (None, "int8", "nf4"))]
)
def test_a_mesh_has_the_fingerprint_of_one_device(params, quantize):
    options = {} if quantize is None else {"quantize": quantize}
    expected = fingerprint((CONFIG, params), **options)
    assert fingerprint((CONFIG, params), mesh="model=2", **options) == expected
    assert fingerprint((CONFIG, params), mesh="data=2", **options) == expected


@pytest.mark.slow
def test_so_has_a_model_that_was_loaded_onto_one():
    assert fingerprint("demo-draft", mesh="model=2") == fingerprint("demo-draft")


@pytest.mark.slow
def test_formats_differ(params):
    found = [fingerprint((CONFIG, params), **({} if one is None else {"quantize": one})) for one in FORMATS]
    assert len({*found}) == len(FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scales", "zeros", "minima", "codebook", "permutation"])
def test_every_part_of_a_quantized_weight_counts(params, name):
    from jaxinfer.batch.fingerprint import _quantized_samples
    from jaxinfer.quantization import quantize_params
    from jaxinfer.quantization.tree import weights

    tree = quantize_params(params, "nf4" if name == "codebook" else "int8")
    leaf = next(leaf for leaf in weights(tree) if hasattr(leaf, "scheme"))
    present = {
        "scales": leaf.scales,
        "zeros": jnp.zeros(leaf.scales.shape, jnp.int8),
        "minima": jnp.zeros(leaf.scales.shape),
        "codebook": leaf.codebook,
        "permutation": jnp.arange(leaf.shape[-2]),
    }[name]
    one, other = (replace(leaf, **{name: part}) for part in (present, present.at[..., 0].add(1)))
    read = [
        [(*one.array[one.index].tolist(),) for one in _quantized_samples(which, which.shape, (None,) * which.ndim)]
        for which in (one, other)
    ]
    assert read[0] != read[1]


@pytest.mark.slow
def test_room_for_adapters_changes_nothing(params):
    """Those that rows name are compared beside it."""
    assert fingerprint((CONFIG, params), max_adapters=1) == fingerprint((CONFIG, params))
