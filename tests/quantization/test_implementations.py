"""The table of implementations in docs/implementations.md: complete, current, and without an unknown slow cell."""

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout

from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.matmul import matmul
from jaxinfer.quantization.on_device import laid_out, layouts
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.hbm import made_in_hbm
from tests.pallas_kernels.quick import quick

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "update_implementations.py"))
FORMS, PLACES = TABLE["FORMS"], TABLE["PLACES"]
# Cells that read a copy of the weight at decode shapes. A cell that becomes fast is taken out here.
KNOWN_SLOW: set[tuple[str, str, str]] = set()


@pytest.fixture(scope="module")
def cells():
    for chip in ("v6e", "h100"):
        if (reason := ahead_of_time.missing_compiler(chip)) is not None:
            pytest.skip(reason)
    pytest.importorskip("numba")
    return TABLE["cells"]()


def test_no_weight_is_converted_before_a_decode_step_multiplies_by_it(cells):
    slow = {cell for cell, use in cells.items() if use is not None and use.is_wasteful}
    exist = {cell for cell, use in cells.items() if use is not None}
    assert slow == KNOWN_SLOW & exist


def test_a_copy_is_said_in_words(cells):
    for cell, use in cells.items():
        if use is not None and "then product" in use.form and "weights to" in use.form:
            assert use.copy is not None, cell


def test_the_page_is_current(cells):
    """`python docs/update_implementations.py` writes it."""
    assert TABLE["FILE"].read_text() == TABLE["page"](cells)


COMPILED = [
    (chip, place, name)
    for chip in ("v6e", "h100")
    for place in ("linear, untied head", "tied head")
    for name, form in FORMS.items()
    if place != "tied head" or TABLE["tied_head"](form, "cpu", "float32") is not None
]
ALWAYS = [(chip, "tied head", "int8, groups of 32 (Q8_0, Q5_0)") for chip in ("v6e", "h100")]
ALWAYS += [("h100", "linear, untied head", "int4, groups of 32 with minima (Q4_1, Q4_K)")]


@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "place", "name"), quick(COMPILED, *ALWAYS))
def test_compiled_in_a_loop_the_weight_is_read_as_stored(chip, place, name):
    """In a loop, where XLA would hoist a copy of the weight, and beside the look-up, which needs another layout."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    is_transposed = place == "tied head"
    inputs, outputs = TABLE["INPUTS"], TABLE["OUTPUTS"]
    form = FORMS[name]
    shape = (outputs, inputs) if is_transposed else (inputs, outputs)
    weight = form.weight(is_transposed=is_transposed) if not isinstance(form, type(jnp.bfloat16)) else None
    weight = jax.ShapeDtypeStruct(shape, form) if weight is None else weight
    with ahead_of_time.as_if_on(chip) as whole:

        def placed(one: Any, layout: Layout) -> jax.ShapeDtypeStruct:
            place_of: Any = Format(layout, whole)
            return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place_of)

        weight = laid_out(weight, "gpu" if chip == "h100" else "tpu", placed)
    x = jax.ShapeDtypeStruct((4, inputs), jnp.bfloat16)

    def decode(x, weight, count):
        def step(_, x):
            product = matmul(x, weight, jnp.float32, is_transposed=is_transposed)
            return (product[:, :inputs] * 1e-3).astype(x.dtype)

        return jax.lax.fori_loop(0, count, step, x)

    count = jax.ShapeDtypeStruct((), jnp.int32)
    found = ahead_of_time.compile_for(chip, jax.jit(decode), x, weight, count)
    size = weight.num_bytes if isinstance(weight, QuantizedArray) else 2 * weight.size
    results = 4 * 8 * outputs
    program = HloProgram(found.program.as_text())
    moved = sum(move.num_bytes for move in program.moves())
    print(f"{chip} {place} {name}: {moved / size:.2f} of the weight, {found.temporary_bytes:,} of temporaries")
    assert moved <= 1.15 * size + 4 * results
    assert found.temporary_bytes <= 0.15 * size + 4 * results
    assert [i.name for i in made_in_hbm(program, at_least=size // 2)] == []


def test_no_tile_of_a_tpu_has_rows_of_two_groups():
    """Tiles have 64 rows of int4 and 32 of int8; for groups of fewer, 8."""

    def layout(name: str, place: str = "linear"):
        weight = FORMS[name].weight(is_transposed=place == "tied head")
        found = {each: (one.major_to_minor, one.tiling) for each, one in layouts(weight, "tpu").items()}
        assert set(found) <= {"values"}
        assert layouts(weight, "cpu") == {}
        return found.get("values")

    assert layout("int4, groups of 32 (Q4_0)") == ((0, 1), ((8, 128), (8, 1)))
    assert layout("int8, groups of 16 (Q6_K)") == ((0, 1), ((8, 128), (4, 1)))
    assert layout("int8, groups of 32 (Q8_0, Q5_0)") == layout("int4, groups of 128") == ((0, 1), None)
    assert layout("int8, a scale per output") is None
    assert layout("int8, groups of 32 (Q8_0, Q5_0)", "tied head") == ((0, 1), None)
    assert layout("int8, a scale per output", "tied head") is None
