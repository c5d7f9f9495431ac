"""The published models' weights in Transformers, float32: the same log-probabilities and the same tokens."""

import numpy as np
import pytest

from jaxinfer.extras import install_hint
from tests.real.exports import dense, log_probs
from tests.real.requests import greedy, opened
from tests.real.texts import HELD_OUT

torch = pytest.importorskip("torch", reason=f"torch is not installed: {install_hint('oracle')}")
transformers = pytest.importorskip("transformers", reason=f"transformers is not installed: {install_hint('oracle')}")

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.optimized]
NUM_TOKENS = 16
PROMPT = "The three largest cities of France are"


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_log_probabilities_and_greedy_tokens(model_path, tmp_path_factory, name):
    path = model_path(name)
    with opened(path) as llm:
        ids, prompt = llm.tokenizer.encode(HELD_OUT), llm.tokenizer.encode(PROMPT)
        ours = np.array(log_probs(llm, ids))
        (output,) = llm.generate([prompt], greedy(NUM_TOKENS, ignore_eos=True), use_tqdm=False)
    folder = dense(path, tmp_path_factory.getbasetemp() / f"{name}-dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
        theirs = theirs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    print(f"{name}: log-probabilities differ by at most {np.abs(ours - theirs).max():.2g}")
    np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=0)
    assert output.outputs[0].token_ids == tokens[len(prompt) :]
