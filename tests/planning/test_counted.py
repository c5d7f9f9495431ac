"""Counting by hand, and the roofline from it."""

from dataclasses import replace
from functools import partial

import jax
import pytest

from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import MLAConfig, MoEConfig, RopeConfig
from jaxinfer.planning import chips
from jaxinfer.planning.compiled import ProgramFigures
from jaxinfer.planning.counted import count
from jaxinfer.planning.roofline import Rates, decode_point, round_point
from jaxinfer.quantization import quantize_params
from tests.planning.plan_models import LLAMA_3_8B
from tests.planning.plan_models import TINY as DEEP

TINY = replace(DEEP, num_layers=4)
# Parameters of Llama-3-8B but the embedding; of 8,030,261,248.
STREAMED = 8_030_261_248 - 128_256 * 4096


def counted(request, **changes):
    spec = EngineSpec(request.config, request.params, request.options, "tpu", None, None)
    return count(spec, spec.config, spec.placed_params, spec.cache)


def attention_flops(its, num_keys):
    """FLOPs of one token that attends to `num_keys` keys, window by window."""
    return its.key_flops * num_keys + sum(flops * min(num_keys, window) for window, flops in its.window_keys)


def test_a_token_of_llama_3_8b(ask):
    found = counted(ask(LLAMA_3_8B, "v6e:1x1"))
    norms = 65 * 4096
    assert found.dense_bytes == 2 * STREAMED
    assert found.token_flops == {"bf16": 2 * (STREAMED - norms)}
    assert found.token_cache_bytes == 131_072
    assert attention_flops(found, 1000) == 32 * 32 * 4 * 128 * 1000
    assert found.read_weight_bytes(1) == found.dense_bytes


def test_a_tied_head_is_read(ask):
    tied, untied = (counted(ask(replace(TINY, tie_word_embeddings=tie), "v6e:1x1")) for tie in (True, False))
    assert tied.dense_bytes == untied.dense_bytes
    assert tied.token_flops == untied.token_flops


def test_windows_bound_what_is_seen(ask):
    config = replace(TINY, sliding_windows=(100, None) * 2)
    full, windowed = (counted(ask(one, "v6e:1x1")) for one in (TINY, config))
    assert attention_flops(windowed, 100) == attention_flops(full, 100)
    assert attention_flops(windowed, 1000) == attention_flops(full, 1000) * (2 * 1000 + 2 * 100) / (4 * 1000)
    of_layer = full.token_cache_bytes // 4
    assert windowed.token_cache_bytes == full.token_cache_bytes == full.read_cache_bytes(1)
    assert windowed.read_cache_bytes(100) == full.read_cache_bytes(100) == 400 * of_layer
    assert windowed.read_cache_bytes(1000) == 2 * (1000 + 100) * of_layer
    # Five queries see four keys more than the window; those of a whole prompt see all.
    assert windowed.read_cache_bytes(1000, 5) == 2 * (1000 + 104) * of_layer
    assert windowed.read_cache_bytes(1000, 1000) == full.read_cache_bytes(1000)


def test_an_indexer_bounds_what_is_attended_to(ask):
    """By as many tokens as it chooses, as a window does; its own scores are of every token."""
    mla = MLAConfig(96, 32, 48, 64, 80, index_topk=100, index_heads=2, index_size=40)
    config = replace(TINY, architecture="DeepseekV32ForCausalLM", num_kv_heads=1, rope=RopeConfig(rotary_dim=32))
    found, dense = (
        counted(ask(replace(config, mla=one, head_dim=one.key_size, attention_scale=0.1), "v6e:1x1"))
        for one in (mla, replace(mla, index_topk=0, index_heads=0, index_size=0))
    )
    scores, of_key = 4 * 2 * 2 * 40, 4 * 2 * 4 * (96 + 32 + 96)  # 4 layers; index heads, and heads
    assert [attention_flops(dense, keys) for keys in (1, 1000)] == [of_key, 1000 * of_key]
    for keys in (1, 100, 1000):
        assert attention_flops(found, keys) == keys * scores + min(keys, 100) * of_key
    indexer = 4 * 2 * (80 * 2 * 40 + 256 * 40 + 256 * 2)  # its three projections
    assert found.token_flops["bf16"] == dense.token_flops["bf16"] + indexer


def test_shared_keys_are_read_by_each_layer(ask):
    own, shared = (counted(ask(replace(TINY, kv_sources=sources), "v6e:1x1")) for sources in ((), (0, 1, 0, 1)))
    assert shared.token_cache_bytes == own.token_cache_bytes
    assert attention_flops(shared, 1000) == attention_flops(own, 1000)


@pytest.mark.parametrize("windows", [(), (100, None, 7, 100)])
def test_a_span_is_its_tokens_one_by_one(ask, windows):
    its = counted(ask(replace(TINY, sliding_windows=windows), "v6e:1x1"))
    for start, length in ((0, 1), (0, 250), (60, 30), (60, 90), (99, 1), (100, 40), (5000, 3)):
        each = sum(attention_flops(its, start + number + 1) for number in range(length))
        assert its.span_flops(start, length) == pytest.approx(each, rel=1e-12)


