"""Bundles of the TPU kernels: how a listing is read, and the bound that the int8 kernel keeps on v6e."""

import pytest

from benchmarks import tpu_bundles
from pallas_kernels import ahead_of_time

# A loop in a loop, as the compiler writes it: a mark before a branch target, a ">" for each loop around a bundle.
LISTING = """
= control target key start
LH: loop header
= control target key end

     0   :  { %s1 = inlined_call_operand.vmem [shape: s32[576], index: 0] }
   0x1   :  { %v2 = vmov 0 }
   0x2 LB: > { %v3 = vld [vmem:[#allocation2] sm:$0xff] }
   0x3   : > { %v4 = vadd.s32 %v3, %v2 }
   0x4   : >> { %v5 = vadd.s32 %v4, %v2 }
   0x5   : >> { %v6 = vadd.s32 %v5, %v2  ;;  %v7 = vadd.s32 %v5, %v3 }
   0x6   : >> { %10 = sbr.rel (%p1) target bundleno = 4 (0x4), region = 93 }
   0x7 PF: > { %v8 = vadd.s32 %v6, %v2 }
   0x8   :  { %11 = vst [vmem:[#allocation3]] %v8 }
hlo: paged_attention_2_queries.1
"""


def test_straight_runs():
    assert [run for run in tpu_bundles.straight_runs(LISTING) if run] == [2, 2, 3, 1, 1]


@pytest.mark.slow
def test_int8_keeps_up_with_its_copies_on_v6e():
    if (reason := ahead_of_time.missing_compiler("v6e")) is not None:
        pytest.skip(reason)
    cost = tpu_bundles.measure("v6e", "decode", "int8")
    print(cost, f"{cost.ratio:.2f}")
    assert 0.1 < cost.ratio <= tpu_bundles.GOAL
