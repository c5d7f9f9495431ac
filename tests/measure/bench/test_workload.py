"""Lengths, datasets and arrivals: what was asked for, again with the same seed."""

import json
import math

import numpy as np
import pytest

from jaxinfer.measure.bench.workload import BenchWorkload, Lengths, arrivals, parse_numbers, read_dataset


@pytest.mark.parametrize(
    ("text", "kind", "low", "high"),
    [("128", "fixed", 128, 128), ("16:256", "uniform", 16, 256), ("log:8:64", "log", 8, 64)],
)
def test_lengths_are_read_and_written_back(text, kind, low, high):
    lengths = Lengths.parse(text, "--prompt-tokens")
    assert (lengths.kind, lengths.low, lengths.high, str(lengths)) == (kind, low, high, text)


@pytest.mark.parametrize("text", ["", "0", "5:4", "1:2:3", "log:5", "a", "log:a:b", "-3"])
def test_other_lengths_are_refused_by_the_options_name(text):
    with pytest.raises(ValueError, match="--answer-tokens"):
        Lengths.parse(text, "--answer-tokens")


def test_drawn_lengths_fill_their_range():
    numbers = np.random.default_rng(0)
    uniform = Lengths("uniform", 3, 6).draw(numbers, 4000)
    assert set(uniform) == {3, 4, 5, 6}
    logs = np.array(Lengths("log", 8, 1024).draw(numbers, 4000))
    assert (logs.min(), logs.max()) >= (8, 1000)
    assert logs.max() <= 1024
    assert abs(np.mean(logs < math.sqrt(8 * 1024)) - 0.5) < 0.04  # half below the geometric mean


def test_a_seed_repeats_requests_and_parts_differ():
    workload = BenchWorkload(Lengths("uniform", 4, 9), Lengths("fixed", 5, 5), seed=3)
    assert workload.requests(6, 100) == workload.requests(6, 100)
    assert workload.requests(6, 100) != workload.requests(6, 100, part=1)
    assert all(4 <= len(request.prompt) <= 9 and request.num_tokens == 5 for request in workload.requests(6, 100))
    assert all(0 <= token < 100 for request in workload.requests(6, 100) for token in request.prompt)


def test_a_dataset_gives_prompts_and_its_own_lengths_and_begins_again():
    workload = BenchWorkload(Lengths("fixed", 1, 1), Lengths("fixed", 7, 7), (("a", None), ([1, 2], 3)))
    requests = workload.requests(3, 100)
    assert [(request.prompt, request.num_tokens) for request in requests] == [("a", 7), ([1, 2], 3), ("a", 7)]


def test_a_dataset_is_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"prompt": [3, 4], "output_tokens": 9, "other": 1}\n')
    assert read_dataset(file) == (("a b", None), ([3, 4], 9))


@pytest.mark.parametrize(
    "line",
    ["nothing", "[]", '{"text": "a"}', '{"prompt": ""}', '{"prompt": []}', '{"prompt": [1.5]}',
     '{"prompt": "a", "output_tokens": 0}', '{"prompt": "a", "output_tokens": true}'],
)  # fmt: skip
def test_a_broken_row_is_named_with_its_line(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "good"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2"):
        read_dataset(file)


@pytest.mark.parametrize("burstiness", [1.0, 0.25])
def test_arrivals_have_the_rate_and_the_spread_of_their_distribution(burstiness):
    times = arrivals(4.0, 20_001, burstiness=burstiness, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    # 5 standard errors of a gamma distribution's mean
    assert abs(gaps.mean() - 0.25) < 5 * 0.25 / math.sqrt(burstiness * 20_000)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert times == arrivals(4.0, 20_001, burstiness=burstiness, seed=1)


def test_an_infinite_rate_sends_all_at_once_and_others_are_refused():
    assert arrivals(math.inf, 3) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="rate must be positive, got -1"):
        arrivals(-1, 3)
    with pytest.raises(ValueError, match="burstiness must be positive, got 0"):
        arrivals(1, 3, burstiness=0)


def test_lists_of_numbers():
    assert parse_numbers("2,inf,2", "--rate") == [2.0, math.inf]
    assert parse_numbers("1,8", "--batch", integers=True) == [1, 8]
    for text in ("", "0", "1.5", "a"):
        with pytest.raises(ValueError, match="--batch"):
            parse_numbers(text, "--batch", integers=True)
