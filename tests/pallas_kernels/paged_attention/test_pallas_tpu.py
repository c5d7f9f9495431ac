"""The TPU kernel: the suite in the interpreter with every check on, its traffic, and the real compilers.

The interpreter runs with small blocks, so that a sequence of some tens of keys goes round the ring of buffers, and
one of more than 16 new tokens is several items.
"""

import itertools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import ahead_of_time, tpu_parameters, tuning
from pallas_kernels.paged_attention import (
    layout,
    make_schedule,
    paged_attention,
    pallas_tpu,
    rotation,
    tpu_program,
    tpu_schedule,
)
from pallas_kernels.paged_attention.shapes import decode_shape
from pallas_kernels.paged_attention.specs import make_spec
from pallas_kernels.paged_attention.tpu_schedule import TpuProgramSizes
from tests.pallas_kernels.paged_attention.shapes import FOUR_BITS, SMALL, PagedShape
from tests.pallas_kernels.paged_attention.suite import SMALL_BLOCKS, use_blocks
from tests.pallas_kernels.quick import quick

CHIPS = ("v5e", "v6e", "tpu7x")
# Two cores, and a quarter of the vector memory (v4).
TWO_CORES = {"v4": ("float32", "bfloat16", "int8"), "v5p": ("bfloat16", "int4")}
CACHE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
# Heads (of queries, of keys) of Llama-3-8B and of the Qwen3 models; head_dim 128.
HEADS = {"llama3": (32, 8), "qwen3_small": (16, 8), "qwen3_large": (64, 8)}


@pytest.fixture
def small_blocks():
    with use_blocks(*SMALL_BLOCKS):
        yield


def jitted(shape: PagedShape):
    return jax.jit(lambda arrays: paged_attention(**arrays, **shape.options, implementation="pallas_tpu"))


# In the interpreter


# One of each path through the kernel.
SUITE = quick(
    SMALL,
    *("decode_one_sequence", "decode_empty_slots", "decode_window", "verify", "verify_tree_window", "prefill_int8"),
)


@pytest.mark.matrix("decode_empty_slots", "decode_one_sequence", "decode_window", "prefill_int8", "verify")
@pytest.mark.parametrize("name", SUITE)
def test_suite(name, check, tpu_interpreter, small_blocks):
    check(SMALL[name], "pallas_tpu", "interleaved")


@pytest.mark.matrix("verify_int4")
@pytest.mark.parametrize("name", quick([n for n in FOUR_BITS if "int8_int4" not in n], "verify_int4"))
def test_suite_of_four_bits(name, check, tpu_interpreter, small_blocks):
    check(FOUR_BITS[name], "pallas_tpu", "interleaved")


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(["decode_e4m3", "decode_int4_page_64"], "decode_e4m3"))
def test_suite_as_on_chips_with_another_bias(name, check, monkeypatch, tpu_interpreter, small_blocks):
    """Chips whose matrix unit takes float8_e4m3b11fnuz: other bits, same numbers."""
    monkeypatch.setattr(tuning, "chip", lambda: "tpu_v6_lite")
    shape = replace((SMALL | FOUR_BITS)[name], dtype="bfloat16")
    assert tpu_program.WordRows(shape.page(), "bfloat16").is_e4m3_converted
    check(shape, "pallas_tpu", "interleaved")


@pytest.mark.slow
def test_suite_with_the_blocks_of_a_chip(check, tpu_interpreter):
    check(SMALL["mixed_tree"], "pallas_tpu", "interleaved")


@pytest.mark.slow
def test_suite_with_other_blocks(check, tpu_interpreter):
    with use_blocks(TpuProgramSizes(16, 16, 2, 2), TpuProgramSizes(8, 48, 4, 2)):
        check(SMALL["prefill_window"], "pallas_tpu", "interleaved")


