"""Every peer that is installed, in its own process, makes the tokens that Transformers makes, of the lengths asked."""

import random
import sys

import pytest

from benchmarks.peers import compare, systems, workload
from benchmarks.peers.workload import Measure

pytestmark = pytest.mark.oracle

SHAPE = {
    **workload.SHAPE,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": workload.MAX_MODEL_LEN,
}
NUMBERS = random.Random(0)
PROMPTS = [[NUMBERS.randrange(3, 96) for _ in range(length)] for length in (16, 40, 5, 80)]
ONE = Measure(PROMPTS[:1], [24], "each", 1)
SEVERAL = Measure(PROMPTS, [8, 20, 12, 3], "batch", 1)
PRESENT = [name for name in systems.PEERS if systems.why_not(name, None) is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from benchmarks.peers.to_gguf import write_gguf

    folder = tmp_path_factory.mktemp("peers") / "model"
    before, workload.WEIGHT_SCALE = workload.WEIGHT_SCALE, 0.2  # so that no two tokens are nearly the same
    try:
        workload.make_checkpoint(folder, SHAPE)
    finally:
        workload.WEIGHT_SCALE = before
    write_gguf(folder, folder / "model-f32.gguf")
    return folder


def answers(name, folder):
    measures = {"one": ONE} if systems.PEERS[name].speculates else {"one": ONE, "several": SEVERAL}
    job = compare.job(name, folder, measures, 1, folder)
    return compare.run_process(job, sys.executable, folder)["answers"]


@pytest.fixture(scope="module")
def expected(folder):
    return answers(compare.REFERENCE, folder)


@pytest.mark.parametrize("name", [name for name in PRESENT if name != compare.REFERENCE])
def test_a_peer_makes_the_same_tokens(name, folder, expected):
    for measure, found in answers(name, folder).items():
        assert found == expected[measure]
