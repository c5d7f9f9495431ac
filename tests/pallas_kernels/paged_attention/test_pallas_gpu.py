"""The GPU kernel: the suite in the interpreter, its schedule, its independence of neighbours, and the real compiler.

The interpreter runs few thread blocks and short splits, so that a block takes several items and a sequence of some
tens of keys has several splits. It has no registers, layouts or asynchronous copies: those are left to the compiler.
"""

import itertools
import re
from bisect import bisect
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead_of_time, tuning
from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.paged_attention import (
    choose,
    gpu_kernel,
    gpu_schedule,
    gpu_sizes,
    make_spec,
    paged_attention,
    pallas_gpu,
)
from pallas_kernels.paged_attention.shapes import decode_shape
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu
from tests.pallas_kernels.paged_attention.shapes import FOUR_BITS, SMALL, PagedShape
from tests.pallas_kernels.paged_attention.suite import use_small_splits
from tests.pallas_kernels.quick import quick

VECTORS = ("query_lengths", "kv_lengths", "query_starts")
# Heads (of queries, of keys) of Llama-3-8B and of the Qwen3 models; head_dim 128.
HEADS = {"llama3": (32, 8), "qwen3_small": (16, 8), "qwen3_large": (64, 8)}
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")


def spec_of(shape: PagedShape, page_layout: str = "separate"):
    return shape.spec(page_layout)


def for_gpu(shape: PagedShape) -> PagedShape:
    """The shape in dtypes and pages that the kernel takes: float32 as bfloat16, scales of at least 32 tokens."""
    cache_dtype = "bfloat16" if shape.cache_dtype == "float32" else shape.cache_dtype
    page_size = max(shape.page_size, 32) if cache_dtype in ("int8", "int4") else shape.page_size
    return replace(shape, dtype="bfloat16", cache_dtype=cache_dtype, page_size=page_size)


@pytest.fixture
def gpu_interpreter(monkeypatch):
    """Mosaic GPU kernels of the test run in the interpreter; fails when two accesses race."""
    use_small_splits(monkeypatch)
    with interpreted_gpu():
        yield


# In the interpreter


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(SMALL, "decode_int8_page_64"))
def test_suite(name, check, gpu_interpreter):
    check(for_gpu(SMALL[name]), "pallas_gpu", "separate")


FOUR = [name for name in FOUR_BITS if "int8_int4" not in name and "96" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(FOUR, "decode_int4_page_64"))
def test_suite_of_four_bits(name, check, gpu_interpreter):
    check(replace(for_gpu(FOUR_BITS[name]), head_dim=128), "pallas_gpu", "separate")


@pytest.mark.parametrize("dtype", quick(["float16", "bfloat16"], "bfloat16"))
def test_float16_and_one_split(dtype, check, gpu_interpreter, monkeypatch):
    """Queries and cache in float16, or results that the kernel writes in the dtype of the queries."""
    if dtype == "bfloat16":
        monkeypatch.setattr(gpu_schedule, "LONGEST_SPLIT", 4096)
        monkeypatch.setattr(gpu_schedule, "SHORTEST_SPLIT", 4096)
    shape = replace(for_gpu(SMALL["verify_window_soft_cap_sinks"]), dtype=dtype, cache_dtype=dtype)
    check(shape, "pallas_gpu", "separate")


@pytest.mark.parametrize("heads", quick([((4, 1),), ((7, 1),)], ((4, 1),)))
def test_many_splits_and_tiles(heads, check, gpu_interpreter):
    """16 new keys lie in two splits, old ones in two more; of 4 heads they are one tile, of 7 two."""
    lengths = ((16, 265), (2, 130), (0, 70), (16, 16))
    check(PagedShape(lengths, 16, heads, 64, "bfloat16", "bfloat16", 16, sinks=True), "pallas_gpu", "separate")


@pytest.mark.parametrize("dtype", quick(CACHE_DTYPES, "bfloat16", "int4"))
def test_splits_with_few_keys(dtype, check, run, gpu_interpreter):
    """Three splits, some with few keys, and a token of no sequence, whose row is zero."""
    shape = PagedShape(((1, 150), (1, 65)), 32, (4, 1), 128, "bfloat16", dtype, 1, num_padding=1)
    check(shape, "pallas_gpu", "separate")
    assert not np.asarray(run(shape, shape.arguments("separate"), "pallas_gpu")[0][2:], np.float32).any()


