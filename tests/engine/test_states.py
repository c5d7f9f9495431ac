"""The engine over models with recurrent layers: an answer does not depend on what runs beside or before it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import attend_without_cache, init_paged_cache, init_state_cache, state_bytes
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs.paged import move_states
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.models import ConvConfig, DeltaConfig, MambaConfig, ModelConfig, RopeConfig, bind, init_params, tap_names
from jaxinfer.speculative import LayersDraft, NgramDraft
from tests.engine.grammars import make_compiler, make_sequence, run
from tests.pallas_kernels.quick import quick

BASE = ModelConfig(
    architecture="Tiny",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    max_position_embeddings=256,
)
MODELS = {
    "delta": replace(BASE, layer_kinds=("gated_delta", "attention", "gated_delta"), delta=DeltaConfig(2, 4, 8, 6)),
    "mamba": replace(
        BASE,
        layer_kinds=("mamba2", "attention", "none"),
        mamba=MambaConfig(4, 8, 2, 6),
        mlp_layers=(True, False, True),
    ),
    "conv": replace(BASE, layer_kinds=("short_conv", "attention", "short_conv"), conv=ConvConfig(3, 32)),
}
OPTIONS = {"max_model_len": 128, "page_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "delta" else pytest.mark.slow) for name in MODELS]
)
def model(request):
    return MODELS[request.param], random_params(MODELS[request.param])


def random_params(config: ModelConfig):
    """Parameters of which none is zero or one."""
    leaves, tree = jax.tree.flatten(init_params(config, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return jax.tree.unflatten(tree, [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in pairs])


def prompts_of(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, size).tolist() for size in rng.integers(3, 90, count)]


@pytest.fixture(scope="module")
def expected(model):
    """Greedy answers without an engine and without a cache."""
    config, params = model

    @jax.jit
    def best(tokens, last):
        decoder = bind(config, params)
        hidden = decoder(tokens[None], jnp.arange(tokens.shape[0])[None], attend_without_cache)
        return jnp.argmax(decoder.logits(hidden[0, last]))

    answers = []
    for prompt in prompts_of(7):
        tokens = np.zeros(128, np.int32)
        tokens[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + GREEDY.max_tokens):
            tokens[end] = best(tokens, end - 1)
        answers.append(tokens[len(prompt) : len(prompt) + GREEDY.max_tokens].tolist())
    assert len({tuple(answer) for answer in answers}) == 7
    return answers


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {"max_seqs": 3},  # slots are used again, and moved
        {"max_seqs": 7, "prefill_chunk": 16},  # prompts in pieces beside decoding
        {"max_seqs": 5, "num_pages": 24},  # preemption
        {"max_seqs": 4, "deterministic": True},
    ],
    ids=["slots", "chunks", "preemption", "uniform"],
)
def test_answers_do_not_depend_on_neighbours(model, expected, options):
    config, params = model
    with LLM((config, params), **OPTIONS, **options) as llm:
        for _ in range(2):  # the second time the slots hold the states of others
            outputs = llm.generate(prompts_of(7), GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow
def test_several_answers_to_a_prompt(model):
    """They share pages up to a saved state at most, as a state cannot be cut."""
    config, params = model
    sampled, found = SamplingParams(temperature=1.0, seed=5, max_tokens=12, n=3), []
    for max_seqs in (4, 1):
        with LLM((config, params), max_seqs=max_seqs, **OPTIONS) as llm:
            (output,) = llm.generate([prompts_of(7)[2]], sampled, use_tqdm=False)
            found.append([one.token_ids for one in output.outputs])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3


def test_states_move_with_their_slots():
    states = init_state_cache(MODELS["delta"], 3, jnp.float32)
    states = jax.tree.map(lambda x: x + jnp.arange(3.0).reshape(3, *(1,) * (x.ndim - 1)), states)
    cache = replace(init_paged_cache(MODELS["delta"], 2, 8, jnp.float32), states=states)
    moved = move_states(cache, jnp.array([2, 0, 1])).states
    for leaf in jax.tree.leaves(moved):
        assert np.asarray(leaf).reshape(3, -1)[:, 0].tolist() == [2, 0, 1]


def test_explain_counts_the_states(model):
    config, params = model
    with LLM((config, params), max_seqs=3, **OPTIONS) as llm:
        explained = llm.explain().to_dict()
    cache, recurrence = explained["cache"], explained["kernels"].get("decode recurrence")
    # Convolutions have no recurrence over a state.
    form = "xla, 1.5 of the bytes of states that are read and written once"
    assert recurrence == (None if "short_conv" in config.layer_kinds else form)
    assert cache["state bytes"] == 2 * 3 * state_bytes(config, jnp.float32)  # as many are saved
    assert (cache["saved states"], cache["prefix cache"]) == (3, "on")
    # Pages are of the one layer with attention: keys and values of 2 heads of 8.
    assert cache["bytes per token"] == 2 * 2 * 8 * 4


@pytest.mark.matrix("False-plain")
@pytest.mark.parametrize("draft", [None, NgramDraft(), LayersDraft(2)], ids=["plain", "ngram", "layers"])
@pytest.mark.parametrize("is_limited", [True, False])
def test_refused_tokens_reach_no_state(is_limited, draft):
    """Masks from the host refuse tokens after they were computed; tables on the device refuse none. Dispatches under
    such masks have one step; where they have more, as in the reasoning before a grammar, answers are computed anew."""
    config = replace(MODELS["delta"], vocab_size=97)
    leaves, tree = jax.tree.flatten(init_params(config, jax.random.key(0)))
    params = jax.tree.unflatten(tree, [4 * leaf if leaf.ndim == 2 else leaf for leaf in leaves])
    compiler, prompts = make_compiler(), [[5] * 9, [7, 8, 9], [60] * 20, [31]]
    form = {"temperature": 2.0, "max_tokens": 16, "structured": StructuredOutputs(regex="([ -O][P-~]){7}")}

    def answers(draft, **options):
        engine = Engine(config, params, EngineOptions(**{**OPTIONS, "max_seqs": 4, **options}), draft=draft)
        engine.scheduler.options = replace(engine.scheduler.options, has_states=is_limited)
        asked = [SamplingParams(seed=number, **form) for number in range(len(prompts))]
        pairs = zip(prompts, asked, strict=True)
        found = run(engine, [make_sequence(compiler, prompt, one, waits=True) for prompt, one in pairs])
        return found, engine.scheduler.counters.num_preemptions

    expected, _ = answers(None)
    assert draft is None or answers(draft)[0] == expected  # under tables on the device
    found, num_preemptions = answers(draft, grammar_memory=0)
    assert found == expected
    assert (num_preemptions > 0) != is_limited


# Other options.


def test_scores_are_those_of_the_answers(model):
    """Of continuations, and of the tokens of a prompt, cold and after their beginnings were cached."""
    prompts, params = prompts_of(7), replace(GREEDY, logprobs=0)
    with LLM(model, max_seqs=3, **OPTIONS) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        made = [
            [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs
        ]
        texts = [prompt + one.token_ids for prompt, one in zip(prompts, outputs, strict=True)]
        for _ in range(2):
            scores = llm.score(prompts, [one.token_ids for one in outputs])
            assert all(score.is_greedy for score in scores)
            asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
            read = [output.prompt_logprobs for output in llm.generate(texts, asked, use_tqdm=False)]
            for prompt, text, score, entries, wanted in zip(prompts, texts, scores, read, made, strict=True):
                np.testing.assert_allclose(score.raw, wanted, atol=1e-4)
                found = [entry[token].logprob for token, entry in zip(text, entries, strict=True) if entry]
                np.testing.assert_allclose(found[len(prompt) - 1 :], wanted, atol=1e-4)


@pytest.mark.slow
def test_taps_are_of_the_states_that_answered(model):
    config, params = model
    prompts = prompts_of(3)
    with LLM(model, max_seqs=3, **OPTIONS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, taps=tap_names(config))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert {name: value.shape for name, value in output.taps.items()} == dict.fromkeys(
            tap_names(config), (len(prompt) + len(tokens), config.hidden_size)
        )
        logits = bind(config, params).logits(jnp.asarray(output.taps["final_norm"]))
        assert jnp.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist() == tokens


SLOTS = {"max_seqs": 3, "max_model_len": 128}
WAYS = {
    "slots": {**SLOTS, "page_size": 8},
    "chunks": {**SLOTS, "page_size": 16, "prefill_chunk": 16},
    "contiguous": {**SLOTS, "cache": "contiguous"},
    "layers": {**SLOTS, "page_size": 8, "draft": "layers:2"},
    "contiguous layers": {**SLOTS, "cache": "contiguous", "draft": "layers:2"},
    "itself": {**SLOTS, "page_size": 8, "draft": "itself"},
    "contiguous itself": {**SLOTS, "cache": "contiguous", "draft": "itself"},
}


def check_ways(model, ways, **options) -> list[list[int]]:
    """However it is computed, one answer, which is returned; twice, as the second time the slots are not new."""
    prompts, found = prompts_of(7), {}
    for way in ways:
        chosen = {**WAYS[way], **options}
        if chosen.get("draft") == "itself":
            chosen["draft"] = model
        with LLM(model, **chosen) as llm:
            for number in range(2):
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                found[way, number] = [output.outputs[0].token_ids for output in outputs]
    (wanted, *others) = found.values()
    assert all(one == wanted for one in others), found
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("contiguous",), pytest.param(tuple(WAYS), marks=pytest.mark.slow)], ids=len)
def test_caches_give_one_answer(model, expected, ways):
    assert check_ways(model, ways) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kv_dtype", "ways"),
    quick(
        [
            ("int8", ("chunks", "contiguous")),
            ("int8", tuple(WAYS)),
            ("fp8_e4m3", tuple(WAYS)),
            ("fp8_e5m2", ("chunks", "contiguous", "layers")),
            ("bfloat16", ("chunks", "contiguous", "layers")),
        ],
        ("int8", ("chunks", "contiguous")),
    ),
)
def test_narrow_caches_give_one_answer(model, kv_dtype, ways):
    """Only keys and values are narrow: states stay as they are."""
    check_ways(model, ways, kv_dtype=kv_dtype, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "layers:2", "itself"])
def test_replicas_give_one_answer(model, expected, draft):
    draft = model if draft == "itself" else draft
    with LLM(model, mesh={"data": 2}, max_seqs=2, draft=draft, **OPTIONS) as llm:
        assert len(llm.engine.engines) == 2
        for _ in range(2):
            outputs = llm.generate(prompts_of(7), GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert all(engine.scheduler.counters.num_finished for engine in llm.engine.engines)


def test_what_states_do_not_go_with_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"Tiny has layers of kind .*: they run on one device, not 2"):
        LLM(model, mesh={"model": 2}, **OPTIONS)
    with pytest.raises(ValueError, match="num_saved_states=3 is for cache='paged' only"):
        LLM(model, max_model_len=128, num_saved_states=3, cache="contiguous")
