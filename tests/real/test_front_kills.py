"""Servers of a published model, killed under their streams: another one goes on, token for token."""

import pytest

from tests.fleet.front.test_kills import KINDS, Process, run_kills, told

pytestmark = [pytest.mark.real, pytest.mark.slow]
NUM_KILLS = 10


@pytest.mark.timeout(3600)
def test_streams_outlive_kills(model_path):
    serve = ("-m", "jaxinfer.cli", "serve", str(model_path("smollm2")), "--max-seqs", "8", "--max-model-len", "512")

    def make_server():
        # The suite's flags make programs that compile fast and run slowly.
        return Process(*serve, "--accept-sent-tokens", "--drain-timeout", "0", XLA_FLAGS="")

    kinds = [KINDS[number] for number in (0, 1, 3, 6)]  # it has no adapter, and calls no tools
    answers, metrics = run_kills(make_server, kinds, 3, NUM_KILLS, 6)
    told(answers, metrics, NUM_KILLS)
    assert int(metrics["jaxinfer_front_continued_total"]) >= NUM_KILLS // 2
