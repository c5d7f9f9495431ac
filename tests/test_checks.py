"""Checks of options, and the parts their messages share."""

from types import SimpleNamespace

import pytest

from jaxinfer.checks import check_positive_integers, did_you_mean, format_bytes


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None])
def test_what_is_no_positive_integer_raises(value):
    with pytest.raises(ValueError, match=f"num_pages must be a positive integer, got {value!r}"):
        check_positive_integers(SimpleNamespace(page_size=1, num_pages=value), "page_size", "num_pages")


def test_optional_attributes_may_be_none():
    options = SimpleNamespace(page_size=None, num_pages=0)
    check_positive_integers(options, optional=["page_size"])
    with pytest.raises(ValueError, match="num_pages"):
        check_positive_integers(options, optional=["page_size", "num_pages"])


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
