"""Weights that change while requests run: what an answer is made of, where the memory is, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import save_huggingface
from jaxinfer import LLM, SamplingParams, compilation_cache
from jaxinfer.engine.request import WeightsSpan
from jaxinfer.engine.weight_forms import by_path
from jaxinfer.engine.weights import WeightsError
from jaxinfer.models import init_params
from jaxinfer.quantization import quantize_params
from tests.engine.test_weights import PROMPTS, RUN, params_of
from tests.engine.tiers.test_host_tier import GIB
from tests.tiny import TINY

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def numbered(number):
    """Weights of a model that says `number`, whatever it reads."""
    params = init_params(TINY, jax.random.key(number))
    head = jnp.zeros_like(params["lm_head"]).at[:, number].set(1)
    return {**params, "embed": jnp.abs(params["embed"]) + 1, "lm_head": head}


def live_bytes():
    return sum({id(array): array.nbytes for array in jax.live_arrays()}.values())


@pytest.fixture(scope="module")
def llm():
    with LLM((TINY, numbered(10)), **RUN) as llm:
        llm.warm_up()
        yield llm


def run(llm, prompt=PROMPTS[0], params=GREEDY):
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.matrix("recompute", "retain")
@pytest.mark.parametrize("mode", ["wait", "abort", "recompute", "retain"])
def test_every_token_names_its_weights(llm, mode):
    llm.update_params(numbered(10), version="ten")
    answers = [llm.submit(llm.prepare(prompt, GREEDY))[0] for prompt in PROMPTS]
    while not answers[0].num_output:
        llm.step(1)
    made = [answer.num_output for answer in answers]
    how = {"mode": "keep", "kv": mode} if mode in ("recompute", "retain") else {"mode": mode}
    new = numbered(11)
    with compilation_cache.counting() as counts:
        assert llm.update_params(new, version="eleven", **how) == "eleven"
        while not all(answer.is_finished for answer in answers):
            llm.step()
    assert counts.compiled + counts.hits == 0
    for answer, count in zip(answers, made, strict=True):
        output = llm.collect([answer]).outputs[0]
        if mode == "abort":
            assert output.finish_reason == "abort"
            assert set(output.token_ids) <= {10}
            continue
        spans = output.weights
        if mode == "wait":
            assert spans == (WeightsSpan("ten"),)
            assert output.token_ids == [10] * 12
            continue
        ends = [*(span.start for span in spans[1:]), 12]
        for span, end in zip(spans, ends, strict=True):
            wanted = {"ten": 10, "eleven": 11}[span.version]
            assert output.token_ids[span.start : end] == [wanted] * (end - span.start)
            assert span.is_retained == (mode == "retain" and span.version == "eleven" and count > 0)
    assert run(llm).weights == (WeightsSpan("eleven"),)
    llm.engine.scheduler.check()


def test_pages_that_are_retained_are_not_found(llm):
    """Another request with the same prompt computes it with the new weights."""
    llm.update_params(params_of(3))
    (answer,) = llm.submit(llm.prepare(PROMPTS[0], replace(GREEDY, max_tokens=30)))
    while answer.num_output < 2:
        llm.step(1)
    llm.update_params(params_of(4), mode="keep", kv="retain")
    output = llm.generate([PROMPTS[0]], replace(GREEDY, logprobs=1), use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    while not answer.is_finished:
        llm.step()
    llm.engine.scheduler.check()
    llm.update_params(params_of(4))
    assert run(llm, params=replace(GREEDY, logprobs=1)).logprobs == output.outputs[0].logprobs


@pytest.mark.slow
def test_pages_that_are_retained_are_not_on_the_disk(tmp_path):
    """An update in the middle of a prompt, whose first pages are of the weights before."""
    options = {**RUN, "prefill_chunk": 8, "host_cache_gib": GIB, "prefix_store": str(tmp_path / "pages")}
    with LLM((TINY, params_of(0)), **options) as llm:
        (answer,) = llm.submit(llm.prepare(PROMPTS[0], GREEDY))
        while not answer.num_confirmed:
            llm.step(1)
        assert answer.num_confirmed < answer.num_prompt - 8
        llm.update_params(params_of(1), mode="keep", kv="retain")
        while not answer.is_finished:
            llm.step()
    with LLM((TINY, params_of(1)), **options) as llm:
        run(llm)
        assert llm.engine.scheduler.counters.disk_read_tokens == 0


def test_one_more_weight_is_in_memory():
    """Besides the weights, the largest one. The caller's tree is in NumPy arrays, which are no memory of the device."""
    new = jax.tree.map(np.asarray, params_of(1))
    with LLM((TINY, params_of(0)), **RUN) as llm:
        run(llm)
        before, most = live_bytes(), []
        weights = llm.engine.weights
        weights.begin()
        weights.write(new, report=lambda name: most.append(live_bytes()))
        weights.finish()
        run(llm)
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(new))
        assert max(most) <= before + largest
        assert live_bytes() <= before + 1024


