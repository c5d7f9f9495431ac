"""`jaxinfer generate` says what the library says, from every source of prompts and in every form of output."""

import io
import json

import pytest

from jaxinfer import SamplingParams


def test_text_is_the_librarys(jaxinfer, model, llm):
    streamed = jaxinfer("generate", "def f", "-m", model, "--temperature", "0", "--max-tokens", "6")
    assert streamed.exit_code == 0
    expected = llm.generate("def f", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0]
    assert streamed.stdout == expected.text + "\n"
    assert streamed.stderr == ""


def test_json_has_everything(jaxinfer, json_lines, model, llm):
    options = ["--seed", "5", "--max-tokens", "5", "--logprobs", "2", "--prompt-logprobs", "1", "--n", "2"]
    result = jaxinfer("generate", "def f", "-m", model, "--json", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    expected = llm.generate("def f", SamplingParams(seed=5, max_tokens=5, logprobs=2, prompt_logprobs=1, n=2))[0]
    assert data["prompt"] == "def f"
    assert data["prompt_token_ids"] == expected.prompt_token_ids
    for found, answer in zip(data["outputs"], expected.outputs, strict=True):
        for name in ("index", "text", "token_ids", "seed", "finish_reason", "stop_reason", "error"):
            assert found[name] == getattr(answer, name)
        assert found["cumulative_logprob"] == pytest.approx(answer.cumulative_logprob)
        assert [one["token_id"] for one in found["logprobs"]] == answer.token_ids
        assert all(len(one["top"]) == 2 for one in found["logprobs"])
    assert data["prompt_logprobs"][0] is None
    assert [one["token_id"] for one in data["prompt_logprobs"][1:]] == expected.prompt_token_ids[1:]
    assert data["timings"]["total_time"] >= data["timings"]["time_to_first_token"] > 0


def test_generation_config_decides_what_is_not_given(jaxinfer, json_lines, model):
    [data] = json_lines(jaxinfer("generate", "hi", "-m", model, "--json", "--ignore-eos").stdout)
    assert len(data["outputs"][0]["token_ids"]) == 8  # its max_new_tokens
    [data] = json_lines(jaxinfer("generate", "hi", "-m", model, "--json", "--ignore-eos", "--max-tokens", "3").stdout)
    assert len(data["outputs"][0]["token_ids"]) == 3
    [data] = json_lines(jaxinfer("generate", "h", "-m", model, "--json", "--ignore-eos", "--max-tokens", "none").stdout)
    assert len(data["outputs"][0]["token_ids"]) == 95  # max_model_len=96


def test_prompts_from_text_file_arguments_and_standard_input_agree(jaxinfer, json_lines, model, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\r\n\nsecond one\n")
    options = ["-m", model, "--json", "--temperature", "0", "--max-tokens", "3"]
    from_file = json_lines(jaxinfer("generate", "--file", path, *options).stdout)
    assert [data["prompt"] for data in from_file] == ["first", "second one"]
    assert [data["index"] for data in from_file] == [0, 1]
    others = [
        jaxinfer("generate", "first", "second one", *options),
        jaxinfer("generate", "--file", "-", *options, input="first\nsecond one\n"),
        jaxinfer("generate", "first", "-", *options, input="second one\n"),
    ]
    for result in others:
        found = json_lines(result.stdout)
        assert [data["outputs"][0]["token_ids"] for data in found] == [
            data["outputs"][0]["token_ids"] for data in from_file
        ]


def test_a_piped_text_is_one_prompt(jaxinfer, json_lines, model):
    result = jaxinfer("generate", "-m", model, "--json", "--max-tokens", "1", input="def f():\n    return\n")
    assert [data["prompt"] for data in json_lines(result.stdout)] == ["def f():\n    return"]


def test_lines_of_jsonl_have_parameters_of_their_own(jaxinfer, json_lines, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a"}, {"prompt": [64, 65], "max_tokens": 2, "seed": 7}, {"prompt": "b", "stop": "zzz"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = json_lines(
        jaxinfer("generate", "--file", path, "-m", model, "--json", "--max-tokens", "4", "--ignore-eos").stdout
    )
    assert [len(data["outputs"][0]["token_ids"]) for data in found] == [4, 2, 4]
    assert found[1]["prompt"] is None
    assert found[1]["prompt_token_ids"] == [64, 65]
    assert found[1]["outputs"][0]["seed"] == 7


def test_many_answers_as_text_have_headings(jaxinfer, model):
    result = jaxinfer("generate", "one", "two", "-m", model, "--n", "2", "--max-tokens", "2", "--logprobs", "1")
    assert result.exit_code == 0
    headings = [line for line in result.stdout.splitlines() if line.startswith("===")]
    assert headings == [
        f"=== {number}/2, answer {answer}/2: {prompt!r}"
        for number, prompt in ((1, "one"), (2, "two"))
        for answer in (1, 2)
    ]
    assert result.stdout.count("logprob") == 4
    assert "\x1b" not in result.stdout


def test_output_goes_to_a_file(jaxinfer, json_lines, model, tmp_path):
    path = tmp_path / "answers.jsonl"
    result = jaxinfer("generate", "one", "two", "-m", model, "--json", "-o", path, "--max-tokens", "2")
    assert (result.exit_code, result.stdout) == (0, "")
    assert [data["prompt"] for data in json_lines(path.read_text())] == ["one", "two"]


def test_some_prompts_failing_is_exit_code_3_and_all_is_1(jaxinfer, json_lines, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    # Only "a" is allowed, and never twice: no token is left for the second place.
    impossible = {"prompt": "x", "allowed_token_ids": [64], "bad_words": ["aa"], "max_tokens": 2}
    path.write_text(json.dumps(impossible) + "\n" + json.dumps({"prompt": "y", "max_tokens": 2}))
    result = jaxinfer("generate", "--file", path, "-m", model, "--json")
    assert result.exit_code == 3
    assert [data["outputs"][0]["finish_reason"] for data in json_lines(result.stdout)] == ["error", "length"]
    assert "prompts.jsonl line 1: " in result.stderr
    assert "1 of 2 prompts failed" in result.stderr
    path.write_text(json.dumps(impossible))
    result = jaxinfer("generate", "--file", path, "-m", model)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "temperature": -1}', "line 2: temperature must be"),
        ('{"prompt": "a", "temprature": 1}', "line 2: 'temprature' is not a sampling parameter: did you mean"),
        ('{"text": "a"}', "line 2 has no 'prompt'"),
        ('{"prompt": 3}', "line 2: prompt must be a text or a list of token ids, got 3"),
        ('{"prompt": "a"', "line 2 is not JSON"),
        ('["a"]', "line 2 must be a JSON object"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_generated(jaxinfer, model, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    result = jaxinfer("generate", "--file", path, "-m", model, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_what_cannot_be_served_is_one_sentence(jaxinfer, model, tmp_path):
    too_long = jaxinfer("generate", "x" * 100, "-m", model)
    assert too_long.exit_code == 1
    assert too_long.stderr.count("\n") == 1
    assert "100 prompt tokens and max_tokens=8 make 108, but max_model_len=96" in too_long.stderr
    assert jaxinfer("generate", "hi", "-m", model, "--logit-bias", "999=1").exit_code == 2
    missing = jaxinfer("generate", "hi", "-m", tmp_path / "none")
    assert missing.exit_code == 1
    assert missing.stderr.count("\n") == 1
    assert "none: no such" in missing.stderr


def test_prompts_that_are_missing_or_given_twice(jaxinfer, monkeypatch, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("\n \n")
    for arguments, message in [
        ([], "standard input is empty"),
        (["a", "--file", path], "not from both"),
        (["--file", path], "has no prompts"),
        (["-", "-"], "can be read once only"),
    ]:
        result = jaxinfer("generate", "-m", "/nowhere", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert jaxinfer("generate", "-m", "/nowhere", "--file", tmp_path / "none").exit_code == 1
    path.write_bytes(b"caf\xe9")
    assert "is not UTF-8 text: byte 3 is 0xe9" in jaxinfer("generate", "-m", "/nowhere", "--file", path).stderr


def test_a_terminal_without_a_prompt_is_not_waited_on(monkeypatch):
    from jaxinfer.cli.command import UsageError
    from jaxinfer.cli.prompts import read_prompts

    terminal = io.StringIO("never read")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(UsageError, match="no prompt: give one"):
        read_prompts([], None)


def test_a_revision_of_a_folder_is_refused(jaxinfer, model):
    result = jaxinfer("generate", "hi", "-m", model, "--revision", "main")
    assert result.exit_code == 2
    assert "--revision is for hub ids" in result.stderr
