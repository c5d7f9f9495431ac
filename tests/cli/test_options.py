"""Every sampling parameter is an option of the commands that sample, and arrives as it was given."""

import runpy
from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest
import typer.main

from jaxinfer.cli.main import app
from jaxinfer.cli.options import LogitOptions, SamplingOptions, merge_params, sampling_values
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.sampling import SamplingParams, SamplingParamsError

GIVEN = {
    "n": (["--n", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "7"], 7),
    "min_p": (["--min-p", "0.01"], 0.01),
    "seed": (["--seed", "3"], 3),
    "stop": (["--stop", "a b", "--stop", "\n\n"], ("a b", "\n\n")),
    "stop_token_ids": (["--stop-token-ids", "4,5", "--stop-token-ids", "6"], (4, 5, 6)),
    "ignore_eos": (["--ignore-eos"], True),
    "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2),
    "logprobs": (["--logprobs", "1"], 1),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.25"], 0.25),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "logit_bias": (["--logit-bias", "4=-1.5", "--logit-bias", "9=2"], {4: -1.5, 9: 2.0}),
    "allowed_token_ids": (["--allowed-token-ids", "64,65", "--allowed-token-ids", "66"], (64, 65, 66)),
    "bad_words": (["--bad-words", "no", "--bad-words", "not"], ("no", "not")),
    "skip_special_tokens": (["--keep-special"], False),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
}


SAMPLING = {field.name for field in fields(SamplingParams)} - {"structured"}


def missing(options: type) -> set[str]:
    return {field.name for field in fields(SamplingParams)} - {field.name for field in fields(options)}


def test_every_sampling_parameter_is_an_option():
    assert missing(SamplingOptions) == {"structured"}
    own = {"json_schema", "json_object", "regex", "choice", "grammar"}  # what `structured` is
    assert {field.name for field in fields(SamplingOptions)} == SAMPLING | own
    less = make_dataclass("Less", [field.name for field in fields(SamplingParams) if field.name != "top_k"])
    assert missing(less) == {"top_k"}
    for name in ("generate", "chat"):
        options = {parameter.name for parameter in typer.main.get_command(app).commands[name].params}
        assert options >= SAMPLING | own
    options = {parameter.name for parameter in typer.main.get_command(app).commands["score"].params}
    assert options >= {field.name for field in fields(LogitOptions)}


@pytest.mark.slow
def test_each_option_arrives(jaxinfer, model, monkeypatch):
    """What the engine is asked for is what was written, field by field."""
    assert GIVEN.keys() == SAMPLING
    seen = []

    def remember(self, prompts, params, **_):
        seen.extend(params)
        raise ValueError("enough")

    monkeypatch.setattr("jaxinfer.api.llm.LLM.generate", remember)
    for name, (arguments, value) in GIVEN.items():
        needed = ["--max-tokens", "9", "--json"] if name != "max_tokens" else ["--json"]
        assert jaxinfer("generate", "hi", "-m", model, *needed, *arguments).stderr == "error: enough\n"
        params = seen.pop()
        assert getattr(params, name) == value
        for other in fields(SamplingParams):
            if other.name not in (name, "max_tokens"):
                assert getattr(params, other.name) == getattr(SamplingParams(), other.name)


def test_the_tables_in_the_docs_are_current():
    """`python docs/update_options.py` writes it."""
    root = Path(__file__).parents[2]
    pages = runpy.run_path(str(root / "docs" / "update_options.py"))
    assert (root / "docs" / "options.md").read_text(encoding="utf-8") == pages["page"]()
    assert (root / "docs" / "serving.md").read_text(encoding="utf-8") == pages["serving_page"]()


def test_values_that_are_not_given_are_left_out():
    assert sampling_values(SamplingOptions()) == {}
    defaults = SamplingParams(temperature=0.3, max_tokens=40)
    assert merge_params(defaults, {}) == defaults
    assert merge_params(defaults, {"max_tokens": None}) == SamplingParams(temperature=0.3, max_tokens=None)


