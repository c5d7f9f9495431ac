"""A layer run alone is the layer in the model, and what is recorded is what goes into its linear layers."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration import capture
from jaxinfer.calibration.capture import KEPT, KeptInputs, LayerProgram, _programs
from jaxinfer.models import bind, collect
from pallas_kernels.flash_attention import flash_attention


def residuals(config, params, tokens):
    """Hidden states before each layer and after the last."""
    found, tap = collect(["embed", *(f"layers.{i}.residual" for i in range(config.num_layers))])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = lambda layer, q, k, v, window: flash_attention(q, k, v, window=window)  # noqa: E731
    bind(config, params)(jnp.asarray(tokens), positions, attend, tap)
    return list(found.values())


@pytest.mark.slow
def test_layers_one_by_one_are_the_model(config, params, held_out):
    states = residuals(config, params, held_out)
    for number in range(config.num_layers):
        found = LayerProgram.of(config, number).forward(params["layers"][str(number)], states[number])
        np.testing.assert_allclose(found, states[number + 1], rtol=1e-5, atol=1e-5)


def test_layers_that_read_the_same_are_found_in_the_order_of_computation(config):
    assert LayerProgram.of(config, 0).groups == (
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        ("attention.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )


def test_layers_of_a_kind_share_their_programs(config):
    first, windowed, last = (LayerProgram.of(config, number) for number in range(3))
    assert first == last != windowed
    assert first == LayerProgram.of(replace(config, num_layers=9, sliding_windows=(None,) * 9), 5)


def test_statistics_are_those_of_the_inputs(config, params, held_out):
    program, layer = LayerProgram.of(config, 0), params["layers"]["0"]
    x = np.asarray(params["embed"])[held_out]
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps)
    rows = (normed * np.asarray(layer["attention_norm"]["weight"])).reshape(-1, config.hidden_size)
    found = program.statistics(layer, [x[:3], x[3:]], program.groups[0])
    np.testing.assert_allclose(found.hessian, rows.T @ rows, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.mean_absolute, np.abs(rows).mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.largest, np.abs(rows).max(0), rtol=1e-5)
    assert int(found.num_tokens) == held_out.size
    down = program.statistics(layer, [x], ("mlp.down_proj",))
    assert down.hessian.shape == (config.intermediate_size,) * 2
    with pytest.raises(ValueError, match="no hidden states"):
        program.statistics(layer, [], program.groups[0])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1])
def test_inputs_that_are_kept_are_not_computed_again(config, params, held_out, number):
    program, layer = LayerProgram.of(config, number), params["layers"][str(number)]
    x = np.asarray(params["embed"])[held_out]
    chunks, kept = [x[:3], x[3:]], KeptInputs()
    for names in program.groups:
        found, wanted = program.statistics(layer, chunks, names, kept), program.statistics(layer, chunks, names)
        np.testing.assert_allclose(found.hessian, wanted.hessian, rtol=1e-5, atol=1e-4)
    for number, chunk in enumerate(chunks):
        given = kept.of_chunk(number)
        assert tuple(given) == KEPT
        out = program.forward(layer, chunk)
        np.testing.assert_allclose(program.forward(layer, chunk, given), out, rtol=1e-5, atol=1e-5)
        assert np.abs(program.forward(layer, chunk, {KEPT[0]: 2 * given[KEPT[0]]}) - out).max() > 1e-2
    compiled = [_programs(program.config).forward.lower(layer, chunk, one).compile().as_text() for one in ({}, given)]
    assert ["cosine" in text for text in compiled] == [True, False]  # of the rotation of queries and keys


def test_kept_inputs_are_bounded(config, params, held_out, monkeypatch):
    program, layer = LayerProgram.of(config, 0), params["layers"]["0"]
    x, kept = np.asarray(params["embed"])[held_out], KeptInputs()
    width = config.num_heads * config.head_dim
    monkeypatch.setattr(capture, "KEPT_BYTES", 4 * width * held_out.size)
    for names in program.groups:
        program.statistics(layer, [x], names, kept)
    assert tuple(kept.of_chunk(0)) == KEPT[:1]