@pytest.mark.slow
def test_the_suite_finds_what_is_left_out(check, gpu_interpreter, monkeypatch):
    """Inverse: tokens that the kernel does not append, and stale values that it does not clean, are noticed."""
    shape = for_gpu(SMALL["decode_one_sequence"])
    append = gpu_kernel._Kernel.write_new_tokens
    monkeypatch.setattr(gpu_kernel._Kernel, "write_new_tokens", _wait_only)
    with pytest.raises(AssertionError):
        check(shape, "pallas_gpu", "separate")
    monkeypatch.setattr(gpu_kernel._Kernel, "write_new_tokens", append)
    monkeypatch.setattr(gpu_kernel.Blocks, "clean_values", lambda self, slot, first_key: None)
    with pytest.raises(AssertionError):
        check(shape, "pallas_gpu", "separate")


def _wait_only(kernel):
    """What is left of `write_new_tokens` without the writes."""
    gpu_kernel.plgpu.barrier_wait(kernel.refs["new_barrier"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "indices"), quick([("verify", (0, 4)), ("mixed", (0, 4, 5))], ("verify", (0, 4))))
def test_neighbours_do_not_matter(name, indices, gpu_interpreter):
    """In a program of one shape, a sequence's rows keep every bit when the others are emptied, and when one is NaN."""
    shape = for_gpu(SMALL[name])
    arguments = shape.arguments("separate")
    call = jax.jit(lambda arrays: paged_attention(**arrays, **shape.options, implementation="pallas_gpu")[0])
    together = np.asarray(call(arguments), np.float32)
    for index in indices:
        only = np.arange(len(shape.lengths)) == index
        alone = arguments | {key: jnp.where(only, arguments[key], 0) for key in ("query_lengths", "kv_lengths")}
        start = int(arguments["query_starts"][index])
        inside = np.isin(np.arange(shape.num_tokens), np.arange(start, start + shape.lengths[index][0]))
        np.testing.assert_array_equal(np.asarray(call(alone), np.float32)[inside], together[inside])
        broken = np.asarray(call(arguments | {"k_new": arguments["k_new"].at[start].set(jnp.nan)}), np.float32)
        assert np.isnan(broken[inside]).all()
        np.testing.assert_array_equal(broken[~inside], together[~inside])


@pytest.mark.slow
def test_bits_do_not_depend_on_the_chunks(gpu_interpreter):
    """12 tokens after 120 keys, at once or as 5, 1 and 6, in one program: keys lie in the same blocks and splits."""
    shape = PagedShape(((12, 132),), dtype="bfloat16", cache_dtype="bfloat16", max_query_length=12)
    arguments = shape.arguments("separate")

    @jax.jit
    def call(arrays):
        return paged_attention(**arrays, **shape.options, implementation="pallas_gpu")

    whole, _ = call(arguments)
    pages, done, parts = arguments["pages"], 0, []
    for chunk in (5, 1, 6):
        rows = {name: jnp.roll(arguments[name], -done, axis=0) for name in ("q", "k_new", "v_new")}
        lengths = {
            "query_lengths": jnp.array([chunk], jnp.int32),
            "kv_lengths": jnp.array([120 + done + chunk], jnp.int32),
        }
        out, pages = call(arguments | rows | lengths | {"pages": pages})
        parts.append(out[:chunk])
        done += chunk
    np.testing.assert_array_equal(np.concatenate(parts), whole)


# The schedule


