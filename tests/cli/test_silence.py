"""No command is silent for long while something is slow: on a terminal, and in a log."""

import json

import pytest

from tests import silence

SECONDS = 6.0  # for which each slow thing keeps a command busy
ENGINE = ("--max-model-len", "64", "--prefill-chunk", "32", "--max-seqs", "1")


@pytest.fixture(scope="module")
def files(tmp_path_factory, model):
    """Inputs of the commands, by name."""
    import checkpoints_convert

    root = tmp_path_factory.mktemp("inputs")
    checkpoints_convert.convert(model, root / "native", progress=None)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "de", "x y")))
    (root / "text.txt").write_text(" ".join(f"line {number} of a text {number * number % 97}" for number in range(900)))
    return {"model": model, "native": root / "native", "prompts": root / "prompts.jsonl", "text": root / "text.txt"}


COMMANDS = {
    "generate": "generate abc -m {model} --max-tokens 6",
    "generate several": "generate -f {prompts} -m {model} --max-tokens 6",
    "batch": "batch {prompts} {out} -m {model}",
    "score": "score -p abc -c def -m {model}",
    "warm": "warm {model}",
    "convert": "convert {model} {out}",
    "verify": "verify {native} --against {model}",
    "quantize": "quantize {model} {out} --method gptq --calibration {text} --samples 8 --length 64",
    "speculate-report": "speculate-report {prompts} -m {model} --draft ngram --num-draft-tokens 2 --max-tokens 6 "
    "--repeats 1 --concurrency 64",
    "distill": "distill {model} --data {text} --out {out} --layers 1 --width 32 --steps 4 --texts 8 "
    "--length 32 --batch-size 2 --no-copying",
    "bench": "bench latency {model} --prompt-tokens 8 --answer-tokens 6 --repeats 1",
    "profile": "profile {model} --batch 1 --prompt-tokens 16 --steps 8",
    "plan": "plan {model} --on v6e:1x1 --no-compile",
    "advise": "advise {model} --on v6e:1x1 --prompt-tokens 8 --answer-tokens 8",
    "kv-report": "kv-report {model} --texts {text} --kv-dtypes int8 --policies all --num-texts 1 --text-tokens 32 "
    "--answers 1 --answer-tokens 4 --needles 0",
    "doctor": "doctor",
}
WITHOUT_ENGINE = ("convert", "verify", "quantize", "distill", "profile", "plan", "advise", "kv-report", "doctor")


def arguments(name, files, tmp_path):
    given = COMMANDS[name].format(**files, out=tmp_path / "out").split()
    return given if name in WITHOUT_ENGINE else [*given, *ENGINE]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("on_terminal", [True, False], ids=["terminal", "log"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_is_silent_for_long(name, on_terminal, files, tmp_path):
    found = silence.watch(
        silence.slowed(SECONDS),
        *arguments(name, files, tmp_path),
        on_terminal=on_terminal,
        variables={"JAXINFER_CACHE_DIR": ""},
        timeout=500,
    )
    assert found.returncode == 0, found.stderr
    print(f"{name:17} {'terminal' if on_terminal else 'log':8} {found.silence:5.1f} s after {found.after!r}")
    # Half a second or one second here; the rest is for a machine that is busy.
    assert found.silence < 0.75 * SECONDS, found.after


@pytest.mark.slow
def test_a_command_shows_nothing_if_it_is_told_to(files, tmp_path):
    """Also the inverse of the test above: the slow things are slow."""
    found = silence.watch(
        silence.slowed(SECONDS),
        *("score", "-p", "abc", "-c", "def", "-m", files["model"], *ENGINE, "--no-progress"),
        on_terminal=True,
        variables={"JAXINFER_CACHE_DIR": ""},
    )
    assert (found.returncode, found.drawings) == (0, ["begun"])
    assert found.silence > 2 * SECONDS
