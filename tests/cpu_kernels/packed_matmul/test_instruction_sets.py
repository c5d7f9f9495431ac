"""The loops as they are compiled for AVX2 and for AVX-512: no register of an inner loop lies on the stack."""

import os
import platform
import re
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="kernels for CPUs need Numba")
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86")

AVX2 = (
    "+64bit +avx +avx2 +bmi +bmi2 +cmov +cx16 +cx8 +f16c +fma +fxsr +lzcnt +mmx +movbe +popcnt "
    "+sse +sse2 +sse3 +sse4.1 +sse4.2 +ssse3 +xsave"
)
AVX512 = f"{AVX2} +avx512f +avx512bw +avx512cd +avx512dq +avx512vl +avx512vnni"
CPUS = {"haswell": AVX2, "cascadelake": AVX512}
PRINT_ASSEMBLY = """
import sys
from numba import types
from cpu_kernels.packed_matmul import table
for name in sys.argv[1:]:
    print(f"loop {name}")
    print(table.compile_loop(name)._library.get_asm_str())
"""
KINDS = ("nibbles", "int8", "bfloat16", "quads")
LOOPS = (*(f"multiply_{kind}_1" for kind in KINDS), "multiply_bfloat16_5", "multiply_int8_5", "tile_float", "tile_int8")


def environment(cpu: str, folder: str) -> dict[str, str]:
    """In which Numba compiles for a CPU, whichever this is."""
    features = CPUS[cpu].replace(" ", ",")
    own = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": folder, "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **own}


def inner_loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop without a loop inside it: from a label to a jump back to it."""
    lines, labels, found = assembly.splitlines(), {}, []
    last_start = -1
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = number
        elif (jump := re.match(r"\s+j\w+\s+(\.L\w+)", line)) and (start := labels.get(jump[1], number)) < number:
            if start > last_start:
                found.append(lines[start : number + 1])
            last_start = max(last_start, start)
    return found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("cpu", CPUS)
def test_inner_loops_do_not_use_the_stack(cpu, tmp_path):
    rows = {"tile_float": 8, "tile_int8": 8} if cpu == "cascadelake" else {"tile_float": 6, "tile_int8": 4}
    names = [f"{name}_{rows[name]}" if name in rows else name for name in LOOPS]
    command = [sys.executable, "-c", PRINT_ASSEMBLY, *names]
    printed = subprocess.run(command, env=environment(cpu, str(tmp_path)), check=True, capture_output=True, text=True)
    parts = re.split(r"^loop (\w+)$", printed.stdout, flags=re.MULTILINE)[1:]
    assert parts[::2] == names
    for name, assembly in zip(parts[::2], parts[1::2], strict=True):
        assert ("%zmm" in assembly) == (cpu == "cascadelake"), name
        loops = [
            loop
            for loop in inner_loops(assembly)
            if sum("fmadd" in line or "dp" in line for line in loop) >= 4 or sum("vpmadd" in line for line in loop) >= 4
        ]
        assert loops, name
        frames = ("(%rsp", "(%rbp") if re.search(r"movq\s+%rsp, %rbp", assembly) else ("(%rsp",)
        for loop in loops:
            assert not [line for line in loop if any(frame in line for frame in frames)], name


def test_the_check_sees_a_stack_reference():
    loop = ".L1:\n\tvfmadd231ps\t32(%rsp), %ymm1, %ymm2\n\tjne\t.L1"
    assert [line for line in inner_loops(loop)[0] if "(%rsp" in line]


PRODUCTS = """
import jax, numpy as np
from pallas_kernels.packed_matmul import packed_matmul
from tests.pallas_kernels.packed_matmul.weights import make
for name, activations in (("q4_1", None), ("int8-g32", None), ("nf4", None), ("q4_1", "int8"), ("int8-g32", "int8")):
    form, arrays, weight = make(name, activations=activations)
    call = jax.jit(lambda x, arrays: packed_matmul(x, [(form, arrays)])[0])
    x = np.random.default_rng(0).standard_normal((75, form.inputs), np.float32)
    together = np.asarray(call(x, arrays))
    np.testing.assert_allclose(together, x @ weight, atol=(0.02 if activations else 2e-6) * np.abs(together).max())
    for count in (1, 5, 20):
        np.testing.assert_array_equal(call(x[:count], arrays), together[:count])
"""


@pytest.mark.slow
def test_products_on_avx2(tmp_path):
    """Also a row has the same bits there; on a machine that has no more, as in all other tests."""
    command = [sys.executable, "-c", PRODUCTS]
    subprocess.run(command, env=environment("haswell", str(tmp_path)), check=True)


COMPARE_ROWS = """
import jax, jax.numpy as jnp, numpy as np
from jaxinfer.quantization.matmul import matmul
from jaxinfer.quantization.packed import pack_weight
numbers = np.random.default_rng(0)
x = numbers.normal(size=(9, 1100)).astype(np.float32)
for dtype in ("float32", "bfloat16", "float16"):
    dense = jnp.asarray(numbers.normal(size=(1100, 70)), dtype)
    weight = pack_weight(dense)
    product = jax.jit(lambda x: matmul(x, weight, jnp.float32))
    alone = np.concatenate([product(x[row : row + 1]) for row in range(9)])
    exact = x.astype(np.float64) @ np.asarray(dense, np.float64)
    assert np.abs(alone - exact).max() < 1e-3, dtype
    for rows in range(2, 10):
        assert np.array_equal(product(x[:rows]), alone[:rows]), (dtype, rows)
"""


@pytest.mark.parametrize("cpu", [pytest.param(None, marks=pytest.mark.slow), "haswell"])
def test_rows_have_the_bits_that_they_have_alone(cpu, tmp_path):
    """With more inputs than a kernel takes at once, on this processor and as on one with AVX2."""
    own = None if cpu is None else environment(cpu, str(tmp_path))
    subprocess.run([sys.executable, "-c", COMPARE_ROWS], env=own, check=True)
