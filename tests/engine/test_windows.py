"""One answer where layers have windows, whose pages are given back: alone and together, however prompts are cut, with
prefix hits, preemption and every kind of draft. Inverse tests plant faults in the pools, which must change answers."""

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.pools import PagePools
from jaxinfer.engine.prefix import PrefixMatch, PrefixTree
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import LayerInputConfig, RopeConfig, abstract_params, init_params
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from jaxinfer.training.objectives import sequence_logits
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.test_scheduler_faults import give_back_a_token_early
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

WINDOWS = {"two windows and full": (8, None, 20, 8), "a window only": (13, 13), "shared keys": (8, 8, None, 8, None)}
# As in Gemma 4: the last layers read the keys of earlier ones, and those without a window have fewer and wider heads,
# whose values are their keys; each layer has an input of its own.
SHARED = {
    "kv_sources": (0, 1, 2, 1, 2),
    "global_head_dim": 12,
    "num_global_kv_heads": 1,
    "global_values_are_keys": True,
    "has_value_norm": True,
    "qk_norm": True,
    "has_double_mlp": True,
    "has_layer_scalar": True,
    "layer_inputs": LayerInputConfig(size=6, vocab_size=TINY.vocab_size, count=5),
    "layer_input_slots": (0, 1, 2, 3, 4),
    "rope": RopeConfig("proportional", rotary_dim=12, num_rotated=4),
    "local_rope": TINY.rope,
}
NUM_PROMPTS = 24
PROMPTS = random_prompts(NUM_PROMPTS - 4, 70, seed=7)
PROMPTS += [PROMPTS[0][:30] + prompt for prompt in random_prompts(4, 40, seed=8)]
PARAMS = [replace(mixed_params(number), max_tokens=6 + number) for number in range(NUM_PROMPTS)]
PARAMS[9] = replace(PARAMS[9], n=3, temperature=0.8, seed=5)  # two answers share the prompt of the first
OPTIONS = {"max_seqs": 8, "max_model_len": 128, "page_size": 4, "prefill_chunk": 16, "steps_per_dispatch": 6}
VARIANTS = {
    "as it is": {},
    "pages of 16": {"page_size": 16},
    "pages of 8, chunks of 5": {"page_size": 8, "prefill_chunk": 5},
    "whole prompts": {"prefill_chunk": 64},
    "one step a dispatch": {"steps_per_dispatch": 1},
    "deterministic": {"deterministic": True},
}
DRAFTS = {
    "ngram": {"draft": "ngram", "num_draft_tokens": 4},
    "own layers": {"draft": "layers:1", "num_draft_tokens": 3},
    "own layers in a tree": {"draft": "layers:1", "draft_tree": (2, 2)},
    "a model with another window": {"draft": (11,), "num_draft_tokens": 4},
    "a model in a tree": {"draft": (None, 11), "draft_tree": (2, 1, 2)},
    "a model, adaptive": {"draft": (11, 3)},
}


def model_of(windows: tuple[int | None, ...], seed: int = 5):
    own = SHARED if windows == WINDOWS["shared keys"] else {}
    config = replace(TINY, num_layers=len(windows), sliding_windows=windows, max_position_embeddings=512, **own)
    params = init_params(config, jax.random.key(seed))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="module", params=quick(WINDOWS, "two windows and full"))