@pytest.mark.matrix("decode_int8")
@pytest.mark.parametrize("name", quick(["decode_int8", "mixed_tree", "prefill_window"], "decode_int8"))
def test_suite_with_page_tables_beyond_scalar_memory(name, check, monkeypatch, tpu_interpreter, small_blocks):
    """A call for each sequence."""
    spec = spec_of(SMALL[name])
    most = tpu_schedule.smem_bytes(spec, 1) + tpu_schedule.SMEM_RESERVED_BYTES
    monkeypatch.setattr(tpu_schedule, "SMEM_BYTES", most)
    calls = tpu_schedule.groups(spec)
    assert len(calls) == spec.num_sequences > 1
    assert [sequence for own in calls for sequence in own] == list(range(spec.num_sequences))
    check(SMALL[name], "pallas_tpu", "interleaved")


@pytest.mark.matrix("decode_int8")
@pytest.mark.parametrize("name", quick(["decode_int8", "mixed", "prefill_int8"], "decode_int8"))
def test_suite_on_two_cores(name, check, monkeypatch, small_blocks):
    """v4 and v5p: the cores share the items and race for nothing."""
    monkeypatch.setattr(pallas_tpu, "num_cores", lambda: 2)
    parameters = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", num_cores_or_threads=2
    )
    pltpu.reset_tpu_interpret_mode_state()
    try:
        with pltpu.force_tpu_interpret_mode(parameters):
            check(SMALL[name], "pallas_tpu", "interleaved")
            assert not interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def transfers(monkeypatch):
    """Bytes of every DMA of the interpreter, by the memories it is from and to; HBM to HBM counts twice."""
    counted = Counter()
    execute_read = interpreter.DMA.execute_read

    def counting(dma):
        is_first = dma.state == interpreter.DmaState.STARTED
        execute_read(dma)
        if is_first:
            ends = [interpreter.TPU_MEMORY_SPACE_NAMES[int(s)] for s in (dma.src_memory_space, dma.dst_memory_space)]
            counted[tuple(ends)] += dma.data_size * sum(str(end) in ("any", "hbm") for end in ends)

    monkeypatch.setattr(interpreter.DMA, "execute_read", counting)
    return counted


