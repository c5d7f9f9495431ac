"""`jaxinfer replay` and `verify-answer` read what generate and batch write; exit codes say equal, different, cannot."""

import json

import pytest

from tests.cli.conftest import write_checkpoint


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory):
    """A file of three answers of `generate --json`, to two prompts."""
    from typer.testing import CliRunner

    from jaxinfer.cli.main import app

    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    given = ["ab", "def f", "-m", model, "-n", "2", "--seed", "5", "--max-tokens", "9", "--logprobs", "1"]
    result = CliRunner().invoke(app, ["generate", *given, "--json", "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path


def changed(answers, path, position: int) -> int:
    """Writes the file with another token in the second line's first answer; returns the token that was there."""
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    tokens = lines[1]["coordinates"][0]["token_ids"]
    made, tokens[position] = tokens[position], tokens[position] ^ 1
    lines[0]["coordinates"][0]["program"]["page_size"] = 8
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


@pytest.mark.slow
def test_equal_answers(jaxinfer, answers):
    result = jaxinfer("replay", answers)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("4 of 4 answers are equal, ")
    result = jaxinfer("verify-answer", answers, "--from", 2, "--to", 5, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert [answer["num_checked"] for answer in report["answers"]] == [3] * 4
    assert report["program"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param("replay", marks=pytest.mark.slow), "verify-answer"])
def test_a_token_that_differs_is_named(jaxinfer, answers, tmp_path, command):
    path = tmp_path / "changed.jsonl"
    made = changed(answers, path, 4)
    result = jaxinfer(command, path)
    assert result.exit_code == 1
    assert result.stdout.startswith("program: page_size is 16 here, and was 8\n")
    assert f"{path} line 2, answer 1: token 4 is {made ^ 1} " in result.stdout
    assert f", and {made} " in result.stdout
    assert "3 of 4 answers are equal, " in result.stdout
    assert "· 1 differ" in result.stdout
    report = json.loads(jaxinfer(command, path, "--json").stdout)
    difference = report["answers"][2]["difference"]
    assert difference == {"position": 4, "claimed": made ^ 1, "made": made, "reason": None}


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "code", "told"), [("abort", 0, "4 of 4"), ("length", 1, "the answer goes on")])
def test_an_answer_without_a_token(jaxinfer, answers, tmp_path, reason, code, told):
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    lines[0]["coordinates"][0] |= {"token_ids": [], "finish_reason": reason}
    path = tmp_path / "empty.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = jaxinfer("verify-answer", path)
    assert (result.exit_code, told in result.stdout) == (code, True)


def test_other_weights_are_refused(jaxinfer, answers, tmp_path):
    other = write_checkpoint(tmp_path / "other", seed=1)
    result = jaxinfer("replay", answers, "-m", other)
    assert result.exit_code == 2
    assert "refused: tokens 0 to 9: weights '0' (" in result.stdout
    assert "· 4 refused" in result.stdout
    assert jaxinfer("replay", answers, "-m", other, "--force").exit_code == 1


@pytest.mark.slow
def test_results_of_a_batch(jaxinfer, model, tmp_path):
    rows = [
        {"custom_id": "a", "prompt": "ab", "temperature": 1.0, "structured": {"regex": "[a-z]{4}"}},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": ["x", "y"], "max_tokens": 4, "seed": 3}},
        {"custom_id": "c", "url": "/v1/responses", "body": {"input": "hello", "max_output_tokens": 3}},
    ]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert jaxinfer("batch", path, out, "-m", model, "--coordinates", "--draft", "ngram").exit_code == 0
    lines = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    fingerprints = {line["weights"]["fingerprint"] for line in lines.values()}
    assert {line["weights"]["version"] for line in lines.values()} == {"0"}
    assert fingerprints == {lines["a"]["coordinates"][0]["weights"][0]["fingerprint"]}
    assert len(lines["b"]["response"]["body"]["coordinates"]) == 2
    for command in ("replay", "verify-answer"):
        result = jaxinfer(command, out)
        assert (result.exit_code, result.stdout.splitlines()[-1].split(",")[0]) == (0, "4 of 4 answers are equal")


def test_rows_may_ask_for_them(jaxinfer, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "a", "max_tokens": 2, "return_coordinate": wanted} for wanted in (True, False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert jaxinfer("batch", path, out, "-m", model, "--sort").exit_code == 0
    assert ["coordinates" in json.loads(line) for line in out.read_text().splitlines()] == [True, False]
    result = jaxinfer("replay", out)
    assert result.exit_code == 0
    assert result.stdout.endswith("· 1 without a coordinate\n")
    path.write_text('{"prompt": "a", "return_coordinate": 1}\n')
    assert (
        "return_coordinate must be true or false, got 1" in jaxinfer("batch", path, tmp_path / "o", "-m", model).stderr
    )


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ('{"outputs": []}', [], "has no coordinate: generate --json and batch --coordinates write them"),
        ("", [], "is empty"),
        ('{"form": 9}', [], "the coordinate has form 9, and this version reads form 1"),
        (None, ["-m", "/nowhere"], "/nowhere cannot be opened for these answers"),
        (None, ["--from", "9"], "the answer has 9 tokens, and --from 9 is none of it"),
        (None, ["--from", "2", "--to", "10"], "--from 2 --to 10 is none of it"),
    ],
)
def test_what_cannot_be_read(jaxinfer, answers, tmp_path, content, more, message):
    path = answers
    if content is not None:
        path = tmp_path / "a.json"
        path.write_text(content)
    result = jaxinfer("verify-answer", path, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())
