"""Layers in the host's memory change no token, whichever they are, and take the device memory of two layers."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.load import OnDefaultDevice
from jaxinfer import LLM, SamplingParams
from jaxinfer.api.options import parse_offload
from jaxinfer.engine import model_runner, offload
from jaxinfer.engine.memory import OutOfMemoryError, plan_pool
from jaxinfer.engine.offload import device_bytes, layers_for_host, spread, with_host_layers
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import MoEConfig, abstract_params, host_layers, init_params
from jaxinfer.models.host_layers import HostLayers, HostStacks, all_layers, layer_of, move_layers_to_host, take_layers
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes, num_parameters, weights
from tests.pallas_kernels.quick import quick
from tests.planning.plan_models import LLAMA_3_8B
from tests.tiny import OPTIONS, TINY

CONFIG = replace(TINY, num_layers=4)
# The third is longer than a chunk; together they are a batch.
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [number % 97 for number in range(45)]]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=10, temperature=0.8, seed=3),
    SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def model():
    params = init_params(CONFIG, jax.random.key(0))
    return CONFIG, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


def answers(model, **options):
    with LLM(model, **OPTIONS, **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
        return found, llm.engine.spec, llm.fingerprint()


@pytest.fixture(scope="module")
def expected(model):
    return answers(model)


@pytest.mark.parametrize("count", quick([0, 1, 2, 4], 2))
def test_the_tokens_are_those_without(model, expected, count):
    tokens, spec, fingerprint = answers(model, offload=count)
    assert tokens == expected[0]
    assert fingerprint == expected[2]
    of_layer = sum(leaf.nbytes for leaf in jax.tree.leaves(model[1]["layers"]["0"]) if leaf.ndim > 1)
    assert (spec.host_bytes, spec.arriving_bytes) == (count * of_layer, count * of_layer)
    assert spec.buffer_bytes == min(count, 2) * of_layer


@pytest.mark.slow
@pytest.mark.parametrize("draft", quick(["ngram", "layers:2", "model"], "layers:2"))
def test_drafts_change_no_token(model, expected, draft):
    draft = model if draft == "model" else draft
    assert answers(model, offload=2, draft=draft, num_draft_tokens=3)[0] == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", quick(["int8", "int4-g32", "nf4"], "int4-g32"))
def test_quantized_weights_keep_their_tokens(model, quantize):
    tokens, spec, _ = answers(model, quantize=quantize)
    offloaded, other, _ = answers(model, quantize=quantize, offload=2)
    assert tokens == offloaded
    assert 0 < other.host_bytes < sum(spec.parts.values())


def test_of_a_mixture_only_experts_move():
    """Beside a dense layer, all of which moves; the router, attention and the shared MLP stay."""
    moe = MoEConfig(num_experts=8, num_experts_per_token=2, expert_size=24, layers=(1, 2, 3), shared_size=16)
    config = replace(CONFIG, architecture="Qwen2MoeForCausalLM", moe=moe)
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, init_params(config, jax.random.key(2)))
    expected, whole, fingerprint = answers((config, params))
    found, spec, same = answers((config, params), offload=4)
    assert (found, same) == (expected, fingerprint)
    stacks = spec.params["host_layers"]
    assert sorted(stacks) == ["0", "1,2,3"]
    assert list(stacks["1,2,3"]) == ["mlp"]
    assert list(stacks["1,2,3"]["mlp"]) == ["experts"]
    assert sum(leaf.size for leaf in jax.tree.leaves(stacks["1,2,3"])) == 3 * 8 * 3 * 32 * 24
    kept = weights(spec.params["layers"]["1"])
    assert max(leaf.ndim for leaf in kept) == 2
    assert num_parameters(all_layers(spec.params)) == num_parameters(whole.params)


@pytest.mark.slow
def test_a_checkpoint_goes_to_the_host_without_passing_the_device(monkeypatch):
    """The embedded model, whose tokens and fingerprint stay; only what does not move is put on the device."""
    with LLM("demo", max_seqs=2, max_model_len=64) as llm:
        expected, fingerprint = llm.generate("Once", SamplingParams(max_tokens=6, seed=1))[0], llm.fingerprint()
        whole = num_bytes(llm.params)
    sizes, place = [], OnDefaultDevice.__call__

    def recorded(self, path, found):
        leaf = place(self, path, found)
        sizes.append(num_bytes(leaf) if isinstance(jax.tree.leaves(leaf)[0], jax.Array) else 0)
        return leaf

    monkeypatch.setattr(OnDefaultDevice, "__call__", recorded)
    with LLM("demo", max_seqs=2, max_model_len=64, offload=3) as llm:
        moved = llm.engine.spec.host_bytes
        # What stays is packed; what moves is not.
        assert sum(sizes) == num_bytes(llm.engine.spec.params) - moved
        assert 0 < moved < whole
        found = llm.generate("Once", SamplingParams(max_tokens=6, seed=1))[0]
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.fingerprint() == fingerprint
        text = str(llm.explain())
    assert "layers on the host        3 of 6: 1, 3, 5" in text
    assert f"host bytes                {moved:,}" in text


@pytest.mark.slow
def test_hidden_states_are_those_without(model):
    taps = ("layers.1.residual", "layers.3.mlp")
    found = []
    for count in (0, 3):
        with LLM(model, **OPTIONS, offload=count) as llm:
            found.append(llm.generate([PROMPTS[0]], PARAMS[0], taps=taps)[0].taps)
    for name in taps:
        np.testing.assert_array_equal(*(one[name] for one in found))


# Which layers.


def spec_of(config, platform="tpu", **options) -> EngineSpec:
    return EngineSpec(config, abstract_params(config, jnp.bfloat16), EngineOptions(**options), platform)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 31, 32])
def test_layers_are_spread_evenly(count):
    layers = spread(count, 32)
    gaps = np.diff([-1, *layers])
    assert len(layers) == count
    assert layers[-1] == 31
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.matrix
@pytest.mark.parametrize("gigabytes", [6, 10, 16, 24, 80])
def test_auto_takes_the_fewest_that_leave_room(gigabytes):
    """Of Llama-3-8B in bfloat16, 16 GB."""
    spec, total = spec_of(LLAMA_3_8B, max_seqs=16, max_model_len=4096), gigabytes * 10**9
    layers = layers_for_host(spec, "auto", total)
    assert layers == spread(len(layers), 32)

    def room(count: int) -> float:
        return 0.9 * total - device_bytes(with_host_layers(spec, spread(count, 32)))

    share = min(0.25 * total, spec.pool_sizes.bytes_of(spec.pool_sizes.default))
    assert room(len(layers)) >= share
    assert not layers or room(len(layers) - 1) < share
    assert bool(layers) == (gigabytes <= 24)


@pytest.mark.slow
def test_a_model_of_three_times_the_memory_runs(monkeypatch):
    config = replace(CONFIG, hidden_size=128, intermediate_size=4096, num_layers=12)
    params = init_params(config, jax.random.key(1))
    options = {"max_seqs": 2, "max_model_len": 64, "prefill_chunk": 32, "grammar_memory": 1}
    prompt, sampling = [PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0)
    with LLM((config, params), **options) as llm:
        expected = llm.generate(prompt, sampling)[0].outputs[0].token_ids
    total = num_bytes(params) // 3
    monkeypatch.setattr("jaxinfer.api.llm.available_bytes", lambda device: total)
    held = {}

    def limited(spec, *, weights, available):
        held["weights"] = weights
        return plan_pool(spec, weights=weights, available=total - weights)

    monkeypatch.setattr(model_runner, "plan_pool", limited)
    with pytest.raises(OutOfMemoryError, match="weights"):
        LLM((config, params), **options)
    with LLM((config, params), **options, offload="auto") as llm:
        spec = llm.engine.spec
        assert held["weights"] + spec.buffer_bytes < total
        assert spec.host_bytes > 2 * total
        assert llm.generate(prompt, sampling)[0].outputs[0].token_ids == expected


# Refusals.


def test_what_cannot_be_is_refused(model):
    with pytest.raises(ValueError, match=r"offload=2 is for one device, and mesh='model=1'"):
        LLM(model, offload=2, mesh="model=1")
    with pytest.raises(ValueError, match="offload=9: the model has 4 layers"):
        LLM(model, **OPTIONS, offload=9)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        LLM(model, offload=-1)
    with pytest.raises(TypeError, match="offload must be auto, disk or a number, got str 'all'"):
        LLM(model, offload="all")
    with pytest.raises(ValueError, match="offload must be auto, disk or a number of layers, got 'many'"):
        parse_offload("many")
    assert (parse_offload("auto"), parse_offload("3")) == ("auto", 3)
    spec = spec_of(CONFIG)
    cut = replace(spec, mesh=jax.sharding.AbstractMesh((2,), ("model",)))
    with pytest.raises(ValueError, match="the mesh has 2"):
        layers_for_host(cut, "auto", 10**9)
    with pytest.raises(ValueError, match="the mesh has 2"):
        replace(cut, params=with_host_layers(spec, (1,)).params)


# The parameters.


def test_all_layers_are_what_was_moved(model):
    """Of dense and quantized weights, with layers of two kinds."""
    _, params = model
    mixed = {**params, "layers": {**params["layers"], "1": quantize_params(params, "int4-g32")["layers"]["1"]}}
    moved = move_layers_to_host(mixed, [0, 1, 3], "cpu")
    assert sorted(moved["host_layers"]) == ["0,3", "1"]
    assert all(leaf.ndim < 2 for leaf in jax.tree.leaves(moved["layers"]["3"]))
    jax.tree.map(np.testing.assert_array_equal, all_layers(moved), mixed)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moved["host_layers"])}
    assert kinds == {"pinned_host"}
    shapes = jax.eval_shape(lambda: mixed)
    abstract = move_layers_to_host(shapes, [0, 1, 3], "cpu")
    assert jax.tree.structure(abstract) == jax.tree.structure(moved)
    assert num_bytes(all_layers(abstract)) == num_bytes(shapes)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(abstract["host_layers"])} == kinds


@pytest.mark.parametrize("layers", [(3, 1), (0, 1), (2,)])
def test_some_layers_of_moved_ones(model, layers):
    """With concrete arrays stacks stay whole; abstract ones are cut."""
    moved = move_layers_to_host(model[1], [1, 2, 3], "cpu")
    taken = take_layers(moved, layers)
    for new, old in enumerate(layers):
        jax.tree.map(np.testing.assert_array_equal, layer_of(taken, new), model[1]["layers"][str(old)])
    abstract = take_layers(move_layers_to_host(jax.eval_shape(lambda: model[1]), [1, 2, 3], "cpu"), layers)
    assert num_bytes(all_layers(abstract)) == num_bytes(all_layers(taken))
    of_host = [leaf.shape[0] for leaf in jax.tree.leaves(abstract.get("host_layers", {}))]
    assert set(of_host) == {sum(layer > 0 for layer in layers)}


def test_stacks_are_filled_in_any_order(model):
    _, params = model
    stacks = HostStacks(jax.eval_shape(lambda: params), [1, 2], jax.devices()[0], "cpu")
    leaves = [
        (tuple(key.key for key in path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    random.Random(5).shuffle(leaves)
    kept = {layer: {} for layer in params["layers"]}
    for path, leaf in leaves:
        if stacks.takes(path):
            stacks.add(path, leaf)
        elif path[0] == "layers":
            inner = kept[path[1]]
            for part in path[2:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = leaf
    found = stacks.finish({"layers": kept})
    jax.tree.map(np.testing.assert_array_equal, all_layers(found)["layers"], params["layers"])
    begun = HostStacks(jax.eval_shape(lambda: params), [1, 2], jax.devices()[0], "cpu")
    begun.add(("layers", "1", "mlp", "up_proj", "weight"), np.zeros((32, 64), np.float32))
    with pytest.raises(RuntimeError, match="1 stacks lack layers: 1,2, mlp, up_proj, weight"):
        begun.finish({})


def test_a_copy_waits_for_the_layer_on_the_host_before_it(model):
    """What arrives next depends on the hidden states before that layer, and at most two are on the device."""
    moved = move_layers_to_host(model[1], [1, 3], "cpu")

    def arriving(params, early, late):
        layers = HostLayers(params)
        layers.take(0, early)
        return layers.take(1, early), layers.take(2, early), layers.take(3, late)

    x = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    traced = jax.make_jaxpr(arriving)(moved, x, x).jaxpr
    used = {id(variable) for equation in traced.eqns for variable in equation.invars}
    early, late = traced.invars[-2:]
    assert id(early) in used
    assert id(late) not in used  # layer 3 was started with layers 1 and 2
    waiting, sizes = HostLayers(moved), []
    for layer in range(4):
        waiting.take(layer, jnp.zeros((1, 32)))
        started = {} if waiting._next is None else waiting._next._copied
        sizes.append(sorted(leaf.size for leaf in started.values()))
    # All of layer 1 with layer 0; of layer 3 the smallest half of the bytes with layer 1, the others with layer 2.
    every = sorted(leaf.size for leaf in jax.tree.leaves(model[1]["layers"]["3"]) if leaf.ndim > 1)
    assert sizes == [every, every[: len(sizes[1])], every, []]
    assert 0.3 < sum(sizes[1]) / sum(every) < 0.7


def test_a_missing_layer_and_a_device_without_host_memory_are_named(model):
    with pytest.raises(ValueError, match="the model has 4 layers, and no layer 7"):
        move_layers_to_host(model[1], [1, 7], "cpu")

    class Device:
        device_kind = "toy"

        def addressable_memories(self):
            return []

    with pytest.raises(ValueError, match="offload: toy has no memory of the host"):
        host_layers.host_sharding(Device())


def test_a_tpu_reads_small_integers_in_its_own_tiling(model):
    shapes = jax.eval_shape(lambda: quantize_params(model[1], "int4-g32"))
    moved = move_layers_to_host(shapes, [1, 3], "tpu")
    leaf = moved["host_layers"]["1,3"]["mlp"]["up_proj"]["weight"]
    assert leaf.values.format.layout.tiling == ((8, 128), (8, 1))
    assert leaf.values.sharding.memory_kind == "pinned_host"
    assert leaf.scales.format.layout.major_to_minor == (0, 1, 2)
    nf4 = move_layers_to_host(jax.eval_shape(lambda: quantize_params(model[1], "nf4")), [1, 3], "tpu")
    codebook = nf4["host_layers"]["1,3"]["mlp"]["up_proj"]["weight"].codebook
    assert (codebook.shape, codebook.sharding.memory_kind) == ((2, 16), "device")
    assert offload.MIN_CACHE_SHARE == 0.25