@pytest.mark.parametrize(
    ("tree", "window"), quick(itertools.product([False, True], [None, 70]), (True, 70), (False, None))
)
def test_items_cover_every_visible_key_once(tree, window, monkeypatch):
    monkeypatch.setattr(gpu_schedule, "SPLITS_OF_A_LENGTH", 2)
    rng = np.random.default_rng(0)
    lengths = tuple((int(n), int(n + rng.integers(0, 900))) for n in (1, 0, 16, 3, 17, 200, 0, 64, 1))
    shape = PagedShape(lengths, 16, (6, 2), 64, "bfloat16", "bfloat16", gap=1, tree=tree, window=window)
    spec, arguments = spec_of(shape), shape.arguments("separate")
    starts, groups = np.asarray(arguments["query_starts"]), spec.num_groups
    found, placed = np.zeros((len(lengths), 200 * groups, 1100), int), np.zeros((spec.num_tokens, groups), int)
    tokens = np.arange(spec.num_tokens)
    is_query = np.any([(tokens >= s) & (tokens < s + n) for s, (n, _) in zip(starts, lengths, strict=True)], axis=0)
    for program in gpu_schedule.split_plan_shapes(spec):
        plan = jax.jit(gpu_schedule.make_split_plan, static_argnums=(0, 1))(
            spec, program, arguments["query_starts"], arguments["query_lengths"], arguments["kv_lengths"]
        )
        items = np.asarray(plan.work)[: int(plan.count[0])]
        assert len(np.unique(items[:, 3])) == len(items)
        slots = {tile: items[items[:, 2] == tile, 3] for tile in items[:, 2]}
        for item in (dict(zip(gpu_schedule.COLUMNS, row, strict=True)) for row in items):
            new, total = lengths[item["sequence"]]
            assert program.min_queries <= new <= program.max_queries
            np.testing.assert_array_equal(slots[item["tile"]], item["first_slot"] + np.arange(item["num_items"]))
            first, last = (bisect(program.split_starts, key) for key in (item["key_begin"], item["key_end"] - 1))
            assert first == last
            assert (
                item["block_begin"] * 64 <= item["key_begin"] < item["key_end"] <= item["block_end"] * 64 <= total + 63
            )
            rows = slice(item["first_row"], min(item["first_row"] + program.out_rows, new * groups))
            found[item["sequence"], rows, item["key_begin"] : item["key_end"]] += 1
            tokens = np.asarray(plan.row_token)[item["tile"]]
            kept = min(program.out_rows, new * groups - item["first_row"])
            row = item["first_row"] + np.arange(kept)
            np.testing.assert_array_equal(tokens[:kept], starts[item["sequence"]] + row // groups)
            if item["slot"] == item["first_slot"]:
                placed[item["query_start"] + row // groups, row % groups] += 1
        np.testing.assert_array_equal(np.asarray(plan.is_padding) == 0, is_query)
        assert not plan.arrivals.any()
    for index, (new, total) in enumerate(lengths):
        for row in range(new * groups):
            position = total - new + row // groups
            is_tree = shape.tree and new <= 32
            low = 0 if shape.window is None else max((total - new if is_tree else position) + 1 - shape.window, 0)
            high = total if is_tree else position + 1
            assert (found[index, row, low:high] == 1).all()
            assert found[index, row].max() == 1
        assert not found[index, new * groups :].any()
    np.testing.assert_array_equal(placed, np.repeat(is_query[:, None], groups, axis=1))


def test_splits_follow_from_shapes_alone():
    """Few sequences have short splits, many have long ones, and partial results stay small."""
    few, many = (
        gpu_schedule.split_plan_shapes(
            spec_of(PagedShape(((1, 32768),) * n, 64, (32, 8), 128, "bfloat16", "bfloat16", 1))
        )[0]
        for n in (1, 256)
    )
    assert (few.split_keys, many.split_keys) == (256, 4096)
    assert few.split_starts[15:18] == (15 * 256, 16 * 256, 18 * 256)
    assert many.split_starts == tuple(range(0, 32768 + 128, 4096))
    assert few.out_rows == 8
    assert 4 * many.num_tiles * many.num_splits * 8 * many.out_rows * 128 <= gpu_schedule.MAX_PARTIAL_BYTES


def partial_bytes(spec, program: gpu_schedule.SplitPlanShape) -> int:
    """Bytes of the partial results of every slot: float32 rows, a maximum and a sum for each."""
    if program.num_splits == 1:
        return 0
    return 4 * program.num_tiles * program.num_splits * spec.num_kv_heads * program.rows * (spec.head_dim + 2)


def served(batch, context, heads, queries, cache_dtype) -> PagedShape:
    lengths = ((queries, context),) * batch
    options: Any = {"max_query_length": queries, "pages_per_sequence": context // 64}
    return PagedShape(lengths, 64, heads, 128, "bfloat16", cache_dtype, **options)


def test_partial_results_are_small_where_no_multiprocessor_idles():
    """At most a tenth of the keys and values, or else half as many splits would not fill the 132 multiprocessors."""
    num_small = num_filling = 0
    heads = ((32, 8), (32, 4), (16, 1), (8, 1))
    for case in itertools.product((1, 8, 16, 64), (1536, 4096, 8192), heads, (1, 6), ("bfloat16", "int8", "int4")):
        spec = spec_of(served(*case))
        (program,) = gpu_schedule.split_plan_shapes(spec)
        batch, context, (_, num_kv_heads), *_ = case
        page = spec.page.abstract("separate")
        cached = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(page)) / page.k.shape[0]
        share = partial_bytes(spec, program) / (batch * context / 64 * cached)
        fewer = program.num_tiles * num_kv_heads * -(-min(context, 4096) // (2 * program.split_keys))
        assert share <= 0.1 or fewer < 132, (case, program, share)
        num_small, num_filling = num_small + (share <= 0.1), num_filling + (share > 0.1)
    print(f"{num_small} shapes have small partial results, {num_filling} would leave multiprocessors idle")
    assert num_small > num_filling


def test_few_partial_results_of_long_programs():
    """Room for those of 8 sequences of 128k tokens takes 17 MB: splits become longer. Of equal ones it would be 68."""
    spec = spec_of(served(8, 131072, (32, 8), 1, "bfloat16"))
    (program,) = gpu_schedule.split_plan_shapes(spec)
    assert (program.split_keys, program.num_splits) == (512, 65)
    assert partial_bytes(spec, program) / 1e6 == pytest.approx(17.3, abs=0.1)


def test_verification_with_one_key_head():
    """6 x 16 rows of 16 sequences are 32 tiles of 48, padded to 64, and 4 splits are 128 blocks: 4.3 MB of partial
    results beside 17 MB of keys and values."""
    spec = spec_of(served(16, 4096, (16, 1), 6, "int8"))
    (program,) = gpu_schedule.split_plan_shapes(spec)
    assert (program.num_tiles, program.out_rows, program.num_splits) == (32, 48, 4)
    assert partial_bytes(spec, program) / 1e6 == pytest.approx(4.26, abs=0.05)


def test_empty_steps_have_no_items():
    spec = spec_of(PagedShape(((1, 40),) * 5, max_query_length=1))
    zeros = jnp.zeros(5, jnp.int32)
    (program,) = gpu_schedule.split_plan_shapes(spec)
    assert int(gpu_schedule.make_split_plan(spec, program, zeros, zeros, zeros).count[0]) == 0


# What it does not do


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"cache_dtype": "float32"}, "same dtype"),
        ({"page_size": 4}, "page_size=4"),
        ({"head_dim": 72}, "head_dim=72"),
        ({"cache_dtype": "int8"}, "16 int8 scales"),
        ({"cache_dtype": "int4", "page_size": 32, "head_dim": 64}, "head_dim=64 is not 128 or 256"),
        ({"cache_dtype": "int8_int4", "page_size": 32}, "int8_int4"),
    ],
    ids=lambda value: str(value),
)
def test_unsupported_with_a_reason(change, reason):
    spec = spec_of(replace(for_gpu(SMALL["decode_bf16"]), **change))
    with compat.interpreted():
        assert reason in str(pallas_gpu.unsupported(spec, "cpu"))
        with pytest.raises(NotImplementedError, match=reason):
            choose(spec, "pallas_gpu")
        assert "interleaved" in str(pallas_gpu.unsupported(spec_of(SMALL["decode_bf16"], "interleaved"), "gpu"))
    assert pallas_gpu.unsupported(spec, "cpu") == "it needs a GPU, and this is a cpu"