@pytest.mark.slow
@pytest.mark.parametrize("which", ["model", "draft"])
def test_one_more_weight_is_in_memory_beside_a_draft(which):
    """A draft model of the same size, given as arrays, which nothing holds but the weights."""
    new = jax.tree.map(np.asarray, params_of(1))
    with LLM((TINY, params_of(0)), **RUN, draft=(TINY, params_of(2)), num_draft_tokens=2) as llm:
        run(llm)
        before, most, own = live_bytes(), [], which == "draft"
        weights = llm._weights[own]
        weights.begin()
        weights.write(new, report=lambda name: most.append(live_bytes()))
        weights.finish()
        assert max(most) <= before + max(leaf.nbytes for leaf in jax.tree.leaves(new))
        assert live_bytes() <= before + 1024
        assert len(run(llm).token_ids) == 12


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_a_model_and_its_draft_are_updated_together(first):
    """Whichever ends first."""
    with LLM((TINY, params_of(1)), **RUN) as fresh:
        expected = run(fresh).token_ids
    with LLM((TINY, params_of(0)), **RUN, draft=(TINY, params_of(2)), num_draft_tokens=2) as llm:
        for own in (False, True):
            llm.begin_update(draft=own)
            llm.write_update(params_of(1), draft=own)
        for own in (first, not first):
            assert "under way" in llm.engine.why_stopped
            llm.finish_update(draft=own)
        assert run(llm).token_ids == expected
        stats = llm.speculation_stats()
        assert stats.accepted == stats.proposed > 0  # it drafts as the model does


def test_a_copy_stays_when_the_trainer_gives_its_arrays_away(llm):
    params = params_of(5)
    llm.update_params(params)
    expected = run(llm).token_ids
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    llm.engine.drop_prefixes()
    assert run(llm).token_ids == expected


@pytest.mark.slow
def test_some_weights_stay(llm):
    llm.update_params(params_of(1))
    llm.update_params({"lm_head": params_of(2)["lm_head"]}, partial=True, version="head")
    found = run(llm)
    assert found.weights == (WeightsSpan("head"),)
    llm.update_params({**params_of(1), "lm_head": params_of(2)["lm_head"]})
    assert run(llm).token_ids == found.token_ids
    with pytest.raises(ValueError, match="embed is missing"):
        llm.update_params({"lm_head": params_of(2)["lm_head"]})


@pytest.mark.slow
@pytest.mark.matrix("int8")
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_files_are_read_in_the_form_that_is_there(kind, tmp_path):
    """And a trainer's tree in another dtype is rounded to it."""
    folders = [save_huggingface(TINY, params_of(seed), tmp_path / str(seed), dtype="float32") for seed in (0, 1)]
    how = {} if kind == "float" else {"quantize": "int8"}
    with LLM(folders[1], **RUN, **how) as fresh:
        expected, scores = run(fresh).token_ids, fresh.score(PROMPTS, use_tqdm=False)
    with LLM(folders[0], **RUN, **how) as llm:
        assert run(llm).token_ids != expected
        llm.update_params(folders[1])
        assert run(llm).token_ids == expected
        llm.update_params(params_of(0))
        assert run(llm).token_ids != expected
        llm.update_params(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params_of(1)))
        assert run(llm).token_ids == expected
        assert llm.score(PROMPTS, use_tqdm=False) == scores


@pytest.mark.slow
def test_what_was_not_rounded_to_nearest_is_refused():
    with LLM((TINY, quantize_params(params_of(0), "int8")), **RUN) as llm:
        before = run(llm).token_ids
        with pytest.raises(ValueError, match="the model's is quantized"):
            llm.update_params(params_of(1))
        assert run(llm).token_ids == before


