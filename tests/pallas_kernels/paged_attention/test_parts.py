"""Pages whose tokens are divided between devices, here the rows of a `jax.vmap`: what all parts find together."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import PagePart, SeparatePages, choose, make_spec, merge_parts, paged_attention
from tests.pallas_kernels.paged_attention.shapes import SMALL, PagedShape
from tests.pallas_kernels.quick import quick

NAMES = [name for name, shape in SMALL.items() if shape.dtype == "float32" and shape.cache_dtype == "float32"]
QUICK = ("mixed", "decode_soft_cap_sinks", "prefill_window")


def divided(pages: SeparatePages, count: int) -> SeparatePages:
    """Pages [count, pages, page / count, ...] of the parts."""
    cut = [leaf.reshape(len(leaf), count, -1, *leaf.shape[2:]).swapaxes(0, 1) for leaf in (pages.k, pages.v)]
    return SeparatePages(*cut)


def attend(shape: PagedShape, count: int, *, scatters: bool = False, shift: int = 0):
    """The output, and the pages put together again. `shift` plants a fault: parts take each other's places."""
    arguments = shape.arguments("separate")
    pages = arguments.pop("pages")

    def one(index, pages):
        (out, lse), pages = paged_attention(
            **arguments, pages=pages, part=PagePart((index + shift) % count, count), **shape.options
        )
        return merge_parts(out, lse, "parts", scatters=scatters), pages

    out, pages = jax.jit(jax.vmap(one, axis_name="parts"))(jnp.arange(count), divided(pages, count))
    together = [leaf.swapaxes(0, 1).reshape(leaf.shape[1], -1, *leaf.shape[3:]) for leaf in (pages.k, pages.v)]
    return np.asarray(out), SeparatePages(*together)


def assert_equals_one_device(shape: PagedShape, out: np.ndarray, pages: SeparatePages) -> None:
    expected, kept = paged_attention(**shape.arguments("separate"), **shape.options, implementation="reference")
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    for found, wanted in zip(pages, kept, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.matrix
@pytest.mark.parametrize("count", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(NAMES, *QUICK))
def test_parts_together_are_attention_to_all_keys(name, count):
    shape = SMALL[name]
    outs, pages = attend(shape, count)
    for out in outs:
        assert_equals_one_device(shape, out, pages)


def test_each_part_gets_its_rows():
    shape = replace(SMALL["prefill_chunk"], num_padding=3)
    assert shape.num_tokens % 4 == 0
    outs, pages = attend(shape, 4, scatters=True)
    assert outs.shape[1] == shape.num_tokens // 4
    assert_equals_one_device(shape, outs.reshape(shape.num_tokens, *outs.shape[2:]), pages)


@pytest.mark.slow
def test_the_check_finds_parts_in_each_others_places():
    shape = SMALL["mixed"]
    outs, pages = attend(shape, 4, shift=1)
    with pytest.raises(AssertionError):
        assert_equals_one_device(shape, outs[0], pages)


def test_rows_without_keys_are_zero():
    """Padding sees no key in any part."""
    shape = SMALL["mixed"]
    outs, _ = attend(shape, 4)
    assert np.isfinite(outs).all()
    assert (outs[:, -shape.num_padding :] == 0).all()


def test_kernels_that_read_whole_pages_refuse_parts():
    shape = SMALL["decode_page_64"].abstract("separate")
    arrays = {name: shape[name] for name in ("q", "k_new", "v_new", "pages", "page_table")}
    spec = make_spec(**arrays, num_parts=4)
    assert {choose(spec, platform=platform).implementation for platform in ("tpu", "gpu", "cpu")} == {"xla"}
    with pytest.raises(NotImplementedError, match="divided between devices"):
        choose(spec, "pallas_tpu", "tpu")
