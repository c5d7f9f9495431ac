"""The pass over recurrent states as the compiler of CUDA 13 makes it."""

import pytest

from pallas_kernels import ahead_of_time
from tests.pallas_kernels.recurrence.compiled_pass import MOST_MOVED, moved_states


@pytest.mark.parametrize(("kind", "num_tokens"), MOST_MOVED)
def test_states_are_read_twice_and_written_once(kind, num_tokens):
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    moved, temporaries = moved_states("h100", kind, num_tokens)
    assert 1.5 <= moved <= MOST_MOVED[kind, num_tokens]
    assert temporaries <= 0.12
