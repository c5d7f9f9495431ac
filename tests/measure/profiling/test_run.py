"""What a dispatch needs at least."""

from jaxinfer.measure.profiling.run import needed
from jaxinfer.planning import chips
from jaxinfer.planning.counted import Counted
from jaxinfer.planning.roofline import Rates


def test_windows_bound_what_a_pass_reads():
    """A layer without a window and one of 100 tokens, each with 10 bytes a token."""
    flops = {"bf16": 1.0}
    counted = Counted(flops, 1.0, ((100, 1.0),), 1000, 0, 0, 0, 20, window_bytes=((100, 10),))
    rates = Rates.of(chips()["h100"])
    # A token after 499 others, a prompt of 300 and five tokens of a draft after 50 others.
    found = needed(counted, rates, [(499, 1), (0, 300), (50, 5)])
    assert found.num_bytes == 1000 + (5000 + 1000) + 2 * 3000 + 2 * 550