def ideal_bytes(shape: PagedShape) -> int:
    """Queries and output, new tokens read and written, and the pages that a query sees, each once."""
    page = shape.page()
    row = page.num_rows * page.num_lanes * jnp.dtype(page.element_dtype).itemsize
    total = 0
    for new, keys in shape.lengths:
        if new:
            low = 0 if shape.window is None else max(keys - new + 1 - shape.window, 0)
            pages = -(-keys // page.page_size) - low // page.page_size
            total += 2 * new * shape.heads[0] * page.num_lanes * jnp.dtype(shape.dtype).itemsize
            total += pages * page.page_size * row + 2 * new * row
            if page.has_scales:
                block = page.abstract("interleaved").scales
                # Read with the page, and the block of the page that receives the token written.
                total += (pages + 1) * block.size // block.shape[0] * 4
    return total


TRAFFIC = {
    "bfloat16": PagedShape(((1, 130), (1, 63), (1, 320)), 64, (8, 2), 128, "bfloat16", "bfloat16", 1),
    "int8": PagedShape(((1, 130), (1, 63), (1, 320)), 64, (8, 2), 128, "bfloat16", "int8", 1),
    "int4": PagedShape(((1, 130), (1, 63), (1, 320)), 64, (8, 4), 128, "bfloat16", "int4", 1),
    "window": PagedShape(((1, 400), (1, 63)), 16, (8, 2), 128, "bfloat16", "bfloat16", 1, window=40),
    "empty slots": PagedShape(
        ((0, 7), (1, 63), (0, 0), (0, 300)), 16, (8, 2), 128, "bfloat16", "bfloat16", 1, num_padding=3
    ),
    "only empty slots": PagedShape(((0, 7), (0, 0)), 16, (8, 2), 128, "bfloat16", "bfloat16", 1, num_padding=3),
    "verify": PagedShape(((4, 130), (3, 64)), 64, (8, 2), 128, "bfloat16", "bfloat16", 4),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(TRAFFIC, "int8", "window"))
def test_bytes_moved(name, transfers, tpu_interpreter):
    """HBM traffic is at most 1.10 times queries, output, new tokens and pages in use."""
    shape = TRAFFIC[name]
    out, pages = jitted(shape)(shape.arguments("interleaved"))
    jax.block_until_ready((out, pages))
    moved, ideal = sum(transfers.values()), ideal_bytes(shape)
    print(f"{name}: {moved:,} bytes moved, {ideal:,} ideal")
    assert moved <= 1.10 * ideal
    # The count is not of nothing.
    assert moved >= 0.5 * ideal


@pytest.mark.slow
def test_each_missing_wait_is_noticed(monkeypatch, capfd):
    """Inverse: with any one wait left out, the interpreter reports a race, or, where nothing in the kernel reads again
    what was copied, a semaphore that is not zero at its end."""
    shape = PagedShape(((2, 36), (1, 5)), cache_dtype="int8", max_query_length=2, heads=(2, 1))
    arguments = shape.arguments("interleaved")
    skipped, seen = [-1], [0]
    dma_wait = interpreter.dma_wait

    def wait(token, *args, **options):
        seen[0] += 1
        return token if seen[0] - 1 == skipped[0] else dma_wait(token, *args, **options)

    monkeypatch.setattr(interpreter, "dma_wait", wait)
    # Copies happen at once here: what does not wait for one races with it.
    parameters = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager", vector_clock_size=64)
    with pltpu.force_tpu_interpret_mode(parameters), use_blocks(TpuProgramSizes(16, 16, 2, 1)):
        compiled = jitted(shape).lower(arguments).compile()

    def run(skip: int) -> tuple[bool, bool]:
        """Whether there was a race, and whether a semaphore was left with a count."""
        skipped[0], seen[0] = skip, 0
        pltpu.reset_tpu_interpret_mode_state()
        try:
            jax.block_until_ready(compiled(arguments))
        except jax.errors.JaxRuntimeError as error:
            # JAX 0.12 stops at the first race.
            if "RACE DETECTED" not in str(error):
                raise
            return True, False
        return interpreter.races.races_found, "non-zero count" in capfd.readouterr().out

    assert run(-1) == (False, False)
    num_waits = seen[0]
    found = [run(skip) for skip in range(num_waits)]
    pltpu.reset_tpu_interpret_mode_state()
    assert all(has_race or has_count for has_race, has_count in found)
    assert sum(has_race for has_race, _ in found) > num_waits / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(["verify_tree", "mixed", "decode_int8"], "decode_int8"))
def test_bits_do_not_depend_on_neighbours(name, check_alone, tpu_interpreter, small_blocks):
    call = jitted(SMALL[name])
    check_alone(SMALL[name], lambda arguments: call(arguments)[0], "interleaved")