# The real compiler

DECODE, VERIFY, PREFILL = ((1, 32768), 1), ((8, 32768), 8), ((512, 32768), 512)
COMPILED = {
    **{f"decode_64_{dtype}": (DECODE, 64, "llama3", dtype, {}) for dtype in CACHE_DTYPES},
    "decode_1_bfloat16": (DECODE, 1, "llama3", "bfloat16", {}),
    "decode_256_bfloat16": (DECODE, 256, "qwen3_small", "bfloat16", {}),
    "verify_tree_bfloat16": (VERIFY, 16, "qwen3_large", "bfloat16", {"tree": True, "window": 4096, "soft_cap": 30.0}),
    "verify_int8": (VERIFY, 16, "llama3", "int8", {"sinks": True}),
    "prefill_bfloat16": (PREFILL, 2, "llama3", "bfloat16", {}),
    "prefill_int8": (PREFILL, 2, "qwen3_small", "int8", {}),
    "verify_int4": (VERIFY, 16, "llama3", "int4", {"sinks": True}),
    "prefill_int4": (PREFILL, 2, "qwen3_small", "int4", {}),
    "decode_int4_head_dim_256": (DECODE, 8, "qwen3_small", "int4", {"head_dim": 256, "page_size": 128}),
    "prefill_float8_e4m3fn": (PREFILL, 2, "qwen3_large", "float8_e4m3fn", {}),
    "decode_head_dim_64_page_16": (DECODE, 8, "llama3", "float8_e4m3fn", {"head_dim": 64, "page_size": 16}),
    "decode_head_dim_80_page_16": (DECODE, 8, "llama3", "bfloat16", {"head_dim": 80, "page_size": 16}),
    "decode_head_dim_256_page_128": (DECODE, 8, "qwen3_small", "bfloat16", {"head_dim": 256, "page_size": 128}),
}