def test_nothing_is_answered_after_half_an_update(llm):
    llm.update_params(params_of(1))
    expected = run(llm).token_ids
    weights = llm.engine.weights
    weights.begin()
    weights.write({"lm_head": params_of(2)["lm_head"]})
    weights.cancel()
    with pytest.raises(WeightsError, match="has failed: 1 of"):
        run(llm)
    with pytest.raises(RuntimeError, match="lm_head is of an update that has not ended"):
        llm.update_params({"embed": params_of(2)["embed"]}, partial=True)
    llm.update_params(params_of(1))
    assert run(llm).token_ids == expected


@pytest.mark.slow
def test_memory_is_given_back_and_taken_again(llm):
    llm.update_params(params_of(1))
    expected = run(llm).token_ids
    (answer,) = llm.submit(llm.prepare(PROMPTS[0], GREEDY))
    while not answer.num_output:
        llm.step(1)
    before = live_bytes()
    llm.sleep()
    assert live_bytes() < before - 0.9 * sum(leaf.nbytes for leaf in jax.tree.leaves(params_of(1)))
    with pytest.raises(RuntimeError, match="asleep"):
        llm.step()
    with pytest.raises(RuntimeError, match="asleep"):
        llm.update_params(params_of(2))
    with pytest.raises(RuntimeError, match="asleep"):
        llm.engine.hidden_states(llm.prepare(PROMPTS[0], GREEDY), ("final_norm",))
    llm.wake_up()
    while not answer.is_finished:
        llm.step()
    assert answer.output == expected
    llm.sleep(weights="drop")
    with pytest.raises(WeightsError, match="were dropped"):
        llm.warm_up()
    llm.wake_up()
    with pytest.raises(WeightsError):
        run(llm)
    llm.update_params(params_of(1))
    assert run(llm).token_ids == expected


@pytest.mark.slow
def test_a_draft_learns_while_it_drafts():
    small = replace(TINY, num_layers=1)
    draft = small, init_params(small, jax.random.key(5))
    target = params_of(1)
    with LLM((TINY, target), **RUN, draft=draft, num_draft_tokens=2) as llm:
        expected = run(llm).token_ids
        other = init_params(small, jax.random.key(6))
        llm.update_params(other, draft=True)
        assert run(llm).token_ids == expected
        first = llm.speculation_stats()
    with LLM((TINY, target), **RUN, draft=(small, other), num_draft_tokens=2) as fresh:
        run(fresh)
        stats = fresh.speculation_stats()
    with LLM((TINY, target), **RUN, draft=draft, num_draft_tokens=2) as old:
        run(old)
        before = old.speculation_stats()
    assert first.accepted == stats.accepted + before.accepted


@pytest.mark.slow
def test_what_a_draft_drafted_before_its_update_is_no_token_of_other_weights():
    with LLM((TINY, params_of(1)), **RUN, draft=(TINY, params_of(2)), num_draft_tokens=2) as llm:
        expected = run(llm).token_ids
        (answer,) = llm.submit(llm.prepare(PROMPTS[0], GREEDY))
        while not answer.num_output:
            llm.step(1)
        llm.update_params(params_of(3), draft=True, mode="keep", kv="retain")
        while not answer.is_finished:
            llm.step()
        assert answer.output == expected
        assert answer.weights == [WeightsSpan("0")]


@pytest.mark.slow
def test_bad_arguments_change_nothing(llm):
    llm.update_params(params_of(1))
    expected = run(llm).token_ids
    for how, message in [
        ({"mode": "soon"}, "mode must be one of"),
        ({"kv": "retain"}, "kv='retain' is for mode='keep'"),
        ({"draft": True}, "has no draft"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.update_params(params_of(2), **how)
    assert run(llm).token_ids == expected


NOT_ARRAYS = {
    "a list": ([[1.0]], "lm_head is a list, not an array"),
    "a number": (3.0, "lm_head is a float, not an array"),
    "nothing": (None, "lm_head is a NoneType, not an array"),
    "texts": (np.full((2, 2), "x"), "lm_head is a ndarray of <U1, not an array of numbers"),
}


@pytest.mark.slow
def test_what_is_no_array_is_refused_by_name(llm):
    """And an array that its owner has freed, which could not be read later either."""
    llm.update_params(params_of(1))
    expected, freed = run(llm).token_ids, params_of(2)
    freed["lm_head"].delete()
    trees = [({**params_of(2), "lm_head": leaf}, told) for leaf, told in NOT_ARRAYS.values()]
    for tree, told in [*trees, (freed, "lm_head was deleted"), (None, "nested dict of arrays"), ([], "nested dict")]:
        with pytest.raises((ValueError, TypeError), match=told):
            llm.update_params(tree)
    assert run(llm).token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "a\nb", "\ud800", "x" * 257, 5])
