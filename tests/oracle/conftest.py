"""The reference implementation for tests with --oracle."""

import pytest

from jaxinfer.extras import install_hint


@pytest.fixture(scope="session")
def reference():
    """`reference.py`, over Transformers. Asked for by --oracle, they must be there: nothing is skipped."""
    try:
        from tests.oracle import reference
    except ImportError as error:
        pytest.fail(f"--oracle needs torch and Transformers ({error}): {install_hint('oracle')}", pytrace=False)
    reference.set_up()
    return reference
