"""Lets the tests here import `families` and `parity`, as `make_golden.py` does when run as a script."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def reference_module():
    """`reference.py`, over Transformers. Asked for by --oracle, they must be there: nothing is skipped."""
    try:
        import reference
    except ImportError as error:
        pytest.fail(f"--oracle needs torch and Transformers ({error}): pip install 'jaxinfer[oracle]'", pytrace=False)
    reference.set_up()
    return reference