@pytest.mark.parametrize("dtype", quick(("bfloat16", "int8", "float32"), "bfloat16"))
def test_uniform_bits_do_not_depend_on_where_a_prompt_is_cut(dtype, tpu_interpreter):
    """A token alone is one part of an item, a prompt's fill several: every row is computed in the same way."""
    num_new, num_keys, q_dtype = 28, 45, "float32" if dtype == "float32" else "bfloat16"
    shape = PagedShape(((num_new, num_keys),), 16, (8, 2), 128, q_dtype, dtype)
    arguments = shape.arguments("interleaved")
    rows, names = {name: arguments[name] for name in ("q", "k_new", "v_new")}, ("query_lengths", "kv_lengths")
    uniform = jax.jit(lambda arrays: paged_attention(**arrays, is_uniform=True, implementation="pallas_tpu"))
    with use_blocks(*[TpuProgramSizes(16, 32, 2, 1)] * 3):

        def pieces(sizes):
            pages, end, found = arguments["pages"], 0, []
            for size in sizes:
                own = {name: jnp.roll(array, -end, axis=0) for name, array in rows.items()}
                lengths = jnp.array([size], jnp.int32), jnp.array([num_keys - num_new + end + size], jnp.int32)
                out, pages = uniform(arguments | own | dict(zip(names, lengths, strict=True)) | {"pages": pages})
                found.append(np.asarray(out[:size]))
                end += size
            return np.concatenate(found), pages

        whole, pages = pieces([num_new])
        cut, pages_of_cut = pieces([1, 27])
    exact = paged_attention(**arguments, implementation="reference")[0] if dtype != "int8" else None
    assert exact is None or np.allclose(np.asarray(exact, np.float32), np.asarray(whole, np.float32), atol=0.02)
    assert (whole == cut).all()
    for one, other in zip(jax.tree.leaves(pages), jax.tree.leaves(pages_of_cut), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), quick([("mixed", 4), ("decode_int8", 1)], ("decode_int8", 1)))
def test_a_nan_stays_in_its_sequence(name, index, tpu_interpreter, small_blocks):
    shape = SMALL[name]
    arguments = shape.arguments("interleaved")
    call = jitted(shape)
    clean = np.asarray(call(arguments)[0])
    start, length = int(arguments["query_starts"][index]), shape.lengths[index][0]
    broken = np.asarray(call(arguments | {"k_new": arguments["k_new"].at[start].set(jnp.nan)})[0])
    rows = np.arange(shape.num_tokens)
    inside = (rows >= start) & (rows < start + length)
    assert np.isnan(broken[inside]).all()
    np.testing.assert_array_equal(broken[~inside], clean[~inside])


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", quick(CACHE_DTYPES, "bfloat16", "int8"))
def test_words_of_a_token(dtype):
    """The strided load that chips run gives the words that the interpreter's spelling gives (`load_words`)."""
    page = layout.PageShape(1, 16, 5, 128, dtype)
    rows = tpu_program.WordRows(page, "float32")
    shape = (page.page_size, rows.buffer_words, rows.pack, layout.LANES)
    bits = np.random.default_rng(0).integers(0, 2**32, (rows.num_words, page.page_size, layout.LANES), np.uint32)
    # No byte of ones in its exponent: a CPU may give one NaN for another.
    bits &= np.uint32(0xBFBFBFBF)
    buffer = np.zeros((*shape[:2], layout.LANES), np.uint32)
    buffer[:, : rows.num_words] = bits.swapaxes(0, 1)
    narrow = buffer.view(np.uint8).reshape(*shape[:2], layout.LANES, rows.pack, -1).swapaxes(2, 3)
    buffer = jnp.asarray(np.ascontiguousarray(narrow).view(jnp.dtype(page.element_dtype)).reshape(shape))

    def words(load):
        def kernel(buffer, out):
            for word in range(rows.num_words):
                out[word] = load(buffer, word)

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(bits.shape, jnp.uint32), interpret=True)(buffer)

    np.testing.assert_array_equal(words(tpu_program.load_words_interpreted), bits)
    np.testing.assert_array_equal(words(tpu_program.load_words), bits)


def test_every_8_bit_code():
    """Bits for chips with another bias give the number of every float8_e4m3fn, NaN included."""
    codes = jnp.arange(256, dtype=jnp.uint8)
    expected = np.asarray(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), np.float32)
    found = lax.bitcast_convert_type(tpu_program._to_bias_11(codes), jnp.float8_e4m3b11fnuz)
    np.testing.assert_array_equal(np.asarray(found, np.float32) * 16, expected)
    assert np.isnan(expected).sum() == 2