def test_a_version_is_a_name(llm, version):
    llm.update_params(params_of(1), version="one")
    with pytest.raises(ValueError, match="version must be a text of 1 to 256 printable characters"):
        llm.update_params(params_of(2), version=version)
    assert run(llm).weights == (WeightsSpan("one"),)


@pytest.mark.slow
def test_an_update_that_has_written_nothing_names_nothing(llm):
    llm.update_params(params_of(1), version="one")
    llm.begin_update()
    with pytest.raises(RuntimeError, match="has written no weights: 'two' would name those of 'one'"):
        llm.finish_update("two")
    assert llm.finish_update() == "one"
    assert run(llm).weights == (WeightsSpan("one"),)


@pytest.mark.slow
def test_what_cannot_be_replaced_ends_no_request(llm):
    llm.update_params(params_of(1))
    (answer,) = llm.submit(llm.prepare(PROMPTS[0], GREEDY))
    llm.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        llm.update_params(params_of(2), mode="abort")
    llm.wake_up()
    while not answer.is_finished:
        llm.step()
    assert answer.finish_reason == "length"


@pytest.mark.slow
def test_a_draft_sleeps_too():
    with LLM((TINY, params_of(0)), **RUN, draft=(TINY, params_of(2)), num_draft_tokens=2) as llm:
        expected, before = run(llm).token_ids, live_bytes()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        llm.sleep(cache=False)
        assert before - live_bytes() > 4 * size  # of two models, as they were given and as a CPU runs them
        llm.wake_up()
        assert run(llm).token_ids == expected
        assert llm.speculation_stats().proposed > 0
        llm.sleep(weights="drop")
        llm.wake_up()
        llm.update_params(params_of(0))
        assert run(llm).token_ids == expected


@pytest.mark.slow
def test_weights_that_sleep_are_dropped(llm):
    """And while they are written they neither sleep nor go."""
    llm.update_params(params_of(1))
    expected = run(llm).token_ids
    llm.sleep()
    llm.sleep(weights="drop")
    assert llm.is_asleep
    assert "asleep and were dropped" in llm.engine.why_stopped
    llm.wake_up()
    assert not llm.is_asleep
    with pytest.raises(WeightsError, match="were dropped: an update has to give all 21"):
        run(llm)
    llm.begin_update()
    llm.write_update(params_of(1))
    for how in ("keep", "drop"):
        with pytest.raises(WeightsError, match="under way: 21 of 21"):
            llm.sleep(weights=how)
    llm.finish_update()
    assert run(llm).token_ids == expected


@pytest.mark.slow
def test_weights_that_another_model_shares_are_not_deleted_with_it(tmp_path):
    folder = save_huggingface(TINY, params_of(0), tmp_path / "model", dtype="float32")
    with LLM(folder, **RUN) as llm:
        with LLM(folder, **RUN):
            llm.update_params({"lm_head": params_of(2)["lm_head"]}, partial=True)
            expected = run(llm).token_ids
        llm.engine.drop_prefixes()
        assert run(llm).token_ids == expected


@pytest.mark.slow
def test_an_update_whose_files_break_has_to_be_made_again(llm):
    """Also where it ends as if nothing had happened."""
    llm.update_params(params_of(1))
    expected = run(llm).token_ids
    weights = llm.engine.weights
    given = list(by_path(params_of(2)).items())

    def broken():
        yield from given[:3]
        raise OSError("the disk is gone")

    weights.begin()
    with pytest.raises(OSError, match="gone"):
        weights.write_each(broken(), [path for path, _ in given])
    with pytest.raises(RuntimeError, match="has not replaced it"):
        weights.finish()
    llm.update_params(params_of(1))
    assert run(llm).token_ids == expected


@pytest.mark.slow
def test_memory_is_free_once_it_is_closed(tmp_path):
    folder = save_huggingface(TINY, params_of(0), tmp_path / "model", dtype="float32")
    new = jax.tree.map(np.asarray, params_of(1))
    before = live_bytes()
    with LLM(folder, **RUN) as llm:
        llm.update_params(new)
        run(llm)
    assert live_bytes() <= before + 1024
