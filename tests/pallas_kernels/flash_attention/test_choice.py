"""Which implementation is taken, the reasons why others are not, and what is refused."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.flash_attention import explain, flash_attention
from pallas_kernels.flash_attention.specs import IMPLEMENTATIONS
from tests.pallas_kernels.flash_attention.shapes import MODELS, FlashShape

PLAIN = FlashShape(128, heads=(8, 2), head_dim=128, dtype="bfloat16", return_lse=False)


def choice(shape: FlashShape, chip: str | None = None, implementation: str | None = None):
    if chip is None:
        return explain(**shape.abstract(), **shape.options, implementation=implementation)
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    with ahead_of_time.as_if_on(chip):
        return explain(**shape.abstract(), **shape.options, implementation=implementation)


def test_a_cpu_takes_xla_and_says_why():
    found = choice(PLAIN)
    assert found.implementation == "xla"
    assert set(found.reasons) == set(IMPLEMENTATIONS) - {"xla"}
    assert found.reasons["pallas_tpu"] == "it needs a TPU, and this is a cpu"
    assert found.reasons["cudnn"] == "it needs a GPU, and this is a cpu"
    assert found.reasons["reference"] == "xla is preferred on a cpu"


@pytest.mark.parametrize(
    ("changes", "chip", "expected", "other", "reason"),
    [
        ({}, "v6e", "pallas_tpu", "xla", "pallas_tpu is preferred on a tpu"),
        ({"dtype": "float16"}, "v6e", "xla", "pallas_tpu", "takes float32 and bfloat16, not float16"),
        ({"head_dim": 16}, "v6e", "xla", "pallas_tpu", "head_dim of 64, 80, 96, 128, 256, not 16"),
        ({"heads": (571, 1)}, "v6e", "xla", "pallas_tpu", "bytes of VMEM"),
        ({}, "h100", "cudnn", "pallas_gpu", "cudnn is preferred on a gpu"),
        ({"window": 8}, "h100", "cudnn", "pallas_tpu", "needs a TPU, and this is a gpu"),
        ({"soft_cap": 2.0}, "h100", "pallas_gpu", "cudnn", "cuDNN has no soft_cap"),
        ({"sinks": True}, "h100", "pallas_gpu", "cudnn", "cuDNN has no sinks"),
        ({"segments": True}, "h100", "pallas_gpu", "cudnn", "cuDNN has no segment_ids"),
        ({"offset": (3,)}, "h100", "pallas_gpu", "cudnn", "cuDNN has no query_offset"),
        ({"lengths": (3,)}, "h100", "pallas_gpu", "cudnn", "may be NaN"),
        ({"return_lse": True}, "h100", "pallas_gpu", "cudnn", "rounded to bfloat16"),
        ({"num_keys": 256}, "h100", "pallas_gpu", "cudnn", "not 128 to 256"),
        ({"head_dim": 256}, "h100", "pallas_gpu", "cudnn", "up to 128, not 256"),
        ({"dtype": "float32"}, "h100", "xla", "pallas_gpu", "takes bfloat16 and float16, not float32"),
        ({"head_dim": 80, "sinks": True}, "h100", "xla", "pallas_gpu", "head_dim of 64, 128, 256, not 80"),
    ],
)
def test_each_chip_takes_the_best_that_can(changes, chip, expected, other, reason):
    found = choice(replace(PLAIN, **changes), chip)
    assert found.implementation == expected
    assert reason in found.reasons[other]
    assert expected not in found.reasons


def test_every_model_has_a_kernel_on_every_chip():
    for name, shape in MODELS.items():
        assert choice(shape, "v5e").implementation == "pallas_tpu", name
        assert choice(shape, "h100").implementation in ("cudnn", "pallas_gpu"), name


def test_naming_one_is_this_or_an_error():
    assert choice(PLAIN, None, "reference").reasons["xla"] == "reference was named"
    for name in ("pallas_tpu", "pallas_gpu", "cudnn"):
        with pytest.raises(NotImplementedError, match=f"{name} cannot run this: .*this is a cpu"):
            choice(PLAIN, None, name)
        with pytest.raises(NotImplementedError, match="this is a cpu"):
            flash_attention(**PLAIN.arguments(), implementation=name)


@pytest.mark.slow
def test_cudnn_is_called_with_the_same_attention():
    # What JAX computes without cuDNN for these arguments is what we ask cuDNN for.
    shape = replace(PLAIN, window=5, scale=0.2, dtype="float32")
    arguments = shape.arguments()
    with jax.default_matmul_precision("highest"):
        found = jax.nn.dot_product_attention(
            *(arguments[name] for name in "qkv"), scale=0.2, is_causal=True, local_window_size=(4, 0),
            implementation="xla",
        )  # fmt: skip
    assert jnp.allclose(found, shape.call("reference")(arguments), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 4, 16)}, r"q \[B, T, Hq, K\].*got q \(2, 4, 16\)"),
        ({"v": (2, 8, 2, 8)}, "equal k, v"),
        ({"q": (3, 4, 4, 16)}, "batch and head_dim must agree"),
        ({"q": (2, 4, 4, 32)}, "batch and head_dim must agree"),
        ({"q": (2, 4, 3, 16)}, "3 query heads must be a multiple of the 2 key heads"),
        ({"q": (2, 0, 4, 16)}, "at least one of everything"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    shapes = {"q": (2, 4, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16), **changes}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(flash_attention, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cudnn7"}, "implementation='cudnn7' is not one of pallas_tpu, cudnn, pallas_gpu, xla"),
        ({"window": 0}, "window=0 needs causal attention and at least 1 key"),
        ({"window": 4, "causal": False}, "window=4 needs causal"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0 must be positive"),
        ({"sinks": jnp.zeros(3)}, r"sinks: expected float32 \(2,\), got float32 \(3,\)"),
        ({"sinks": jnp.zeros(2, jnp.bfloat16)}, r"sinks: expected float32 \(2,\), got bfloat16 \(2,\)"),
        ({"query_offset": jnp.zeros(2, jnp.int32)}, r"query_offset: expected int32 \(1,\), got int32 \(2,\)"),
        ({"kv_lengths": jnp.zeros(1)}, r"kv_lengths: expected int32 \(1,\), got float32 \(1,\)"),
        ({"segment_ids": jnp.zeros((1, 3), jnp.int32)}, r"segment_ids of the queries: expected int32 \(1, 4\)"),
        ({"segment_ids": (jnp.zeros((1, 4), jnp.int32),) * 3}, "not 3 arrays"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    arguments = [FlashShape(4, head_dim=16).arguments()[name] for name in "qkv"]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(flash_attention, **options), *arguments)
    with pytest.raises(ValueError, match=message):
        explain(*arguments, **options)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16", "bfloat16"), ("int32",) * 3])
def test_dtypes_that_do_not_fit_are_refused(dtypes):
    operands = [FlashShape(4).arguments()[name].astype(dtype) for name, dtype in zip("qkv", dtypes, strict=True)]
    with pytest.raises(ValueError, match="one floating dtype"):
        flash_attention(*operands)
