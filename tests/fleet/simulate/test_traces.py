"""Arrivals from files of public formats, and made ones."""

import json

import numpy as np
import pytest

from jaxinfer.fleet.simulate.times import MILLISECOND, SECOND
from jaxinfer.fleet.simulate.traces import open_trace

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}


def written(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_public_formats_are_read_and_errors_name_file_and_line(tmp_path):
    rows = "5,ChatGPT,472,18,490,Conversation log\n2.5,GPT-4,417,276,693,API log\n9,ChatGPT,30,0,30,API log\n"
    trace = open_trace(written(tmp_path, "burst.csv", BURSTGPT + rows))
    assert list(zip(trace.times, trace.prompts, trace.answers, strict=True)) == [
        (0, 417, 276),
        (5 * SECOND // 2, 472, 18),
    ]
    assert trace.notes == ("1 requests without a prompt or an answer (failed ones) are left out",)
    sessions = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    assert open_trace(written(tmp_path, "v2.csv", sessions + "5,,1.5,GPT-4,7,9,16,API log\n")).prompts == (7,)
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319569,3180,8\n"
    azure = open_trace(written(tmp_path, "azure.csv", AZURE + rows))
    assert (azure.times, azure.answers) == ([0, 51_996_900_000], (10, 8))
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:01:00+00:00,2399,6\n"
    assert open_trace(written(tmp_path, "azure2.csv", AZURE + rows)).seconds == pytest.approx(59.99007)
    later = {**MOONCAKE, "timestamp": 3000, "hash_ids": [7, 8, 10]}
    lines = "\n".join(map(json.dumps, (later, {**MOONCAKE, "timestamp": 1500})))
    mooncake = open_trace(written(tmp_path, "mooncake.jsonl", lines))
    assert (mooncake.times, mooncake.blocks) == ([0, 1500 * MILLISECOND], [(7, 8, 9), (7, 8, 10)])
    for name, text, message in (
        (
            "a.csv",
            BURSTGPT + "5,ChatGPT,472,18,490,x\n6,ChatGPT,many,18,490,x\n",
            "a.csv, line 3: Request tokens .*'many'",
        ),
        ("b.csv", BURSTGPT + "soon,ChatGPT,472,18,490,x\n", "b.csv, line 2: Timestamp must be seconds.*'soon'"),
        ("c.csv", AZURE + "yesterday,1,2\n", "c.csv, line 2: TIMESTAMP must be as 2023.*'yesterday'"),
        ("d.csv", "time,tokens\n1,2\n", "d.csv, line 1: columns time, tokens are neither"),
        ("e.csv", AZURE, "e.csv has no requests"),
        ("f.csv", AZURE + "2023-11-16 18:17:03\n", "f.csv, line 2: 1 columns, and the first line has 3"),
        ("g.jsonl", json.dumps({**MOONCAKE, "hash_ids": [1]}), "g.jsonl, line 1: 1 hash_ids, and 1100 tokens are 3"),
        (
            "h.jsonl",
            json.dumps(MOONCAKE) + "\n" + json.dumps({**MOONCAKE, "output_length": 0}),
            "line 2: output_length",
        ),
        ("i.jsonl", "[1]", "i.jsonl, line 1: not an object"),
        ("j.txt", "", "j.txt ends in neither"),
    ):
        with pytest.raises(ValueError, match=message):
            open_trace(written(tmp_path, name, text))


@pytest.mark.slow
def test_made_traces():
    trace = open_trace("gamma:rate=10,cv=2,prompt=10:20,answer=5,requests=20000", seed=1)
    gaps = np.diff(trace.times) / SECOND
    assert trace.rate == pytest.approx(10, rel=0.06)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(2, rel=0.05)
    assert (min(trace.prompts), max(trace.prompts), set(trace.answers)) == (10, 20, {5})
    assert trace.at_rate(40).rate == pytest.approx(40)
    assert trace.times == open_trace(trace.name, seed=1).times != open_trace(trace.name, seed=2).times
    talks = open_trace("conversations:rate=5,turns=3,shared=64,prompt=16:40,answer=32,think=5,requests=4500", seed=1)
    assert talks.rate == pytest.approx(5, rel=0.15)
    assert {blocks[:4] for blocks in talks.blocks} == {(0, 1, 2, 3)}
    lengths = zip(talks.prompts, talks.answers, talks.blocks, strict=True)
    assert all(len(blocks) == -(-(prompt + answer) // 16) for prompt, answer, blocks in lengths)
    for text, message in (
        ("poisson:prompt=5", "poisson needs rate=X"),
        ("poisson:rate=5,turns=2", "poisson has no value 'turns'"),
        ("poisson:rate=0", "rate must be a number above 0, got '0'"),
        ("poisson:rate=1,requests=2.5", "requests must be a whole number above 0"),
        ("poisson:rate=1,prompt=9:3", "prompt: '9:3' is none of"),
        ("poison:rate=1", "poisson"),
    ):
        with pytest.raises(ValueError, match=message):
            open_trace(text)
    with pytest.raises(FileNotFoundError):
        open_trace("not_there.csv")
