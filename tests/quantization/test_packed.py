"""Weights packed for a CPU: nothing is lost, and products, rows and whole models are those of the weights that were
packed."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.extras import install_hint
from jaxinfer.loading import load_model, load_shapes
from jaxinfer.models import MoEConfig
from jaxinfer.quantization import NestedScales, QuantizedArray, Recipe, Scheme, check, quantize, quantize_params
from jaxinfer.quantization.matmul import matmul, matmul_several, rows, transposed
from jaxinfer.quantization.on_device import Packing, rounds_activations, unpack_params
from jaxinfer.quantization.packed import pack_weight, why_not_packed
from jaxinfer.quantization.tree import describe, describe_scheme, is_packed, is_weight, num_bytes, num_parameters
from jaxinfer.quantization.tree import weights as weights_of
from tests.random_params import random_params
from tests.tiny import OPTIONS, TINY

X = jax.random.normal(jax.random.key(0), (2, 5, 128))
W = jax.random.normal(jax.random.key(1), (128, 72)) * 0.02
RECIPES = ("int8", "int8-g32-asym", "int4-g32", "int4-g32-asym", "nf4-dq", "mxfp4", "fp8", "fp8-block")


def affine(weight: jax.Array, dtype=jnp.float32) -> QuantizedArray:
    """Codes with minima, of round-to-nearest's integers with zeros."""
    found = quantize(weight, "int4-g32-asym")
    scales = found.scales.astype(jnp.float32)
    return QuantizedArray(
        found.values,
        scales.astype(dtype),
        scheme=Scheme("affine", 4, found.scheme.block),
        minima=((-8.0 - found.zeros) * scales).astype(dtype),  # pyright: ignore[reportOptionalOperand]
    )


def permuted(weight: jax.Array) -> QuantizedArray:
    order = jax.random.permutation(jax.random.key(2), len(weight))
    return replace(quantize(weight[order], "int4-g32"), permutation=order.astype(jnp.int32))


def plain(weight: QuantizedArray) -> QuantizedArray:
    """With scales that are not nested, as packing keeps them."""
    return replace(weight, scales=weight.scales.dequantize()) if isinstance(weight.scales, NestedScales) else weight


CASES = {
    **{name: lambda weight, name=name: quantize(weight, name) for name in RECIPES},
    "affine": affine,
    "float16 minima": lambda weight: affine(weight, jnp.float16),
    "permuted": permuted,
    "float16 scales": lambda weight: quantize(weight, "int4-g32", scale_dtype=jnp.float16),
}
FLOATS = ("float32", "bfloat16", "float16")


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_quantized_weights(name):
    weight = CASES[name](W)
    packed = pack_weight(weight)
    assert (packed.shape, packed.ndim) == (weight.shape, 2)
    assert_same(packed.unpacked(), plain(weight))
    check(packed.unpacked(), name)
    np.testing.assert_allclose(packed.dequantize(), weight.dequantize(), atol=1e-8)
    np.testing.assert_allclose(matmul(X, packed), X @ weight.dequantize(), atol=3e-6)
    np.testing.assert_allclose(matmul(X[0, 0], packed), X[0, 0] @ weight.dequantize(), atol=3e-6)
    assert matmul(X.astype(jnp.bfloat16), packed).dtype == jnp.bfloat16
    assert matmul(X.astype(jnp.bfloat16), packed, jnp.float32).dtype == jnp.float32
    assert describe_scheme(packed) == describe_scheme(plain(weight))
    assert num_parameters({"w": packed}) == W.size


