"""The entry points: choices with reasons, schedules, and errors that carry the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.paged_attention import (
    choose,
    make_schedule,
    make_spec,
    new_pages,
    paged_attention,
    platform_layout,
)
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, _within_window
from pallas_kernels.paged_attention.layout import layout_of
from tests.pallas_kernels.paged_attention.shapes import SMALL, PagedShape

VECTORS = ("query_lengths", "kv_lengths", "query_starts")


def spec_of(shape: PagedShape, page_layout: str = "separate"):
    return shape.spec(page_layout)


def test_choice_by_platform():
    spec = spec_of(SMALL["decode_bf16"])
    assert choose(spec, platform="cpu").implementation in ("numba_cpu", "xla")
    with pytest.raises(NotImplementedError, match="pallas_tpu cannot run this"):
        choose(spec, "pallas_tpu", platform="gpu")
    with pytest.raises(ValueError, match="fastest"):
        choose(spec, "fastest")
    for platform in ("cpu", "tpu", "gpu"):
        choice = choose(spec_of(SMALL["decode_bf16"]), platform=platform)
        assert choice.implementation in IMPLEMENTATIONS
        assert all(choice.reasons.values())


def test_a_fallback_says_why():
    """A cache in the GPU's layout cannot feed the TPU kernel: XLA takes it, with the reason."""
    choice = choose(spec_of(SMALL["decode_bf16"], "separate"), platform="tpu")
    assert choice.implementation == "xla"
    assert "layout" in choice.reasons["pallas_tpu"]


def test_new_pages_have_the_layout_of_the_platform():
    assert type(new_pages(2, 16, 2, 64, "float32")).__name__ == "SeparatePages"
    assert new_pages(2, 16, 2, 64, jnp.int8).k_scales.shape == (2, 2, 16)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        assert platform_layout("cpu", dtype) == layout_of(new_pages(2, 16, 2, 64, dtype)) == "bits"
        assert platform_layout("gpu", dtype) == "separate"
    if ahead_of_time.missing_compiler("v6e") is None:
        with ahead_of_time.as_if_on("v6e"):
            pages = jax.eval_shape(lambda: new_pages(2, 16, 2, 64, "float32"))
        assert type(pages).__name__ == "InterleavedPages"


@pytest.mark.slow
def test_one_schedule_serves_all_layers():
    shape = SMALL["decode_empty_slots"]
    arguments = shape.arguments("separate")

    @jax.jit
    def two_layers(arrays):
        spec = make_spec(**{k: v for k, v in arrays.items() if k not in VECTORS}, **shape.options)
        schedule = make_schedule(
            spec, arrays["page_table"], *(arrays[n] for n in VECTORS[:2]), query_starts=arrays[VECTORS[2]]
        )
        return [paged_attention(**arrays, **shape.options, schedule=schedule)[0] for _ in range(2)]

    expected = paged_attention(**arguments, **shape.options)[0]
    for out in two_layers(arguments):
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_starts_default_to_the_running_sum():
    shape = SMALL["verify"]
    arguments = shape.arguments("separate")
    starts = arguments.pop("query_starts")
    np.testing.assert_array_equal(starts, np.cumsum(arguments["query_lengths"]) - arguments["query_lengths"])
    np.testing.assert_array_equal(
        paged_attention(**arguments, **shape.options)[0],
        paged_attention(**arguments, query_starts=starts, **shape.options)[0],
    )


def test_tree_bits_within_a_window():
    """A chain of 5: with a window of 2 each token keeps itself and its parent; a branch counts depth, not place."""
    chain = [0b1, 0b11, 0b111, 0b1111, 0b11111]
    branch = [0b1, 0b11, 0b101, 0b1011]
    found = _within_window(jnp.array([*chain, *branch], jnp.uint32), 2)
    assert found.tolist() == [0b1, 0b11, 0b110, 0b1100, 0b11000, 0b1, 0b11, 0b101, 0b1010]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 3, 64))}, r"the 3 query heads must be a multiple of the 2 key heads"),
        ({"q": jnp.zeros((3, 4, 64))}, r"q \(3, 4, 64\) does not fit k_new \(2, 2, 64\)"),
        ({"q": jnp.zeros((2, 4, 64), jnp.int8)}, r"got int8"),
        ({"v_new": jnp.zeros((2, 2, 32))}, r"\(2, 2, 32\)"),
        ({"page_table": jnp.zeros((2, 3))}, r"int32 \[S, P\]; got float32"),
        ({"query_lengths": jnp.zeros((3,), jnp.int32)}, r"query_lengths is int32 \[2\]; got int32 \(3,\)"),
        ({"kv_lengths": jnp.zeros((2,))}, r"kv_lengths is int32 \[2\]; got float32"),
        ({"window": 0}, "window=0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"max_query_length": 3}, "max_query_length=3 is not between 1 and the 2 tokens"),
        ({"sinks": jnp.zeros(3)}, r"sinks are float32 \[4\]"),
        ({"ancestors": jnp.zeros(2, jnp.int32)}, r"ancestors are uint32 \[2\]; got int32"),
        ({"pages": new_pages(4, 16, 3, 64, "float32")}, r"pages for 2 heads of 64"),
        ({"implementation": "cudnn"}, "cudnn"),
    ],
)
def test_bad_input(change, message):
    shape = PagedShape(((1, 20), (1, 3)))
    with pytest.raises(ValueError, match=message):
        paged_attention(**shape.arguments("separate") | change)


def test_a_schedule_of_another_call_is_refused():
    shape = SMALL["decode_window"]
    arguments = shape.arguments("separate")
    spec = spec_of(SMALL["decode_one_sequence"])
    other = SMALL["decode_one_sequence"].arguments("separate")
    schedule = make_schedule(spec, other["page_table"], other["query_lengths"], other["kv_lengths"])
    with pytest.raises(ValueError, match=r"the schedule was made for \w+ and PagedSpec"):
        paged_attention(**arguments, **shape.options, schedule=schedule)


def test_layouts_of_four_bits():
    """The TPU's kernel reads int4; what no kernel reads lies as XLA takes it."""
    assert [platform_layout(platform, "int4") for platform in ("tpu", "gpu", "cpu")] == [
        "interleaved",
        "separate",
        "separate",
    ]
    assert {platform_layout(platform, "int8_int4") for platform in ("tpu", "gpu", "cpu")} == {"separate"}
    assert platform_layout("tpu", "int8") == "interleaved"
