"""Checks of the copies of TPU kernels: on in tests, off in ordinary use, for every kernel."""

import re
from pathlib import Path

import jax
import jax.extend
import pytest

from pallas_kernels import tpu_parameters
from pallas_kernels.paged_attention import paged_attention
from tests.pallas_kernels.paged_attention.shapes import SMALL

KERNELS = sorted(Path(tpu_parameters.__file__).parent.rglob("pallas_tpu.py"))


def parameters_of(jaxpr) -> list:
    """Compiler parameters of all Pallas calls in a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation.params["compiler_params"])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += parameters_of(inner)
    return found


def test_tests_have_them():
    assert tpu_parameters.has_checks()


@pytest.mark.parametrize(("value", "is_on"), [("", False), ("1", True)])
def test_attention_has_them_where_they_are_asked_for(value, is_on, monkeypatch, tpu_interpreter):
    monkeypatch.setenv(tpu_parameters.CHECKS_VARIABLE, value)
    shape = SMALL["decode_int8"]

    def call(arrays):
        return paged_attention(**arrays, **shape.options, implementation="pallas_tpu")

    found = parameters_of(jax.make_jaxpr(call)(shape.arguments("interleaved")).jaxpr)
    assert found
    for parameters in found:
        assert (parameters.disable_bounds_checks, parameters.disable_semaphore_checks) == (not is_on, not is_on)


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.parent.name)
def test_every_kernel_takes_its_parameters_from_one_place(file):
    text = file.read_text(encoding="utf-8")
    assert "pltpu.CompilerParams" not in text
    calls = len(re.findall(r"pl\.pallas_call\(", text))
    assert len(re.findall(r"compiler_params=compiler_params\(", text)) == calls > 0
