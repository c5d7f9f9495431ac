"""Clients that people have, in environments of their own (`make test-clients`), against a server in a process."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.conftest import write_checkpoint
from tests.server.clients.calling_model import write_calling_checkpoint
from tests.server.conftest import offline
from tests.server.process import Process
from tests.store.conftest import environment as hub_environment
from tests.store.fake_hub import serving

HERE = Path(__file__).parent
NUM_CALLS, NUM_EXAMPLES = 10_000, 1050  # of all routes; of each, beside those for its boundaries
GENERATING = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/tokenize", "/detokenize"),
)
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
    [
        ("openai", "clients"),
        ("anthropic", "clients"),
        ("ollama", "clients"),
        ("langchain", "clients"),
        ("litellm", "litellm"),
    ],
)
def test_a_client(server, name, environment):
    use(name, environment, server)


@pytest.mark.timeout(900)
def test_ollama_pulls_copies_calls_and_deletes(tmp_path):
    """A server that was started without a model, and a hub."""
    if not ENVIRONMENTS["clients"].exists():
        pytest.skip("clients: there is no .venv-clients; make test-clients makes it")
    checkpoints = {
        "someone/calls": write_calling_checkpoint(tmp_path / "calls"),
        "someone/tiny": write_checkpoint(tmp_path / "tiny"),
    }
    with serving() as hub:
        for name, folder in checkpoints.items():
            hub.push(name, {path.name: path.read_bytes() for path in folder.iterdir()})
        variables = {**os.environ, **hub_environment(hub, tmp_path), "PYTHONPATH": str(HERE.parents[2])}
        command = [sys.executable, "-m", "jaxinfer.cli", "serve", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
            try:
                assert process.stderr is not None
                url = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.]+:\d+", line)))
                threading.Thread(target=process.stderr.read, daemon=True).start()
                use("ollama_store", "clients", url)
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0


def score(engine, context, continuation):
    """The log-probability of a continuation, and whether each of its tokens is the most probable one."""
    tokenize = engine.llm.client.tokenize
    ids, start = tokenize(context + continuation, False)[1], len(tokenize(context, False)[1])
    entries = offline(engine, ids, temperature=0, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    found = [entry[token] for token, entry in zip(ids[start:], entries[start:], strict=True)]
    return sum(one.logprob for one in found), all(one.rank == 1 for one in found)


def rolled(engine, text, length):
    """The log-probability of a text in pieces of `length` tokens, as lm-eval cuts it: each token counts once, the first
    after the token that begins texts, the others after what is before them in `length` tokens."""
    tokenizer = engine.llm.tokenizer
    tokens, total, done = engine.llm.client.tokenize(text, False)[1], 0.0, 0
    while done < len(tokens):
        end = min(done + length, len(tokens))
        context = tokens[max(end - length - 1, 0) : done] or [tokenizer.eos_token_id]
        ids = [*context, *tokens[done:end]]
        entries = offline(engine, ids, temperature=0, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        scored = zip(ids[len(context) :], entries[len(context) :], strict=True)
        total += sum(entry[token].logprob for token, entry in scored)
        done = end
    return total


@pytest.mark.timeout(900)
def test_scores_of_lm_eval_are_those_of_the_library(server, engine, tmp_path):
    questions = ["def read_lines(path):", "class Reader:", "for line in lines:", "if __name__ =="]
    best = [offline(engine, one, temperature=0, max_tokens=2, ignore_eos=True).outputs[0].text for one in questions]
    rows = [
        {"question": question, "choices": [" pass", best[number], " return None"], "answer": number % 2}
        for number, question in enumerate(questions)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = "def read_lines(path):\n    with open(path) as file:\n        return [line.rstrip() for line in file]\n"
    texts = [source[:end] for end in (3, 60, 100)] + [source * count for count in (1, 2, 5)]  # up to six pieces
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
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

    for name in ("ids", "batches"):
        answers = [one["answers"] for one in found[name]["samples"]["jaxinfer_roll"]]
        sums = [answer[0][0] if isinstance(answer[0], list) else answer[0] for answer in answers]
        assert [float(one) for one in sums] == pytest.approx([rolled(engine, text, 31) for text in texts], abs=1e-3)

    for name in ("ids", "batches", "texts", "chat"):
        for sample, question in zip(found[name]["samples"]["jaxinfer_write"], questions, strict=True):
            prompt = engine.llm.chat_prompt([{"role": "user", "content": question}]) if name == "chat" else question
            answer = offline(engine, prompt, temperature=0, max_tokens=12, stop=["\n"]).outputs[0]
            assert sample["answers"] == [[answer.text]]


def count_answers(server):
    """Answers by route and status, as the server counts them."""
    text = urllib.request.urlopen(f"{server}/metrics").read().decode()
    pattern = r'^jaxinfer_http_requests_total\{code="(\d+)",.*route="(.*)"\} ([\d.]+)$'
    return {(route, int(code)): int(float(count)) for code, route, count in re.findall(pattern, text, re.MULTILINE)}


def schemathesis(url, num_examples, folder):
    """Calls of all routes that /openapi.json describes, by route in processes of their own: of operations that threads
    begin at once, schemathesis leaves some out. Returns the routes with bodies and the processes."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    posts = [path for path, methods in paths.items() if "post" in methods]
    command = [
        *(ENVIRONMENTS["clients"].with_name("st"), "run", f"{url}/openapi.json", "--seed", "1", "--workers", "1"),
        *("--phases", "coverage,fuzzing", "--max-examples", str(num_examples), "--no-shrink", "--no-color"),
        # A description cannot say all that makes a request wrong: the context's length, the vocabulary, a template.
        *("--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--request-timeout", "300"),
        *("--generation-database", "none", "--warnings", "off"),
    ]

    def call(number, selection):
        environment = {**os.environ, "PYTHONPATH": str(HERE), "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
        own = folder / str(number)
        own.mkdir()
        return subprocess.run(
            [*command, *selection], capture_output=True, text=True, cwd=own, env=environment, timeout=7000
        )

    selections = [["--include-method", "GET"], *(["--include-path", path] for path in posts)]
    with ThreadPoolExecutor(len(selections)) as pool:
        runs = list(pool.map(call, range(len(selections)), selections))
    for one in runs:
        assert one.returncode == 0, one.stdout[-6000:] + one.stderr[-2000:]
    return posts, sum(int(re.search(r"(\d+) generated", one.stdout)[1]) for one in runs)


@pytest.mark.timeout(7200)
def test_calls_of_schemathesis_are_answered_as_described(server, tmp_path):
    """Right and wrong requests, as many as 10,000: no answer of 5xx, none that /openapi.json does not describe."""
    before = count_answers(server)
    posts, num_calls = schemathesis(server, NUM_EXAMPLES, tmp_path)
    after = count_answers(server)
    answered = {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}
    print(f"{num_calls} calls; answers by route and status: {answered}")
    assert num_calls >= NUM_CALLS
    assert sum(answered.values()) >= num_calls
    assert [key for key in answered if key[1] >= 500] == []
    for path in posts:
        assert sum(count for (one, _), count in answered.items() if one == path) >= 100, path
        # Others need the name of a model, which random texts are not, or one that embeds.
        assert path not in GENERATING or answered[path, 200] >= 100, path
        assert sum(count for (route, code), count in answered.items() if route == path and code >= 400) >= 100, path


@pytest.mark.timeout(7200)
def test_calls_of_schemathesis_through_a_front(server, tmp_path):
    command = [sys.executable, "-m", "jaxinfer.cli", "front", "--replica", server, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as front:
        try:
            told = (re.search(r"listening at (http://[\d.]+:\d+)", line) for line in front.stderr)
            url = next(found[1] for found in told if found)
            threading.Thread(target=front.stderr.read, daemon=True).start()
            while "jaxinfer_front_ready_replicas 1" not in urllib.request.urlopen(f"{url}/metrics").read().decode():
                time.sleep(0.1)
            before = count_answers(server)
            posts, num_calls = schemathesis(url, 60, tmp_path)
            after = count_answers(server)
        finally:
            front.terminate()
    print(f"{num_calls} calls of {len(posts)} routes through a front")
    assert num_calls >= 1000
    assert [key for key in after if key[1] >= 500 and after[key] > before.get(key, 0)] == []
