"""`kv_policy`: bounded memory, caches of few bits, what is refused, what `explain` says, and programs without one."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import moved_sinks
from jaxinfer.cache.policy import best_pages, kept_pages
from jaxinfer.cache.policy.contract import PolicyUse
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.cache.policy.sinks_window import SinksWindow
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import NO_DRAFT, LayersDraft, NgramDraft
from tests.engine.test_mixtures import CONFIG as LATENT
from tests.engine.test_policies import OPTIONS, PAGE, POLICY, model_of
from tests.engine.test_scheduler_faults import give_back_a_token_early
from tests.engine.test_windows import check_idle, most_owned
from tests.models.test_recurrent import DELTA
from tests.tiny import TINY

# Bounded memory.


def check_slides(num_tokens: int, length: int) -> None:
    """A sequence holds no more pages when it is long, beyond what the model was trained for too."""
    options = {**OPTIONS, "max_model_len": num_tokens, "max_seqs": 1}
    with LLM(model_of((None, None), length), **options) as llm:
        spec = llm.engine.spec
        (most,), (group,) = most_owned(llm, num_tokens), spec.groups
        # One page of sinks, two of the window, and what two dispatches of 6 tokens store.
        assert most <= 1 + 2 + 1 + 2 == spec.pool_sizes.of_sequence((group.window, group.num_sinks, None))
        assert group.num_pages < 20
        assert (group.num_scratch > 0) == (length < num_tokens)
        check_idle(llm)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("length", [pytest.param(1024, marks=pytest.mark.slow), 48])
def test_a_sequence_slides_in_bounded_memory(length):
    check_slides(400, length)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_answer_of_100000_tokens_in_bounded_memory():
    check_slides(100_000, 512)


@pytest.mark.slow
def test_prompts_slide_in_a_pool_smaller_than_they_are():
    """Chunk by chunk: two chunks and what is kept are held at once, not the prompt."""
    model, found = model_of((None, None), 48), []
    for num_pages in (None, 100):
        options = {**OPTIONS, "max_model_len": 512, "max_seqs": 1, "num_pages": num_pages, "prefill_chunk": 32}
        with LLM(model, **options) as llm:
            assert num_pages or llm.engine.spec.num_pages * PAGE < 200
            prompt = [*range(90)] * 5
            found.append(llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids)
            check_idle(llm)
    assert found[0] == found[1]


# Caches of few bits: the same answer however it is cut.


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_dtype", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_e4m3", "bfloat16"))]
)
def test_rounded_keys_change_no_answer(kv_dtype):
    model, prompt = model_of((None, None), 48), [*range(80)]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    found = []
    for options in ({"prefill_chunk": 128}, {"prefill_chunk": 5, "draft": "ngram", "num_draft_tokens": 3}):
        with LLM(model, **{**OPTIONS, "max_seqs": 2, "kv_dtype": kv_dtype, **options}) as llm:
            found.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


# Planted faults.


def logprobs_of(llm: LLM, prompt) -> list[float]:
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
    output = llm.generate(prompt, params)[0].outputs[0]
    return [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]


@pytest.mark.slow
def test_a_page_evicted_a_position_early_changes_answers(monkeypatch):
    """Chunks of 3, of which one begins at the last token of a page and ends in the next."""
    found = []
    for _ in range(3):
        with LLM(model_of((None, None)), **{**OPTIONS, "prefill_chunk": 3, "max_seqs": 1}) as llm:
            found.append(logprobs_of(llm, [*range(48)]))
        if len(found) == 2:
            give_back_a_token_early(monkeypatch)
    assert found[0] == found[1]
    assert max(abs(a - b) for a, b in zip(found[1], found[2], strict=True)) > 1e-3


@pytest.mark.slow
def test_a_page_evicted_while_it_is_shared_changes_answers(monkeypatch):
    """A second answer shares the pages of the first one's prompt. The first goes on and drops them while the second,
    some tokens behind, still reads them."""
    params, found = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), []

    def release(self, pages, *, evict_first=False):
        for page in reversed([page for page in pages if self._owners[page]]):
            self._owners[page] = 0
            if page in self._on_evict:
                self._on_evict.pop(page)()
            self._free.append(page)

    for _ in range(2):
        with LLM(model_of((None, None)), **{**OPTIONS, "max_seqs": 4, "steps_per_dispatch": 1}) as llm:
            request = llm.prepare([*range(37)], params)
            (first,) = llm.submit(request)
            while first.num_output < 2:
                llm.step()
            second = SequenceState(request, 1, leader=first)
            llm.engine.add(second)
            while second.num_output < 30:
                llm.step()
            assert second.num_reused > 30
            found.append((first.output[:30], second.output[:30]))
        monkeypatch.setattr(PagePool, "release", release)
        monkeypatch.setattr(PagePool, "keep", lambda self, page, forget: None)  # which would notice
    assert found[0][0] == found[0][1]
    assert found[1][0] != found[1][1]


# What is refused.

QUEST = "quest(16)"
REFUSED = [
    ({"kv_policy": QUEST}, {}, None, "is for layers after the first 2: .* has none without a window"),
    ({"kv_policy": QUEST, "cache": "contiguous"}, {}, None, "it is for cache='paged' only"),
    ({"kv_policy": QUEST, "draft_tree": (2, 1)}, {}, NgramDraft(), r"cannot be combined with draft_tree=\(2, 1\)"),
    ({"kv_policy": QUEST}, {}, LayersDraft(1), r"quest\(16\)' cannot be combined with draft='layers:1'"),
    ({"kv_policy": QUEST}, {"sliding_windows": (8, 8)}, None, "have a window already, of 8 tokens"),
    ({"kv_policy": "sinks(4)"}, {}, None, r"lacks window\(N\)"),
    ({"cache": "contiguous"}, {}, None, "it is for cache='paged' only"),
    ({"draft_tree": (2, 1)}, {}, NgramDraft(), r"cannot be combined with draft_tree=\(2, 1\)"),
    ({}, {}, LayersDraft(1), "cannot be combined with draft='layers:1'"),
    ({}, {"sliding_windows": (8, 8)}, None, "have a window already, of 8 tokens"),
    ({}, {"sliding_windows": (20, None)}, None, "keeps 16 tokens, fewer than the model's own window of 20"),
    (
        {"kv_dtype": "int4"},
        {"max_position_embeddings": 64},
        None,
        "moves keys, .* of kv_dtype='int4' once more",
    ),
    ({}, {"max_position_embeddings": 31}, None, "of more than 31 tokens, for which .* was trained, attends to 32"),
    (
        {},
        {"max_position_embeddings": 64, "qk_norm": True, "is_qk_norm_after_rotation": True},
        None,
        "more than 64 tokens: .* normalizes keys after their rotation",
    ),
]


@pytest.mark.parametrize(("options", "changes", "draft", "message"), REFUSED, ids=[one[3][:40] for one in REFUSED])
def test_what_cannot_be_combined_is_refused_by_name(options, changes, draft, message):
    config = replace(TINY, **{"max_position_embeddings": 512, **changes})
    with pytest.raises(ValueError, match=message):
        spec_of(config, draft=draft, **options)


def test_models_without_pages_of_all_tokens_are_refused():
    for policy in (POLICY, QUEST):
        with pytest.raises(ValueError, match="has recurrent layers, whose states are of all tokens"):
            spec_of(DELTA, kv_policy=policy)


def test_latent_attention_and_several_devices_are_refused():
    for policy in (POLICY, QUEST):
        with pytest.raises(ValueError, match="has latent attention, whose cache is kept whole"):
            spec_of(LATENT, kv_policy=policy)
        use = PolicyUse(f"kv_policy={policy!r}", TINY, 128, num_devices=2)
        with pytest.raises(ValueError, match="runs on one device, not 2"):
            parse_policy(policy).bound(PAGE, None).check(use)


def test_taps_are_refused():
    with (
        LLM(model_of((None, None)), **OPTIONS) as llm,
        pytest.raises(ValueError, match=r"computed over all tokens, not kv_policy='sinks\(4\)\+window\(16\)'"),
    ):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1), taps=["embed"])


def spec_of(config, draft=None, **options) -> EngineSpec:
    options = {"kv_policy": POLICY, "max_model_len": 128, "max_seqs": 4, "page_size": PAGE, **options}
    if options.get("cache") == "contiguous":
        del options["page_size"]
    return EngineSpec(
        config, abstract_params(config, "float32"), EngineOptions(**options), "cpu", draft=draft or NO_DRAFT
    )


def test_quest_does_not_lengthen_what_a_model_takes():
    with pytest.raises(ValueError, match="max_model_len=128 is more than the 64 tokens the model declares"):
        LLM(model_of((None,) * 3, 64), **{**OPTIONS, "kv_policy": QUEST})


# Bytes and programs.


def test_explain_counts_what_is_allocated():
    with LLM(model_of((None, None), 48), **OPTIONS) as llm:
        facts, spec = llm.explain().to_dict()["cache"], llm.engine.spec
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner._cache))
        assert facts["bytes"] == arrays == spec.parts["cache"] == num_bytes(spec.cache)
        assert facts["policy"].startswith("sinks(4)+window(16): pages of 8 tokens, 1 first, 2 before a token's own")
        assert "beyond 48 tokens" in facts["policy"]


def test_explain_says_what_quest_reads():
    with LLM(model_of((8, None, None, None)), **{**OPTIONS, "kv_policy": QUEST}) as llm:
        facts, spec = llm.explain().to_dict()["cache"], llm.engine.spec
        cache = llm.engine.runner._cache
        assert facts["bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == num_bytes(spec.cache)
        read = "in 2 of 4 layers a token of an answer reads the bounds of all full pages, the best 2 pages of 8 tokens"
        assert read in facts["policy"]
        # Two numbers of float32 for each channel and page.
        assert facts["  of these bounds"] == 2 * 2 * TINY.num_kv_heads * TINY.head_dim * 4 // PAGE


@pytest.mark.matrix
@pytest.mark.parametrize("draft", [None, NgramDraft()])
def test_without_a_policy_nothing_of_it_is_traced(monkeypatch, draft):
    config = replace(TINY, max_position_embeddings=512)

    def refuse(*args, **kwargs):
        raise AssertionError("traced")

    for module, name in (
        *((kept_pages, "pieces"), (kept_pages, "attend_to_pieces"), (kept_pages, "kept_view")),
        *((best_pages, "query_parts_of_step"), (best_pages, "query_parts_of_slots"), (best_pages, "attend_to_best")),
        *((SinksWindow, "limit_rows"), (moved_sinks, "move_sinks")),
    ):
        monkeypatch.setattr(module, name, refuse)
    for one in planned_programs(spec_of(config, draft=draft, kv_policy=None, prefill_chunk=23)).values():
        one.function.lower(*one.arguments)
    decode = planned_programs(spec_of(config, prefill_chunk=21))["decode"]
    with pytest.raises(AssertionError, match="traced"):
        decode.function.lower(*decode.arguments)
    longer = replace(config, num_layers=3)
    for one in planned_programs(spec_of(longer, draft=draft, kv_policy="quest(16)", prefill_chunk=25)).values():
        with pytest.raises(AssertionError, match="traced"):
            one.function.lower(*one.arguments)


def test_a_decode_step_reads_what_is_kept_only():
    """The tables of a decode step have as many columns as tokens attend to, however long sequences may be."""
    shapes = []
    for length in (512, 100_000):
        config = replace(TINY, max_position_embeddings=length)
        spec = spec_of(config, max_model_len=length)
        view = jax.eval_shape(
            lambda tables, counts, spec=spec: kept_pages.kept_view(
                spec.policy, spec.config, spec.cache, (tables,), counts, counts
            ).page_tables[0],
            np.zeros((4, spec.pages_per_sequence), np.int32),
            np.zeros(4, np.int32),
        )
        shapes.append(view.shape)
    assert shapes == [(4, 4), (4, 4)]