def test_min_tokens_may_exceed_the_default_max_tokens():
    """generation_config may allow more; the model is not loaded yet when options are first checked."""
    assert sampling_values(SamplingOptions(min_tokens=100)) == {"min_tokens": 100}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature must be 0 (greedy) or"),
        (["--top-p", "0"], "top_p must be a finite number"),
        (["--n", "0"], "n must be an integer in 1..256"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--min-tokens", "5", "--max-tokens", "4"], "min_tokens=5 is larger than max_tokens=4"),
        (["--temperature", "0", "--n", "2"], "greedy answers are all the same"),
        (["--logprobs", "21"], "logprobs must be"),
        (["--max-tokens", "many"], "'many' is not a number of tokens or 'none'"),
        (["--logit-bias", "4"], "'4' is not ID=BIAS"),
        (["--stop-token-ids", "x"], "'x' is not a token id"),
        (["--top-k", "1.5"], "valid integer"),
    ],
)
def test_bad_values_are_refused_before_the_model_is_looked_for(jaxinfer, arguments, message):
    result = jaxinfer("generate", "hi", "-m", "/nowhere", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_sampling_params_error_is_what_is_caught():
    with pytest.raises(SamplingParamsError):
        sampling_values(SamplingOptions(temperature=-1.0))


def test_the_dtype_of_the_cache_arrives(jaxinfer, model, monkeypatch):
    seen = []
    monkeypatch.setattr("jaxinfer.api.llm.LLM.__init__", lambda self, *_, **options: seen.append(options) or 1 / 0)
    for command in (["generate", "hi"], ["chat"], ["score", "-p", "a", "-c", "b"]):
        jaxinfer(*command, "-m", model, "--kv-dtype", "int8")
    assert [options["kv_dtype"] for options in seen] == ["int8"] * 3
    jaxinfer("generate", "hi", "-m", model, "--draft", "demo", "--draft-kv-dtype", "fp8_e5m2")
    assert seen[-1]["draft_kv_dtype"] == "fp8_e5m2"


@pytest.mark.parametrize("option", ["--kv-dtype", "--draft-kv-dtype"])
def test_a_wrong_dtype_of_the_cache_is_refused_with_the_right_ones(jaxinfer, option):
    result = jaxinfer("generate", "hi", "-m", "/nowhere", "--draft", "ngram", option, "fp4")
    name = option.strip("-").replace("-", "_")
    known = "auto, float32, bfloat16, float16, int8, int8_int4, int4, fp8_e4m3, fp8_e5m2"
    wanted = f"error: {name}='fp4' is not one of {known}\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", wanted)


@pytest.mark.slow
def test_an_answer_over_a_cache_of_8_bits(jaxinfer, json_lines, model):
    arguments = ["generate", "hi", "-m", model, "--max-tokens", "4", "--temperature", "0", "--json"]
    for kv_dtype in ("int8", "fp8_e4m3"):
        (found,) = json_lines(jaxinfer(*arguments, "--kv-dtype", kv_dtype).stdout)
        assert len(found["outputs"][0]["token_ids"]) == 4


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--json-schema", "FILE"], {"json": '{"type": "integer"}'}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[0-9]+"], {"regex": "[0-9]+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ("yes", "no")}),
        (["--grammar", "FILE"], {"grammar": '{"type": "integer"}'}),
    ],
)
def test_structured_output_arrives(jaxinfer, model, monkeypatch, tmp_path, arguments, wanted):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    seen = []

    def remember(self, prompts, params, **_):
        seen.extend(params)
        raise ValueError("enough")

    monkeypatch.setattr("jaxinfer.api.llm.LLM.generate", remember)
    arguments = [str(path) if one == "FILE" else one for one in arguments]
    assert jaxinfer("generate", "hi", "-m", model, "--json", *arguments).stderr == "error: enough\n"
    assert seen[0].structured == StructuredOutputs(**wanted)
    error = jaxinfer("generate", "hi", "-m", model, "--json-schema", str(tmp_path / "none")).stderr
    assert "--json-schema" in error
    assert "cannot be read" in error
