"""Replaced weights: an engine at rest answers as one that was made from the new tree, and compiles nothing for it."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import save_huggingface
from jaxinfer import LLM, SamplingParams, compilation_cache
from jaxinfer.engine.weights import as_weights
from jaxinfer.models import init_params
from jaxinfer.quantization import quantize_params
from tests.engine.tiers.test_host_tier import GIB
from tests.pallas_kernels.quick import quick
from tests.tiny import OPTIONS, TINY

PROMPTS = [[number % 89 + 3 for number in range(40)], [7, 8, 9], [5] * 21]
PARAMS = [
    SamplingParams(max_tokens=10, temperature=0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=8, temperature=0.9, seed=3, logprobs=1),
    SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3),
]
RUN = {**OPTIONS, "page_size": 4}
KINDS = {
    "plain": {},
    "layers": {"draft": "layers:1", "num_draft_tokens": 2},
    "mesh": {"mesh": "model=2"},
    "replicas": {"mesh": "data=2"},
    "offload": {"offload": 1},
    "host": {"host_cache_gib": GIB, "num_pages": 24},
}


def params_of(seed, how=None):
    """Weights of the tiny model, large enough that the logits are far from flat."""
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(TINY, jax.random.key(seed)))
    return params if how is None else quantize_params(params, how)


def results(llm):
    """Everything that depends on weights: answers, log-probabilities, scores, hidden states, and what is reused."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, taps=["layers.1.residual"])
    again = llm.generate(PROMPTS[0], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)[0]
    answers = [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]
    return (
        answers,
        [one.taps["layers.1.residual"].tobytes() for one in outputs],
        again.outputs[0].token_ids,
        again.num_cached_tokens,
        [one.raw for one in llm.score(PROMPTS, use_tqdm=False)],
        llm.fingerprint(),
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(llm.params)],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_huggingface(TINY, params_of(0), tmp_path_factory.mktemp("weights") / "model", dtype="float32")


@pytest.mark.matrix("plain-None")
@pytest.mark.parametrize(
    ("kind", "how"),
    quick(
        [(kind, how) for kind in KINDS for how in (None, "int8", "int4-g32")],
        ("plain", None),
        ("plain", "int8"),
        ("plain", "int4-g32"),
        ("layers", "int8"),
        ("replicas", None),
        ("offload", None),
        ("host", None),
    ),
)
def test_an_engine_answers_as_a_fresh_one(kind, how):
    options, new = {**RUN, **KINDS[kind]}, params_of(1, how)
    with LLM((TINY, new), **options) as fresh:
        expected = results(fresh)
    with LLM((TINY, params_of(0, how)), **options) as llm:
        llm.warm_up()
        assert results(llm) != expected
        placed = new if llm.fit is None else llm.fit.place(new)
        with compilation_cache.counting() as counts:
            llm.engine.weights.replace(placed)
            found = results(llm)
        assert found == expected
        assert (llm.engine.weights.version, counts.compiled + counts.hits) == (1, 0)
        for engine in llm.engine.engines:
            engine.scheduler.check()


def test_a_draft_of_layers_follows():
    options = {**RUN, "draft": "layers:1", "num_draft_tokens": 3}

    def accepted(llm):
        llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0), use_tqdm=False)
        stats = llm.speculation_stats()
        return stats.accepted, stats.proposed

    with LLM((TINY, params_of(1)), **options) as fresh:
        expected = accepted(fresh)
    with LLM((TINY, params_of(0)), **options) as llm:
        llm.engine.weights.replace(params_of(1))
        assert accepted(llm) == expected


@pytest.mark.slow
def test_a_draft_model_goes_on_with_its_own():
    draft = replace(TINY, num_layers=1), init_params(replace(TINY, num_layers=1), jax.random.key(5))
    options = {**RUN, "draft": draft, "num_draft_tokens": 2}
    with LLM((TINY, params_of(1)), **options) as fresh:
        expected = results(fresh)
    with LLM((TINY, params_of(0)), **options) as llm:
        assert results(llm) != expected
        llm.engine.weights.replace(params_of(1))
        assert results(llm) == expected


