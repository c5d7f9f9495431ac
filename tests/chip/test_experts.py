"""Layers of quantized experts as the compiler of CUDA 13 makes them: every form in memory, at decode shapes."""

import pytest

from pallas_kernels import ahead_of_time
from tests.models.decoded_experts import check_decoding

FORMS = ("int8", "int4", "int4-g128", "int4-g128-asym", "int8-g128", "int4-g32", "nf4", "nf4-dq", "mxfp4", "fp8")
FORMS += ("fp8-block", "w8a8", "w8a8-fp8", "w8a8-fp8-block")
SIZES = [(1, 8, 2), (1, 64, 8), (8, 32, 4)]  # tokens, experts, experts of a token


@pytest.mark.parametrize("recipe", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decoding_reads_the_integers_of_the_chosen_experts(recipe, sizes):
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    check_decoding("h100", recipe, *sizes)
