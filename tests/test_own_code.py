"""The code of docs/guides/own_code.md runs as it stands, on a tiny model; its loops give the engine's tokens."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import bind, init_params
from jaxinfer.quantization import dequantize_params, quantize_params
from pallas_kernels import portable
from pallas_kernels.platform import current_platform
from tests.tiny import TINY

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "own_code.md"
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
NUM_TOKENS, PAGE = 6, 8


def logits_of(params, tokens):
    decoder = bind(TINY, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, attend_without_cache))


@pytest.fixture(scope="module")
def params():
    return init_params(TINY, jax.random.key(3))


@pytest.fixture(scope="module")
def guide(params):
    """The names that the code of the guide defines, but for its first block, which loads a model."""
    tokens = jnp.asarray([[5, 6, 7, 8, 9, 10, 11, 12]])
    given: dict[str, Any] = {
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "partial": partial,
        "config": TINY,
        "params": params,
        "tokens": tokens,
        "positions": jnp.arange(8)[None],
        "decoder": bind(TINY, params),
        "optimizer": optax.adam(1e-3),
        "logits_of": logits_of,
        "num_rows": 2,
        "max_length": 32,
        "num_pages": 5,
        "page_size": PAGE,
    }
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert "LLM(" in blocks[0]
    found = dict(given)
    own = [block for block in blocks[1:] if 'LLM("demo"' not in block]  # which test_newcomer.py runs
    for number, block in enumerate(own, 2):
        exec(compile(block, f"own_code.md, block {number}", "exec"), found)  # noqa: S102  # our own document
        found[f"cache of {number}"] = found.get("cache")
    return found


@pytest.fixture(scope="module")
def expected(params):
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM((TINY, params), max_seqs=2, max_model_len=32) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]


@pytest.mark.slow
def test_a_step_lowers_the_loss(guide, params):
    own = jax.tree.map(jnp.copy, params)
    state = guide["optimizer"].init(own)
    losses = []
    for _ in range(3):
        own, state, loss = guide["train_step"](own, state, guide["tokens"])
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]
    np.testing.assert_allclose(losses[0], guide["loss_of"](params, guide["tokens"]), rtol=1e-5)


@pytest.mark.slow
def test_taps(guide):
    assert guide["found"]["layers.1.residual"].shape == (1, 8, TINY.hidden_size)


@pytest.mark.slow
def test_a_loop_over_the_preallocated_cache(guide, params, expected):
    step = jax.jit(guide["step"])
    lengths = jnp.asarray([5, 3])
    padded = jnp.asarray([PROMPTS[0], [*PROMPTS[1], 0, 0]])
    cache, token = step(params, guide["cache of 4"], padded, jnp.zeros(2, jnp.int32), lengths)
    found = [token]
    for number in range(NUM_TOKENS - 1):
        cache, token = step(params, cache, token[:, None], lengths + number, jnp.ones(2, jnp.int32))
        found.append(token)
    assert np.stack(found, 1).tolist() == expected


@pytest.mark.slow
def test_a_loop_over_pages(guide, params, expected):
    step = jax.jit(guide["ragged_step"])
    table, lengths = jnp.asarray([[3, 1], [2, 4]]), jnp.asarray([5, 3])
    tokens = jnp.asarray(PROMPTS[0] + PROMPTS[1])
    positions = jnp.asarray([0, 1, 2, 3, 4, 0, 1, 2])
    cache, token = step(params, guide["cache of 5"], table, tokens, positions, jnp.asarray([0, 5]), lengths, lengths)
    found = [token]
    for number in range(NUM_TOKENS - 1):
        at = lengths + number
        cache, token = step(params, cache, table, token, at, jnp.arange(2), jnp.ones(2, jnp.int32), at + 1)
        found.append(token)
    assert np.stack(found, 1).tolist() == expected


def test_an_exported_function_has_no_kernel_and_gives_the_same(guide, params):
    read = jax.export.deserialize(guide["written"])
    assert set(read.platforms) == {"cpu", "cuda", "tpu"}
    assert "custom_call" not in read.mlir_module()
    np.testing.assert_allclose(
        read.call(params, guide["tokens"]), jax.jit(logits_of)(params, guide["tokens"]), atol=1e-4
    )


def test_what_was_traced_before_is_traced_again_within_portable(params):
    """And not taken for what runs after it."""
    seen = []

    @jax.jit
    def function(x):
        seen.append(current_platform())
        return x + 1

    function(1.0)
    with portable():
        function(1.0)
    function(1.0)
    assert seen == [jax.default_backend(), "any"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [None, "int8", "int4-g32"])
def test_gradients_of_dequantized_parameters(params, recipe):
    given = params if recipe is None else quantize_params(params, recipe)
    with LLM((TINY, given), max_seqs=1, max_model_len=32) as llm:
        floats = dequantize_params(llm.params)
    tokens = jnp.asarray([[5, 6, 7, 8]])
    gradients = jax.grad(lambda one: logits_of(one, tokens).sum())(floats)
    assert all(np.isfinite(leaf).all() and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(logits_of(floats, tokens), logits_of(given, tokens), atol=2e-3)
