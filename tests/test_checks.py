"""Parts that messages on options share."""

import pytest

from jaxinfer.checks import did_you_mean, format_bytes


def test_the_nearest_name_or_what_is_said_otherwise():
    assert did_you_mean("tmperature", ["temperature", "top_p"]) == ": did you mean 'temperature'?"
    assert did_you_mean("x", ["temperature"], otherwise="; known are temperature") == "; known are temperature"
    assert did_you_mean(3, ["temperature"]) == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 bytes"), (1000, "1.0 KiB"), (3 * 2**20, "3.0 MiB"), (2**30 // 5, "0.20 GiB"), (2**43, "8,192.00 GiB")],
)
def test_bytes_have_the_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text
