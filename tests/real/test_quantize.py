"""SmolLM2's GGUF file through `jaxinfer quantize`: the result opens, answers, and loses no more than it may."""

from pathlib import Path

import pytest

from tests.real.exports import command, mean_loss
from tests.real.requests import QUESTION, greedy, opened
from tests.real.texts import HELD_OUT

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.optimized]

DOCS = Path(__file__).parents[2] / "docs"
CALIBRATION = ("--calibration", DOCS / "guides", "--samples", 24, "--length", 128)
GROUPS = ("--group-size", 64)  # 576 inputs
# Options, and nats per token that may be lost of 3.645; measured: 0.009, 0.283, 0.185 and 0.261.
METHODS = {
    "int8": (("--method", "rtn", "--bits", 8), 0.02),
    "rtn": (("--method", "rtn", "--bits", 4, *GROUPS), 0.40),
    "awq": (("--method", "awq", "--bits", 4, *GROUPS, *CALIBRATION), 0.25),
    "gptq": (("--method", "gptq", "--bits", 4, *GROUPS, *CALIBRATION), 0.35),
}


@pytest.fixture(scope="module")
def loss(model_path):
    with opened(model_path("smollm2")) as llm:
        return mean_loss(llm, llm.tokenizer.encode(HELD_OUT))


@pytest.mark.parametrize("method", METHODS)
def test_the_result_opens_answers_and_loses_little(model_path, loss, tmp_path, method):
    options, bound = METHODS[method]
    command("quantize", model_path("smollm2"), tmp_path / "made", "--dtype", "float32", *options)
    with opened(tmp_path / "made") as llm:
        assert ("int8, a scale per output" if method == "int8" else "int4, 64 inputs a scale") in str(llm.explain())
        found = mean_loss(llm, llm.tokenizer.encode(HELD_OUT))
        (output,) = llm.chat(QUESTION, greedy(16), use_tqdm=False)
    print(f"{method}: {found - loss:+.4f} nats of {loss:.4f}: {output.outputs[0].text}")
    assert abs(found - loss) > 1e-5  # it was rounded
    assert found - loss < bound
    assert "Paris" in output.outputs[0].text
