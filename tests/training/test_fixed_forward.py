"""The fixed forward pass: every bit that a deterministic engine reports, in float32 and bfloat16, whatever the engine
did, for five families of models; its gradients, which are those of the ordinary forward pass; and its refusals."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import DeltaConfig, ModelConfig, MoEConfig, RopeConfig, bind, init_params
from jaxinfer.quantization import quantize_params
from jaxinfer.sampling import exact
from jaxinfer.training.fixed_forward import FixedShape, forward_fixed, logprobs_fixed, refusal, states_fixed
from tests.engine.mixed_requests import random_prompts
from tests.engine.test_mixtures import CONFIG as DEEPSEEK
from tests.speculative.tiny_heads import config_of, random_params
from tests.tiny import TINY

LLAMA = replace(TINY, hidden_size=64, head_dim=16, rope=RopeConfig(rotary_dim=16), max_position_embeddings=512)
FAMILIES = {
    "Llama": LLAMA,
    "Llama of an odd width": replace(LLAMA, hidden_size=100, intermediate_size=72),
    "Gemma 3": replace(
        LLAMA,
        architecture="Gemma3ForCausalLM",
        num_layers=3,
        sliding_windows=(8, None, 20),
        local_rope=RopeConfig(rotary_dim=16),
        qk_norm=True,
        norm="rms_zero_centred",
        block="sandwich_norm",
        activation="gelu_tanh",
        embedding_multiplier=8.0,
        tie_word_embeddings=True,
    ),
    "Qwen3-MoE": replace(LLAMA, architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=MoEConfig(8, 2, 32, (0, 1))),
    "Qwen3.5": replace(
        LLAMA,
        architecture="Qwen3_5ForConditionalGeneration",
        num_layers=3,
        layer_kinds=("gated_delta", "attention", "gated_delta"),
        delta=DeltaConfig(2, 4, 8, 6),
        is_attention_gated=True,
        qk_norm=True,
    ),
    "DeepSeek-V3": replace(DEEPSEEK, max_position_embeddings=512),
}
DTYPES = ("float32", "bfloat16")
OPTIONS: dict[str, Any] = {"max_seqs": 4, "max_model_len": 128, "num_pages": 60, "deterministic": True}
WIDEST = 112  # tokens of the longest sequence: one shape of the fixed pass for all
_logprobs = jax.jit(logprobs_fixed, static_argnums=0, static_argnames=("shape", "chunk", "return_routes"))


@cache
def model(family: str, dtype: str) -> tuple[ModelConfig, Any]:
    """A family's tiny model, of which no parameter is zero or one."""
    config = replace(FAMILIES[family], dtype=dtype)
    leaves, tree = jax.tree.flatten(init_params(replace(config, dtype="float32"), jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = jax.tree.unflatten(
        tree, [leaf + 0.15 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )
    return config, jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key == "correction" else leaf.astype(dtype), params
    )


def random_tokens(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, shape).astype(np.int32)


def fixed(model: Any, shape: FixedShape, sequences: Sequence[list[int]], **options: Any) -> list[list[float]]:
    """The log-probabilities of all tokens but the first of each sequence."""
    tokens = np.zeros((len(sequences), max(WIDEST, *map(len, sequences))), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    found = np.asarray(_logprobs(*model, tokens, lengths, shape=shape, **options))
    assert not found[:, 0].any()
    assert not any(row[length:].any() for row, length in zip(found, lengths, strict=True))
    return [row[1:length].tolist() for row, length in zip(found, lengths, strict=True)]


def reported(llm: LLM, prompts: Sequence[list[int]], params: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Prompts with their answers, and the log-probabilities that the engine reports of them: those of an answer as it
    was decoded, and those of its prompt, as far as it has any."""
    sequences, logprobs = [], []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        answer, steps = output.outputs[0].token_ids, output.outputs[0].logprobs
        entries = list(zip(prompt, output.prompt_logprobs or (), strict=False))[1:]
        before = [step[token].logprob for token, step in entries] or [None] * (len(prompt) - 1)
        sequences.append([*prompt, *answer])
        logprobs.append([*before, *(step[token].logprob for token, step in zip(answer, steps, strict=True))])
    return sequences, logprobs


def differing(found: Sequence[list], expected: Sequence[list], tolerance: float = 0.0) -> int:
    """Tokens whose log-probability was reported and is another one."""
    assert list(map(len, found)) == list(map(len, expected))
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
    assert sum(one is not None for _, one in pairs) >= 8
    return sum(one is not None and abs(mine - one) > tolerance for mine, one in pairs)


SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=0)


@pytest.mark.parametrize(("dtype", "slots"), [pytest.param("float32", 4, marks=pytest.mark.slow), ("bfloat16", 1)])
def test_every_bit_is_that_of_the_engine(dtype, slots):
    """Answers decoded with drafts of n-grams, prompts in chunks, prefix hits, and scores are compared;
    one slot's product with the output layer has a row less than any other."""
    own, prompts = model("Llama", dtype), [[5, 6, 7] * 9, random_tokens(61, seed=4).tolist()]
    params = [replace(SAMPLED, temperature=0, max_tokens=40), SAMPLED]
    drafting: dict[str, Any] = {"draft": "ngram", "num_draft_tokens": 3, "prefill_chunk": 24}
    with LLM(own, **{**OPTIONS, **drafting, "max_seqs": slots}) as llm:
        shape = FixedShape.of(llm.engine.spec)
        sequences, decoded = reported(llm, prompts, params)
        again, after_hits = reported(llm, prompts, params)
        assert llm.engine.scheduler.counters.reused_tokens > 0
        _, with_prompts = reported(llm, prompts, [replace(one, prompt_logprobs=0) for one in params])
        scores = llm.score(sequences)
        stats = llm.speculation_stats()
    assert stats is not None
    assert stats.acceptance_rate > 0
    assert again == sequences
    found = fixed(own, shape, sequences)
    assert differing(found, decoded) == differing(found, after_hits) == differing(found, with_prompts) == 0
    assert differing(found, [score.raw for score in scores]) == 0
    assert differing(found, [score.processed for score in scores]) == 0


@pytest.mark.slow
def test_the_ordinary_forward_pass_differs_by_rounding(capsys):
    """An inverse test: passes of another shape have other bits, of at most 1e-4."""
    config, params = model("Llama", "float32")
    tokens = random_tokens(1, WIDEST, seed=9)
    found = np.asarray(_logprobs(config, params, tokens))
    ordinary = np.asarray(jax.jit(partial(ordinary_logprobs, config))(params, tokens))
    print(f"the largest difference of an ordinary pass is {np.abs(found - ordinary).max():.2e}")
    assert 0 < np.abs(found - ordinary).max() < 1e-4


def ordinary_logprobs(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    decoder, positions = bind(config, params), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logprobs = jax.nn.log_softmax(decoder.logits(decoder(tokens, positions, attend_without_cache)))
    following = jnp.take_along_axis(logprobs[:, :-1], jnp.asarray(tokens)[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(following, ((0, 0), (1, 0)))


GRADIENTS = [
    pytest.param(family, marks=() if family == "Qwen3-MoE" else pytest.mark.slow)
    for family in FAMILIES
    if "odd" not in family
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("family", GRADIENTS)
def test_gradients_are_those_of_the_ordinary_forward_pass(family):
    """Gradients are of a weighted sum of log-probabilities, of several lengths, and no bit of the values changes."""
    config, params = model(family, "float32")
    tokens, lengths = random_tokens(2, 40, seed=2), np.array([40, 23], np.int32)
    shares = jax.random.normal(jax.random.key(3), tokens.shape)

    def loss(logprobs, params):
        values = logprobs(params, tokens)
        is_real = jnp.arange(tokens.shape[1]) < lengths[:, None]
        return jnp.sum(shares * jnp.where(is_real, values, 0)), values

    own = partial(logprobs_fixed, config, lengths=lengths, shape=FixedShape(num_rows=64), chunk=8)
    (_, values), found = jax.jit(jax.value_and_grad(partial(loss, own), has_aux=True))(params)
    _, expected = jax.jit(jax.value_and_grad(partial(loss, partial(ordinary_logprobs, config)), has_aux=True))(params)
    np.testing.assert_array_equal(values, jax.jit(own)(params, tokens))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other), path
    assert all(
        np.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(found["lm_head" if "lm_head" in found else "embed"])
    )


@pytest.mark.slow
def test_logits_are_those_of_the_log_probabilities_and_have_a_gradient():
    config, params = model("Llama", "float32")
    tokens = random_tokens(3, 20, seed=6)
    forward = jax.jit(partial(forward_fixed, config, shape=FixedShape(num_rows=64)))
    logits = forward(params, tokens)
    assert (logits.shape, logits.dtype) == ((3, 20, config.vocab_size), jnp.float32)
    logprobs = jax.jit(exact.log_softmax)(logits[:, :-1].reshape(-1, config.vocab_size)).reshape(3, 19, -1)
    found = np.take_along_axis(np.asarray(logprobs), tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_array_equal(found, _logprobs(config, params, tokens, shape=FixedShape(num_rows=64))[:, 1:])
    gradient = jax.grad(lambda params: jnp.sum(jnp.sin(forward(params, tokens))))(params)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_routes_are_those_of_the_engine():
    """The experts that a tap of the engine returns; others would be chosen for other hidden states."""
    own = model("Qwen3-MoE", "bfloat16")
    prompt, names = random_tokens(40, seed=5).tolist(), ["layers.0.experts", "layers.1.experts"]
    with LLM(own, **OPTIONS) as llm:
        output = llm.generate(prompt, SAMPLED, taps=[*names, "final_norm"], use_tqdm=False)[0]
        shape = FixedShape.of(llm.engine.spec)
    tokens = np.array([[*prompt, *output.outputs[0].token_ids]])
    _, routes = _logprobs(*own, tokens, shape=shape, chunk=7, return_routes=True)
    assert sorted(routes) == names
    for name in names:
        assert (routes[name].dtype, routes[name].shape) == (jnp.int32, (*tokens.shape, 2))
        np.testing.assert_array_equal(routes[name][0], output.taps[name])
    states = states_fixed(*own, tokens, ("final_norm",), shape=shape)
    np.testing.assert_array_equal(states["final_norm"][0], output.taps["final_norm"])


def test_what_does_not_fit_is_refused():
    config, params = model("Llama", "float32")
    tokens = np.zeros((2, 8), np.int32)
    with pytest.raises(ValueError, match="kv_dtype='int8' has no fixed forward pass"):
        FixedShape(kv_dtype="int8")
    with pytest.raises(ValueError, match="num_rows must be at least 1, got 0"):
        FixedShape(num_rows=0)
    with pytest.raises(ValueError, match="chunk=300 is not between 1 and the 256 rows"):
        logprobs_fixed(config, params, tokens, chunk=300)
    with pytest.raises(ValueError, match=r"tokens are int32 \[B, T\]"):
        forward_fixed(config, params, tokens[0])
    with pytest.raises(ValueError, match=r"lengths are int32 \[2\]"):
        forward_fixed(config, params, tokens, np.zeros(3, np.int32))
    quantized = jax.jit(partial(quantize_params, how="int8"))(params)
    with pytest.raises(ValueError, match="gradients need plain arrays"):
        jax.grad(lambda params: logprobs_fixed(config, params, tokens).sum(), allow_int=True)(quantized)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"deterministic": False}, "it is not deterministic"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8' is none of"),
        ({"kv_policy": "snapkv(64)"}, r"kv_policy='snapkv\(64\)'"),
        ({"steered_layers": (1,)}, r"its passes add vectors \(steered_layers=\(1,\)\)"),
    ],
)
def test_engines_without_a_fixed_forward_pass_say_why(options, reason):
    with LLM(model("Llama", "float32"), **{**OPTIONS, **options}) as llm:
        assert refusal(llm.engine.spec)
        with pytest.raises(ValueError, match=reason):
            FixedShape.of(llm.engine.spec)


# The matrix.

WAYS: dict[str, dict[str, Any]] = {
    "crowded, in chunks, with n-grams": {"max_seqs": 3, "prefill_chunk": 17, "draft": "ngram", "num_draft_tokens": 3},
    "one slot, pages of 8, the model itself drafts": {"max_seqs": 1, "page_size": 8, "draft": "itself"},
    "own layers": {"draft": "layers", "num_draft_tokens": 2},
    "a head": {"draft": "head", "num_draft_tokens": 3},
}


def with_draft(options: dict[str, Any], family: str, dtype: str) -> dict[str, Any]:
    own = model(family, dtype)
    drafts: dict[str, Any] = {"itself": own, "layers": "layers:2" if own[0].recurrent_layers else "layers:1"}
    if options["draft"] == "head":
        config = config_of("eagle3", own[0])
        drafts["head"] = config, random_params(config)
    return {**options, "draft": drafts.get(options["draft"], options["draft"])}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_way(family, dtype, way):
    """Lengths from 1 on: a prompt of one token is decoded alone. Recurrent layers in float32 on a CPU are rounded by
    where a pass begins, in the engine too."""
    tolerance = 1e-4 if (family, dtype) == ("Qwen3.5", "float32") else 0.0
    own = model(family, dtype)
    prompts = [[7], [5, 6, 7] * 9, *random_prompts(5, 90, seed=12), random_tokens(96, seed=13).tolist()]
    with LLM(own, **OPTIONS | with_draft(WAYS[way], family, dtype)) as llm:
        shape = FixedShape.of(llm.engine.spec)
        sequences, decoded = reported(llm, prompts, SAMPLED)
        again, after_hits = reported(llm, prompts, SAMPLED)
        _, with_prompts = reported(llm, prompts, replace(SAMPLED, prompt_logprobs=0))
        scores = llm.score(sequences)
    assert again == sequences
    for chunk in (None, 37):
        found = fixed(own, shape, sequences, chunk=chunk)
        for name, one in (("decoded", decoded), ("after hits", after_hits), ("with prompts", with_prompts)):
            assert differing(found, one, tolerance) == 0, name
        assert differing(found, [score.raw for score in scores], tolerance) == 0
        assert differing(found, [score.processed for score in scores], tolerance) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [255, 256, 257, 4096, 32_768])
def test_long_sequences(length, dtype):
    config, params = model("Llama", dtype)
    config = replace(config, max_position_embeddings=32_768)
    tokens = random_tokens(length, seed=length).tolist()
    options = OPTIONS | {"max_model_len": 32_768, "num_pages": 2100, "max_seqs": 2}
    with LLM((config, params), **options) as llm:
        shape = FixedShape.of(llm.engine.spec)
        (score,) = llm.score(tokens)
    found = np.asarray(_logprobs(config, params, np.array([tokens]), shape=shape))[0, 1:]
    assert found.tolist() == score.raw
