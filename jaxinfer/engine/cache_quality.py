"""Measures what a cache of few bits costs in quality: the engine's own passes over given texts, against one of
float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import KVScales
from jaxinfer.calibration.quality import kl_divergence
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.model_runner import ModelRunner
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs import ProgramModel, Weights, padded
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.engine.scoring import PromptScorer, ScoredChunk
from jaxinfer.models import ModelConfig, Params
from jaxinfer.sampling import SamplingParams

CHUNK = 64


@dataclass(frozen=True)
class CacheQuality:
    """Means over all positions of the texts.

    Attributes:
      kv_dtype: what the cache stored. bytes_per_token: of values and scales, in all layers.
      kl, max_kl: KL(reference || this) of the next token's distribution in nats, its mean and the largest.
      perplexity: of the texts. top1_agreement: share of positions with the reference's most probable token.
    """

    kv_dtype: str
    bytes_per_token: float
    kl: float
    max_kl: float
    perplexity: float
    top1_agreement: float
    num_tokens: int


def cache_quality(
    config: ModelConfig,
    params: Params,
    texts: Sequence[Sequence[int]],
    kv_dtypes: Sequence[str],
    *,
    reference: str = "float32",
    kv_scales: KVScales | None = None,
) -> list[CacheQuality]:
    """Teacher-forced: each text goes through an engine in chunks of 64 tokens, which read their keys and values back
    from its pages; once with a cache of the reference's dtype, once with each of `kv_dtypes`.

    Raises ValueError for a text of fewer than two tokens, and for names that are no dtype of a cache.
    """
    texts = [list(text) for text in texts]
    short = next((number for number, text in enumerate(texts) if len(text) < 2), None)
    if short is not None or not texts:
        raise ValueError(f"text {short or 0} has fewer than two tokens, so nothing is predicted in it")
    expected, model, weights, _ = _hidden_states(config, params, texts, reference, kv_scales)
    measurements = []
    for kv_dtype in kv_dtypes:
        hidden, _, _, size = _hidden_states(config, params, texts, kv_dtype, kv_scales)
        kl, surprise, agrees = compared(model, weights, texts, expected, hidden)
        perplexity = float(np.exp(surprise.mean()))
        measurements.append(
            CacheQuality(kv_dtype, size, float(kl.mean()), float(kl.max()), perplexity, float(agrees.mean()), len(kl))
        )
    return measurements


def compared(
    model: ProgramModel,
    weights: Weights,
    texts: Sequence[Sequence[int]],
    expected: Sequence[np.ndarray],
    tested: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three numbers of each predicted token of the texts, float64 [N]: KL(expected || tested) in nats, the surprise of
    `tested` at the text's token, and 1 where both have the same most probable token. Hidden states are [T, D] for each
    text."""
    parts = []
    for text, *pair in zip(texts, expected, tested, strict=True):
        for start in range(0, len(text) - 1, CHUNK):
            count = min(CHUNK, len(text) - 1 - start)
            rows = (np.pad(states[start : start + count], ((0, CHUNK - count), (0, 0))) for states in pair)
            targets = padded(list(text[start + 1 : start + 1 + count]), CHUNK)
            parts.append([column[:count] for column in jax.device_get(_compare(model, weights, *rows, targets))])
    kl, surprise, agrees = (np.concatenate(column).astype(np.float64) for column in zip(*parts, strict=True))
    return kl, surprise, agrees


class _Recorder(PromptScorer):
    """In the place of what scores prompts: keeps the hidden states that it would score."""

    def __init__(self, runner: ModelRunner):
        super().__init__(runner.spec.config.vocab_size, runner.spec.max_seqs, runner)
        self.rows: dict[SequenceState, np.ndarray] = {}

    def score(self, pieces: tuple[ScoredChunk, ...], hidden: jax.Array, num_rows: int) -> None:
        states = np.asarray(hidden)
        for piece in pieces:
            shape = (len(piece.sequence.tokens), states.shape[1])
            rows = self.rows.setdefault(piece.sequence, np.zeros(shape, states.dtype))
            rows[piece.start : piece.start + piece.length] = states[piece.row : piece.row + piece.length]


def hidden_states(
    engine: Engine, texts: Sequence[Sequence[int]], num_prompts: Sequence[int] | None = None
) -> list[np.ndarray]:
    """The final hidden states [T, D] of each text, as an idle engine computes them: with its weights and its cache.
    `num_prompts` are tokens of the texts that are prompts, for policies that compact these; by default all.

    Raises ValueError for a text without room for one more token.
    """
    longest, allowed = max(map(len, texts), default=0), engine.spec.max_model_len
    if longest >= allowed:
        raise ValueError(f"a text of {longest} tokens does not fit an engine with max_model_len={allowed}")
    runner = engine.runner
    scorer = runner._scorer
    runner._scorer = recorder = _Recorder(runner)
    try:
        # With log-probabilities of the prompt, every token of it is computed.
        sequences = []
        for text, num_prompt in zip(texts, num_prompts or map(len, texts), strict=True):
            # Tokens after the prompt are computed as those of an answer whose sequence was preempted.
            count = len(text) - num_prompt + 1
            params = SamplingParams(temperature=0, max_tokens=count, prompt_logprobs=0, seed=0, ignore_eos=True)
            request = Request(list(text[:num_prompt]), params, max_tokens=count)
            sequences.append(SequenceState(request, tokens=list(text)))
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
        return [recorder.rows[sequence] for sequence in sequences]
    finally:
        runner._scorer = scorer


def log_probs(engine: Engine, states: np.ndarray) -> np.ndarray:
    """float32 log-probabilities [T, V] of the next token, of final hidden states [T, D]."""
    parts = []
    for start in range(0, len(states), CHUNK):
        rows = states[start : start + CHUNK]
        padding = ((0, CHUNK - len(rows)), (0, 0))
        parts.append(
            np.asarray(_log_probs(engine.runner.model, engine.runner.weights.value, np.pad(rows, padding)))[: len(rows)]
        )
    return np.concatenate(parts)


def _hidden_states(
    config: ModelConfig, params: Params, texts: list[list[int]], kv_dtype: str, kv_scales: KVScales | None
) -> tuple[list[np.ndarray], ProgramModel, Weights, float]:
    """The final hidden states [T, D] of each text, and what a token takes in the cache."""
    longest = max(map(len, texts))
    options = EngineOptions(max_model_len=longest + 1, max_seqs=1, prefill_chunk=CHUNK, kv_dtype=kv_dtype)
    engine = Engine(config, params, options, kv_scales=kv_scales)
    try:
        states = hidden_states(engine, texts)
        runner = engine.runner
        return states, runner.model, runner.weights.value, engine.spec.pool_sizes.token_bytes
    finally:
        engine.close()


@partial(jax.jit, static_argnums=0)
def _log_probs(model: ProgramModel, weights: Weights, states: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model.bind(weights).logits(states).astype(jnp.float32))


@partial(jax.jit, static_argnums=0)
def _compare(model: ProgramModel, weights: Weights, expected: jax.Array, tested: jax.Array, targets: jax.Array):
    """KL, surprise at the targets int32[T], and whether both choose the same token, [T] each."""
    decoder = model.bind(weights)
    wanted, logprobs = (jax.nn.log_softmax(decoder.logits(x)) for x in (expected, tested))
    surprise = -jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    return kl_divergence(wanted, logprobs), surprise, jnp.argmax(wanted, -1) == jnp.argmax(logprobs, -1)
