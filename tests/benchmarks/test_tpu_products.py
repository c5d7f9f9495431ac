"""Bundles of products on TPUs: how loops of a listing are counted, and that the engine has the figures of the file."""

import json
from pathlib import Path

import pytest

from benchmarks import tpu_products
from jaxinfer.engine.determinism import SHARES_OF_FLOPS

ROOT = Path(__file__).parents[2]
BITS = {"bfloat16": 16, "int8": 8, "int4-g128": 4}
# Four blocks, as the compiler pipelines them: copied in one pass, multiplied in the next, written in the one after.
LISTING = """
     0   :  { %s1 = inlined_call_operand.vmem [shape: bf16[64,256], index: 0] }
   0x1 LB: > { %s2 = sadd.s32 4294967295, %s9 /* iteration index, stage = 1 */  ;;  %s3 = sphi /* stage = 2 */ }
   0x2   : > { %s4 = sadd.s32 4294967294, %s9 /* iteration index, stage = 2 */ }
   0x3   :  {}
   0x4   : > { %5 = vmatmul.mubr.bf16.gmra.mxu0 %v6_v0 }
   0x5 PF: > { %p7 = scmp.ge.s32.totalorder %s8_s9, 6 /* loop exit test */ }
   0x6   :  { %11 = vst [vmem:[#allocation3]] %v8 }
"""


def test_a_block_is_counted_once_however_deep_its_pipeline_is():
    assert tpu_products.all_bundles(LISTING) == 1 + 4 * 5 + 1


def test_a_loop_in_a_loop():
    inner = """   0x5 LB: >> { %5 = vmatmul %v6 }
   0x6   : >> { %p7 = scmp.ge.s32.totalorder %s8_s9, 3 /* loop exit test */ }
"""
    listing = LISTING.replace("   0x5 PF: >", inner + "   0x7 PF: >")
    assert tpu_products.all_bundles(listing) == 1 + 4 * (5 + 3 * 2) + 1


def test_a_loop_whose_passes_are_not_known_is_no_figure():
    with pytest.raises(ValueError, match="0 tests end a loop of 5 bundles"):
        tpu_products.all_bundles(LISTING.replace("loop exit test", "a test"))


def test_the_engine_has_the_shares_of_the_file():
    found: dict = {}
    for line in json.loads((ROOT / "benchmarks/results/tpu_products.json").read_text(encoding="utf-8")):
        by_bits = found.setdefault(line["chip"], {}).setdefault(BITS[line["weights"]], {})
        if line["product"] == "gate":
            by_bits[line["rows"]] = min(1.0, line["share_of_flops"])
    for chip, by_bits in SHARES_OF_FLOPS.items():
        for bits, shares in by_bits.items():
            assert shares == {rows: found[chip][bits][rows] for rows in shares}


def test_the_page_has_the_figures_of_the_file():
    lines = json.loads((ROOT / "benchmarks/results/tpu_products.json").read_text(encoding="utf-8"))
    assert tpu_products.table(lines) in (ROOT / "docs/engine.md").read_text(encoding="utf-8")
