"""Clients that people have, in environments of their own (`make test-clients`), against a server in a process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import offline
from tests.server.process import Process

HERE = Path(__file__).parent
ENVIRONMENTS = {name: HERE.parents[2] / f".venv-{name}" / "bin" / "python" for name in ("clients", "litellm")}

pytestmark = [pytest.mark.slow, pytest.mark.clients]


@pytest.fixture(scope="module")
def server():
    for name, python in ENVIRONMENTS.items():
        if not python.exists():
            pytest.skip(f"clients: there is no .venv-{name}; make test-clients makes it")
    with Process("5") as process:
        process.until_ready()
        yield f"http://127.0.0.1:{process.port}"


def use(name, environment, *arguments, cwd=None, **variables):
    command = [ENVIRONMENTS[environment], HERE / f"use_{name}.py", *arguments]
    # These packages must not look for the modules of this repository.
    variables = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}
    found = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=cwd, env=variables)
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "environment"),
    [("openai", "clients"), ("anthropic", "clients"), ("langchain", "clients"), ("litellm", "litellm")],
)
def test_a_client(server, name, environment):
    use(name, environment, server)


def score(engine, context, continuation):
    """The log-probability of a continuation, and whether each of its tokens is the most probable one."""
    tokenize = engine.llm.client.tokenize
    ids, start = tokenize(context + continuation, False)[1], len(tokenize(context, False)[1])
    entries = offline(engine, ids, temperature=0, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    found = [entry[token] for token, entry in zip(ids[start:], entries[start:], strict=True)]
    return sum(one.logprob for one in found), all(one.rank == 1 for one in found)


@pytest.mark.timeout(900)
def test_scores_of_lm_eval_are_those_of_the_library(server, engine, tmp_path):
    questions = ["def read_lines(path):", "class Reader:", "for line in lines:", "if __name__ =="]
    best = [offline(engine, one, temperature=0, max_tokens=2, ignore_eos=True).outputs[0].text for one in questions]
    rows = [
        {"question": question, "choices": [" pass", best[number], " return None"], "answer": number % 2}
        for number, question in enumerate(questions)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    use("lm_eval", "litellm", server, tmp_path / "found.json", cwd=tmp_path, HF_HOME=str(tmp_path / "cache"))
    found = json.loads((tmp_path / "found.json").read_text())

    expected = [[score(engine, row["question"], choice) for choice in row["choices"]] for row in rows]
    assert any(is_greedy for row in expected for _, is_greedy in row)
    chosen = [max(range(3), key=lambda i: row[i][0]) for row in expected]
    accuracy = sum(one == row["answer"] for one, row in zip(chosen, rows, strict=True)) / len(rows)
    assert 0 < accuracy < 1
    for name in ("ids", "batches", "texts"):
        assert found[name]["scores"]["jaxinfer_choose"]["acc,none"] == accuracy
        for sample, row in zip(found[name]["samples"]["jaxinfer_choose"], expected, strict=True):
            answers = [answer for (answer,) in sample["answers"]]
            assert [answer[0] for answer in answers] == pytest.approx([one[0] for one in row], abs=1e-3)
            assert [answer[1] for answer in answers] == [one[1] for one in row]

    for name in ("ids", "batches", "texts", "chat"):
        for sample, question in zip(found[name]["samples"]["jaxinfer_write"], questions, strict=True):
            prompt = engine.llm.chat_prompt([{"role": "user", "content": question}]) if name == "chat" else question
            answer = offline(engine, prompt, temperature=0, max_tokens=12, stop=["\n"]).outputs[0]
            assert sample["answers"] == [[answer.text]]