def test_every_pair_of_4_bit_codes():
    codes = jnp.broadcast_to(jnp.arange(256, dtype=jnp.uint8).reshape(-1, 1, 128), (2, 16, 128)).reshape(32, 128)

    def kernel(codes, keys, values):
        keys[...], values[...] = tpu_program._levels(codes[...])

    out = [jax.ShapeDtypeStruct(codes.shape, jnp.uint8)] * 2
    both = pl.pallas_call(kernel, out_shape=out, interpret=True)(codes)
    for found, code in zip(both, (codes & 15, codes >> 4), strict=True):
        numbers = np.asarray(lax.bitcast_convert_type(found, jnp.float8_e4m3fn), np.float32) * 2**9
        np.testing.assert_allclose(numbers * rotation.LEVEL_STEP, rotation.levels_of(code), rtol=1e-6)


# What it refuses


def spec_of(shape: PagedShape, page_layout: str = "interleaved"):
    return shape.spec(page_layout)


@pytest.mark.parametrize(
    ("change", "page_layout", "platform", "message"),
    [
        ({}, "interleaved", "cpu", "needs a TPU"),
        ({}, "separate", "tpu", "interleaved layout"),
        ({"dtype": "float16"}, "interleaved", "tpu", "float16"),
        ({"cache_dtype": "float16"}, "interleaved", "tpu", "float16"),
        ({"cache_dtype": "int8_int4"}, "separate", "tpu", "interleaved layout"),
        (
            {"pages_per_sequence": 300_000},
            "interleaved",
            "tpu",
            "of 983,040 bytes of scalar memory .one seq.*larger pages",
        ),
        ({"heads": (512, 512), "head_dim": 256}, "interleaved", "tpu", "bytes of vector memory"),
    ],
)
def test_unsupported(change, page_layout, platform, message):
    spec = spec_of(replace(SMALL["decode_one_sequence"], **change), page_layout)
    assert re.search(message, pallas_tpu.unsupported(spec, platform))


def test_supported():
    """128 Ki page ids fit in scalar memory."""
    shape = PagedShape(((1, 65536),) * 256, 128, (32, 8), 128, "bfloat16", "bfloat16", 1, pages_per_sequence=512)
    assert pallas_tpu.unsupported(spec_of(shape), "tpu") is None
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        make_schedule(spec_of(shape), *[None] * 3, implementation="pallas_tpu")


# In the compilers of the chips


def chip_shape(kind: str, heads: str, dtype: str) -> PagedShape:
    options = {
        "page_size": 128,
        "heads": HEADS[heads],
        "head_dim": 128,
        "dtype": "float32" if dtype == "float32" else "bfloat16",
        "cache_dtype": dtype,
    }
    if kind == "decode":
        return PagedShape(((1, 32768),) * 256, max_query_length=1, pages_per_sequence=256, **options)
    if kind == "verify":
        return PagedShape(((8, 32768),) * 64, max_query_length=8, **options)
    if kind == "prefill":
        return PagedShape(((512, 8192),), **options)
    return PagedShape(((1, 8192),) * 63 + ((449, 8192),), **options)


