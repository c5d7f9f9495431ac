"""Routers and products over experts, against the formulas of the papers in NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.models import MoEConfig
from jaxinfer.models.experts import (
    FORMS,
    Experts,
    choose_form,
    gathered_rows,
    most_blocks,
    route,
    run_experts,
    tile_rows,
)
from jaxinfer.models.moe import Router, SparseMoE, clamped_swiglu
from jaxinfer.quantization import QuantizedArray, quantize
from jaxinfer.quantization.packed import pack_weight

T, D, F, E, C = 23, 16, 24, 8, 3
PLAIN = MoEConfig(E, C, F, (0,))
GROUPED = MoEConfig(E, C, F, (0,), num_groups=4, num_chosen_groups=2)
V3 = MoEConfig(E, C, F, (0,), "sigmoid", scale=2.5, num_groups=4, num_chosen_groups=2, group_score="top2_sum",
               has_correction_bias=True)  # fmt: skip
_run = jax.jit(run_experts, static_argnames=("activation", "form", "over"))


def run(x, chosen, weights, experts, *, form=None, **options):
    """`run_experts`, jitted, with stacks that are packed for the form "packed"."""
    if form == "packed":
        pytest.importorskip("numba", reason="kernels for CPUs need Numba")
        gate, up, down = (None if stack is None else pack_weight(stack) for stack in experts[:3])
        experts = experts._replace(gate=gate, up=up, down=down)
    return _run(x, chosen, weights, experts, form=form, **options)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def routed(moe: MoEConfig, logits, correction=None):
    """Chosen experts and their weights, one token at a time, with sets and sorts."""
    chosen, weights = [], []
    for row in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-row)) if moe.scoring.startswith("sigmoid") else softmax(row)
        choice = scores if correction is None else scores + correction
        size = moe.num_experts // moe.num_groups
        groups = [choice[g * size : (g + 1) * size] for g in range(moe.num_groups)]
        value = [sorted(group)[-1] if moe.group_score == "max" else sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(moe.num_groups), key=lambda g: -value[g])[: moe.num_chosen_groups]
        allowed = [e for e in range(moe.num_experts) if e // size in best]
        mine = sorted(allowed, key=lambda e: -choice[e])[: moe.num_experts_per_token]
        found = softmax(row[mine]) if moe.scoring == "softmax_of_chosen" else scores[mine]
        chosen.append(mine)
        weights.append(found / (found.sum() if moe.normalize else 1) * moe.scale)
    return np.array(chosen), np.array(weights)


@pytest.mark.parametrize(
    "moe",
    [
        PLAIN,
        MoEConfig(E, C, F, (0,), normalize=False),
        MoEConfig(E, C, F, (0,), "softmax_of_chosen"),
        GROUPED,
        MoEConfig(E, C, F, (0,), num_groups=4, num_chosen_groups=2, normalize=False, scale=16.0),
        V3,
        MoEConfig(E, C, F, (0,), "sigmoid_of_chosen", normalize=False),
        MoEConfig(E, C, F, (0,), has_correction_bias=True),
        MoEConfig(E, C, F, (0,), num_groups=4, num_chosen_groups=2, group_score="top2_sum"),
    ],
    ids=["mixtral", "qwen2-moe", "gpt-oss", "grouped", "deepseek-v2", "deepseek-v3", "llama4", "ernie", "mistral4"],
)
def test_routing_is_that_of_the_formula(moe):
    logits = 2 * random(200, E)
    correction = random(E) if moe.has_correction_bias else None
    chosen, weights = route(moe, jnp.asarray(logits), None if correction is None else jnp.asarray(correction))
    expected_chosen, expected_weights = routed(moe, logits, correction)
    np.testing.assert_array_equal(chosen, expected_chosen)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


def test_sparsemixer_weighs_each_expert_among_those_near_it():
    moe = MoEConfig(E, 2, F, (0,), "sparsemixer", jitter=0.1)
    logits = np.array(
        [[5.0, 4.5, 4.4, 1.0, -9.0, 0.0, 3.0, 2.0], [1.0, 0.2, -3.0, 0.1, 0.0, -0.5, 0.7, 0.3]], np.float32
    )
    chosen, weights = route(moe, jnp.asarray(logits))
    assert chosen.tolist() == [[0, 1], [0, 6]]
    first = np.exp([5.0, 4.5, 4.4])  # 4.4 is within 0.2 * 5 of 5, 3 is not
    second = np.exp([4.5, 4.4])
    np.testing.assert_allclose(weights[0], [first[0] / first.sum(), second[0] / second.sum()], rtol=1e-6)
    np.testing.assert_allclose(weights[1], [1, 1], rtol=1e-6)


def test_sparsemixer_compares_with_the_larger_size_of_two_logits():
    """-1.1 is 1.4 below 0.3, more than 0.2 times their larger size, and -8 is 7 below -1, less than 2 times 8."""
    near = MoEConfig(3, 2, F, (0,), "sparsemixer", jitter=0.5)
    _, weights = route(near, jnp.array([[-1.0, -8.0, -9.5]]))
    others = np.exp([-8.0, -9.5])
    every = np.exp([-1.0, -8.0, -9.5])
    np.testing.assert_allclose(weights[0], [every[0] / every.sum(), others[0] / others.sum()], rtol=1e-6)
    with pytest.raises(ValueError, match="sparsemixer chooses 2 experts, not num_experts_per_token=3"):
        MoEConfig(E, 3, F, (0,), "sparsemixer")


def test_scores_may_scale_what_experts_read():
    moe = MoEConfig(E, C, F, (0,), "sigmoid_of_chosen", scales_input=True)
    layer = SparseMoE(moe, D, jax.nn.silu, shared=None, dtype="float32", rngs=nnx.Rngs(0))
    x = random(T, D)
    chosen, weights = (np.asarray(each) for each in layer.router(jnp.asarray(x)))
    experts, expected = layer.experts(), np.zeros((T, D))
    for choice in range(C):
        alone = chosen[:, choice : choice + 1], np.ones((T, 1))
        expected += expected_output(x * weights[:, choice : choice + 1], *alone, experts, silu_gate)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=2e-6)
    plain = expected_output(x, chosen, weights, experts, silu_gate)
    assert np.abs(plain - expected).max() > 1e-5


def test_a_correction_bias_moves_the_choice_and_not_the_weights():
    logits = jnp.asarray(random(50, E))
    moe = MoEConfig(E, 2, F, (0,), "sigmoid", normalize=False, has_correction_bias=True)
    chosen, weights = route(moe, logits, jnp.zeros(E).at[5].set(100.0))
    assert (chosen[:, 0] == 5).all()
    np.testing.assert_allclose(weights[:, 0], jax.nn.sigmoid(logits[:, 5]), rtol=1e-6)


def test_the_router_computes_in_float32_whatever_the_weights_are():
    # Scores of bfloat16 products would tie: 256 and 257 are one number there.
    router = Router(MoEConfig(2, 1, F, (0,)), 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    router.weight[...] = jnp.array([[256, 256], [0, 1]], jnp.bfloat16)
    chosen, _ = router(jnp.array([[1, 1]], jnp.bfloat16))
    assert chosen.tolist() == [[1]]


def stacks(seed=0, bias=False):
    weights = [random(E, *shape, seed=seed) / 4 for shape in ((D, F), (D, F), (F, D))]
    weights[1] = weights[1] + 0.1  # gates and ups differ
    biases = [random(E, width, seed=seed + 7) for width in (F, F, D)] if bias else [None] * 3
    return Experts(*(None if a is None else jnp.asarray(a) for a in (*weights, *biases)))


def expected_output(x, chosen, weights, experts, activation):
    """Token by token, expert by expert, in float64."""
    gate, up, down, *biases = (None if a is None else np.asarray(a, np.float64) for a in experts)
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            g, u = row @ gate[expert], row @ up[expert]
            if biases[0] is not None:
                g, u = g + biases[0][expert], u + biases[1][expert]
            inner = np.asarray(activation(g, u), np.float64) @ down[expert]
            out[token] += weight * (inner if biases[2] is None else inner + biases[2][expert])
    return out


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def silu_gate(g, u):
    return g / (1 + np.exp(-g)) * u


def clamped(g, u):
    g, u = np.minimum(g, 0.5), np.clip(u, -0.5, 0.5)
    return (u + 1) * g / (1 + np.exp(-1.702 * g))


ACTIVATIONS = {"swiglu": (swiglu, silu_gate), "clamped": (partial(clamped_swiglu, 0.5, 1.702), clamped)}


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_experts_are_those_of_the_formula(form, kind):
    ours, theirs = ACTIVATIONS[kind]
    experts, x = stacks(bias=kind == "clamped"), jnp.asarray(random(T, D))
    chosen, weights = route(PLAIN, jnp.asarray(2 * random(T, E)))
    found = run(x, chosen, weights, experts, activation=ours, form=form)
    expected = expected_output(x, np.asarray(chosen), np.asarray(weights), experts, theirs)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_may_go_to_the_same_experts(form):
    """Dropless: no expert has a limit."""
    experts, x = stacks(), jnp.asarray(random(T, D))
    chosen = jnp.broadcast_to(jnp.array([6, 1, 2]), (T, C))
    weights = jnp.asarray(abs(random(T, C)))
    found = run(x, chosen, weights, experts, activation=swiglu, form=form)
    expected = expected_output(x, np.asarray(chosen), np.asarray(weights), experts, silu_gate)
    np.testing.assert_allclose(found, expected, atol=4e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_whatever_its_neighbours_route(form):
    experts = stacks()
    row, route_of_row = random(1, D), np.array([[7, 0, 3]])
    found = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x, place = random(T, D, seed=seed), rng.integers(T)
        chosen = np.argsort(rng.random((T, E)), axis=1)[:, :C]
        if seed % 3 == 0:
            chosen[:] = route_of_row  # all of them
        x[place], chosen[place] = row, route_of_row
        weights = jnp.full((T, C), 1 / 3)
        out = run(jnp.asarray(x), jnp.asarray(chosen, jnp.int32), weights, experts, activation=swiglu, form=form)
        found.add(np.asarray(out[place]).tobytes())
    assert len(found) == 1


# Of "ragged" only on a TPU: XLA:CPU multiplies every row by every expert, and 0 * NaN is NaN.
@pytest.mark.parametrize("form", ["tiles", "dense", "gathered", "packed"])
def test_what_is_not_finite_stays_with_its_token(form):
    """A NaN in one token, an infinity in the result of an expert that another token does not use."""
    experts = stacks()
    experts = experts._replace(up=experts.up.at[4].set(jnp.inf))
    x = random(T, D)
    x[3] = np.nan
    chosen = jnp.broadcast_to(jnp.array([0, 1, 2]), (T, C)).at[8].set(jnp.array([0, 4, 2]))
    out = np.asarray(run(jnp.asarray(x), chosen, jnp.full((T, C), 0.5), experts, activation=swiglu, form=form))
    bad = ~np.isfinite(out).all(1)
    assert bad.nonzero()[0].tolist() == [3, 8]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "recipe", ["int8", "int4-g32-asym", pytest.param("nf4-dq", marks=pytest.mark.slow), "mxfp4", "fp8-block"]
)
def test_quantized_experts_are_their_dequantized_selves(recipe):
    plain, x = stacks(), jnp.asarray(random(T, D))
    stack = Experts(*(quantize(weight, recipe) for weight in plain[:3]))
    assert all(isinstance(leaf, QuantizedArray) for leaf in stack[:3])
    chosen, weights = route(PLAIN, jnp.asarray(random(T, E)))
    dequantized = Experts(*(leaf.dequantize() for leaf in stack[:3]))
    expected = expected_output(x, np.asarray(chosen), np.asarray(weights), dequantized, silu_gate)
    for form in ("tiles", "gathered"):
        found = run(x, chosen, weights, stack, activation=swiglu, form=form)
        np.testing.assert_allclose(found, expected, atol=3e-6)
    assert np.abs(expected - expected_output(x, np.asarray(chosen), np.asarray(weights), plain, silu_gate)).max() > 1e-4


@pytest.mark.matrix("w8a8-True", "nf4-dq-False")
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-fp8-block", "nf4-dq", "int4-g32-asym", "fp8"])
def test_gathered_experts_equal_those_of_a_loop(recipe, is_permuted):
    """Rounded activations, scales of scales and permuted inputs among them. A token without experts, as on a device
    that has others, gets zeros, and so do all."""
    stack = Experts(*(quantize(weight, recipe) for weight in stacks()[:3]))
    if is_permuted:
        orders = jnp.stack([jax.random.permutation(jax.random.key(e), D) for e in range(E)])
        stack = stack._replace(up=replace(stack.up, permutation=orders))
    x, (chosen, weights) = jnp.asarray(random(T, D)), route(PLAIN, jnp.asarray(random(T, E)))
    chosen, weights = chosen.at[2].set(E), weights.at[2].set(0)
    found, expected = (run_experts(x, chosen, weights, stack, swiglu, form=form) for form in ("gathered", "tiles"))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not np.asarray(found[2]).any()
    none = run_experts(x, jnp.full_like(chosen, E), jnp.zeros_like(weights), stack, swiglu, form="gathered")
    assert not np.asarray(none).any()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 10**6))
def test_blocks_of_experts_are_never_more_than_planned(num_tokens, num_experts, num_choices, seed):
    num_choices, size = min(num_choices, num_experts), gathered_rows(num_tokens)
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((num_tokens, num_experts)) ** rng.integers(1, 9), axis=1)[:, :num_choices]
    counts = np.bincount(chosen.reshape(-1), minlength=num_experts)
    assert size <= 8
    assert np.ceil(counts / size).sum() <= most_blocks(chosen.size, num_experts, size)
    assert most_blocks(num_choices, num_experts, gathered_rows(1)) == num_choices  # one token: its experts, no more


def test_quantized_experts_have_one_form():
    stack = Experts(*(quantize(weight, "int8") for weight in stacks()[:3]))
    with pytest.raises(NotImplementedError, match="'ragged' does not read quantized experts"):
        run_experts(jnp.ones((2, D)), jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)), stack, swiglu, form="ragged")
    with pytest.raises(ValueError, match="form='sparse'"):
        run_experts(jnp.ones((2, D)), jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)), stacks(), swiglu, form="sparse")


def test_forms_by_platform_and_number_of_tokens():
    assert choose_form("cpu", 1, 8, 128, False) == choose_form("gpu", 1, 8, 128, False) == "tiles"
    assert choose_form("tpu", 1, 8, 128, False) == "ragged"
    assert choose_form("tpu", 1, 8, 128, True) == "tiles"
    assert choose_form("gpu", 64, 8, 128, False) == "dense"
    assert choose_form("gpu", 4096, 8, 128, False) == "tiles"
    assert choose_form("gpu", 1, 8, 128, True) == choose_form("gpu", 64, 8, 128, True) == "gathered"
    assert choose_form("gpu", 1, 8, 128, True, can_gather=False) == choose_form("gpu", 512, 8, 128, True) == "tiles"
    assert [tile_rows(rows, 128) for rows in (1, 2048, 4096, 10**6)] == [8, 16, 32, 128]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer"),
        ({"num_groups": 3}, "8 experts cannot form 3 groups"),
        ({"num_groups": 4, "num_chosen_groups": 5}, "num_chosen_groups=5 of only 4"),
        ({"num_groups": 8}, "num_experts_per_token=3 of only 1"),
        ({"num_groups": 8, "num_chosen_groups": 8, "group_score": "top2_sum"}, "no best two"),
        ({"scoring": "tanh"}, "scoring='tanh'"),
        ({"has_shared_gate": True}, "shared_size is 0"),
        ({"clamp": -1.0}, "clamp must be positive"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"num_experts": E, "num_experts_per_token": C, "expert_size": F, "layers": (0,), **options})


@pytest.mark.parametrize("is_gated", [True, False])
def test_blocks_of_experts_have_the_gradients_of_one_product(is_gated):
    """The loop over blocks has a gradient of its own: of x, the weights of the choices, all stacks and biases."""
    x, weights = random(T, D), np.abs(random(T, C, seed=1))
    chosen = np.argsort(random(T, E - 1, seed=2), axis=-1)[:, :C].astype(np.int32)  # the last expert has no token
    stacks = (random(E, D, F, seed=3) if is_gated else None, random(E, D, F, seed=4), random(E, F, D, seed=5))
    biases = (random(E, F, seed=6) if is_gated else None, random(E, F, seed=7), random(E, D, seed=8))

    def activation(gate, up):
        return jax.nn.silu(up) if gate is None else jax.nn.silu(gate) * up

    def loss(form, x, weights, experts):
        return jnp.sum(jnp.sin(run_experts(x, chosen, weights, experts, activation, form=form)))

    gradients = (jax.jit(jax.grad(partial(loss, form), (0, 1, 2))) for form in ("tiles", "ragged"))
    found, expected = (gradient(x, weights, Experts(*stacks, *biases)) for gradient in gradients)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_a_tap_may_replace_the_experts(scoring):
    """Their weights are then those of the experts that it gives."""
    router = Router(replace(PLAIN, scoring=scoring), D, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x, others = random(T, D), np.argsort(random(T, E, seed=2), axis=-1)[:, :C].astype(np.int32)
    tapped = {}
    chosen, own_weights = router(x, lambda name, chosen: tapped.update({name: chosen}))
    np.testing.assert_array_equal(tapped["experts"], chosen)
    np.testing.assert_array_equal(router(x, lambda name, _: chosen)[1], own_weights)
    replaced, weights = router(x, lambda name, _: jnp.asarray(others))
    np.testing.assert_array_equal(replaced, others)
    logits = x @ np.asarray(router.weight[...])
    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else softmax(logits)
    expected = np.take_along_axis(scores, others, -1)
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True), rtol=1e-4)
