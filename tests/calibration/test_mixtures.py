"""Mixtures of experts and latent attention: an expert is calibrated on what it reads, by every method."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration import CalibrationOptions, FloatModel, Keep, quantize_model, quantize_within
from jaxinfer.calibration.capture import ROUTER, STACKS, LayerProgram
from jaxinfer.calibration.driver import abstract_weights, check_input, quantize_layer
from jaxinfer.calibration.journal import CalibrationJournal
from jaxinfer.calibration.layer_state import dequantized, find
from jaxinfer.calibration.quality import logits
from jaxinfer.calibration.scaling import folds
from jaxinfer.calibration.stacks import tokens_needed
from jaxinfer.calibration.verify import align_rerouted_tokens
from jaxinfer.models import ConvConfig, LayerInputConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxinfer.quantization import QuantizedArray, Scheme, quantize, quantize_params
from jaxinfer.quantization.gptq import GptqOptions
from jaxinfer.quantization.tree import is_quantized
from tests.random_params import random_params

OPTIONS = CalibrationOptions("gptq", 3, group_size=16, dtype="float32")
# Every weight is [32, 32], so that few programs are compiled.
COMMON = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(rotary_dim=16),
    max_position_embeddings=64,
)
MIXTRAL = replace(COMMON, architecture="MixtralForCausalLM", moe=MoEConfig(4, 2, 32, (0,)))
QWEN2 = replace(
    COMMON,
    architecture="Qwen2MoeForCausalLM",
    qkv_bias=True,
    moe=MoEConfig(4, 2, 32, (0,), normalize=False, shared_size=32, has_shared_gate=True),
)
DEEPSEEK = replace(
    COMMON,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_dim=32,
    rope=RopeConfig(rotary_dim=8),
    attention_scale=0.25,
    moe=MoEConfig(4, 2, 32, (0,), "sigmoid", scale=2.5, num_groups=2, num_chosen_groups=1, group_score="top2_sum",
                  has_correction_bias=True, shared_size=32),
    mla=MLAConfig(latent_size=24, rope_size=8, nope_size=8, value_size=16, query_rank=32),
)  # fmt: skip
GPT_OSS = replace(
    COMMON,
    architecture="GptOssForCausalLM",
    num_layers=2,
    qkv_bias=True,
    output_bias=True,
    has_sinks=True,
    norm="rms_float32",
    moe=MoEConfig(
        4, 2, 32, (0, 1), "softmax_of_chosen", has_router_bias=True, has_expert_bias=True, clamp=0.8, clamp_slope=1.7
    ),
)
FAMILIES = {"mixtral": MIXTRAL, "qwen2": QWEN2, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}


@pytest.fixture(scope="module")
def models(varied) -> dict[str, FloatModel]:
    return {name: FloatModel.of(config, varied(random_params(config))) for name, config in FAMILIES.items()}


# Of one shape, so that fewer programs are compiled.
@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 64, (16, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def held_out() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 64, (16, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def mixture(models, tokens):
    """A layer with experts: its program, its parameters, and hidden states before it."""
    model = models["mixtral"]
    return LayerProgram.of(MIXTRAL, 0), model.layer(0), model.embedded(tokens)


def routed_rows(program, params, chunk):
    """What each expert reads [tokens, D], by a loop over tokens."""
    x = np.asarray(chunk, np.float32)
    probe = {"attention_norm": params["attention_norm"], "attention": params["attention"]}
    silent = jax.tree.map(jnp.zeros_like, params["mlp"])
    after_attention = np.asarray(program.forward({**params, **probe, "mlp": silent}, x))
    normed = after_attention / np.sqrt(np.mean(after_attention**2, -1, keepdims=True) + MIXTRAL.norm_eps)
    rows = (normed * np.asarray(params["mlp_norm"]["weight"])).reshape(-1, MIXTRAL.hidden_size)
    logits = rows @ np.asarray(params["mlp"]["router"]["weight"])
    best = np.argsort(-logits, axis=-1)[:, :2]
    return [rows[(best == expert).any(-1)] for expert in range(4)]


@pytest.mark.slow
def test_statistics_are_those_of_the_tokens_of_each_expert(mixture):
    program, params, chunks = mixture
    rows = routed_rows(program, params, chunks[0])
    assert sum(map(len, rows)) == 2 * chunks[0].shape[0] * chunks[0].shape[1]
    experts = params["mlp"]["experts"]
    for name in STACKS:
        found = program.expert_statistics(params, [chunks[0], chunks[0]], name, 2**20)
        for expert, (statistics, seen) in enumerate(zip(found, rows, strict=True)):
            if name == STACKS[2]:
                gate, up = (seen @ np.asarray(experts[part]["weight"][expert]) for part in ("gate_proj", "up_proj"))
                seen = gate / (1 + np.exp(-gate)) * up
            seen = np.concatenate([seen, seen])
            scale = np.abs(seen.T @ seen).max()
            np.testing.assert_allclose(statistics.hessian, seen.T @ seen, rtol=1e-4, atol=1e-5 * scale)
            np.testing.assert_allclose(statistics.mean_absolute, np.abs(seen).mean(0), rtol=1e-4)
            np.testing.assert_allclose(statistics.largest, np.abs(seen).max(0), rtol=1e-4)
            assert int(statistics.num_tokens) == len(seen)


@pytest.mark.slow
def test_sums_do_not_depend_on_how_many_experts_fit(mixture):
    program, params, chunks = mixture
    three, four = (
        [list(program.expert_statistics(params, chunks, name, count * 4 * 32 * 32)) for name in STACKS[1:]]
        for count in (3, 4)
    )
    jax.tree.map(np.testing.assert_array_equal, three, four)
    with pytest.raises(ValueError, match=r"one expert's 32 inputs takes 4,096 bytes, and expert_memory is 4,095"):
        next(program.expert_statistics(params, chunks, STACKS[0], 4095))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.slow), "smoothquant"])
def test_one_expert_that_sees_all_is_a_dense_layer(models, varied, tokens, method):
    """Up to the order in which floats are summed."""
    dense = replace(COMMON, intermediate_size=32)
    single = replace(dense, moe=MoEConfig(1, 1, 32, (0,)))
    of_dense = varied(random_params(dense))["layers"]["0"]
    experts = {name: {"weight": part["weight"][None]} for name, part in of_dense["mlp"].items()}
    of_single = {**of_dense, "mlp": {"experts": experts, "router": {"weight": jnp.ones((32, 1))}}}
    chunks = models["mixtral"].embedded(tokens)
    # Symmetric ranges put their largest weight halfway between two values, where float errors decide; AWQ's choice
    # between nearly equal candidates follows.
    change = {"gptq": {}, "awq": {"symmetric": False}, "smoothquant": {"bits": 8, "group_size": None}}[method]
    options = replace(OPTIONS, method=method, **change)
    wanted, found = (
        quantize_layer(LayerProgram.of(config, 0), 0, params, chunks, options)
        for config, params in ((dense, of_dense), (single, of_single))
    )
    np.testing.assert_array_equal(found.params["mlp_norm"]["weight"], wanted.params["mlp_norm"]["weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        one, other = found.params["mlp"]["experts"][name]["weight"], wanted.params["mlp"][name]["weight"]
        assert one.scheme == other.scheme
        assert np.mean(~np.isclose(one.scales[0], other.scales, rtol=1e-5)) < 0.05
        assert np.mean(np.asarray(one.values[0]) != np.asarray(other.values)) < 0.02
        if method != "smoothquant":
            error, of_stack = wanted.errors[f"mlp.{name}"], found.errors[f"mlp.experts.{name}"]
            assert (of_stack.error, of_stack.rounded) == pytest.approx((error.error, error.rounded), rel=1e-2)
            assert (of_stack.num_experts, of_stack.num_few) == (1, 0)


def unrounded(weight, recipe, scale_dtype=None):
    """A leaf whose values are the weight itself."""
    inputs, outputs = weight.shape[-2:]
    return QuantizedArray(weight, jnp.ones((*weight.shape[:-2], 1, outputs)), scheme=Scheme("float", 8, (inputs, 1)))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "smoothquant") for name in ("deepseek", "gpt-oss")),
        *(pytest.param(name, "smoothquant", marks=pytest.mark.slow) for name in ("mixtral", "qwen2")),
        ("mixtral", "awq"),
        *(pytest.param(name, "awq", marks=pytest.mark.slow) for name in FAMILIES if name != "mixtral"),
    ],
)
def test_folding_changes_nothing_but_the_rounding(models, tokens, held_out, name, method, monkeypatch):
    """With weights that are not rounded the model computes what it did: the router's logits, shared experts, their
    gate, biases, and what comes from latent vectors included."""
    import jaxinfer.calibration.scaling as scaling
    import jaxinfer.calibration.stacks as stacks

    for module in (scaling, stacks):
        monkeypatch.setattr(module, "quantize", unrounded)
        monkeypatch.setattr(module, "clip", lambda weight, hessian, grid: weight)
    model, config = models[name], FAMILIES[name]
    change = {"bits": 8, "group_size": None} if method == "smoothquant" else {}
    found = quantize_model(model, replace(OPTIONS, method=method, **change), tokens, held_out)
    before, after = model.layer(0), dequantized(found.read("layers.0"))
    for fold in folds(config):
        if fold.norm is not None:
            assert not np.allclose(find(before, fold.norm)["weight"], find(after, fold.norm)["weight"])
        for other in fold.others:
            assert not np.allclose(find(before, other), find(after, other))
    if method == "awq":
        moved = find(before, "mlp.experts.up_proj.weight") / find(after, "mlp.experts.up_proj.weight")
        assert np.ptp(np.asarray(moved)) > 0.1
    [hidden] = model.embedded(held_out)
    for number in range(config.num_layers):
        hidden = LayerProgram.of(config, number).forward(model.layer(number), hidden)
    wanted, same = (logits(config, model.without_layers(), states) for states in (hidden, found.hidden))
    np.testing.assert_allclose(same, wanted, rtol=1e-4, atol=1e-4 * float(np.abs(wanted).max()))
    notes = {note for layer in found.layers for note in layer.notes}
    is_left_out = "mlp.experts.down_proj: its input is not scaled, since the clamped activation" in " ".join(notes)
    assert is_left_out == (name == "gpt-oss" and method == "awq")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("deepseek", "attention"),
        ("deepseek", "mlp"),
        *(pytest.param(name, "attention", marks=pytest.mark.slow) for name in FAMILIES if name != "deepseek"),
    ],
)
def test_calibration_beats_rounding_on_other_text(models, tokens, held_out, name, kept):
    """Of experts and those that all tokens go through, and of latent attention."""
    model, kl, options = models[name], {}, replace(OPTIONS, keep=(Keep(f"*.{kept}"),))
    for method in ("rtn", "gptq", "awq"):
        found = quantize_model(model, replace(options, method=method), tokens, held_out)
        kl[method] = found.quality.kl
        errors = found.layers[-1].errors
        assert (set(STACKS) <= errors.keys()) == (kept == "attention")
        if method != "rtn":
            assert all(error.error <= error.rounded * 1.0001 for error in errors.values())
    assert kl["gptq"] < 0.75 * kl["rtn"]
    assert kl["awq"] < 0.9 * kl["rtn"]


@pytest.mark.slow
def test_experts_have_activations_of_8_bits(models, tokens, held_out):
    options = replace(OPTIONS, method="smoothquant", bits=8, group_size=None)
    found = quantize_model(models["deepseek"], options, tokens, held_out)
    weights = quantize_model(models["deepseek"], replace(options, method="rtn"), tokens, held_out)
    assert weights.quality.kl < found.quality.kl < 0.05
    assert found.params["layers"]["0"]["mlp"]["experts"]["up_proj"]["weight"].scheme.activations == "int8"


@pytest.fixture(scope="module")
def unbalanced(models):
    """Expert 3 is never chosen, and expert 2 is whenever anything is."""
    model = models["gpt-oss"]
    params = {**{unit: model.read(unit) for unit in model.rest}, "layers": {str(i): model.layer(i) for i in range(2)}}
    for layer in params["layers"].values():
        layer["mlp"]["router"]["bias"] = jnp.array([0.0, 0.0, 100.0, -100.0])
    return FloatModel.of(GPT_OSS, params)


class Killed(Exception):
    pass


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_with_few_tokens_are_rounded_and_named_also_after_a_kill(
    unbalanced, tokens, held_out, method, tmp_path
):
    options = replace(OPTIONS, method=method, gptq=GptqOptions(static_groups=False), clip=True)

    def kill(done):
        raise Killed

    def run(**more):
        with CalibrationJournal(tmp_path / "work") as journal:
            result = quantize_model(unbalanced, options, tokens, held_out, journal=journal, **more)
            return result, result.params

    with pytest.raises(Killed):
        run(report=kill)
    found, params = run()
    assert [layer.is_resumed for layer in found.layers] == [True, False]
    whole = quantize_model(unbalanced, options, tokens, held_out)
    same(params, whole.params)
    assert found.quality == whole.quality
    assert [(layer.errors, layer.notes) for layer in found.layers] == [
        (layer.errors, layer.notes) for layer in whole.layers
    ]
    for layer in found.layers:
        for names in (f"{STACKS[0]} and {STACKS[1]}", STACKS[2]):
            assert (
                f"{names}: 1 of 4 experts had fewer than {tokens_needed(32)} tokens: rounded to nearest" in layer.notes
            )
        for name in STACKS:
            assert (layer.errors[name].num_experts, layer.errors[name].num_few) == (4, 1)
    if method == "gptq":
        for name in STACKS:
            weight = find(unbalanced.layer(1), name)["weight"]
            nearest = quantize(weight, options.recipe(3), scale_dtype="float32").dequantize()
            differ = [bool((one != other).any()) for one, other in zip(
                find(params["layers"]["1"], name)["weight"].dequantize(), nearest, strict=True)]  # fmt: skip
            assert differ == [True, True, True, False]


_PERMUTED = {"gptq": GptqOptions(static_groups=False)}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", _PERMUTED),
        ("deepseek", {"method": "awq"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mixtral", {}), ("mixtral", {"method": "awq"}), ("deepseek", {}), ("deepseek", _PERMUTED))
        ),
    ],
)
def test_what_a_weight_will_be_is_known_before(models, tokens, name, change):
    options = replace(OPTIONS, dtype="bfloat16", keep=(Keep("*.attention", 8), Keep("*.experts.up_proj")), **change)
    expected = abstract_weights(FAMILIES[name], options)
    params = quantize_model(models[name], options, tokens).params
    found = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
        if is_quantized(leaf)
    }
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert jax.tree.structure(leaf) == jax.tree.structure(expected[path])
        kinds = [[(part.shape, part.dtype) for part in jax.tree.leaves(each)] for each in (leaf, expected[path])]
        assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_bits_are_chosen_for_experts_too(models, held_out):
    model, options = models["deepseek"], replace(OPTIONS, method="rtn", bits=2)
    lowest = quantize_model(model, options, None, held_out).quality.kl
    found = quantize_within(model, options, lowest / 4, None, held_out)
    assert found.kls[-1] <= lowest / 4 < found.kls[0]
    experts = found.result.params["layers"]["0"]["mlp"]["experts"]
    bits = found.bits["layers.0.mlp"]
    assert {16 if not is_quantized(stack["weight"]) else stack["weight"].scheme.bits for stack in experts.values()} == {
        bits
    }
    assert found.sensitivity.num_bytes["layers.0.mlp"][2] > 3 * 4 * 32 * 32 // 2  # all experts


@pytest.mark.slow
def test_rounded_to_nearest_are_experts_and_all_that_plain_quantization_rounds(models, held_out):
    model = models["deepseek"]
    original = model.layer(0)
    original["mlp"]["router"]["correction"] = jnp.full(4, 1 / 3)  # no bfloat16
    model = replace(model, read=lambda name: original if name == "layers.0" else models["deepseek"].read(name))
    options = CalibrationOptions(method="rtn", bits=4, group_size=16, dtype="bfloat16")
    found = quantize_model(model, options, held_out, held_out)
    layer = found.read("layers.0")
    wanted = quantize_params({"layers": {"0": original}}, "int4")["layers"]["0"]
    kinds = jax.tree.map(is_quantized, layer, is_leaf=is_quantized)
    assert kinds == jax.tree.map(is_quantized, wanted, is_leaf=is_quantized)
    assert kinds["mlp"]["experts"]["down_proj"]["weight"]
    assert not kinds["attention"]["k_up"]["weight"]
    np.testing.assert_array_equal(layer["mlp"]["router"]["correction"], original["mlp"]["router"]["correction"])
    assert "mlp.experts.up_proj" in found.layers[0].errors


def test_an_expert_whose_hessian_does_not_fit_is_told_at_once(models, tokens, tmp_path):
    options = replace(OPTIONS, expert_memory=4000)
    words = r"layers.0.mlp.experts.gate_proj: the float32 Hessian of one expert's 32 inputs takes 4,096 bytes"
    with pytest.raises(ValueError, match=words):
        quantize_model(models["mixtral"], options, tokens, journal=CalibrationJournal(tmp_path / "work"))
    assert not (tmp_path / "work").exists()
    kept = replace(options, keep=(Keep("*.experts"),))
    assert not is_quantized(quantize_model(models["mixtral"], kept, tokens).params["layers"]["0"]["mlp"]["router"])
    assert options.to_dict() == OPTIONS.to_dict()  # the memory changes no result


def test_the_router_is_looked_at_and_never_quantized(mixture):
    program, params, chunks = mixture
    assert ROUTER not in [name for names in program.groups for name in names]
    shared = program.statistics(params, chunks, (ROUTER,)).hessian
    routed = sum(each.hessian for each in program.expert_statistics(params, chunks, STACKS[0], 2**20))
    np.testing.assert_allclose(routed, 2 * shared, rtol=1e-4, atol=1e-3)


def test_tokens_between_two_experts_are_settled_if_they_are_few():
    exact = np.random.default_rng(0).normal(size=(2, 100, 8)).astype(np.float32)
    close = exact + np.float32(1e-6)
    for num_others, is_settled in ((0, True), (2, True), (3, False)):
        found = close.copy()
        found[1, 7 : 7 + num_others] += 1
        assert (np.abs(align_rerouted_tokens(exact, found) - exact).max() < 1e-5) == is_settled


def test_experts_whose_inputs_the_router_scales_are_only_rounded(tokens):
    assert MIXTRAL.moe is not None
    config = replace(MIXTRAL, moe=replace(MIXTRAL.moe, scoring="sigmoid_of_chosen", scales_input=True))
    with pytest.raises(ValueError, match="gptq is not supported for MixtralForCausalLM, whose router scales"):
        check_input(config, CalibrationOptions(method="gptq"), tokens, None)
    check_input(config, CalibrationOptions(method="rtn"), tokens, None)


@pytest.mark.parametrize(
    ("changes", "method", "message"),
    [
        ({"kv_sources": (0,)}, "rtn", "read the keys and values of earlier ones"),
        ({"layer_inputs": LayerInputConfig(4, 64, 1), "layer_input_slots": (0,)}, "gptq", "inputs of their own"),
        ({"has_value_norm": True}, "awq", "values are normalized; gptq is"),
    ],
)
def test_layers_that_cannot_run_alone_are_refused(tokens, changes, method, message):
    config = replace(MIXTRAL, num_layers=1, moe=None, **changes)
    with pytest.raises(ValueError, match=message):
        check_input(config, CalibrationOptions(method=method), tokens, None)


def test_models_with_recurrent_layers_are_only_rounded(tokens):
    config = replace(MIXTRAL, layer_kinds=("short_conv",) * MIXTRAL.num_layers, conv=ConvConfig(3, MIXTRAL.hidden_size))
    with pytest.raises(ValueError, match="gptq is not supported for MixtralForCausalLM, which has recurrent layers"):
        check_input(config, CalibrationOptions(method="gptq"), tokens, None)
    check_input(config, CalibrationOptions(method="rtn"), tokens, None)
