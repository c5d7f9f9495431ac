"""Which outputs of a stored tensor a parameter has: index maps, on arrays and on quantized weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints_convert.outputs import Outputs, OutputsError, join_outputs, take_outputs
from jaxinfer.quantization import check, quantize
from jaxinfer.quantization.rtn import Recipe


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_parts_of_groups_have_every_output_once(groups, sizes):
    stored = groups * sum(sizes)
    parts, start = [], 0
    for size in sizes:
        parts.append(Outputs(stored, groups, start, start + size).index)
        start += size
    assert sorted(np.concatenate(parts)) == list(range(stored))
    # The first part's first outputs are a run at the beginning of each group.
    assert parts[0][0] == 0
    assert groups == 1 or parts[0][sizes[0]] == sum(sizes)


def test_neighbours_become_halves_within_the_rotated_part_of_each_head():
    outputs = Outputs(12, head_dim=6, rotary_dim=4)
    assert outputs.index.tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert outputs.bounds() == (0, 12)
    part = Outputs(24, 2, 6, 12, head_dim=6, rotary_dim=6)
    assert part.index.tolist() == [6, 8, 10, 7, 9, 11, 18, 20, 22, 19, 21, 23]


def test_bounds_of_a_run():
    assert Outputs(12, 1, 4, 8).bounds() == (4, 8)


RECIPES = {
    "groups": Recipe("int", 4, (8, 1), True),
    "asymmetric": Recipe("int", 4, (8, 1), False),
    "channel": Recipe("int", 8, (None, 1), True),
    "tensor": Recipe("int", 8, (None, None), True),
    "nf4": Recipe("nf4", 4, (8, 1), True),
    "fp8 blocks": Recipe("fp8", 8, (8, 16), True),
}
PARTS = [Outputs(48, 2, 0, 16), Outputs(48, 2, 16, 24)]  # the second cuts blocks of 16 in halves


@pytest.fixture(params=list(RECIPES))
def weight(request):
    values = jnp.asarray(np.random.default_rng(0).standard_normal((32, 48)), jnp.float32)
    return jax.tree.map(np.asarray, quantize(values, RECIPES[request.param]))


@pytest.mark.matrix
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_the_part_of_the_whole_bit_for_bit(weight, part):
    found = take_outputs(weight, part)
    check(found, "part")
    np.testing.assert_array_equal(found.dequantize(), np.asarray(weight.dequantize())[:, part.index])
    if weight.scheme.block[1] in (1, 48):
        assert found.scheme.kind == weight.scheme.kind
        assert found.scheme.block[0] == weight.scheme.block[0]


def test_joined_the_parts_are_the_whole(weight):
    whole = join_outputs([take_outputs(weight, part) for part in PARTS], PARTS)
    check(whole, "whole")
    np.testing.assert_array_equal(whole.dequantize(), weight.dequantize())


def test_whole_blocks_keep_their_scales():
    weight = quantize(jnp.ones((32, 48)), Recipe("fp8", 8, (8, 16), True))
    found = take_outputs(jax.tree.map(np.asarray, weight), Outputs(48, 1, 16, 48))
    assert found.scheme.block == (8, 16)
    assert found.scales.shape == (4, 2)


def test_parts_that_differ_are_not_joined():
    parts = [Outputs(32, 1, 0, 16), Outputs(32, 1, 16, 32)]
    weights = [quantize(jnp.ones((32, 16)), Recipe("int", bits, (8, 1), True)) for bits in (4, 8)]
    with pytest.raises(OutputsError, match="quantized differently"):
        join_outputs(weights, parts)