def test_the_roofline_reads_windows(ask):
    its = counted(ask(replace(TINY, sliding_windows=(100, None) * 2), "v6e:1x1"))
    assert point(its, batch=2, context=1000).hbm_bytes == its.dense_bytes + 2 * its.read_cache_bytes(1000)
    kernels = 64 * its.read_cache_bytes(4096)
    compiled = ProgramFigures(0, 0, 0, 0, 0, None, its.dense_bytes, kernels, 0, 0)
    half = point(its, compiled, batch=32, context=2048)
    assert half.hbm_bytes == pytest.approx(its.dense_bytes + 32 * its.read_cache_bytes(2048))


def test_experts_are_read_as_tokens_choose_them(ask):
    moe = MoEConfig(num_experts=8, num_experts_per_token=2, expert_size=512, layers=range(4))
    found = counted(ask(replace(TINY, moe=moe), "v6e:1x1"))
    assert found.expert_bytes == 4 * 8 * 3 * 256 * 512 * 2
    assert found.read_weight_bytes(1) == pytest.approx(found.dense_bytes + found.expert_bytes / 4)
    assert found.read_weight_bytes(2) == pytest.approx(found.dense_bytes + found.expert_bytes * (1 - 0.75**2))
    assert found.read_weight_bytes(1000) == pytest.approx(found.dense_bytes + found.expert_bytes)
    dense = counted(ask(TINY, "v6e:1x1"))
    routers = 4 * 2 * 256 * 8
    # Two experts of 512 in place of an MLP of 512.
    assert found.token_flops["bf16"] == dense.token_flops["bf16"] + 4 * 2 * 3 * 256 * 512 + routers


def test_quantized_weights_are_fewer_bytes_and_the_same_products(ask):
    plain = ask(TINY, "v6e:1x1")

    def rounded(recipe):
        return counted(replace(plain, params=jax.eval_shape(partial(quantize_params, how=recipe), plain.params)))

    dense, int8, w8a8 = counted(plain), rounded("int8"), rounded("w8a8")
    assert 0.5 < int8.dense_bytes / dense.dense_bytes < 0.54
    assert int8.token_flops == dense.token_flops
    assert w8a8.token_flops["int8"] > 0.9 * dense.token_flops["bf16"]
    assert sum(w8a8.token_flops.values()) == sum(dense.token_flops.values())


def point(found, compiled=None, *, batch=1, context=1024, chip="h200", **more):
    options = {"compiled_batch": 64, "compiled_context": 4096, "num_replicas": 1, **more}
    return decode_point(Rates.of(chips()[chip]), found, compiled, batch=batch, context=context, **options)


@pytest.mark.parametrize(
    ("chip", "tokens_per_second"),
    # One sequence of 1,024 tokens of Llama-3.1-8B: bandwidth over weights and cache.
    [("a100-80", 135), ("h100", 221), ("h200", 317), ("v5e", 54), ("v5p", 183), ("v6e", 108)],
)
def test_one_sequence_is_bound_by_the_memory(ask, chip, tokens_per_second):
    found = point(counted(ask(LLAMA_3_8B, "v6e:1x1")), chip=chip)
    assert found.bound == "memory"
    assert found.tokens_per_second == pytest.approx(tokens_per_second, rel=0.01)


def test_many_sequences_without_a_cache_are_bound_by_computing(ask):
    its = counted(ask(LLAMA_3_8B, "v6e:1x1"))
    assert point(its, batch=2048, context=1).bound == "compute"
    ridge = 989e12 / 4.8e12
    assert point(its, batch=int(0.9 * ridge), context=1).bound == "memory"


def test_what_the_program_moves_besides_counts_by_the_row(ask):
    its = counted(ask(LLAMA_3_8B, "v6e:1x1"))
    cache, rows, sent = 64 * 4096 * its.token_cache_bytes, 64 * 10**6, 64 * 10**5
    compiled = ProgramFigures(0, 0, 0, 0, 0, None, its.dense_bytes + rows, cache, 64, sent)
    assert point(its, compiled, batch=64, context=4096).hbm_bytes == its.dense_bytes + cache + rows
    half = point(its, compiled, batch=32, context=2048)
    assert half.hbm_bytes == its.dense_bytes + cache / 4 + rows / 2
    assert half.link_seconds == sent / 2 / 450e9
    assert half.seconds == half.memory_seconds + half.link_seconds


def test_replicas_multiply_tokens_and_nothing_else(ask):
    its = counted(ask(LLAMA_3_8B, "v6e:1x1"))
    one, four = point(its), point(its, num_replicas=4)
    assert four.seconds == one.seconds
    assert four.tokens_per_second == 4 * one.tokens_per_second


def test_rounds():
    rates = Rates.of(chips()["h200"])
    target = point_of_seconds(memory=8.0, compute=1.0)
    free = round_point(rates, target, None, num_draft_tokens=4, num_replicas=1)
    assert free.seconds == 8.0
    assert free.tokens_per_second["0.8"] == pytest.approx((1 - 0.8**5) / 0.2 / 8.0)
    drafted = round_point(rates, target, point_of_seconds(memory=0.5, compute=0.1), num_draft_tokens=4, num_replicas=2)
    assert drafted.seconds == 10.0
    assert drafted.tokens_per_second["0.8"] == pytest.approx(2 * (1 - 0.8**5) / 0.2 / 10.0)
    # Checking many tokens together may cost computing.
    assert round_point(rates, target, None, num_draft_tokens=15, num_replicas=1).seconds == 16.0


def point_of_seconds(*, memory, compute):
    from jaxinfer.planning.roofline import RooflinePoint

    return RooflinePoint(1, 1, 0, 0, 0, memory, compute, 0.0, 1 / memory)
