"""Decoding under grammars, compiled by the real compilers: what masks and tables add to the bytes that move."""

from dataclasses import dataclass

import pytest

from jaxinfer.grammar.device import TableSizes
from jaxinfer.quantization.tree import num_bytes
from tests.engine.test_compiled import NARROW, SLOTS, Case, compiled

SIZES = TableSizes.of_bytes(32 * 2**20, SLOTS, NARROW.vocab_size)


@dataclass(frozen=True)
class WithTables(Case):
    @property
    def arguments(self):
        return *super().arguments, SIZES.abstract()


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_masks_add_their_own_bytes(chip):
    free, masked = (compiled(kind(chip, 1, "decode", num_layers=1, model=NARROW)) for kind in (Case, WithTables))
    tables = num_bytes(SIZES.abstract())
    assert masked.compilation.argument_bytes - free.compilation.argument_bytes <= 1.02 * tables
    # Tables are read where they are: no copy of one is made, and a step of free rows moves nothing of them.
    assert masked.compilation.temporary_bytes - free.compilation.temporary_bytes <= 8 * SLOTS * NARROW.vocab_size
    mask, logits = SLOTS * SIZES.abstract().masks.shape[1] * 4, 4 * SLOTS * NARROW.vocab_size
    added = masked.moved() - free.moved()
    print(f"{tables:,} bytes of tables; free rows move {added:,} bytes more")
    states = 2.1 * num_bytes(SIZES.abstract().states)  # which are brought near once a step
    assert added <= states
    # If every row is masked: its mask, and the logits once more in and out.
    added = masked.moved(takes_branches=True) - free.moved(takes_branches=True)
    print(f"masked rows move {added:,} bytes more; masks {mask:,}, logits {logits:,}")
    assert added <= states + mask + 2.1 * logits
