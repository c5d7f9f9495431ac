"""The TPU kernels of tied embeddings: in the interpreter against float64, and by the real compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quantization import QuantizedArray, Scheme
from jaxinfer.quantization.matmul import matmul, rows
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from pallas_kernels.quantized_matmul import choose, make_spec, pallas_tpu, quantized_matmul
from tests.hbm import made_in_hbm
from tests.pallas_kernels.quantized_matmul.weights import exact_product, head
from tests.pallas_kernels.quick import quick

# Rows, inputs, outputs, inputs of a group, dtype of the values, what the groups have besides. A chunk of 64 inputs, a
# block of outputs that is not full, several tiles of rows, groups of one and of two chunks.
PRODUCTS = [
    (4, 576, 700, 32, "int8", None),
    (1, 256, 256, 16, "int8", None),
    (130, 320, 256, 64, "int8", "zeros"),
    (3, 384, 130, 32, "int4", "minima"),
    (3, 256, 256, 128, "int4", "zeros"),
    (2, 512, 256, 256, "int8", None),
    (3, 128, 256, 64, "int4", "codebook"),
]
ALWAYS = [(4, 576, 700, 32, "int8", None), (3, 384, 130, 32, "int4", "minima")]


@pytest.mark.matrix
@pytest.mark.parametrize(("num_rows", "inputs", "outputs", "group", "dtype", "extra"), quick(PRODUCTS, *ALWAYS))
def test_products(num_rows, inputs, outputs, group, dtype, extra, tpu_interpreter):
    arrays = head(inputs, outputs, group, dtype, extra)
    x = jax.random.normal(jax.random.key(0), (num_rows, inputs))
    found = quantized_matmul(x, *arrays, block=(group, 1), is_transposed=True, implementation="pallas_tpu")
    expected = exact_product(x, arrays, group)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def test_integers_are_exact_in_bfloat16(tpu_interpreter):
    arrays = head(128, 256, 32, "int8", None)
    x = jax.random.normal(jax.random.key(0), (2, 128)).astype(jnp.bfloat16)
    found = quantized_matmul(
        x, *arrays, block=(32, 1), is_transposed=True, out_dtype=jnp.float32, implementation="pallas_tpu"
    )
    expected = exact_product(x, arrays, 32)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def test_rows_of_scales_are_taken(tpu_interpreter):
    array = jax.random.normal(jax.random.key(0), (300, 20))
    indices = jnp.array([0, 299, 5, 127, 128, 300, 7, 8, 256])  # 300 is clipped, as a gather clips
    np.testing.assert_array_equal(pallas_tpu.take_rows(array, indices), array[indices])


def test_what_it_refuses(tpu_interpreter):
    def reason(shape=(256, 128), dtype="int8", block=(32, 1), activations=None, is_transposed=True):
        x = jax.ShapeDtypeStruct((1, shape[is_transposed]), jnp.bfloat16)
        values = jax.ShapeDtypeStruct(shape, dtype)
        spec = make_spec(x, values, None, None, block=block, activations=activations, is_transposed=is_transposed)
        return pallas_tpu.unsupported(spec, "tpu")

    assert reason() is None
    assert "XLA fuses" in (reason(is_transposed=False) or "")
    assert "XLA fuses" in (reason(block=(128, 1)) or "")
    assert "int4 and int8, not float8" in (reason(dtype="float8_e4m3fn") or "")
    assert "not blocks of (48, 1)" in (reason((256, 96), block=(48, 1)) or "")
    assert "floating-point activations" in (reason(activations="int8") or "")


def test_another_platform_takes_its_own():
    x, values = jnp.ones((1, 128)), jnp.ones((256, 128), jnp.int8)
    spec = make_spec(x, values, None, None, block=(32, 1), activations=None, is_transposed=True)
    assert choose(spec, platform="cpu").implementation != "pallas_tpu"
    assert choose(spec, platform="tpu").implementation == "pallas_tpu"


CHIPS = [(chip, count) for chip in ("v5e", "v6e", "h100") for count in (4, 64)]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "count"), quick(CHIPS, ("v6e", 4), ("h100", 4)))
def test_a_look_up_and_a_product_make_no_second_head(chip, count):
    """Of Gemma 3 270M: [262144, 640] of int8 in groups of 32. They need different layouts of XLA:TPU."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    values: Any = jax.ShapeDtypeStruct((262_144, 640), jnp.int8)
    scales: Any = jax.ShapeDtypeStruct((262_144, 20), jnp.float32)
    table = QuantizedArray(values, scales, scheme=Scheme("int", 8, (1, 32)))
    tokens = jax.ShapeDtypeStruct((count,), jnp.int32)

    def step(table, tokens):
        x = rows(table, tokens, jnp.bfloat16)
        return jnp.argmax(matmul(x, table, jnp.float32, is_transposed=True), axis=-1)

    def decode(table, tokens, num_steps):
        return jax.lax.fori_loop(0, num_steps, lambda _, taken: step(table, taken), tokens)

    found = ahead_of_time.compile_for(chip, jax.jit(decode), table, tokens, jax.ShapeDtypeStruct((), jnp.int32))
    program = HloProgram(found.program.as_text())
    moved = sum(move.num_bytes for move in program.moves())
    logits = 4 * 262_144 * max(count, 8)
    print(f"{chip} {count}: {moved / table.num_bytes:.2f} of the weight, {found.temporary_bytes:,} of temporaries")
    if chip != "h100" or count <= 16:  # with more rows a GPU converts the weight once
        assert moved <= 1.03 * table.num_bytes + 4 * logits
        assert found.temporary_bytes <= 2 * logits
        large = made_in_hbm(program, at_least=4 * 262_144 * 20)
        assert [i.name for i in large if i.results[0].shape[0] not in (count, 8)] == []
