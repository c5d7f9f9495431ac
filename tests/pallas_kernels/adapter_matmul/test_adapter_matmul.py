"""Adapters of rows against float64, their bits, and what does not reach other rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.adapter_matmul import add_adapters, choose, make_spec
from pallas_kernels.adapter_matmul.xla import FLAT_COLUMNS
from tests.pallas_kernels.adapter_matmul.calls import AdapterCall, make

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

BOTH = pytest.mark.parametrize("implementation", ["numba_cpu", "xla"])
# Of few slots, one of which no row uses; of more columns than XLA multiplies at once; of more rows; of one row.
CALLS = {
    "flat": make([1, 0, 2, 3, 3, 1, 1], 100, (50, 130, 17), (10, 3, 7, 5), 10),
    "blocks": make([1, 0, 2, 3, 3, 8, 1, 4] * 2, 72, (64, 51), (40, 64, 8, 33, 1, 1, 1, 5), 64),
    "many_rows": make(np.repeat([0, 1, 2, 3], [30, 20, 10, 270]), 40, (70,), (5, 100, 33), 100),
    "one_row": make([2], 200, (144, 16), (4, 16), 16),
}
FORMS = pytest.mark.parametrize("name", CALLS)


def assert_equal_rows(found: list[np.ndarray], expected: list[np.ndarray], rows: np.ndarray) -> None:
    """Compares the bits of some rows, so that zeros of both signs and NaN count."""
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array[rows].view(np.int32), other[rows].view(np.int32))


@BOTH
@FORMS
def test_results_equal_float64(name, implementation):
    call = CALLS[name]
    for found, expected in zip(call.results(implementation), call.expected(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def test_the_calls_take_all_ways():
    sizes = [call.stacks[0][0].shape[0] * call.stacks[0][0].shape[1] for call in CALLS.values()]
    assert {size > FLAT_COLUMNS for size in sizes} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flat", "blocks"])
def test_bfloat16_is_summed_in_float32(name):
    """Rounded are what A gives, by 2^-9 at most of each number, and once the result."""
    call = CALLS[name]
    x, stacks, products = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (call.x, call.stacks, call.products))
    call = replace(call, x=x, stacks=stacks, products=products)
    in_float32 = replace(call, products=[product.astype(jnp.float32) for product in products]).results("xla")
    for found, unrounded, expected in zip(call.results("xla"), in_float32, call.expected(), strict=True):
        np.testing.assert_allclose(unrounded, expected, atol=2**-8 * np.abs(expected).max())
        np.testing.assert_array_equal(found, unrounded.astype(jnp.bfloat16))


@BOTH
def test_leading_axes(implementation):
    call = CALLS["blocks"]
    folded = call.rows(np.arange(16).reshape(2, 8))
    for found, expected in zip(folded.results(implementation), call.results(implementation), strict=True):
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


@BOTH
@pytest.mark.parametrize("name", ["flat", "blocks"])
def test_rows_without_an_adapter_have_the_bits_of_their_products(name, implementation):
    """Negative zeros and NaN, too; as if they had none, rows whose number no slot has."""
    call = CALLS[name]
    call = replace(call, ids=np.where(call.ids == 3, 99, call.ids))
    call = replace(call, ids=np.where(call.ids == 2, -1, call.ids))
    for product in call.products:
        product[:, :3] = -0.0, np.nan, np.inf
    assert_equal_rows(call.results(implementation), call.products, (call.ids <= 0) | (call.ids == 99))


@FORMS
def test_a_row_does_not_depend_on_the_others_and_on_its_slot(name):
    """To the bit, with Numba: by itself, among others, and with its adapter in another slot of more."""
    call = CALLS[name]
    together = call.results("numba_cpu")
    for row in {0, 1, len(call.ids) // 2, len(call.ids) - 1} & set(range(len(call.ids))):
        alone = call.rows([row])
        assert_equal_rows(alone.results("numba_cpu"), [array[[row]] for array in together], np.array([0]))
    num_slots = len(call.ranks) + 3
    slots = range(num_slots - 2, 1, -1)
    assert_equal_rows(call.with_slots(slots, num_slots).results("numba_cpu"), together, call.ids >= 0)


def changed(call: AdapterCall, kept: int) -> AdapterCall:
    """The call with other rows beside those of an adapter."""
    is_kept = call.ids == kept
    x, products = np.array(call.x), [np.array(product) for product in call.products]
    for array in (x, *products):
        array[~is_kept] *= -3
    others = [own for own in range(len(call.ranks) + 1) if own != kept]
    return replace(
        call, x=x, products=products, ids=np.where(is_kept, kept, np.resize(others, call.ids.shape)).astype(np.int32)
    )


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("name", ["flat", "blocks", "many_rows"])
@pytest.mark.optimized
def test_a_row_has_the_same_bits_in_a_program(name, implementation):
    """With XLA for equal shapes, too: other rows, and adapters in other slots."""
    call = CALLS[name]
    together = call.results(implementation)
    assert_equal_rows(changed(call, 1).results(implementation), together, call.ids == 1)
    slots = [(slot + 1) % len(call.ranks) for slot in range(len(call.ranks))]
    assert_equal_rows(call.with_slots(slots, len(slots)).results(implementation), together, call.ids >= 0)


@BOTH
@FORMS
def test_nan_stays_in_its_rows(name, implementation):
    """In slots that no row uses, and in a row; with Numba and in blocks also in a slot that another row uses, where
    slots of few columns have to be finite."""
    call = CALLS[name]
    expected = call.results(implementation)
    own = call.ids[-1]
    is_flat = implementation == "xla" and len(call.ranks) * call.stacks[0][0].shape[1] <= FLAT_COLUMNS
    used = set(call.ids) if is_flat else {own}
    stacks = [tuple(np.array(stack) for stack in pair) for pair in call.stacks]
    for pair in stacks:
        for slot in range(len(call.ranks)):
            if slot + 1 not in used:
                for stack in pair:
                    stack[slot] = np.nan
    if is_flat:
        stacks = [(np.where(np.arange(len(a))[:, None, None] == own - 1, a, np.nan), b) for a, b in stacks]
    x = np.where((call.ids == own)[:, None], call.x, np.nan)
    found = replace(call, x=x, stacks=stacks).results(implementation)
    assert_equal_rows(found, expected, call.ids == own)
    assert_equal_rows(found, expected, call.ids == 0)
    others = (call.ids != own) & (call.ids != 0)
    assert all(np.isnan(array[others]).all() for array in found)  # else nothing was to be kept


@BOTH
@pytest.mark.parametrize("name", ["blocks", "many_rows"])
def test_ranks_beyond_an_adapter_s_have_no_effect(name, implementation):
    """Values that are not read, such as those of another adapter that was there before, NaN included."""
    call = CALLS[name]
    stacks = [tuple(np.array(stack) for stack in pair) for pair in call.stacks]
    for pair in stacks:
        for slot, rank in enumerate(call.ranks):
            for stack in pair:
                stack[slot, rank:] = 7.0 if implementation == "xla" else np.nan
    found = replace(call, stacks=stacks).results(implementation)
    assert_equal_rows(found, call.results(implementation), call.ids >= 0)


@BOTH
def test_products_that_are_used_elsewhere_stay(implementation):
    call = CALLS["flat"]

    @jax.jit
    def both(x, ids):
        product = jnp.tanh(x[:, :50])
        ranks = jnp.asarray(call.ranks)
        return product, add_adapters(x, [product], call.stacks[:1], ids, ranks, implementation=implementation)[0]

    product, result = both(call.x, call.ids)
    np.testing.assert_array_equal(product, jnp.tanh(call.x[:, :50]))
    assert np.array_equal(product[1], result[1])
    assert not np.array_equal(product[0], result[0])


def test_a_batch_is_mapped():
    call = CALLS["flat"]
    stacked = [np.stack([array, 2 * array]) for array in (call.x, call.products[0])]

    def add(x, product):
        return add_adapters(x, [product], call.stacks[:1], jnp.asarray(call.ids), jnp.asarray(call.ranks))[0]

    found = jax.vmap(add)(*stacked)
    for index in range(2):
        np.testing.assert_array_equal(found[index], add(*(array[index] for array in stacked)))


def test_nothing_to_add():
    x, ids, ranks = jnp.ones((2, 8)), jnp.zeros(2, jnp.int32), jnp.zeros(0, jnp.int32)
    assert add_adapters(x, [], [], ids, ranks) == []
    product = jnp.ones((2, 4))
    assert add_adapters(x, [product], [(jnp.ones((0, 4, 8)), jnp.ones((0, 4, 4)))], ids, ranks)[0] is product


def test_float32_is_chosen():
    def spec(x_dtype, dtype):
        product, a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 4), (3, 16, 8), (3, 16, 4)))
        return make_spec(jax.ShapeDtypeStruct((2, 8), x_dtype), [product], [(a, b)])

    assert choose(spec("float32", "float32"), platform="cpu").implementation == "numba_cpu"
    mixed = choose(spec("float32", "bfloat16"), platform="cpu")
    assert (mixed.implementation, mixed.reasons["numba_cpu"]) == (
        "xla",
        "it multiplies float32, not float32 and bfloat16",
    )
    on_tpu = choose(spec("float32", "float32"), platform="tpu")
    assert (on_tpu.implementation, on_tpu.reasons["numba_cpu"]) == ("xla", "it needs a CPU, and this is a tpu")
    with pytest.raises(NotImplementedError, match="multiplies float32, not bfloat16"):
        CALLS["flat"].results("numba_cpu", jnp.bfloat16)


def test_adapters_of_arrays_on_several_devices_are_left_to_xla():
    spec = make_spec(jax.ShapeDtypeStruct((2, 8), "float32"), [], [])
    with jax.set_mesh(jax.make_mesh((2,), ("x",))):
        assert choose(spec).implementation == "xla"
    assert choose(spec).implementation == "numba_cpu"


def test_bad_shapes():
    x, ids, ranks = jnp.ones((2, 8)), jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32)
    a, b, product = jnp.ones((3, 16, 8)), jnp.ones((3, 16, 4)), jnp.ones((2, 4))
    with pytest.raises(ValueError, match="1 products and 0 pairs"):
        make_spec(x, [product], [])
    with pytest.raises(ValueError, match=r"A \(3, 16, 8\) and B \(3, 8, 4\) do not fit"):
        make_spec(x, [product], [(a, b[:, :8])])
    with pytest.raises(ValueError, match=r"ids \(2,\) and ranks \(2,\)"):
        add_adapters(x, [product], [(a, b)], ids, ranks[:2])
    with pytest.raises(ValueError, match="nonsense"):
        add_adapters(x, [product], [(a, b)], ids, ranks, implementation="nonsense")
