"""A layer run alone is the layer in the model, and what is recorded is what goes into its linear layers."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.models import bind, collect
from pallas_kernels.flash_attention import flash_attention


def residuals(config, params, tokens):
    """Hidden states before each layer and after the last."""
    found, tap = collect(["embed", *(f"layers.{i}.residual" for i in range(config.num_layers))])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = lambda layer, q, k, v, window: flash_attention(q, k, v, window=window)  # noqa: E731
    bind(config, params)(jnp.asarray(tokens), positions, attend, tap)
    return list(found.values())


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
