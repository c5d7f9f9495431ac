"""Dequantization: golden values of gguf-py, bit for bit, and leaves that dequantize to the same bits."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints_convert.gguf import blocks as gguf_blocks
from checkpoints_convert.gguf.blocks import TYPES, abstract_leaf, dequantize, quantized_leaf, unpack
from jaxinfer.quantization import check
from tests.checkpoints_convert.gguf.gguf_writer import BLOCKS, FLOATS, random_blocks

GOLDEN = Path(__file__).parents[2] / "oracle" / "golden" / "gguf_blocks.npz"


def bits(array):
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", [*FLOATS, *BLOCKS])
def test_as_gguf_py_dequantizes(kind):
    with np.load(GOLDEN) as golden:
        blocks, values = golden[f"{kind}.blocks"], golden[f"{kind}.values"]
    np.testing.assert_array_equal(bits(dequantize(kind, blocks)), bits(values))


def test_every_type_that_is_read_has_golden_values():
    with np.load(GOLDEN) as golden:
        assert {name.removesuffix(".values") for name in golden if name.endswith(".values")} == set(TYPES)


@pytest.mark.matrix
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_leaf_dequantizes_to_the_same_bits(kind, transpose, monkeypatch):
    """Below the normal half-precision scales too; and however many rows are unpacked at once."""
    monkeypatch.setattr(gguf_blocks, "_CHUNK_BYTES", 4000)  # several rows, in several chunks
    blocks = random_blocks(kind, (24, 512), np.random.default_rng(1))
    of_type = TYPES[kind]

    def rows(first, last):
        return blocks.raw[first:last]

    with ThreadPoolExecutor(2) as executor:
        leaf = quantized_leaf(of_type, rows, 24, 512, transpose=transpose, executor=executor)
    check(leaf, kind)
    expected = dequantize(kind, blocks.raw)
    found = np.asarray(jax.tree.map(jax.numpy.asarray, leaf).dequantize())
    np.testing.assert_array_equal(bits(found), bits(expected.T if transpose else expected))
    shape = (512, 24) if transpose else (24, 512)
    assert abstract_leaf(of_type, shape, transpose=transpose).num_bytes == leaf.num_bytes


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_are_independent(kind):
    blocks = random_blocks(kind, (5, 512), np.random.default_rng(2)).raw
    order = np.array([3, 1, 4])
    whole, part = unpack(kind, blocks), unpack(kind, blocks[order])
    np.testing.assert_array_equal(whole.codes[order], part.codes)
    np.testing.assert_array_equal(whole.scales[order], part.scales)


def test_q8_0_and_q4_0_are_plain_integers():
    for kind, number, dtype in (("Q8_0", 8, "int8"), ("Q4_0", 4, "int4")):
        blocks = random_blocks(kind, (2, 64), np.random.default_rng(3))
        with ThreadPoolExecutor(1) as executor:
            leaf = quantized_leaf(
                TYPES[kind], lambda a, b, raw=blocks.raw: raw[a:b], 2, 64, transpose=True, executor=executor
            )
        assert (leaf.scheme.kind, leaf.scheme.bits, leaf.scheme.block) == ("int", number, (32, 1))
        assert (leaf.values.dtype.name, leaf.zeros, leaf.minima) == (dtype, None, None)