def compiled_shape(name: str) -> PagedShape:
    (lengths, queries), count, heads, cache_dtype, options = COMPILED[name]
    options = {"page_size": 64, "head_dim": 128} | options
    return PagedShape(
        (lengths,) * count,
        heads=HEADS[heads],
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        max_query_length=queries,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(COMPILED, "verify_int4"))
def test_compiled_in_place(name):
    """The cache is updated in place and never copied; temporaries do not grow with it.

    The compiler refuses a kernel of more than 227 KiB of shared memory; two thread blocks share a multiprocessor.
    """
    if (why := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(why)
    shape = compiled_shape(name)
    arguments = shape.abstract("separate", num_pages=2048 if shape.page_size >= 64 else 8192)
    pages = arguments.pop("pages")

    def call(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="pallas_gpu")

    compiled = ahead_of_time.compile_for("h100", call, pages, arguments, donate_argnums=(0,))
    assert compiled.aliased_bytes >= sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))
    spec = spec_of(shape)
    bound = 2**20 + 8 * arguments["q"].size * 2
    for program in gpu_schedule.split_plan_shapes(spec):
        # XLA may keep the partial results twice while it sums them.
        bound += 8 * program.num_tiles * program.num_splits * spec.num_kv_heads * program.out_rows * (spec.head_dim + 2)
        size = gpu_sizes.kernel_sizes(spec, program, pallas_gpu._appends_in_kernel(spec))
        limit = gpu_sizes.PAIR_SHARED_BYTES if spec.head_dim <= 128 else gpu_sizes.MAX_SHARED_BYTES
        assert size.shared_bytes <= limit
    assert compiled.temporary_bytes <= bound
    text = compiled.program.as_text()
    assert 'custom_call_target="mosaic_gpu' in text
    cache_shape = ",".join(map(str, pages.k.shape))
    assert not re.search(rf"\[{cache_shape}\]\S* copy\(", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "share"),
    [
        ((8, 1536, (32, 8), 1, "bfloat16"), 0.1),
        ((8, 4096, (32, 8), 6, "int8"), 0.105),  # with queries in tiles
        ((16, 4096, (16, 1), 6, "bfloat16"), 0.15),  # tiles of 48 rows are padded to 64
        ((16, 4096, (16, 1), 6, "int8"), 0.3),  # 0.14 with 64 blocks, on half of the multiprocessors
    ],
    ids=str,
)
def test_temporaries_beside_what_is_read(case, share):
    if (why := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(why)
    shape = served(*case)
    arguments = shape.abstract("separate", num_pages=case[0] * shape.table_width)
    pages = arguments.pop("pages")

    def call(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="pallas_gpu")

    compiled = ahead_of_time.compile_for("h100", call, pages, arguments, donate_argnums=(0,))
    read = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(pages))
    print(f"{case}: {compiled.temporary_bytes / 1e6:.2f} MB beside {read / 1e6:.1f}")
    assert compiled.temporary_bytes <= share * read


@pytest.mark.slow
def test_block_sizes_change_no_answer(check, gpu_interpreter, with_dtypes):
    with tuning.force(gpu_schedule.SHORT_NAME, split_keys=128, stages=3):
        check(with_dtypes(SMALL["decode_page_64"], "bfloat16", "bfloat16"), "pallas_gpu", "separate")


def test_every_candidate_is_a_size_of_the_kernel():
    for num_new in (1, 512):
        shape = decode_shape("llama-3-8b", 1, 4096, num_new=num_new)
        arguments = shape.abstract("separate")
        names = ("q", "k_new", "v_new", "pages", "page_table")
        spec = make_spec(**{name: arguments[name] for name in names}, **shape.options)
        for name, tried in pallas_gpu.candidates(spec).items():
            for blocks in tried:
                with tuning.force(name, **asdict(blocks)):
                    found = pallas_gpu.tunable(spec)[name]
                assert found.stages == blocks.stages
                assert found.split_keys >= blocks.split_keys