def test_no_prefix_of_other_weights_is_found():
    prompt = PROMPTS[0]
    with LLM((TINY, params_of(0)), **RUN, host_cache_gib=GIB) as llm:
        for _ in range(2):
            (output,) = llm.generate([prompt], PARAMS[2], use_tqdm=False)
        assert output.num_cached_tokens == 36
        llm.engine.weights.replace(params_of(1))
        assert llm.engine.scheduler.prefixes.num_pages == 0
        (output,) = llm.generate([prompt], PARAMS[2], use_tqdm=False)
        assert output.num_cached_tokens == 0


def test_the_disk_has_pages_of_the_new_weights_only(tmp_path):
    options = {**RUN, "host_cache_gib": GIB, "prefix_store": str(tmp_path / "pages")}

    def num_read(llm):
        llm.generate(PROMPTS[:1], PARAMS[2:], use_tqdm=False)
        return llm.engine.scheduler.counters.disk_read_tokens

    with LLM((TINY, params_of(0)), **options) as llm:
        assert num_read(llm) == 0
        llm.engine.weights.replace(params_of(1))
        assert num_read(llm) == 0
    with LLM((TINY, params_of(2)), **options) as llm:
        assert num_read(llm) == 0
        for count, seed in enumerate((1, 0), 1):
            llm.engine.weights.replace(params_of(seed))
            assert num_read(llm) == 36 * count


def test_a_model_that_shares_weights_detaches(folder):
    new = params_of(1)
    with LLM((TINY, new), **RUN) as fresh:
        expected = results(fresh)[:5]
    with LLM(folder, **RUN) as llm, LLM(folder, **RUN) as other:
        before, shared = results(other), jax.tree.leaves(other.params)
        assert all(one is its for one, its in zip(jax.tree.leaves(llm.params), shared, strict=True))
        llm.engine.weights.replace(new)
        assert results(llm)[:5] == expected
        assert results(other) == before
        with LLM(folder, **RUN) as third:
            assert all(one is its for one, its in zip(jax.tree.leaves(third.params), shared, strict=True))
        llm.close()
        assert results(other) == before
    assert all(leaf.is_deleted() for leaf in shared)


def test_weights_come_back(folder):
    with LLM(folder, **RUN) as llm:
        before, old = results(llm), llm.params.copy()
        llm.engine.weights.replace(params_of(1))
        assert results(llm) != before
        llm.engine.weights.replace(old)
        assert results(llm) == before
        assert llm.engine.weights.version == 2


def committed(array):
    return jax.device_put(array, jax.devices()[0])


@pytest.mark.slow
@pytest.mark.parametrize("make", [np.asarray, committed])
def test_arrays_are_taken_from_anywhere(make):
    new = jax.tree.map(make, params_of(1))
    with LLM((TINY, params_of(0)), **RUN) as llm:
        llm.warm_up()
        results(llm)
        with compilation_cache.counting() as counts:
            llm.engine.weights.replace(new)
            found = results(llm)
        assert counts.compiled + counts.hits == 0
    with LLM((TINY, params_of(1)), **RUN) as fresh:
        assert results(fresh) == found


@pytest.mark.slow
def test_a_saved_model_has_the_new_weights(tmp_path):
    with LLM((TINY, params_of(0)), **RUN) as llm:
        llm.engine.weights.replace(params_of(1))
        expected = results(llm)[:5]
        path = llm.save(tmp_path / "saved")
    with LLM(path, **RUN) as llm:
        assert results(llm)[:5] == expected


