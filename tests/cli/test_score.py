"""`jaxinfer score` gives the library's numbers, as a table and as JSON."""

import json

import pytest

from jaxinfer import SamplingParams


def test_numbers_are_the_librarys(jaxinfer, json_lines, model, llm):
    arguments = ["-p", "def f", "-c", "(x)", "-c", ":"]
    found = json_lines(jaxinfer("score", "-m", model, *arguments, "--temperature", "0.5", "--json").stdout)
    expected = llm.score(["def f"] * 2, ["(x)", ":"], SamplingParams(temperature=0.5))
    for data, score in zip(found, expected, strict=True):
        assert data["raw_total"] == pytest.approx(score.raw_total)
        assert data["processed_total"] == pytest.approx(score.processed_total)
        assert data["is_greedy"] == score.is_greedy
        assert [token["token_id"] for token in data["tokens"]] == score.token_ids
        assert [token["raw"] for token in data["tokens"]] == pytest.approx(score.raw)
    assert [token["token"] for token in found[0]["tokens"]] == ["(", "x", ")"]


def test_without_sampling_options_processed_is_raw(jaxinfer, json_lines, model):
    [data] = json_lines(jaxinfer("score", "-m", model, "-p", "a", "-c", "bc", "--json").stdout)
    assert data["processed_total"] == pytest.approx(data["raw_total"], abs=1e-4)


def test_what_is_forbidden_is_minus_infinity(jaxinfer, json_lines, model):
    result = jaxinfer("score", "-m", model, "-p", "a", "-c", "bc", "--allowed-token-ids", "64,65", "--json")
    [data] = json_lines(result.stdout)
    assert data["processed_total"] == "-Infinity"
    assert isinstance(data["raw_total"], float)


def test_table(jaxinfer, model):
    result = jaxinfer("score", "-m", model, "-p", "one", "-p", "two", "-c", "x", "-c", "[y]", "--tokens")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("'one'", "'two'", "'[y]'", "raw", "processed", "per token", "greedy", "'['"):
        assert words in result.stdout


def test_pairs_from_a_file(jaxinfer, json_lines, model, tmp_path):
    path, out = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    pairs = [{"prompt": "a", "continuation": "b"}, {"prompt": [64, 65], "continuation": [66]}]
    path.write_text("\n".join(map(json.dumps, pairs)))
    assert jaxinfer("score", "-m", model, "--file", path, "--json", "-o", out).exit_code == 0
    assert [data["num_tokens"] for data in json_lines(out.read_text())] == [1, 1]


def test_texts_are_scored_from_their_second_token(jaxinfer, json_lines, model, llm):
    found = json_lines(jaxinfer("score", "-m", model, "-t", "def f(x)", "--text", "[y]", "--json").stdout)
    for data, score in zip(found, llm.score(["def f(x)", "[y]"]), strict=True):
        assert [token["token_id"] for token in data["tokens"]] == score.token_ids
        assert (data["loss"], data["perplexity"]) == pytest.approx((score.loss, score.perplexity))
    assert [data["text"] for data in found] == ["def f(x)", "[y]"]


@pytest.mark.parametrize(
    ("name", "lines"), [("a.txt", "ab\n\n[y]\n"), ("a.jsonl", '{"text": "ab"}\n{"text": "[y]"}\n')]
)
def test_a_file_of_texts(jaxinfer, model, tmp_path, name, lines):
    (tmp_path / name).write_text(lines)
    result = jaxinfer("score", "-m", model, "--texts", tmp_path / name, "--tokens")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("'ab'", "'[y]'", "perplexity", "2 texts, 3 tokens: loss "):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "a"], 2, "needs --prompt and --continuation, or --file, or texts"),
        (["-t", "a", "-p", "a"], 2, "texts (--text, --texts) or pairs"),
        (["-t", "a", "--texts", "x.txt"], 2, "from --text or from --texts, not from both"),
        (["-t", "ab", "-t", "a"], 1, "text 1: a score needs at least 2 tokens, got 1"),
        (["-p", "a", "-p", "b", "-c", "d", "-c", "e", "-c", "f"], 2, "2 prompts and 3 continuations do not pair up"),
        (["-p", "a", "-c", "b", "--top-p", "2"], 2, "top_p must be"),
        (["-p", "a", "-c", ""], 1, "pair 0: 1 prompt and 0 continuation tokens"),
    ],
)
def test_wrong_pairs(jaxinfer, model, arguments, code, message):
    result = jaxinfer("score", "-m", model, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_unknown_keys_in_a_file_are_refused(jaxinfer, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "continuation": "b", "temperature": 1}\n')
    result = jaxinfer("score", "-m", "/nowhere", "--file", path)
    assert result.exit_code == 2
    assert "line 1: unknown key 'temperature'" in result.stderr