def check_compiled(chip: str, shape: PagedShape) -> None:
    """Compiles; the cache is updated in place, nothing of its size is copied, and temporaries are as q and out."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    arguments = shape.abstract("interleaved", num_pages=4096)
    pages = arguments.pop("pages")
    num_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))

    def call(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="pallas_tpu")

    compiled = ahead_of_time.compile_for(chip, call, pages, arguments, donate_argnums=(0,))
    print(f"{compiled.seconds:.2f} seconds, {compiled.temporary_bytes:,} bytes of temporaries")
    assert compiled.aliased_bytes >= num_bytes
    queries = arguments["q"].size * arguments["q"].dtype.itemsize
    # With int4, queries and outputs are rotated in float32.
    assert compiled.temporary_bytes <= (10 if shape.cache_dtype == "int4" else 4) * queries + (4 << 20)
    text = compiled.program.as_text()
    dimensions = ",".join(map(str, pages.kv.shape))
    assert f"[{dimensions}]" in text
    assert not re.search(rf"= \S*\[{dimensions}\]\S* copy", text)
    for leaf in jax.tree.leaves(pages):  # nor is it moved to vector memory and back, scales neither
        assert not re.search(rf"\[{','.join(map(str, leaf.shape))}\]{{[^}}]*S\(1\)", text)


PROGRAMS = itertools.product(CHIPS, ("decode", "verify", "prefill", "mixed"), HEADS, CACHE_DTYPES)


@pytest.mark.matrix("v6e-mixed-qwen3_small-int8")
@pytest.mark.parametrize(
    ("chip", "kind", "heads", "dtype"),
    quick(PROGRAMS, ("v6e", "mixed", "qwen3_small", "int8")),
)
def test_compiled(chip, kind, heads, dtype):
    check_compiled(chip, chip_shape(kind, heads, dtype))


CORE_PROGRAMS = [
    (chip, kind, dtype)
    for chip, dtypes in TWO_CORES.items()
    for kind in ("decode", "prefill", "mixed")
    for dtype in dtypes
]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "kind", "dtype"), quick(CORE_PROGRAMS, ("v4", "decode", "bfloat16")))
def test_compiled_for_two_cores(chip, kind, dtype):
    check_compiled(chip, chip_shape(kind, "llama3", dtype))


def test_cores_of_chips():
    if (reason := ahead_of_time.missing_compiler("v4")) is not None:
        pytest.skip(reason)
    found = {}
    for chip in (*CHIPS, *TWO_CORES):
        with ahead_of_time.as_if_on(chip):
            found[chip] = (tpu_parameters.num_cores(), tpu_schedule.vmem_limit() >> 20)
    assert found == {"v5e": (1, 48), "v6e": (1, 48), "tpu7x": (1, 48), "v4": (2, 15), "v5p": (2, 48)}


def test_a_v4_reads_no_8_bit_floats():
    if (reason := ahead_of_time.missing_compiler("v4")) is not None:
        pytest.skip(reason)
    with ahead_of_time.as_if_on("v4"):
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int4"):
            assert "no 8-bit floats" in pallas_tpu.unsupported(spec_of(chip_shape("decode", "llama3", dtype)), "tpu")


FEATURES = {
    "gpt_oss": PagedShape(
        ((1, 4096),) * 8 + ((64, 4096),), 64, (64, 8), 64, "bfloat16", "bfloat16", window=128, sinks=True
    ),
    "gemma2": PagedShape(((1, 4096),) * 8, 64, (8, 4), 256, "bfloat16", "int8", 1, window=1024, soft_cap=50.0),
    "tree": PagedShape(((8, 4096),) * 4, 32, (16, 8), 128, "bfloat16", "bfloat16", 8, window=512, tree=True),
    "odd_heads": PagedShape(((1, 4096),) * 4, 16, (15, 5), 64, "bfloat16", "int8", 1),
    "head_dim_80": PagedShape(((1, 4096),) * 4, 16, (7, 1), 80, "float32", "float8_e4m3fn", 1),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("chip", "name"),
    quick(itertools.product(CHIPS, FEATURES), ("v6e", "tree")),
)
def test_compiled_features(chip, name):
    check_compiled(chip, FEATURES[name])


def test_every_candidate_of_the_tuner_fits():
    for num_new in (1, 512):
        shape = decode_shape("llama-3-8b", 4, 4096, num_new=num_new)
        arguments = shape.abstract("interleaved")
        spec = make_spec(**{n: arguments[n] for n in ("q", "k_new", "v_new", "pages", "page_table")}, **shape.options)
        ((name, tried),) = pallas_tpu.candidates(spec).items()
        assert len(tried) > 10
        for blocks in tried:
            with use_blocks(*[blocks] * 2), ahead_of_time.as_if_on("v6e"):
                assert pallas_tpu.unsupported(spec, "tpu") is None
                assert pallas_tpu.tunable(spec)[name] == replace(
                    blocks, num_queries=pallas_tpu.tunable(spec)[name].num_queries
                )