@pytest.mark.parametrize("name", FLOATS)
def test_floating_point_weights(name):
    weight = W.astype(name)
    packed = pack_weight(weight)
    assert packed.scheme is None
    assert_same(packed.unpacked(), np.asarray(weight))
    np.testing.assert_allclose(matmul(X, packed), X @ weight.astype(jnp.float32), atol=3e-6)
    padded = -(-W.shape[1] // 64) * 64
    assert num_bytes(packed) == packed.num_bytes == W.shape[0] * padded * weight.dtype.itemsize


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nf4-dq", "permuted")])
def test_quantized_embeddings(name):
    """One form serves rows and logits."""
    table = transposed(CASES[name](W))
    packed = pack_weight(table, is_transposed=True)
    assert packed.shape == table.shape
    assert_same(packed.unpacked(), table)
    tokens = jnp.array([[3, 0, 71], [7, 7, 1]])
    np.testing.assert_allclose(rows(packed, tokens), table.dequantize()[tokens], atol=1e-8)
    assert rows(packed, tokens, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_allclose(matmul(X, packed, is_transposed=True), X @ table.dequantize().T, atol=3e-6)
    np.testing.assert_allclose(matmul(X, transposed(packed)), X @ table.dequantize().T, atol=3e-6)
    y = X[..., : packed.shape[0]]
    np.testing.assert_allclose(matmul(y, packed), y @ table.dequantize(), atol=3e-6)


@pytest.mark.parametrize("name", FLOATS)
def test_floating_point_embeddings(name):
    table = W.T.astype(name)
    packed = pack_weight(table, is_transposed=True)
    assert_same(packed.unpacked(), np.asarray(table))
    np.testing.assert_array_equal(rows(packed, jnp.array([3, 0, 71])), table[jnp.array([3, 0, 71])])
    np.testing.assert_allclose(matmul(X, packed, is_transposed=True), X @ table.T.astype(jnp.float32), atol=3e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*RECIPES, "affine", *FLOATS])
def test_stacks_of_experts(name):
    """All experts have numbers of the same kinds: the second one's scales alone would be exact in 16 bits."""
    halves = jnp.sign(W) * 0.5
    if name in FLOATS:
        stack = jnp.stack([W, halves, -W]).astype(name)
        each, expected = list(stack), stack.astype(jnp.float32)
    else:
        each = [CASES[name](one) for one in (W, halves, -W)]
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(replace(one, codebook=None) for one in each))
        stack = replace(stack, codebook=each[0].codebook)
        if isinstance(stack.scales, NestedScales):
            stack = replace(stack, scales=replace(stack.scales, table=stack.scales.table[0]))
        expected = stack.dequantize()
    packed = pack_weight(stack)
    assert (packed.shape, packed.ndim) == ((3, *W.shape), 3)
    assert_same(packed.unpacked(), np.asarray(stack) if name in FLOATS else plain(stack))
    np.testing.assert_allclose(packed.dequantize(), expected, atol=1e-7)
    for number in range(3):
        np.testing.assert_array_equal(packed.of_expert(number).dequantize(), packed.dequantize()[number])
    x = jnp.stack([X[0]] * 3)
    np.testing.assert_allclose(matmul(x, packed), jnp.einsum("etk,ekn->etn", x, expected), atol=2e-5)


def test_several_products_in_one_call():
    each = [quantize(W, "int4-g32"), quantize(W[:, :8], "int8"), W.astype(jnp.bfloat16)]
    packed = [pack_weight(one) for one in each]
    calls = str(jax.make_jaxpr(lambda x: matmul_several(x, packed))(X)).count("ffi_call[")
    assert calls == 1
    alone = [matmul(X, one) for one in packed]
    for found, other, weight in zip(matmul_several(X, packed), alone, each, strict=True):
        np.testing.assert_array_equal(found, other)
        np.testing.assert_allclose(found, matmul(X, weight.astype(X.dtype) if weight is each[2] else weight), atol=3e-6)
    # Weights whose inputs are permuted, or that are not packed, are multiplied one by one.
    mixed = [pack_weight(permuted(W)), packed[0], each[0]]
    for found, weight in zip(matmul_several(X, mixed), (permuted(W), each[0], each[0]), strict=True):
        np.testing.assert_allclose(found, matmul(X, weight), atol=3e-6)


