"""Flags of other engines: what they mean here, and what is said of those that mean nothing."""

import pytest


@pytest.fixture
def seen(monkeypatch):
    """The options of the model and the parameters that commands ask for, without any work."""
    found = []

    class Model:
        is_leader = True

        def __init__(self, model, **options):
            from jaxinfer.sampling import SamplingParams

            found.append(options)
            self.default_params = SamplingParams()

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def on_leader(self, work):
            return work()

        def generate(self, prompts, params, adapter=None):
            found.append(prompts)
            found.append(params[0])
            raise ValueError("enough")

    monkeypatch.setattr("jaxinfer.api.llm.LLM", Model)
    return found


@pytest.mark.parametrize(
    ("arguments", "options", "sampling"),
    [
        (["--tensor-parallel-size", "2", "--data-parallel-size=2"], {"mesh": "data=2,model=2"}, {}),
        (["--max-num-seqs", "3", "--gpu-memory-utilization=0.5"], {"max_seqs": 3, "memory_fraction": 0.5}, {}),
        (["--kv-cache-dtype", "fp8", "--dtype", "half"], {"kv_dtype": "fp8_e4m3", "dtype": "float16"}, {}),
        (["--no-enable-prefix-caching"], {"prefix_cache": False}, {}),
        (
            ["--speculative-model", "[ngram]", "--num-speculative-tokens", "3"],
            {"draft": "ngram", "num_draft_tokens": 3},
            {},
        ),
        (["--swap-space", "0", "--tokenizer-mode", "auto", "--enable-chunked-prefill"], {}, {}),
        (["--max-new-tokens", "7", "--temp", "0.5"], {}, {"max_tokens": 7, "temperature": 0.5}),
        (["--num-predict", "-1"], {}, {"max_tokens": None}),
        (["--stop-strings", "a", "--stop", "b"], {}, {"stop": ("a", "b")}),
        (["--do-sample", "--no-use-beam-search"], {}, {}),
        (["--no-do-sample"], {}, {"temperature": 0.0}),
        (["--quantization", "awq", "-c", "512"], {"quantization": "awq", "max_model_len": 512}, {}),
    ],
    ids=str,
)
def test_flags_of_the_same_meaning_are_applied(jaxinfer, seen, arguments, options, sampling):
    result = jaxinfer("generate", "hi", "-m", "m", "--json", *arguments)
    assert result.stderr == "error: enough\n"
    given, prompts, params = seen
    assert (given, prompts) == (options, ["hi"])
    for name, value in sampling.items():
        assert getattr(params, name) == value


def test_a_prompt_may_have_a_flag(jaxinfer, seen):
    jaxinfer("generate", "-m", "m", "--json", "--prompt", "-5 degrees", "--", "--max-new-tokens")
    assert seen[1] == ["--max-new-tokens", "-5 degrees"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--deterministic", "hi"], True),
        (["hi", "--deterministic"], True),
        (["--deterministic", "off", "hi"], False),
        (["--deterministic=auto", "hi"], "auto"),
        (["--deterministic", "--seed", "3", "hi"], True),
    ],
    ids=str,
)
def test_a_flag_that_may_stand_alone(jaxinfer, seen, arguments, value):
    jaxinfer("generate", "-m", "m", "--json", *arguments)
    assert seen[:2] == [{"deterministic": value}, ["hi"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--enforce-eager"],
            "--enforce-eager (other engines): no option here means the same; every step is a compiled program",
        ),
        (["--do-sample", "--temperature", "0"], "--do-sample (Transformers): --temperature 0 is greedy"),
        (["-ngl", "99"], "--n-gpu-layers 99 (other engines): no option here means the same; see --offload"),
        (["--stream"], "--stream (other engines): the answer to a single prompt is streamed"),
        (["--repeat-penalty", "1.1"], "see --repetition-penalty, --presence-penalty"),
        (["--max-tokens", "4", "--max-new-tokens", "4"], "--max-new-tokens and --max-tokens are the same option"),
        (["--max-new-tokens=4", "--num-predict", "4"], "--max-new-tokens and --num-predict are the same option"),
        (["--mesh", "model=2", "--tensor-parallel-size", "2"], "--mesh and --tensor-parallel-size are the same option"),
        (["--max-num-seqs"], "--max-num-seqs (vLLM) needs a value"),
        (["--tensor-parallel-size", "two"], "it must be a positive integer"),
    ],
    ids=str,
)
def test_the_others_are_refused_with_ours(jaxinfer, arguments, message):
    result = jaxinfer("generate", "hi", "-m", "m", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_command_takes_only_names_of_what_it_does(jaxinfer):
    result = jaxinfer("convert", "a", "b", "--max-new-tokens", "4")
    assert result.exit_code == 2
    assert "No such option: --max-new-tokens" in result.stderr
