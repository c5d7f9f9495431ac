"""Prompts cut from texts, and how much of them is shared."""

import pytest

from jaxinfer.measure.advise.measure import for_quality, make_requests, shared_share
from jaxinfer.measure.bench.workload import BenchWorkload, Lengths


@pytest.mark.parametrize(
    ("prompts", "share"),
    [
        ([[1, 2, 3], [4, 5, 6]], 0.0),
        ([[1, 2, 3], [1, 2, 4]], 2 / 6),
        ([[1, 2], [9, 9], [1, 2], [1, 2]], 4 / 8),  # neighbours or not
        ([], 0.0),
    ],
)
def test_the_share_that_reuse_could_save(prompts, share):
    assert shared_share(prompts) == pytest.approx(share)


def test_prompts_are_pieces_of_the_texts_and_repeat():
    texts = [list(range(100)), list(range(100, 150))]
    workload = BenchWorkload(Lengths("uniform", 5, 9), Lengths("fixed", 3, 3), seed=1)
    requests = make_requests(workload, texts, 20, 150, num_shared=4)
    assert requests == make_requests(workload, texts, 20, 150, num_shared=4)
    for request in requests:
        body = request.prompt[4:]
        assert 5 <= len(body) <= 9
        assert body == list(range(body[0], body[0] + len(body)))
        assert request.prompt[:4] == requests[0].prompt[:4]
        assert request.num_tokens == 3
    assert shared_share([request.prompt for request in requests]) > 0.2


def test_a_dataset_is_taken_as_it_is():
    workload = BenchWorkload(Lengths("fixed", 5, 5), Lengths("fixed", 3, 3), (("one", None), ([1, 2], 7)))
    assert [(request.prompt, request.num_tokens) for request in make_requests(workload, [], 3, 9)] == [
        ("one", 3),
        ([1, 2], 7),
        ("one", 3),
    ]


def test_a_text_that_is_shorter_than_a_prompt_goes_round():
    workload = BenchWorkload(Lengths("fixed", 7, 7), Lengths("fixed", 1, 1))
    assert make_requests(workload, [[1, 2, 3]], 1, 9)[0].prompt == [1, 2, 3, 1, 2, 3, 1]


def test_texts_for_quality_keep_within_the_memory_of_log_probabilities():
    texts = [[1] * 1000, [2], [3] * 10]
    assert for_quality(texts, 100, 63) == [[1] * 63, [3] * 10]
    assert len(for_quality([[1] * 300] * 8, 2**19, 256)) == 2