def model(request):
    return model_of(WINDOWS[request.param])


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of all answers to each prompt alone, over a contiguous cache."""
    with LLM(model, cache="contiguous", max_seqs=3, max_model_len=128) as llm:
        return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


def answers(llm: LLM, numbers) -> list[list[list[int]]]:
    outputs = llm.generate([PROMPTS[number] for number in numbers], [PARAMS[number] for number in numbers])
    return [[one.token_ids for one in output.outputs] for output in outputs]


def open_llm(model, **options) -> LLM:
    if isinstance(windows := options.get("draft"), tuple):
        options["draft"] = model_of(windows, seed=6)
    return LLM(model, **{**OPTIONS, **options})


@pytest.mark.slow
def test_alone_is_what_dense_attention_gives(model, expected):
    config, params = model
    pairs = [(number, tokens) for number, found in enumerate(expected) for tokens in found[:1]]
    rows = np.array([([*PROMPTS[number], *tokens] + [0] * 128)[:128] for number, tokens in pairs])
    logits = jax.jit(partial(sequence_logits, config))(params, rows)
    places = [(number, k) for number, tokens in pairs for k in range(len(tokens))]
    batch = make_batch([SamplingRow(PARAMS[n], PARAMS[n].seed or 0) for n, _ in places], config.vocab_size)
    state = make_state([PROMPTS[n] for n, _ in places], config.vocab_size, [expected[n][0][:k] for n, k in places])
    positions = np.array([len(PROMPTS[n]) + k for n, k in places], np.int32)
    found = jax.jit(sample)(np.asarray(logits)[[n for n, _ in places], positions - 1], positions, batch, state).tokens
    is_first = [PARAMS[n].n == 1 or PARAMS[n].temperature == 0 for n, _ in places]
    wanted = [expected[n][0][k] for n, k in places]
    assert [a for a, is_own in zip(found.tolist(), is_first, strict=True) if is_own] == [
        b for b, is_own in zip(wanted, is_first, strict=True) if is_own
    ]
    assert len({str(one) for one in expected}) > 18  # different enough to tell a mistake


def check_everything(llm: LLM, expected) -> None:
    """Alone, together, again with prefix hits, and so short of pages of each kind that sequences are preempted."""
    scheduler, everything = llm.engine.scheduler, range(NUM_PROMPTS)
    for number in range(0, NUM_PROMPTS, 4):
        assert answers(llm, [number])[0] == expected[number], number
    for pool in scheduler.pools.all:
        pool.drop_idle()
        random.Random(3).shuffle(pool._free)
    assert answers(llm, everything) == expected
    assert answers(llm, everything) == expected
    # The pools hold the windows of as many sequences as run at once: few prompts are found again.
    reused = scheduler.counters.reused_tokens
    for _ in range(2):
        assert answers(llm, range(4)) == expected[:4]
    assert scheduler.counters.reused_tokens > reused + 60
    spare, scheduler._num_spare = scheduler._num_spare, lambda: [0] * len(scheduler.pools.all)  # admits too many
    for index, pool in enumerate(scheduler.pools.all):
        least = scheduler.pools.least_pages(128)[index]
        pool.drop_idle()
        hidden = pool.allocate(pool.num_available - least - 1)
        preempted = scheduler.counters.num_preemptions
        assert answers(llm, everything) == expected, scheduler.pools.groups[index].name
        assert scheduler.counters.num_preemptions > preempted
        pool.release(hidden)
    scheduler._num_spare = spare
    check_idle(llm)


def check_idle(llm: LLM) -> None:
    """Nothing is owned, and no program wrote to a null page."""
    assert not llm.engine.scheduler.has_work
    assert llm.engine.scheduler.pools.num_owned == 0
    llm.engine.scheduler.check()
    caches = [llm.engine.runner._cache, llm.engine.runner._draft_cache]
    assert not any(np.asarray(leaf[0]).any() for leaf in jax.tree.leaves([c.layers for c in caches if c is not None]))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "as it is"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with open_llm(model, **VARIANTS[variant]) as llm:
        check_everything(llm, expected)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(DRAFTS, "a model with another window"))
def test_drafts_change_no_answer(model, expected, name):
    with open_llm(model, **DRAFTS[name]) as llm:
        check_everything(llm, expected)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "as it is"])
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_and_cuts_change_no_answer(model, expected, variant, name):
    options = {**VARIANTS[variant], **DRAFTS[name]}
    if options.get("deterministic") and options.get("draft_tree"):
        pytest.skip("deterministic engines draft no trees")
    with open_llm(model, **options) as llm:
        check_everything(llm, expected)


@pytest.mark.slow
def test_layers_that_share_keys_change_no_answer():
    """With windows, prefix hits and the first layers as the draft, against a contiguous cache."""
    model, numbers = model_of(WINDOWS["shared keys"]), [0, 1, 20, 21]
    with LLM(model, cache="contiguous", max_seqs=4, max_model_len=128) as llm:
        wanted = answers(llm, numbers)
    with open_llm(model, draft="layers:2", num_draft_tokens=3) as llm:
        assert answers(llm, numbers) == wanted
        assert answers(llm, numbers) == wanted
        assert llm.engine.scheduler.counters.reused_tokens > 0
        check_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["two windows and full", "shared keys"])
def test_rounded_keys_change_no_answer(name, kv_dtype):
    model, everything = model_of(WINDOWS[name]), range(NUM_PROMPTS)
    with open_llm(model, kv_dtype=kv_dtype) as llm:
        wanted = [answers(llm, [number])[0] for number in everything]
        assert answers(llm, everything) == wanted
    for options in ({"prefill_chunk": 5}, {"draft": "layers:2", "num_draft_tokens": 3}):
        with open_llm(model, kv_dtype=kv_dtype, **options) as llm:
            assert answers(llm, everything) == wanted


# Bounded memory.


def most_owned(llm: LLM, num_tokens: int) -> list[int]:
    """The most pages of each pool that a sequence of so many tokens owns while it runs."""
    most = [0] * len(llm.engine.spec.groups)
    request = llm.prepare([1, 2, 3], SamplingParams(max_tokens=num_tokens - 3, temperature=0, ignore_eos=True))
    (answer,) = llm.submit(request)
    while not answer.is_finished:
        llm.step()
        most = [max(a, pool.num_owned) for a, pool in zip(most, llm.engine.scheduler.pools.all, strict=True)]
    return most


def check_slides(num_tokens: int) -> None:
    model = model_of((8, None, 20))
    config = replace(model[0], max_position_embeddings=2 * num_tokens)
    options = {**OPTIONS, "max_model_len": num_tokens, "max_seqs": 1, "prefix_cache": True}
    with LLM((config, model[1]), **options) as llm:
        spec = llm.engine.spec
        most = most_owned(llm, num_tokens)
        assert [group.window for group in spec.groups] == [None, 20, 8]
        assert most[0] >= (num_tokens - 1) // 4
        for group, count in zip(spec.groups[1:], most[1:], strict=True):
            assert 0 < count <= spec.pool_sizes.of_sequence((group.window, 0, None))
            assert count * 4 <= (group.window or 0) + 2 * 6 + 8
            assert group.num_pages < 30
        check_idle(llm)


@pytest.mark.slow
def test_a_window_slides_in_bounded_memory():
    check_slides(400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_window_slides_for_20000_tokens_in_bounded_memory():
    check_slides(20_000)


@pytest.mark.slow
def test_prompts_slide_in_a_pool_smaller_than_they_are():
    """Chunk by chunk: two chunks and the window are held at once, not the prompt."""
    model = model_of((8, None))
    with LLM(model, **{**OPTIONS, "max_model_len": 512, "max_seqs": 1}) as llm:
        assert llm.engine.spec.groups[1].num_pages * 4 < 100
        prompt = random_prompts(1, 1, seed=1)[0] * 400
        found = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
        check_idle(llm)
    with LLM(model, cache="contiguous", max_seqs=1, max_model_len=512) as llm:
        assert llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids == found


# Bytes, of shapes alone.

GPT_OSS_20B = replace(
    TINY, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64, hidden_size=2880, sliding_windows=(128, None) * 12
)
GEMMA_3_27B = replace(
    TINY,
    num_layers=62,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    hidden_size=5376,
    sliding_windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(62)),
)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(
    ("config", "length", "share"),
    [(GPT_OSS_20B, 8192, 0.53), (GPT_OSS_20B, 131_072, 0.51), (GEMMA_3_27B, 16_384, 0.25), (GEMMA_3_27B, 32_768, 0.21)],
    ids=["gpt-oss-20b at 8k", "gpt-oss-20b at 128k", "gemma-3-27b at 16k", "gemma-3-27b at 32k"],
)
def test_the_cache_of_a_sequence_is_small(config, length, share, platform):
    """Against pages of the full context in every layer: what a sequence takes at most, and its part of all pools."""
    config = replace(config, max_position_embeddings=length)
    options = EngineOptions(max_model_len=length, max_seqs=64)
    spec = EngineSpec(config, abstract_params(config, jnp.bfloat16), options, platform)
    sizes = spec.pool_sizes
    before = spec.pages_per_sequence * sum(spec.group_page_bytes)
    assert before == config.num_layers * length * 2 * config.num_kv_heads * config.head_dim * 2
    found = sizes.sequence_bytes / before, sizes.bytes_of(sizes.default) / (64 * before)
    print(f"{found[0]:.4f} of the bytes of a sequence, {found[1]:.4f} of all pools")
    assert max(found) <= share
    assert sum(group.pool_bytes for group in spec.groups) == num_bytes(spec.cache) == sizes.bytes_of(spec.num_pages)


@pytest.mark.matrix
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_shared_keys_take_bytes_once(platform):
    """In heads and widths of their own: of each layer that stores keys, and of no other."""
    config = replace(model_of(WINDOWS["shared keys"])[0], head_dim=64, global_head_dim=128, num_kv_heads=4)
    config = replace(config, rope=RopeConfig(rotary_dim=128), local_rope=RopeConfig(rotary_dim=64))
    options = EngineOptions(max_model_len=128, max_seqs=2, page_size=32)
    spec = EngineSpec(config, abstract_params(config, jnp.bfloat16), options, platform)
    stored = [0 if pages is None else num_bytes(pages) for pages in spec.cache.layers]
    counts = {group.window: group.num_pages for group in spec.groups}
    of_window, of_full = counts[8] * 32 * 2 * 4 * 64 * 2, counts[None] * 32 * 2 * 1 * 128 * 2
    assert stored == [of_window, of_window, of_full, 0, 0]
    assert num_bytes(spec.cache) == sum(stored)


@pytest.mark.slow
def test_explain_counts_what_is_allocated():
    """The same bytes in the arrays, in `explain()`, and in the shapes that plans are made of."""
    with open_llm(model_of(WINDOWS["two windows and full"])) as llm:
        facts, spec = llm.explain().to_dict()["cache"], llm.engine.spec
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner._cache))
        assert facts["bytes"] == arrays == spec.parts["cache"] == num_bytes(spec.cache)
        shown = [facts[f"pages of window of {window}"] for window in (20, 8)]
        assert [text.partition(",")[0] for text in shown] == ["1 layers", "2 layers"]
        assert facts["bytes of a full sequence"] == spec.pool_sizes.sequence_bytes
        assert {"pages in use / idle", "pages in use / idle, window of 8"} <= set(facts)


def test_larger_pools_are_divided_among_the_groups():
    config = replace(GPT_OSS_20B, max_position_embeddings=8192)
    options = EngineOptions(max_seqs=8, max_model_len=8192)
    sizes = EngineSpec(config, abstract_params(config, jnp.bfloat16), options, "tpu").pool_sizes
    for num_bytes_ in (0, 10**8, 10**9, 10**10):
        pages = sizes.fitting(num_bytes_)
        assert sizes.bytes_of(pages) <= num_bytes_ < sizes.bytes_of(pages + 1) or pages == 0
    small, default, large = (sizes.pages(count)[1] for count in (10, sizes.default, 4 * sizes.default))
    assert (small, large) == (10, 4 * default)
    assert default == sizes.base((128, 0, None)) < sizes.default // 8


# Planted faults.


def match_without_the_last_window(monkeypatch):
    """A prefix hit takes what full attention needs, and of a window what there is."""

    def walk(self, keys, salt):
        node, found = self._roots.get(salt), []
        for key in keys if node is not None else ():
            node = node.children.get(key)
            if node is None or any(node.pages[group] == 0 for group in self._full):
                break
            found.append(node)
        return found

    def match(self, keys, salt=""):
        nodes, tables = self._walk(keys, salt), []
        for index, (group, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            first = group.first_needed(len(nodes) * self._page_size, self._page_size)
            tables.append([0] * min(first, len(nodes)) + [node.pages[index] for node in nodes[first:]])
            pool.share([page for page in tables[-1] if page])
        return PrefixMatch(tables)

    def release(self, tables):
        for pool, table in zip(self.all, tables, strict=True):
            pool.release([page for page in table if page])

    monkeypatch.setattr(PrefixTree, "_walk", walk)
    monkeypatch.setattr(PrefixTree, "match", match)
    monkeypatch.setattr(PagePools, "release_behind", lambda self, sequence, prefixes: None)
    monkeypatch.setattr(PagePools, "release_all", lambda self, one: (release(self, one.tables), empty(self, one)))


def empty(pools, sequence) -> None:
    sequence.tables, sequence.num_released = [[] for _ in pools.groups], [0] * len(pools.groups)


@pytest.mark.slow
def test_a_page_given_back_a_token_early_changes_answers(monkeypatch):
    """Chunks of 3, of which one begins 2 tokens into a page and ends in the next, whose entry the device gets together
    with the missing one."""
    model = model_of(WINDOWS["two windows and full"])
    prompt, params = [*range(60)], SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
    found = []
    for _ in range(3):
        with open_llm(model, prefill_chunk=3) as llm:
            output = llm.generate(prompt, params)[0].outputs[0]
            found.append([step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)])
        if len(found) == 2:
            give_back_a_token_early(monkeypatch)
    assert found[0] == found[1] != found[2]
    assert max(abs(a - b) for a, b in zip(found[1], found[2], strict=True)) > 1e-3


@pytest.mark.slow
def test_a_hit_whose_last_window_is_not_there_changes_answers(monkeypatch):
    model = model_of(WINDOWS["two windows and full"])
    prompt, params = [*range(60)], SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    with open_llm(model) as llm:
        expected = llm.generate(prompt, params)[0].outputs[0].token_ids
        match_without_the_last_window(monkeypatch)
        for pool in llm.engine.scheduler.pools.all[1:]:
            pool.drop_idle()
        reused = llm.engine.scheduler.counters.reused_tokens
        assert llm.generate(prompt, params)[0].outputs[0].token_ids != expected
        assert llm.engine.scheduler.counters.reused_tokens == reused + 56
