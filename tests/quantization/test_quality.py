"""What quantizing costs the embedded model: KL against float32 on text that it never saw."""

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.quantization import quantize_params
from jaxinfer.training import corpus
from jaxinfer.training.objectives import forward_kl, sequence_logits

LENGTH, NUM_ROWS = 256, 8


@pytest.fixture(scope="module")
def demo():
    """(config, params, int32 tokens [8, 256] from as many files)."""
    with LLM("demo", max_seqs=1, max_model_len=64) as llm:
        texts = [llm.tokenizer.encode(text)[:LENGTH] for _, text in corpus.held_out_files(3 * NUM_ROWS)]
        rows = [text for text in texts if len(text) == LENGTH][:NUM_ROWS]
        yield llm.config, llm.params, np.asarray(rows, np.int32)


BOUNDS = {"int8": 0.002, "w8a8": 0.01, "fp8": 0.005, "int4-g128": 0.08}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [name if name == "int4-g128" else pytest.param(name, marks=pytest.mark.slow) for name in BOUNDS]
)
def test_kl(demo, recipe):
    config, params, rows = demo
    assert rows.shape == (NUM_ROWS, LENGTH)
    logits = jax.jit(sequence_logits, static_argnums=0)
    expected, found = logits(config, params, rows), logits(config, quantize_params(params, recipe), rows)
    kl = float(np.mean(jax.jit(forward_kl)(expected, found)))
    agreement = float(np.mean(expected.argmax(-1) == found.argmax(-1)))
    print(f"{recipe}: KL {kl:.5f}, the same most probable token at {100 * agreement:.2f} % of {rows.size:,} positions")
    assert kl <= BOUNDS[recipe]
