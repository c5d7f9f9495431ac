"""`benchmarks.quality.layers`, on the embedded model."""

import pytest

from benchmarks.quality.layers import EXACT, LayerReporter
from jaxinfer.loading import load_model
from jaxinfer.training.corpus import held_out_files


@pytest.mark.slow
def test_fewer_bits_lose_more_and_exact_layers_lose_nothing():
    model = load_model("demo")
    reporter = LayerReporter(model, [next(text for _, text in held_out_files(8) if len(text) > 4000)])
    exact, eight, four = ([bits] * model.config.num_layers for bits in (EXACT, 8, 4))
    one = [4, *exact[1:]]
    assert reporter.kl(exact, exact) == 0
    losses = [reporter.kl(*bits) for bits in ((eight, eight), (one, exact), (four, exact), (four, four))]
    assert losses == sorted(losses)
    assert 0 < losses[0] < 0.001 < losses[-1]
