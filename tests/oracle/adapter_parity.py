"""Our side of a comparison with PEFT: log-probabilities of texts under adapters."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints_convert
from checkpoints_convert.adapters import merged, read_adapter
from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import ModelConfig, Params, bind
from tests.oracle.adapter_cases import Kind

SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def open_llm(base: Any, adapters: Mapping[str, Path], **options: Any) -> LLM:
    """An engine for a base in float32 with adapters."""
    return LLM(base, dtype="float32", adapters=dict(adapters), max_seqs=8, max_model_len=64, **options)


def together(llm: LLM, kind: Kind, **options: Any) -> np.ndarray:
    """float64 [rows, tokens - 1] of a kind's texts in one batch, each with the adapter of its row."""
    options = {"adapter": kind.rows, **options}
    outputs = llm.generate(kind.tokens.tolist(), SCORED, use_tqdm=False, **options)
    # Of each position there is one entry, that of its token.
    return np.array(
        [[entry.logprob for one in output.prompt_logprobs[1:] for entry in one.values()] for output in outputs]
    )


def alone(llm: LLM, kind: Kind) -> np.ndarray:
    """As `together`, of one text after the other."""
    texts = zip(kind.tokens.tolist(), kind.rows, strict=True)
    return np.array([llm.score([text], adapter=adapter, use_tqdm=False)[0].raw for text, adapter in texts])


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference; NaN counts as infinity."""
    assert found.shape == expected.shape
    differences = np.abs(found - expected.astype(np.float64))
    return float(np.where(np.isnan(differences), np.inf, differences).max())


def merged_logprobs(base: Path, adapter: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 [rows, tokens - 1] of a base with an adapter merged, in one pass without a cache."""
    config, params = checkpoints_convert.load(base, dtype="float32", progress=False)
    config, params = merged(config, params, read_adapter(adapter, config))
    return np.asarray(_logprobs(config, params, jnp.asarray(tokens)))


@partial(jax.jit, static_argnums=0)
def _logprobs(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = decoder.logits(decoder(tokens, positions, attend_without_cache, None))
    logprobs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)[..., 0]
