"""The decoder and the plain dict of its parameters: what crosses jit, names, shapes, taps, and incremental == full."""

import gc
import re
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import CachedAttention, PagedAttention, attend_without_cache, init_cache, init_paged_cache
from jaxinfer.engine import programs
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.models import (
    ModelConfig,
    RopeConfig,
    abstract_params,
    bind,
    check_taps,
    collect,
    decoder,
    init_params,
    logical_axes,
    tap_names,
)
from jaxinfer.models.layers import DecoderLayer

PLAIN = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
)
FULL = replace(
    PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, sliding_windows=(3, None), head_dim=6,
    rope=RopeConfig(rotary_dim=4),
)  # fmt: skip
TIED = replace(PLAIN, tie_word_embeddings=True)
SANDWICH = replace(
    PLAIN,
    norm="rms_zero_centred",
    block="sandwich_norm",
    activation="gelu_tanh",
    sliding_windows=(3, None),
    local_rope=RopeConfig(rotary_dim=8, theta=100.0),
    attention_scale=0.3,
    attention_softcap=2.0,
    logit_softcap=0.05,
    embedding_multiplier=4.0,
)
PARALLEL = replace(
    PLAIN,
    norm="layer",
    norm_bias=True,
    block="parallel_one_norm",
    is_mlp_gated=False,
    lm_head_bias=True,
    qk_norm=True,
    qk_norm_span="each_head",
    has_position_embedding=True,
    max_position_embeddings=16,
    rotated_layers=(False, True),
    residual_multiplier=0.5,
    logit_scale=2.0,
)
CONFIGS = pytest.mark.parametrize(
    "config",
    [PLAIN, FULL, TIED, SANDWICH, PARALLEL],
    ids=["plain", "full", "tied", "sandwich", "parallel"],
)
# Others take as long to compile and add little.
TWO_CONFIGS = pytest.mark.parametrize(
    "config",
    [
        pytest.param(PLAIN, marks=pytest.mark.slow, id="plain"),
        pytest.param(FULL, id="full"),
        pytest.param(TIED, marks=pytest.mark.slow, id="tied"),
        pytest.param(SANDWICH, marks=pytest.mark.slow, id="sandwich"),
        pytest.param(PARALLEL, id="parallel"),
    ],
)
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4]], jnp.int32)
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(rotary_dim=128, theta=500000.0),
    dtype="bfloat16",
)
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)


@cache
def initialized(config):
    return init_params(config, jax.random.key(0))


