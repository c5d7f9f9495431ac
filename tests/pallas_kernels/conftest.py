"""What the tests of kernels share: the TPU interpreter with every check on."""

import pytest

from tests.pallas_kernels.tpu_interpreter import interpreted_tpu, interpreter


@pytest.fixture
def tpu_interpreter():
    """Pallas TPU kernels of the test run in the interpreter, as `interpreted_tpu`."""
    with interpreted_tpu():
        yield interpreter
