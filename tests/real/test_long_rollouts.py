"""Rollouts at 16,000 tokens, where two engines of the field differ by 0.59 in the probability of a token (marin#7555):
Gemma 3 270M's greedy tokens have the highest log-probability of the trainer's forward pass, bit for bit."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.quantization import dequantize_params
from jaxinfer.training.corpus import held_out_files
from jaxinfer.training.fixed_forward import FixedShape, logprobs_fixed

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.optimized]
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 8, 16_000, 8


@pytest.mark.timeout(7200)
def test_greedy_tokens_at_16000_are_those_of_the_trainer(model_path):
    # The trainer multiplies as many rows by 262,144 columns at a time as the engine has slots.
    slots: dict[str, Any] = {"max_seqs": 32, "num_pages": 2100}
    options = {**slots, "max_model_len": 16_384, "prefill_chunk": 512, "deterministic": True}
    with LLM(str(model_path("gemma3-270m")), max_seqs=1, max_model_len=64) as llm:
        params = jax.tree.map(jnp.copy, dequantize_params(llm.params.copy()))  # a trainer has plain weights of its own
        model = llm.config, params, llm.tokenizer
    with LLM(model, **options) as llm:
        text = "\n".join(text for _, text in held_out_files(400))
        tokens = llm.tokenizer.encode(text)
        assert len(tokens) >= NUM_PROMPTS * PROMPT_TOKENS, len(tokens)
        starts = range(0, NUM_PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)
        prompts = [tokens[start : start + PROMPT_TOKENS] for start in starts]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        shape, config, own = FixedShape.of(llm.engine.spec), llm.config, llm.params
        forward = jax.jit(partial(logprobs_fixed, config, shape=shape))
        num_equal, difference = 0, 0.0
        for prompt, output in zip(prompts, outputs, strict=True):
            row = np.array([[*prompt, *output.token_ids]], np.int32)
            made = np.asarray(forward(own, row))[0, len(prompt) :]
            entries = [entry[token] for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            assert all(entry.rank == 1 for entry in entries)
            told = np.array([entry.logprob for entry in entries], np.float32)
            difference = max(difference, float(np.abs(np.exp(made) - np.exp(told)).max()))
            num_equal += int(np.array_equal(made, told))
            print(f"{num_equal} answers have the trainer's bits", flush=True)
    print(f"{num_equal} of {NUM_PROMPTS} answers have the trainer's bits, probabilities differ by {difference:.1e}")
    assert num_equal == NUM_PROMPTS
