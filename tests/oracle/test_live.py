"""Parity with Hugging Face Transformers in this process: other seeds than the golden files', and bfloat16.

Needs torch and Transformers: `make test-oracle`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from families import VARIANTS, Variant
from parity import TOLERANCE, cached_logits, for_length, full_logits, max_error

import checkpoints_convert
from jaxinfer.models import ModelConfig, Params

pytestmark = pytest.mark.oracle
FIRST_SEED = 1000  # beyond any that a golden file uses


@pytest.fixture(scope="module")
def oracle(reference_module):
    return reference_module


@pytest.fixture(params=list(VARIANTS), scope="module")
def variant(request) -> Variant:
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def expected(oracle, variant):
    """What Transformers computes."""
    return oracle.compute(variant, FIRST_SEED)


@pytest.fixture(scope="module")
def checkpoint(expected, tmp_path_factory) -> tuple[ModelConfig, Params]:
    """The same model, through the files that Transformers writes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    expected.model.save_pretrained(folder)
    return checkpoints_convert.load(folder, dtype="float32")


def test_logits(variant, expected, checkpoint):
    config, params = checkpoint
    config = for_length(config, variant.num_logit_tokens)
    tokens = expected.prompt[: variant.num_logit_tokens]
    found = max_error(full_logits(config, params, tokens), expected.logits)
    through_cache = max_error(cached_logits(config, params, tokens, 37), expected.logits)
    print(f"{variant.name}: max |difference| {found:.1e}, through the cache {through_cache:.1e}")
    assert found <= TOLERANCE
    assert through_cache <= TOLERANCE


def test_greedy_tokens(variant, expected, checkpoint):
    print(f"{variant.name}: seed {expected.seed}, margin {expected.margin:.4f}")
    with parity.engine(*checkpoint, variant) as llm:
        parity.assert_alone(llm, expected.greedy)
        parity.assert_batched(llm, expected.greedy)
        parity.assert_streamed(llm, expected.greedy)
        parity.assert_regrown(llm, expected.greedy[:2], num_tokens=16)


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of softmax(logits) from softmax(reference), in nats per position."""
    p, q = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (reference, logits))
    return float(jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1)))


def test_bfloat16_is_as_close_to_float32_as_transformers_is(oracle, variant, expected, checkpoint):
    config, params = checkpoint
    config = for_length(config, variant.num_logit_tokens)
    tokens = expected.prompt[: variant.num_logit_tokens]
    theirs = oracle.forward(oracle.in_bfloat16(expected.model), tokens)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours = np.asarray(full_logits(config, params, tokens))

    noise, found = divergence(expected.logits, theirs), divergence(expected.logits, ours)
    between = divergence(theirs, ours)
    agree = np.mean(theirs.argmax(-1) == ours.argmax(-1))
    # Where the best token leads by far more than rounding moves a logit, all choose the same.
    second, best = np.sort(expected.logits, -1)[:, -2:].T
    is_clear = best - second > 6 * np.std(theirs - expected.logits)
    print(
        f"{variant.name}: KL from float32 {found:.1e} (Transformers {noise:.1e}), between {between:.1e}, "
        f"top-1 agreement {agree:.3f}, {is_clear.mean():.2f} of positions clear"
    )
    assert found <= 1.5 * noise
    assert between <= 1e-3
    assert np.array_equal(theirs.argmax(-1)[is_clear], ours.argmax(-1)[is_clear])
    assert is_clear.mean() > 0.5
