"""Bytes that a pass over all states moves on a GPU, as `form` says."""

import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.recurrence import form
from tests.pallas_kernels.recurrence.compiled_pass import MOST_MOVED, moved_states


@pytest.mark.parametrize(("kind", "num_tokens"), MOST_MOVED)
def test_a_gpu_moves_states_as_explained(kind, num_tokens):
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    moved, temporaries = moved_states("h100", kind, num_tokens)
    print(f"{kind}, {num_tokens} tokens: {moved:.3f} of the states moved, {temporaries:.3f} of temporaries")
    assert 1.5 <= moved <= MOST_MOVED[kind, num_tokens]
    assert temporaries <= 0.12


def test_the_form_of_each_platform():
    shape = (64, 16, 128, 256)
    assert form(shape, "gpu") == "xla, 1.5 of the bytes of states that are read and written once"
    assert form(shape, "tpu") == "pallas_tpu, 1 of the bytes of states that are read and written once"
    assert form((64, 16, 8, 256), "tpu").startswith("xla, 1.5")