@pytest.mark.parametrize("name", ["int8", "int4-g32", "affine"])
def test_rounded_activations(name):
    weight = CASES[name](W)
    packed = pack_weight(weight, activations="int8")
    assert packed.form.activations == "int8"
    assert_same(packed.unpacked(), weight)
    found, exact = matmul(X, packed), X @ weight.dequantize()
    error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    assert 1e-5 < error < 0.02
    assert pack_weight(W, activations="int8").form.activations is None
    assert pack_weight(quantize(W, "mxfp4"), activations="int8").form.activations is None


def test_what_cannot_be_packed():
    assert why_not_packed(quantize(W, "w8a8")) == "its products round activations to int8"
    assert why_not_packed(quantize(W, "int8")) is None
    assert why_not_packed(W[:, :0]) == "the weight is empty"
    assert why_not_packed(W.astype(jnp.int32)) == "int32 has no packed form"
    assert why_not_packed(W[None, None]) == "it has 4 axes"
    assert "groups of 12 inputs are no multiple of 8" in str(why_not_packed(quantize(W, Recipe("int", 4, (12, 1)))))
    with pytest.raises(ValueError, match="cannot pack: its products round activations to int8"):
        pack_weight(quantize(W, "w8a8"))
    with pytest.raises(ValueError, match="permuted inputs cannot be transposed"):
        transposed(pack_weight(permuted(W)))


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, random_params(TINY))


PROMPTS = [[5, 3, 9, 11], list(range(40)), [95]]


def answers(model, **options):
    with LLM(model, **OPTIONS, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def without_kernels(monkeypatch):
    """A function after whose call the kernels for CPUs are left out."""

    def leave_out() -> None:
        jax.clear_caches()
        monkeypatch.setattr("pallas_kernels.cpu_calls.unsupported", lambda platform: "left out in this test")

    yield leave_out
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [None, "int4-g32-asym"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_answers_are_those_of_the_weights_that_were_packed(params, recipe, is_tied, without_kernels):
    config = replace(TINY, tie_word_embeddings=is_tied)
    own = {name: leaf for name, leaf in params.items() if name != "lm_head" or not is_tied}
    own = own if recipe is None else quantize_params(own, recipe, also=["embed"])
    found = answers((config, own))
    drafted = answers((config, own), draft="layers:1", num_draft_tokens=2)
    packed = Packing(is_tied=is_tied).params(own)
    assert sum(map(is_packed, weights_of(packed))) == 14 + (is_tied or recipe is not None) + (not is_tied)
    assert answers((config, packed)) == found == drafted
    assert_same(jax.tree.map(jnp.asarray, unpack_params(packed)), own)
    without_kernels()
    assert answers((config, own)) == found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_checkpoint_of_16_bits(params, dtype, is_tied, tmp_path, without_kernels):
    """Its matrices stay in 16 bits and are exact, its vectors become float32; what is counted beforehand is held."""
    from checkpoints_convert import save_huggingface

    config = replace(TINY, tie_word_embeddings=is_tied)
    own = {name: leaf for name, leaf in params.items() if name != "lm_head" or not is_tied}
    path = save_huggingface(config, own, tmp_path / "model", dtype=dtype)
    found = load_model(path)
    assert found.config.dtype == "float32"
    held = found.params
    assert {leaf.form.codes for leaf in weights_of(held) if is_packed(leaf)} == {dtype}
    assert {leaf.dtype.name for leaf in weights_of(held) if not is_packed(leaf)} == {"float32"}
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), own)
    assert_same(unpack_params(held), expected)
    _, shapes = load_shapes(path, is_here=True)
    assert num_bytes(shapes) == num_bytes(held)
    assert jax.tree.map(jnp.shape, shapes, is_leaf=is_weight) == jax.tree.map(jnp.shape, held, is_leaf=is_weight)
    found.weights.release()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_model(path, dtype=dtype).params)} == {dtype}
    with LLM(path, **OPTIONS) as llm:
        fingerprint = llm.fingerprint()
        assert f"by {dtype}: numba_cpu, float32 activations" in str(llm.explain())
    tokens = answers(path)
    without_kernels()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_model(path).params)} == {"float32"}
    assert answers(path) == tokens
    with LLM(path, **OPTIONS) as llm:
        assert llm.fingerprint() == fingerprint