@cache
def random_params(config):
    """Parameters of which none is 0 or 1, large enough that all matter."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        noise = rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(0.3 * noise if leaf.ndim == 2 else 1 + 0.3 * noise)

    return jax.tree.map(draw, abstract_params(config))


def names(tree) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


@partial(jax.jit, static_argnums=0)
def full_pass(config, params, tokens):
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, attend_without_cache))


# What crosses jit.


@pytest.mark.slow
@pytest.mark.matrix
@TWO_CONFIGS
def test_params_are_nested_dicts_of_plain_arrays(config):
    def check(node):
        if type(node) is dict:
            assert all(type(key) is str for key in node)
            for child in node.values():
                check(child)
        else:
            assert isinstance(node, jax.Array)

    check(initialized(config))


def packages(tree) -> set[str]:
    """Where the types of all inner nodes of a pytree are defined."""

    def walk(treedef):
        data = treedef.node_data()
        found = {data[0].__module__.partition(".")[0]} if data else set()
        return found.union(*(walk(child) for child in treedef.children()))

    return walk(jax.tree.structure(tree))


@pytest.mark.slow
def test_no_module_and_no_variable_crosses_the_jit_of_a_serving_program(monkeypatch):
    called = set()

    def watched(name, program):
        def call(*args):
            traced = program.trace(*args)
            assert packages((traced.in_avals, traced.out_info)) <= {"builtins", "jaxinfer", "pallas_kernels"}
            for leaf in jax.tree.leaves((traced.in_avals, traced.out_info)):
                assert leaf.dtype in (bool, jnp.int32, jnp.uint32, jnp.float32)
            called.add(name)
            return program(*args)

        call.lower = program.lower
        return call

    homes = {paged_programs: ("step", "sample_step", "decode"), programs: ("score", "hidden_states")}
    for module, name in [(module, name) for module, names in homes.items() for name in names]:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    with LLM((PLAIN, initialized(PLAIN)), max_model_len=16, max_seqs=1) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2, prompt_logprobs=1), taps=["embed"])
    assert called == {"step", "sample_step", "decode", "score", "hidden_states"}


def test_the_check_finds_a_variable_and_a_module():
    module = nnx.eval_shape(lambda: DecoderLayer(PLAIN, 0, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    for planted in (nnx.state(module, nnx.Param), nnx.split(module)):
        assert "flax" in packages(planted)


# Names, shapes, axes.


def test_parameter_names():
    layer = [
        f"layers.{i}.{name}"
        for i in range(2)
        for name in (
            *(f"attention.{proj}_proj.{part}" for proj in "kqov" for part in ("bias", "weight")),
            "attention.k_norm.weight",
            "attention.q_norm.weight",
            "attention_norm.weight",
            *(f"mlp.{proj}_proj.{part}" for proj in ("down", "gate", "up") for part in ("bias", "weight")),
            "mlp_norm.weight",
        )
    ]
    everything = sorted(["embed", "final_norm.weight", "lm_head", *layer])
    assert sorted(names(abstract_params(FULL))) == everything
    optional = re.compile(r"bias|q_norm|k_norm")
    assert sorted(names(abstract_params(PLAIN))) == [name for name in everything if not optional.search(name)]
    assert set(names(abstract_params(PLAIN))) - set(names(abstract_params(TIED))) == {"lm_head"}


@pytest.mark.matrix
@TWO_CONFIGS
def test_abstract_params_are_the_shapes_of_init_params(config):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), initialized(config))
    assert shapes == abstract_params(config)
    assert {x.dtype for x in jax.tree.leaves(initialized(config))} == {jnp.dtype("float32")}
    for make in (init_params, lambda config, key, dtype: abstract_params(config, dtype)):
        params = jax.eval_shape(partial(make, config, dtype="bfloat16"), jax.random.key(0))
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_shapes_are_kept_for_each_configuration(monkeypatch, tmp_path):
    """As in processes without Flax: the first makes them, later ones read them."""
    configs = (PLAIN, FULL, TIED, replace(PLAIN, num_layers=3), replace(PLAIN, dtype="bfloat16"))
    expected = [abstract_params(config) for config in configs]
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decoder, "sys", SimpleNamespace(modules={}))
    assert [abstract_params(config) for config in configs] == expected
    monkeypatch.setattr(decoder, "_modules", lambda: pytest.fail("this needs Flax"))
    assert [abstract_params(config) for config in configs] == expected
    assert abstract_params(PLAIN, "bfloat16") == expected[-1]
    monkeypatch.setattr(decoder, "sources_key", lambda *paths: "of other sources")
    with pytest.raises(pytest.fail.Exception, match="this needs Flax"):
        abstract_params(PLAIN)


@pytest.mark.slow
def test_init_params_values():
    params = initialized(FULL)
    for name, leaf in zip(names(params), jax.tree.leaves(params), strict=True):
        if name.endswith("bias"):
            assert np.all(leaf == 0), name
        elif name.endswith("norm.weight"):
            assert np.all(leaf == 1), name
        else:
            assert np.std(leaf) == pytest.approx(0.02, rel=0.25), name
    flat = [tuple(np.ravel(leaf)[:4]) for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert len(set(flat)) == len(flat), "two parameters have the same values"
    assert jax.tree.all(jax.tree.map(np.array_equal, params, init_params(FULL, jax.random.key(0))))
    assert not np.array_equal(params["embed"], init_params(FULL, jax.random.key(1))["embed"])


@CONFIGS
def test_logical_axes_name_every_dimension(config):
    axes = logical_axes(config)
    params = abstract_params(config)
    is_names = lambda node: isinstance(node, tuple)  # noqa: E731
    assert jax.tree.structure(axes, is_leaf=is_names) == jax.tree.structure(params)
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "positions": config.max_position_embeddings,
    }
    for given, leaf in zip(jax.tree.leaves(axes, is_leaf=is_names), jax.tree.leaves(params), strict=True):
        # Where a head's width is an axis of its own, heads are counted.
        own = {"heads": config.num_heads, "kv_heads": config.num_kv_heads} if given[1:] == ("head_dim",) else {}
        assert tuple({**sizes, **own}[name] for name in given) == leaf.shape


@pytest.mark.parametrize(
    ("config", "billions"),
    [(LLAMA_8B, 8.03), pytest.param(LLAMA_70B, 70.55, marks=pytest.mark.slow)],
    ids=["8b", "70b"],
)
def test_large_models_are_described_without_memory(config, billions):
    gc.collect()  # arrays of other tests do not go meanwhile
    before = len(jax.live_arrays())
    params = jax.tree.leaves(abstract_params(config))
    assert all(type(leaf) is jax.ShapeDtypeStruct and leaf.dtype == jnp.bfloat16 for leaf in params)
    assert sum(leaf.size for leaf in params) / 1e9 == pytest.approx(billions, abs=0.005)
    assert len(jax.live_arrays()) == before


def test_a_pass_through_a_70b_model_has_the_right_shapes():
    config = replace(LLAMA_70B, num_layers=3)  # tracing time grows with the layers, shapes do not
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    logits = jax.eval_shape(partial(full_pass, config), abstract_params(config), tokens)
    assert (logits.shape, logits.dtype) == ((2, 8, config.vocab_size), jnp.float32)


# Binding.


@pytest.mark.slow
def test_parameters_that_do_not_fit_are_named():
    params = init_params(PLAIN, jax.random.key(0))
    del params["layers"]["1"]["mlp_norm"]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: parameter 'layers\.1\.mlp_norm\.weight' is missing$"):
        bind(PLAIN, params)
    params = init_params(PLAIN, jax.random.key(0)) | {"lm_head_bias": jnp.zeros(50)}
    with pytest.raises(ValueError, match="parameter 'lm_head_bias' is not of this model"):
        bind(PLAIN, params)
    with pytest.raises(ValueError, match=r"parameter 'embed' is missing; .*; and 16 more"):
        bind(PLAIN, {})


@pytest.mark.slow
def test_binding_leaves_params_and_other_bindings_alone():
    first, second = random_params(PLAIN), initialized(PLAIN)
    one, two = bind(PLAIN, first), bind(PLAIN, second)
    assert np.array_equal(one.embed[...], first["embed"])
    assert np.array_equal(two.embed[...], second["embed"])
    assert names(first) == names(second)


def test_layers_of_one_kind_are_traced_twice(monkeypatch):
    """The first in place, and one for all others: with the results of layers that are traced one by one."""
    traced = []
    run_layer = DecoderLayer.run
    monkeypatch.setattr(DecoderLayer, "run", lambda self, *args: traced.append(self) or run_layer(self, *args))
    config = replace(FULL, num_layers=6, sliding_windows=(3, None) * 3)
    assert config.kinds == (0, 1) * 3

    def run(attend_of, params, cache):
        attend = PagedAttention(cache, jnp.array([[1, 2]]), jnp.array([0]), jnp.array([5]), jnp.array([5]))
        hidden = bind(config, params)(jnp.arange(5), jnp.arange(5), attend_of(attend))
        return hidden, attend.cache

    inputs = random_params(config), init_paged_cache(config, 3, 4, jnp.float32)
    found = jax.jit(partial(run, lambda attend: attend))(*inputs)
    assert len(traced) == 4
    expected = jax.jit(partial(run, lambda attend: lambda *args, **options: attend(*args, **options)))(*inputs)
    assert len(traced) == 4 + 6
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


# Computing.


@pytest.mark.slow
@pytest.mark.matrix
@TWO_CONFIGS
def test_incremental_equals_full(config):
    params = random_params(config)
    expected = full_pass(config, params, TOKENS)

    @partial(jax.jit, static_argnums=3)
    def chunk(params, cache, start, size):
        decoder = bind(config, params)
        rows, starts = jnp.arange(2), jnp.full(2, start)
        tokens = jax.lax.dynamic_slice_in_dim(TOKENS, start, size, 1)
        attend = CachedAttention(cache, rows, starts, jnp.full(2, size), size)
        hidden = decoder(tokens, start + jnp.broadcast_to(jnp.arange(size), tokens.shape), attend)
        return attend.cache, decoder.logits(hidden)

    for sizes in ((4, 4, 1), (1,) * 9):
        cache, parts, start = init_cache(config, 2, 16, jnp.float32), [], 0
        for size in sizes:
            cache, logits = chunk(params, cache, jnp.int32(start), size)
            parts.append(logits)
            start += size
        np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=0, atol=2e-5)


def test_leading_dimensions_are_free():
    params = random_params(FULL)

    def flat_attend(layer, q, k, v, window):
        return attend_without_cache(layer, q[None], k[None], v[None], window)[0]

    @jax.jit
    def flat(params, tokens):
        decoder = bind(FULL, params)
        return decoder.logits(decoder(tokens, jnp.arange(9), flat_attend))

    expected = full_pass(FULL, params, TOKENS)
    for row in range(2):
        np.testing.assert_allclose(flat(params, TOKENS[row]), expected[row], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_tied_logits_use_the_embedding():
    params = random_params(TIED)
    untied = {**params, "lm_head": params["embed"].T}
    np.testing.assert_allclose(full_pass(TIED, params, TOKENS), full_pass(PLAIN, untied, TOKENS), rtol=0, atol=1e-5)


def test_logits_are_scaled_and_then_capped():
    params = random_params(PLAIN)
    plain = np.asarray(full_pass(PLAIN, params, TOKENS))
    found = full_pass(replace(PLAIN, logit_scale=0.5, logit_softcap=0.05), params, TOKENS)
    np.testing.assert_allclose(found, 0.05 * np.tanh(0.5 * plain / 0.05), rtol=0, atol=1e-6)
    assert np.abs(plain).max() > 0.2


def test_every_parameter_matters():
    params = random_params(FULL)
    expected = full_pass(FULL, params, TOKENS)
    leaves, tree = jax.tree.flatten(params)
    for i, name in enumerate(names(params)):
        # Not a factor: normalization takes that out again.
        changed = leaves[i].at[(0,) * leaves[i].ndim].add(0.5)
        found = full_pass(FULL, jax.tree.unflatten(tree, [*leaves[:i], changed, *leaves[i + 1 :]]), TOKENS)
        if name == "embed":  # token 0 is not among the tokens
            assert np.array_equal(found, expected)
        else:
            assert np.abs(found - expected).max() > 1e-4, name


def test_a_bfloat16_model_gives_float32_logits():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(PLAIN))
    logits = full_pass(PLAIN, params, TOKENS)
    assert logits.dtype == jnp.float32
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16)), "the logits were rounded to bfloat16"


# Taps.


def test_taps_give_the_named_hidden_states():
    params = random_params(FULL)
    wanted = tap_names(FULL)
    assert wanted == [
        "embed",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.0.residual",
        "layers.1.attention",
        "layers.1.mlp",
        "layers.1.residual",
        "final_norm",
    ]

    @jax.jit
    def run(params, tokens):
        found, tap = collect(wanted)
        bind(FULL, params)(tokens[None], jnp.arange(9)[None], attend_without_cache, tap)
        return {name: value[0] for name, value in found.items()}

    found = run(params, TOKENS[0])
    assert sorted(found) == sorted(wanted)
    assert {value.shape for value in found.values()} == {(9, FULL.hidden_size)}
    np.testing.assert_array_equal(found["embed"], params["embed"][TOKENS[0]])
    total = found["embed"]
    for layer in range(2):
        total = total + found[f"layers.{layer}.attention"] + found[f"layers.{layer}.mlp"]
        np.testing.assert_allclose(found[f"layers.{layer}.residual"], total, rtol=1e-5, atol=1e-5)
    logits = found["final_norm"] @ params["lm_head"]
    np.testing.assert_allclose(logits, full_pass(FULL, params, TOKENS)[0], rtol=0, atol=1e-4)


def test_only_what_is_asked_for_is_kept():
    found, tap = collect(("embed",))
    for name in ("embed", "final_norm"):
        tap(name, jnp.zeros(1))
    assert list(found) == ["embed"]


@pytest.mark.parametrize(
    ("tap", "message"),
    [
        ("layers.2.residual", r"no tap 'layers\.2\.residual': did you mean 'layers\.[01]\.residual'"),
        ("layer.0.mlp", "did you mean 'layers.0.mlp'"),
        ("embedding", "did you mean 'embed'"),
        ("zzz", "^no tap 'zzz'$"),
    ],
)
def test_unknown_taps_are_refused_with_the_nearest_name(tap, message):
    with pytest.raises(ValueError, match=message):
        check_taps(PLAIN, ["embed", tap])
    assert check_taps(PLAIN, ["embed", "final_norm"]) == ("embed", "final_norm")
