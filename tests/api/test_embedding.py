"""Embeddings through the engine: the same vector whatever the chunks, the batch mates and the cache."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer import LLM, AsyncEngine, SamplingParams
from jaxinfer.api.embedding import best_first
from jaxinfer.engine.programs import pool
from jaxinfer.engine.request import Pooling, PoolingKind, Request
from tests.oracle.embedding_cases import CASES, WIDTH, write
from tests.oracle.test_embedding_golden import OPTIONS  # the same programs

KINDS = ("last", "mean", "cls")
BOUND = 1e-5
_random = np.random.default_rng(0)
TEXTS = [_random.integers(0, 256, length).tolist() for length in (1, 5, 31, 70, 32, 128, 3, 100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A live model, which says nothing of embedding."""
    return checkpoints_convert.load(write(tmp_path_factory.mktemp("model"), CASES["qwen2_cls"]), dtype="float32")


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as found:
        yield found


def expected(llm, kind):
    states = []
    for text in TEXTS:
        padded = [*text, *[0] * (128 - len(text))]  # one program
        request = Request(padded, SamplingParams(), 1)
        states.append(llm.engine.hidden_states(request, ("final_norm",))["final_norm"][: len(text)])
    pick = {"last": lambda one: one[-1], "cls": lambda one: one[0], "mean": lambda one: one.mean(axis=0)}[kind]
    vectors = np.array([pick(one) for one in states])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_pooled_hidden_states(llm, kind):
    wanted = expected(llm, kind)
    found = llm.embed(TEXTS, pooling=kind)
    assert found.shape == (len(TEXTS), WIDTH)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= BOUND
    # Again, when their beginnings are cached, and each alone: chunks are cut elsewhere.
    again = np.concatenate([llm.embed([text], pooling=kind) for text in TEXTS])
    assert np.abs(again - wanted).max() <= BOUND
    assert llm.engine.scheduler.pool.num_owned == 0


def test_beginnings_are_reused_for_the_last_token_only(llm):
    text = np.random.default_rng(1).integers(0, 256, 90).tolist()
    counters = llm.engine.scheduler.counters
    first = llm.embed([text], pooling="last")
    before = counters.reused_tokens
    assert np.abs(llm.embed([text], pooling="last") - first).max() <= BOUND
    assert counters.reused_tokens - before == 80  # whole pages
    # An answer to the same prompt uses the pages of the embedding.
    output = llm.generate([text], SamplingParams(max_tokens=2, temperature=0))[0]
    assert output.num_cached_tokens == 80
    assert output.pooled is None
    before = counters.reused_tokens
    llm.embed([text], pooling="mean")
    assert counters.reused_tokens == before


def test_answers_beside_embeddings_are_what_they_are_alone(llm):
    prompt, greedy = TEXTS[3], SamplingParams(max_tokens=6, temperature=0, logprobs=0)
    alone = llm.generate([prompt], greedy)[0].outputs[0].token_ids
    running = llm.submit(llm.prepare(prompt, greedy))
    job = llm.embedder.embed(TEXTS, pooling="mean")
    answers = [one for request in job.requests for one in llm.submit(request)]
    for _ in llm.client.run(dict.fromkeys([*running, *answers])):
        pass
    assert llm.collect(running).outputs[0].token_ids == alone
    found = job.result([llm.collect([one]) for one in answers])
    assert np.abs(found - expected(llm, "mean")).max() <= BOUND


def test_dimensions_are_cut_before_the_length_is_made_one(llm):
    whole = llm.embed(TEXTS[:3], pooling="last", normalize=False)
    found = llm.embed(TEXTS[:3], pooling="last", dimensions=8)
    assert np.allclose(found, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6)
    assert np.abs(np.linalg.norm(whole, axis=1) - 1).min() > 0.1
    assert llm.embed([], pooling="last").shape == (0, WIDTH)


