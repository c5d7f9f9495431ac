"""The GPU kernel: in the interpreter against float64, and by the real compiler: no weight is written anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format

from jaxinfer.quantization import quantize, quantize_params
from jaxinfer.quantization.matmul import matmul
from jaxinfer.quantization.on_device import OUTPUT_MAJOR, in_layouts
from pallas_kernels import ahead_of_time
from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.quantized_matmul import choose, make_spec, pallas_gpu, quantized_matmul
from pallas_kernels.quantized_matmul.gpu_blocks import plan
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu
from tests.pallas_kernels.quick import quick

# [K, N] of Llama-3-8B's layers: queries and outputs, keys and values, gate and up, down.
LLAMA_3_8B = [(4096, 4096), (4096, 1024), (4096, 14_336), (14_336, 4096)]


# Splits of the groups, zeros, rows that are padded, more stages than steps, several tiles of rows and of outputs.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "rows", "inputs", "outputs", "splits"),
    quick(
        [
            ("int4-g64", 3, 512, 128, 1),
            ("int4-g128-asym", 20, 2048, 64, 2),
            ("int8-g128", 130, 256, 64, 1),
            ("int3-g64-asym", 1, 1024, 64, 2),
        ],
        ("int8-g128", 130, 256, 64, 1),
        ("int3-g64-asym", 1, 1024, 64, 2),
    ),
)
def test_products(name, rows, inputs, outputs, splits):
    w = quantize(jax.random.normal(jax.random.key(1), (inputs, outputs)) * 0.02, name)
    x = jax.random.normal(jax.random.key(0), (rows, inputs)).astype(jnp.bfloat16)
    spec = make_spec(x, w.values, w.zeros, None, block=w.scheme.block, activations=None)
    assert plan(spec).splits == splits
    with interpreted_gpu():
        found = pallas_gpu.matmul(x, w.values, w.scales, w.zeros, None, None, spec, "gpu")
    expected = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64)
    # The integers are exact in bfloat16, so only sums are rounded, in float32.
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


def operations(jaxpr) -> Iterator[str]:
    """Names of a program's operations in their order, those of inner programs among them."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from operations(inner)


def test_a_result_is_fenced_before_it_is_copied_out():
    """The interpreter has no asynchronous copies that could come first, so the order in the program is what counts."""
    x, w = jnp.zeros((8, 256), jnp.bfloat16), quantize(jnp.ones((256, 64)), "int8-g128")
    spec = make_spec(x, w.values, w.zeros, None, block=w.scheme.block, activations=None)
    with compat.interpreted():
        program = jax.make_jaxpr(lambda x: pallas_gpu.matmul(x, w.values, w.scales, None, None, None, spec, "gpu"))(x)
    order = [name for name in operations(program.jaxpr) if name in ("swap", "commit_smem", "copy_smem_to_gmem")]
    copied = [number for number, name in enumerate(order) if name == "copy_smem_to_gmem"]
    assert copied
    assert all(order[number - 2 : number] == ["swap", "commit_smem"] for number in copied)


COMPILED = [
    (name, rows) for name in ("int4-g128", "int4-g128-asym", "int4-g64", "int8-g128") for rows in (1, 16, 64, 512)
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "rows"), quick(COMPILED, ("int4-g128-asym", 16)))
def test_compiled_for_hopper_no_weight_is_written(name, rows):
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    for inputs, outputs in LLAMA_3_8B:
        x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
        w = jax.eval_shape(partial(quantize, how=name), jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16))
        with ahead_of_time.as_if_on("h100") as whole:
            place = Format(OUTPUT_MAJOR, whole)
            w = replace(w, values=jax.ShapeDtypeStruct(w.shape, w.values.dtype, sharding=place))
        found = ahead_of_time.compile_for("h100", matmul, x, w)
        spec = make_spec(x, w.values, w.zeros, None, block=w.scheme.block, activations=None)
        sums = 4 * plan(spec).splits * max(rows, 8) * outputs  # of tiles of at least 8 rows
        print(
            f"{name} {inputs} x {outputs}, {rows} rows: {found.temporary_bytes:,} bytes of temporaries, "
            f"{w.num_bytes:,} of weights, {plan(spec).splits} splits"
        )
        assert "mosaic_gpu" in found.program.as_text()
        # Beside the kernel's sums: padded rows, and the sums of their groups; scales are converted in registers.
        assert found.temporary_bytes <= 2 * sums + 8 * 2 * inputs + 8 * rows * inputs // w.scheme.block[0] + 2**16
        if rows <= 64:
            assert found.temporary_bytes < w.values.size // 2


@pytest.mark.slow
def test_values_are_laid_out_for_the_kernel():
    params = {"layers": {"0": {"up": {"weight": jax.random.normal(jax.random.key(0), (128, 64))}}}}
    # Of groups that the kernel does not take XLA reads the scales in the layout of the values.
    for name, order, of_scales in (("int4-g64", (1, 0), (0, 1)), ("int8", (0, 1), (0, 1)), ("mxfp4", (1, 0), (1, 0))):
        quantized = quantize_params(params, name)
        placed = in_layouts(quantized, "gpu")["layers"]["0"]["up"]["weight"]
        assert placed.values.format.layout.major_to_minor == order
        assert placed.scales.format.layout.major_to_minor == of_scales
        np.testing.assert_array_equal(placed.dequantize(), quantized["layers"]["0"]["up"]["weight"].dequantize())


def test_what_it_refuses():
    def reason(name, dtype=jnp.bfloat16, inputs=256, outputs=64, platform="gpu"):
        w = jax.eval_shape(partial(quantize, how=name), jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16))
        x = jax.ShapeDtypeStruct((1, inputs), dtype)
        spec = make_spec(x, w.values, w.zeros, w.codebook, block=w.scheme.block, activations=w.scheme.activations)
        return pallas_gpu.unsupported(spec, platform)

    with compat.interpreted():
        assert reason("int4-g128") is None
        assert reason("int4-g128", platform="tpu") == "it needs a GPU, and this is a tpu"
        assert reason("int8") == "XLA fuses products with a scale per output"
        assert "integers" in reason("nf4")
        assert "floating-point activations" in reason("w8a8")
        assert "groups of 64 or 128 inputs, not blocks of (32, 1)" in reason("int4-g32")
        assert "bfloat16, not float32" in reason("int4-g128", jnp.float32)
        x, values, minima = jnp.ones((1, 128), jnp.bfloat16), jnp.ones((128, 64), jnp.int8), jnp.ones((2, 64))
        with_minima = make_spec(x, values, None, None, minima, block=(64, 1), activations=None)
        assert "not minima" in (pallas_gpu.unsupported(with_minima, "gpu") or "")
        assert "not 256 x 100" in reason("int4-g128", outputs=100)


def test_named_on_another_platform():
    w = quantize(jnp.ones((128, 64)), "int4-g64")
    with pytest.raises(NotImplementedError, match="pallas_gpu cannot run this: it needs a GPU"):
        quantized_matmul(jnp.ones((1, 128)), w.values, w.scales, block=(64, 1), implementation="pallas_gpu")
    spec = make_spec(jnp.ones((1, 128)), w.values, None, None, block=(64, 1), activations=None)
    assert choose(spec, platform="cpu").implementation != "pallas_gpu"
