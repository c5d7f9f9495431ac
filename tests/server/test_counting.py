"""Bytes that a model is counted to need before it is loaded, next to what it holds: weights of GGUF files, packed."""

import asyncio
from dataclasses import replace

import pytest

from jaxinfer import SamplingParams
from jaxinfer.server.catalogue import LocalModels, count_needs, resident_bytes
from jaxinfer.server.options import ServerOptions
from tests.checkpoints_convert.gguf.gguf_models import write_random_llama

ENGINE = {"max_seqs": 2, "max_model_len": 32, "prefill_chunk": 32}
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "MXFP4", "IQ4_NL", "Q2_K", "TQ2_0", "IQ1_S")
OPTIONS = ({}, {"activations": "int8"}, {"requantize": "dense"}, {"requantize": "int4-g128"}, {"dtype": "bfloat16"})
SLOW = pytest.mark.slow
CASES = [
    pytest.param(kind, options, marks=() if (kind, options) == ("Q4_1", {}) else SLOW)
    for kind in KINDS
    for options in OPTIONS
]


def opened(path, arguments, needs):
    return LocalModels({path: path}, arguments, ServerOptions(lazy=True)).find(path).open(needs)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_packed_weights_take_at_most_what_is_counted(tmp_path, kind, options, caplog):
    """Scales that are exact in 16 bits are stored so, which the shapes do not tell: some 10 % less."""
    path = str(write_random_llama(tmp_path / "model.gguf", kind, num_layers=2))
    arguments = {**ENGINE, **options}
    if "activations" in options:
        pytest.importorskip("numba", reason="products that round activations need Numba")
    needs = count_needs(path, arguments, 2**40)
    engine = opened(path, arguments, needs)
    try:
        held = resident_bytes(engine)
    finally:
        asyncio.run(engine.close())
    assert held <= needs.num_bytes <= held + 0.5 * needs.parts["weights"]
    assert "counted beforehand" not in caplog.text


@pytest.mark.slow
def test_a_model_that_holds_more_than_was_counted_is_served_with_a_warning(tmp_path, caplog):
    path = str(write_random_llama(tmp_path / "model.gguf", "Q4_0", num_layers=1))
    needs = count_needs(path, ENGINE, 2**40)
    too_few = replace(needs, parts={**needs.parts, "weights": 1000})

    async def run():
        engine = opened(path, ENGINE, too_few)
        async with engine:
            return [delta async for delta in engine.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))]

    assert asyncio.run(run())[-1].finish_reason == "length"
    assert "MiB were counted beforehand" in caplog.text