def test_files_with_more_bits_or_fewer_are_rounded_to_the_models(tmp_path):
    """A trainer's float32 checkpoint for a model that was opened in 16 bits, and the other way round."""
    pytest.importorskip("numba", reason="weights are packed with Numba")
    paths = {}
    with LLM((TINY, params_of(0)), **RUN) as llm:
        paths["old", "bfloat16"] = llm.save(tmp_path / "old16", dtype="bfloat16")
        paths["old", "float32"] = llm.save(tmp_path / "old32")
        llm.engine.weights.replace(params_of(1))
        paths["new", "bfloat16"] = llm.save(tmp_path / "new16", dtype="bfloat16")
        paths["new", "float32"] = llm.save(tmp_path / "new32")
    with LLM(paths["new", "bfloat16"], **RUN) as llm:
        expected = results(llm)[:5]
    for own, given in (("bfloat16", "float32"), ("float32", "bfloat16")):
        with LLM(paths["old", own], **RUN) as llm:
            assert results(llm)[:5] != expected
            llm.update_params(paths["new", given])
            assert results(llm)[:5] == expected


def without(params, name):
    return {key: value for key, value in params.items() if key != name}


DIFFERENT = {
    "missing": (lambda params: without(params, "lm_head"), "lm_head is missing"),
    "more": (lambda params: {**params, "bias": jnp.zeros(3)}, "bias is none of the model's"),
    "shape": (lambda params: {**params, "embed": params["embed"][:-1]}, r"embed is float32\[96, 32\], not float32\[97"),
    "dtype": (lambda params: {**params, "embed": params["embed"].astype(jnp.int8)}, "embed is int8"),
    "kind": (lambda params: quantize_params(params, "int8"), r"layers.0.*weight is QuantizedArray .*, not float32"),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("case", DIFFERENT)
def test_other_trees_are_refused_and_change_nothing(case):
    change, message = DIFFERENT[case]
    with LLM((TINY, params_of(0)), **RUN) as llm:
        before = results(llm)
        with pytest.raises(ValueError, match=message):
            llm.engine.weights.replace(change(params_of(1)))
        assert results(llm) == before
        assert llm.engine.weights.version == 0


@pytest.mark.slow
def test_a_form_that_programs_do_not_take_changes_nothing():
    """A view's refusal comes before any other has the new weights: scales that are powers of two are packed in
    8 bits."""
    pytest.importorskip("numba", reason="weights are packed with Numba")
    new = params_of(1, "int8")
    place = new["layers"]["1"]["attention"]
    weight = place["q_proj"]["weight"]
    place["q_proj"]["weight"] = replace(weight, scales=jnp.exp2(jnp.round(jnp.log2(weight.scales))))
    with LLM((TINY, params_of(0, "int8")), **RUN) as llm:
        before = results(llm)
        with pytest.raises(ValueError, match=re.escape("layers.1.attention.q_proj.weight: programs would be compiled")):
            llm.engine.weights.replace(new)
        assert results(llm) == before
        assert llm.engine.weights.version == 0


def test_who_else_holds_a_form_is_told_when_it_is_freed():
    told = []
    weights = as_weights({"embed": np.zeros((2, 3))})
    first = weights.view(lambda params: params["embed"], on_drop=lambda: told.append("first"))
    second = first.view(lambda leaf: leaf + 1, on_drop=lambda: told.append("second"))
    first.drop()
    assert told == ["first", "second"]
    assert first.value is second.value is None


@pytest.mark.parametrize("kind", ["plain", pytest.param("replicas", marks=pytest.mark.slow)])
def test_weights_are_not_replaced_while_requests_run(kind):
    with LLM((TINY, params_of(0)), **RUN, **KINDS[kind]) as llm:
        (answer,) = llm.submit(llm.prepare(PROMPTS[0], PARAMS[2]))
        for _ in range(2):
            llm.step(1)
            with pytest.raises(RuntimeError, match="while requests are unfinished"):
                llm.engine.weights.replace(params_of(1))
        while not answer.is_finished:
            llm.step()
        found = llm.collect([answer]).outputs[0].token_ids
        llm.engine.weights.replace(params_of(1))
    with LLM((TINY, params_of(0)), **RUN) as fresh:
        assert fresh.generate(PROMPTS[0], PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids == found


def test_layers_of_files_are_not_replaced(folder):
    with LLM(folder, **RUN, offload="disk") as llm, pytest.raises(ValueError, match="offload='disk'"):
        llm.engine.weights.replace(params_of(1))
