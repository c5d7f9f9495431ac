"""`explain()` prints the bytes of weights that a decode step reads, and names a matrix that is copied first."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxinfer.engine import explanation
from jaxinfer.engine.explanation import _quantized_products
from jaxinfer.models import abstract_params
from jaxinfer.quantization import QuantizedArray, Scheme
from jaxinfer.quantization.reads import MOST_READ, product_use
from tests.tiny import TINY as UNTIED

TINY = replace(UNTIED, tie_word_embeddings=True)


def facts_of(config, params):
    """Of an engine on a CPU, by what `_quantized_products` reads of its `EngineSpec`."""
    spec: Any = SimpleNamespace(config=config, base_params=params, mesh=None, dtype="float32", max_seqs=4)
    return _quantized_products(spec)


def tied_in_groups(config):
    """Parameters with a tied head of int8 in groups of 16 along its rows."""
    params = abstract_params(config, "float32")
    vocabulary, width = params["embed"].shape
    values: Any = jax.ShapeDtypeStruct((vocabulary, width), "int8")
    scales: Any = jax.ShapeDtypeStruct((vocabulary, width // 16), "float32")
    return {**params, "embed": QuantizedArray(values, scales, scheme=Scheme("int", 6, (1, 16)))}


def test_a_head_that_is_copied_is_named(monkeypatch):
    params = tied_in_groups(TINY)
    uses = []

    def converting(weight, rows, dtype, *, is_transposed=False):
        """As XLA on a CPU multiplies, whatever kernels there are."""
        found = product_use(weight, rows, dtype, is_transposed=is_transposed, platform="cpu")
        copied = found.stored_bytes + 4 * weight.size
        found = found if not is_transposed else type(found)("xla, copied", found.stored_bytes, copied, "float32")
        uses.append(found)
        return found

    monkeypatch.setattr(explanation, "product_use", converting)
    facts = facts_of(TINY, params)
    every = uses[1::2]  # one row, all rows
    assert facts["weight bytes of a step"] == sum(use.read_bytes for use in every)
    assert facts["  the least"].startswith(f"{sum(use.stored_bytes for use in every):,} (")
    is_above = facts["weight bytes of a step"] > MOST_READ * sum(use.stored_bytes for use in every)
    assert is_above == ("  warning" in facts)
    assert is_above
    assert "embed (" in facts["  warning"]
    assert "layers" not in facts["  warning"]


def test_nothing_is_warned_of_without_a_copy():
    facts = facts_of(TINY, abstract_params(TINY, "float32"))
    assert "  warning" not in facts
    assert facts["  the least"].endswith("(1.00x)")


@pytest.mark.parametrize(("platform", "copy"), [("tpu", None), ("gpu", None)])
def test_a_tied_head_on_a_chip_has_no_copy(platform, copy):
    head = tied_in_groups(TINY)["embed"]
    use = product_use(head, 4, "bfloat16", is_transposed=True, platform=platform)
    assert use.copy == copy
    assert not use.is_wasteful
