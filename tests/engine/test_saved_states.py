"""Prefix reuse over models with recurrent layers: one answer, cold and warm, and how many tokens are reused.

The rule by which the scheduler saves states is tested on a fake device, in test_scheduler.py."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import PagedCache, init_state_cache, state_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs.paged import copy_states
from jaxinfer.engine.saved_states import SavedStates, num_common
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import ModelDraft
from tests.engine.sequences import make_sequence
from tests.engine.test_states import MODELS, random_params
from tests.pallas_kernels.quick import quick

MIXED = replace(
    MODELS["delta"],
    num_layers=5,
    layer_kinds=("gated_delta", "attention", "mamba2", "short_conv", "attention"),
    mamba=MODELS["mamba"].mamba,
    conv=MODELS["conv"].conv,
)
CONFIGS = {
    name: replace(config, max_position_embeddings=1024) for name, config in {**MODELS, "all kinds": MIXED}.items()
}
OPTIONS = {"max_model_len": 512, "page_size": 8, "max_seqs": 4}
VARIANTS = {
    "chunks of 16": {"prefill_chunk": 16},
    "chunks of 64, pages of 16": {"prefill_chunk": 64, "page_size": 16},
    "chunks of 256, one state": {"prefill_chunk": 256, "num_saved_states": 1},
    "pages of 48": {"page_size": 48},
    "deterministic": {"deterministic": True},
}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


SYSTEM = random_tokens(200, seed=1)
PROMPTS = [SYSTEM + random_tokens(size, seed=10 + size) for size in (5, 90, 17, 64, 120, 33)]
PROMPTS += [random_tokens(64, seed=2), random_tokens(65, seed=3), random_tokens(150, seed=4)]
PROMPTS += [PROMPTS[1] + random_tokens(40, seed=5), PROMPTS[0]]


@pytest.fixture(scope="module", params=quick(CONFIGS, "all kinds"))
def model(request):
    return CONFIGS[request.param], random_params(CONFIGS[request.param])


@pytest.fixture(scope="module")
def expected(model):
    """Greedy answers of each prompt alone, computed from its beginning."""
    with LLM(model, **{**OPTIONS, "max_seqs": 1}, prefix_cache=False) as llm:
        found = answers(llm, PROMPTS)
        assert llm.engine.scheduler.counters.reused_tokens == 0
    assert len({tuple(answer) for answer in found}) == len(PROMPTS) - 1
    return found


def answers(llm: LLM, prompts, **options) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False, **options)]


def check_idle(llm: LLM) -> None:
    """Nothing is owned, neither pages nor places of states."""
    scheduler = llm.engine.scheduler
    assert not scheduler.has_work
    scheduler.check()
    assert [pool.num_owned for pool in (*scheduler.pools.all, *scheduler.saved.pools)] == [0, 0]


def check_everything(llm: LLM, expected) -> None:
    """Alone, together, again, with few pages for all, and with no place left for another state."""
    scheduler = llm.engine.scheduler
    for number in range(0, len(PROMPTS), 3):
        assert answers(llm, PROMPTS[number : number + 1]) == [expected[number]], number
    for _ in range(2):
        assert answers(llm, PROMPTS) == expected
    assert scheduler.counters.reused_tokens > 500
    spare, scheduler._num_spare = scheduler._num_spare, lambda: [0]  # admits too many
    least = scheduler.pools.least_pages(352)[0]
    scheduler.pool.drop_idle()
    hidden = scheduler.pool.allocate(scheduler.pool.num_available - least)
    preempted = scheduler.counters.num_preemptions
    assert answers(llm, PROMPTS) == expected
    assert scheduler.counters.num_preemptions > preempted
    scheduler.pool.release(hidden)
    scheduler._num_spare = spare
    (pool,) = scheduler.saved.pools
    places = pool.allocate(pool.num_available)
    assert answers(llm, PROMPTS) == expected
    pool.release(places)
    check_idle(llm)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "chunks of 16"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with LLM(model, **{**OPTIONS, **VARIANTS[variant]}) as llm:
        check_everything(llm, expected)


def test_a_restored_state_is_that_of_its_tokens(model):
    """Log-probabilities show what tokens may hide: a state that lacks a few tokens is often near enough."""
    params, found = replace(PARAMS, logprobs=0), []
    with LLM(model, **OPTIONS, prefill_chunk=16) as llm:
        for cached in (0, 256):
            (output,) = llm.generate([PROMPTS[1][:270]], params, use_tqdm=False)
            assert output.num_cached_tokens == cached
            (answer,) = output.outputs
            found.append([step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)])
    assert np.abs(np.subtract(*found)).max() < 1e-5


# How much is reused.


@pytest.fixture(scope="module")
def small_model():
    return CONFIGS["delta"], random_params(CONFIGS["delta"])


def num_cached(llm: LLM, prompts) -> list[int]:
    return [output.num_cached_tokens for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def test_many_requests_with_one_system_prompt(small_model):
    """Together: all but the first reuse the last border of what they share, 192 of 200 tokens. One after the other: the
    second shows what is shared, and the third finds it."""
    prompts = [SYSTEM + random_tokens(80, seed=20 + number) for number in range(8)]
    with LLM(small_model, **OPTIONS) as llm:
        assert num_cached(llm, prompts) == [0, *[192] * 7]
        assert llm.engine.scheduler.counters.reused_tokens == 7 * 192
    with LLM(small_model, **OPTIONS) as llm:
        assert [num_cached(llm, [prompt])[0] for prompt in prompts] == [0, 0, *[192] * 6]


def test_a_conversation_that_goes_on(small_model):
    """Each turn goes on from the last border of the prompt before: the answer and the new message are computed."""
    with LLM(small_model, **OPTIONS) as llm:
        prompt, found, lengths = random_tokens(150, seed=6), [], []
        for turn in range(4):
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            found.append(output.num_cached_tokens)
            lengths.append(len(prompt))
            prompt = [*prompt, *output.outputs[0].token_ids, *random_tokens(60, seed=30 + turn)]
        assert found == [0, *[length // 64 * 64 for length in lengths[:-1]]]
        check_idle(llm)


def test_tenants_share_no_states(small_model):
    salts = ["one", "two", "one"]
    with LLM(small_model, **OPTIONS) as llm:
        outputs = [llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False, cache_salt=salt)[0] for salt in salts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 256]


def test_answers_to_one_prompt_share_its_state(small_model):
    params = replace(PARAMS, n=3, temperature=1.0, seed=5)
    found = []
    for options in ({"prefix_cache": False}, {}):
        with LLM(small_model, **OPTIONS, **options) as llm:
            (output,) = llm.generate([PROMPTS[4]], params, use_tqdm=False)
            found.append([one.token_ids for one in output.outputs])
            reused = llm.engine.scheduler.counters.reused_tokens
    assert found[0] == found[1]
    assert reused == 2 * 256  # of 320 tokens, of which one must be left over


def test_nothing_is_reused_without_places(small_model):
    with LLM(small_model, **OPTIONS, num_saved_states=0) as llm:
        assert num_cached(llm, [PROMPTS[1]] * 2) == [0, 0]
        assert llm.explain().to_dict()["cache"]["prefix cache"] == "off"
        assert llm.engine.runner._saved is None


@pytest.mark.slow
def test_no_program_is_compiled_later(small_model):
    with LLM(small_model, **OPTIONS) as llm:
        llm.warm_up()
        before = copy_states._cache_size()
        num_cached(llm, PROMPTS[:4])
        assert copy_states._cache_size() == before


def test_memory_is_counted(small_model):
    config, _ = small_model
    with LLM(small_model, **OPTIONS, num_saved_states=7) as llm:
        spec, runner = llm.engine.spec, llm.engine.runner
        saved = sum(leaf.nbytes for leaf in jax.tree.leaves(runner._saved))
        assert (
            saved == spec.parts["saved states"] == num_bytes(spec.saved_states) == 7 * state_bytes(config, spec.dtype)
        )
        assert (
            llm.explain().to_dict()["cache"]["state bytes"] == spec.state_bytes == 11 * state_bytes(config, spec.dtype)
        )


RECIPES = (None, "int8", "int4-g32-asym", "nf4-dq", "mxfp4", "fp8", "w8a8", "w8a8-fp8")
STORED = [(dtype, recipe) for dtype in ("float32", "bfloat16", "float16", "mixed") for recipe in RECIPES]


@pytest.mark.parametrize(("dtype", "recipe"), quick(STORED, ("mixed", None), ("bfloat16", "int8")))
def test_states_keep_their_dtypes(dtype, recipe):
    """Of slots, of programs' outputs, of saved copies and of a draft's slots, whatever weights are stored as: a saved
    state is restored bit by bit, and no program is compiled for other dtypes than those that were planned."""
    params = abstract_params(MIXED, "bfloat16" if dtype == "mixed" else dtype)
    if dtype == "mixed":  # norms of their own dtype, which is that of hidden states
        params["final_norm"] = abstract_params(MIXED, "float32")["final_norm"]
    if recipe is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    options = EngineOptions(max_model_len=512, page_size=8, max_seqs=4, num_pages=40, num_draft_tokens=3)
    spec = EngineSpec(MIXED, params, options, "cpu", draft=ModelDraft("itself", MIXED, params))

    def form(tree):
        return [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(tree)]

    assert {str(layer.columns.dtype) for layer in spec.cache.states.layers if layer} == {
        "float32" if dtype == "mixed" else dtype
    }
    assert form(spec.cache.states) == form(spec.saved_states) == form(spec.draft_cache.states)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32), jnp.int32(0)
    assert form(copy_states.eval_shape(spec.saved_states, spec.cache.states, *ids)) == form(spec.saved_states)
    for program in planned_programs(spec).values():
        outputs = program.function.eval_shape(*program.arguments)
        caches = [one for one in outputs if isinstance(one, PagedCache)]
        assert [form(one.states) for one in caches] == [form(spec.cache.states)] * len(caches), program.name
        assert len(caches) == 1 + (program.name == "speculate")


# Parts.


def test_copies_of_states():
    """Of the first `count` pairs; others stay."""

    def numbered(count: int, first: int):
        states = init_state_cache(MODELS["delta"], count, jnp.float32)
        return jax.tree.map(lambda x: x + first + jnp.arange(1.0 * count).reshape(count, *(1,) * (x.ndim - 1)), states)

    ids = np.array([3, 1, 0], np.int32), np.array([0, 4, 2], np.int32)
    copied = copy_states(numbered(5, 10), numbered(4, 20), *ids, np.int32(2))
    for leaf in jax.tree.leaves(copied):
        assert np.asarray(leaf).reshape(5, -1)[:, -1].tolist() == [23, 11, 12, 13, 21]


@pytest.mark.parametrize(
    ("num_tokens", "num_shared", "borders"),
    [
        (300, 0, [256]),
        (300, 200, [192, 256]),
        (257, 256, [256]),
        (256, 256, [192]),
        (64, 64, []),
        (65, 0, [64]),
        (63, 0, []),
    ],
)
def test_where_states_are_saved(num_tokens, num_shared, borders):
    sequence = make_sequence([1] * num_tokens)
    sequence.target = num_tokens
    SavedStates(3, 64, 8).plan(sequence, num_shared)
    assert sequence.save_at == borders


def test_a_running_sequence_saves_what_another_waits_for():
    saved, running = SavedStates(3, 64, 8), make_sequence([1] * 400)
    running.target, running.num_stored, running.save_at = 400, 100, [384]
    assert not saved.request_from(running, num_known=0, num_shared=127)  # 64 is behind it
    assert saved.request_from(running, num_known=0, num_shared=300)
    assert running.save_at == [256, 384]
    assert not saved.request_from(running, num_known=256, num_shared=300)
    assert saved.request_from(running, num_known=256, num_shared=400)


def test_common_keys():
    assert [num_common(list(a), list(b)) for a, b in [("abc", "abd"), ("ab", "abc"), ("", "a"), ("b", "a")]] == [
        2,
        2,
        0,
        0,
    ]