def test_what_cannot_be_embedded_is_refused(llm):
    long = [*TEXTS[:2], [1] * 513]
    with pytest.raises(ValueError, match=r"text 2 has 513 tokens, but max_model_len=512; set truncate to cut it"):
        llm.embed(long, pooling="last")
    cut = llm.embed(long, pooling="last", truncate=True)[2]
    assert np.abs(cut - llm.embed([[1] * 512], pooling="last")).max() <= BOUND
    with pytest.raises(ValueError, match=r"does not say how it embeds texts .*give pooling, one of last, mean, cls"):
        llm.embed([[1]])
    for options, message in (
        ({"pooling": "max"}, "pooling='max' is none of last, mean, cls"),
        ({"dimensions": 33}, "dimensions=33 must be 1 to 32"),
        ({"prompt_name": "querry"}, "prompt_name='querry'.* is none of the model's prompts: none"),
        ({"prompt": "x"}, "text 0: a prompt goes before texts, not before token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.embed([[1]], **{"pooling": "last", **options})
    with pytest.raises(ValueError, match="rerank needs a tokenizer"):
        llm.rerank("a", ["b"])
    with pytest.raises(TypeError, match="document: a list of texts is needed, got str"):
        llm.rerank("a", "b")


def test_rows_that_are_not_finite_stay_apart():
    hidden = jnp.asarray(np.arange(12.0).reshape(6, 2)).at[2].set(jnp.nan).at[5].set(jnp.inf)
    rows = np.array([[0, 2], [1, 4], [3, 4], [3, 5], [5, 5]], np.int32)
    found = np.asarray(pool(hidden, rows))
    assert np.array_equal(found[[0, 2, 3, 4]], [[2, 4], [6, 7], [14, 16], [0, 0]])
    assert np.isnan(found[1]).all()


def test_pooled_rows_of_chunks():
    kinds: list[tuple[int, PoolingKind]] = [(0, "last"), (0, "mean"), (3, "mean"), (0, "cls"), (3, "cls")]
    for start, kind in kinds:
        pooling, rows = Pooling(kind, start), []
        for first in range(0, 10, 4):
            low, high = pooling.rows(10, first, min(first + 4, 10))
            rows += range(low, high)
        assert rows == {"last": [9], "mean": list(range(start, 10)), "cls": [start]}[kind]


def test_best_first():
    scores = np.array([0.5, 0.9, 0.5, 0.1], np.float32)
    assert [index for index, _ in best_first(scores, None)] == [1, 0, 2, 3]
    assert best_first(scores, 1) == [(1, pytest.approx(0.9))]
    with pytest.raises(ValueError, match="top_n=0 must be a positive integer or None"):
        best_first(scores, 0)


def test_async_engine_embeds_beside_answers(llm, model):
    wanted = expected(llm, "last")

    async def run():
        async with AsyncEngine(model, **OPTIONS) as engine:
            first = asyncio.create_task(engine.embed(TEXTS, pooling="last"))
            second = await engine.embed(TEXTS, pooling="mean", normalize=False)
            left = asyncio.create_task(engine.embed(TEXTS * 4, pooling="mean"))
            await asyncio.sleep(0.01)
            left.cancel()
            found = await first
            while engine.llm.engine.has_work:
                await asyncio.sleep(0.01)
            return found, second, engine.llm.engine.snapshot().running

    found, second, running = asyncio.run(run())
    assert np.abs(found - wanted).max() <= BOUND
    assert np.abs(second / np.linalg.norm(second, axis=1, keepdims=True) - expected(llm, "mean")).max() <= BOUND
    assert not running


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 7},
        {"prefix_cache": False},
        {"max_seqs": 8, "prefill_chunk": 300},
        {"draft": "ngram"},
        {"cache": "contiguous"},
        {"shuffle_seed": 3, "max_seqs": 3},
    ],
    ids=str,
)
def test_vectors_do_not_depend_on_options(llm, model, options):
    with LLM(model, **{**OPTIONS, "deterministic": False, **options}) as other:
        for kind in KINDS:
            found = other.embed(TEXTS * 2, pooling=kind)
            assert np.abs(found - np.tile(expected(llm, kind), (2, 1))).max() <= BOUND
        whole = other.embed([[1] * 512], pooling="last")
        assert np.abs(whole - llm.embed([[1] * 512], pooling="last")).max() <= BOUND


@pytest.mark.slow
def test_a_preempted_text_is_pooled_anew(llm, model):
    few = {"prefill_chunk": 2, "num_pages": 14, "prefix_cache": False, "page_size": 16}
    with LLM(model, **{**OPTIONS, **few}) as other:
        growing = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
        answers = [one for text in TEXTS[2:5] for one in other.submit(other.prepare(text[:5], growing))]
        job = other.embedder.embed([TEXTS[7], TEXTS[3]], pooling="mean")
        pooled = [one for request in job.requests for one in other.submit(request)]
        for _ in other.client.run(dict.fromkeys([*answers, *pooled])):
            pass
        assert max(one.num_preemptions for one in pooled) > 0
        found = job.result([other.collect([one]) for one in pooled])
        assert np.abs(found - expected(llm, "mean")[[7, 3]]).max() <= BOUND