@pytest.mark.slow
def test_experts_and_quantization_while_loading(tmp_path, without_kernels):
    """Stacks are packed; the router is not."""
    from checkpoints_convert import save_huggingface

    config = replace(
        TINY,
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        moe=MoEConfig(4, 2, 32, (0, 1)),
    )
    path = save_huggingface(config, random_params(config), tmp_path / "model", dtype="bfloat16")
    found = load_model(path, quantize="int4-g32")
    packed = found.params
    experts = packed["layers"]["0"]["mlp"]["experts"]
    assert experts["up_proj"]["weight"].shape == (4, 32, 32)
    assert experts["up_proj"]["weight"].form.codes == "nibbles"
    assert packed["layers"]["0"]["mlp"]["router"]["weight"].dtype == jnp.float32
    assert packed["lm_head"].form.codes == "bfloat16"
    _, shapes = load_shapes(path, quantize="int4-g32", is_here=True)
    assert num_bytes(shapes) == num_bytes(packed)
    found.weights.release()
    tokens = answers(path, quantize="int4-g32")
    with LLM(path, quantize="int4-g32", **OPTIONS) as llm:
        fingerprint, described = llm.fingerprint(), describe(llm.params)
    without_kernels()
    assert answers(path, quantize="int4-g32") == tokens
    with LLM(path, quantize="int4-g32", **OPTIONS) as llm:
        assert (llm.fingerprint(), describe(llm.params)) == (fingerprint, described)


@pytest.mark.slow
def test_shapes_are_at_least_what_is_held(params):
    for recipe in (*RECIPES, "int8-g128"):
        own = quantize_params(params, recipe)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), own)
        packing = Packing(is_tied=False)
        made, foreseen = packing.params(own), packing.params(shapes)
        assert num_bytes(made) <= num_bytes(foreseen) < 1.3 * num_bytes(made)
        for one, other in zip(weights_of(made), weights_of(foreseen), strict=True):
            assert (one.shape, is_packed(one)) == (other.shape, is_packed(other))


def test_the_option_activations(params, caplog):
    quantized = quantize_params(params, "int8-g32")
    with LLM((TINY, quantized), activations="int8", **OPTIONS) as llm:
        assert (rounds_activations(llm.engine.spec.params), rounds_activations(llm.params)) == (True, False)
        assert "numba_cpu, activations rounded to int8" in str(llm.explain())
        rounded = llm.fingerprint()
    with LLM((TINY, quantized), **OPTIONS) as llm:
        assert llm.fingerprint() != rounded
    packed = Packing(is_tied=False, activations="int8").params(quantized)
    assert rounds_activations(Packing(is_tied=False).params(packed))  # packed weights stay what they are
    other = Packing(is_tied=False, activations="int8").params(Packing(is_tied=False).params(quantized))
    assert_same(other, packed)
    with pytest.raises(ValueError, match="activations='int8' is for integer weights of 4 to 8 bits"):
        LLM((TINY, params), activations="int8", **OPTIONS)
    with pytest.raises(ValueError, match="activations must be float32 or int8, got 'int4'"):
        LLM((TINY, quantized), activations="int4")
    with pytest.raises(ValueError, match="activations='int8': it is for one device"):
        LLM((TINY, quantized), activations="int8", mesh="model=2")
    with pytest.raises(ValueError, match="activations='int8' excludes offload=1"):
        LLM((TINY, quantized), activations="int8", offload=1)


def test_activations_without_numba(params, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(f"it needs Numba, which is not installed: {install_hint('cpu')}")):
        LLM((TINY, quantize_params(params, "int8")), activations="int8", **OPTIONS)


def test_a_plain_installation_is_told_once(monkeypatch, caplog):
    from jaxinfer.loaded_weights import tell_what_is_slower

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tell_what_is_slower.cache_clear()
    for _ in range(2):
        tell_what_is_slower()
    (record,) = caplog.records
    assert "several times slower" in record.message
    assert install_hint("cpu") in record.message
    tell_what_is_slower.cache_clear()
