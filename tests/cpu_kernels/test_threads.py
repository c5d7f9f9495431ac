"""Parts of a kernel on XLA's threads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

from cpu_kernels import frames, kernels, threads
from pallas_kernels import cpu_calls


@pytest.fixture(autouse=True)
def not_kept():
    """The kernels here are no part of the sources that keys of kept ones cover."""
    store = kernels.store
    kernels.keep_in(None)
    yield
    kernels.keep_in(store)


@frames.internal()
def _count(frame, part):
    """Adds 1 to the part's place, parts with odd numbers after some work."""
    number = np.float32(part)
    for _ in range(100_000 * (part % 2)):
        number = np.sqrt(number + np.float32(1))
    frames.floats(frames.result(frame, 0), part + 1)[part] += np.float32(1 if number >= 0 else 2)


_count_parts = threads.in_parts(_count)


@frames.compiled
def counting_handler(frame):
    if not frames.answers_metadata(frame):
        counts = frames.floats(frames.result(frame, 0), frames.result_size(frame, 0, 0))
        counts[:] = 0
        _count_parts(frame, frame, counts.size)
    return 0


@frames.compiled
def thread_handler(frame):
    if not frames.answers_metadata(frame):
        frames.floats(frames.result(frame, 0), 1)[0] = threads.num_threads(frame)
    return 0


def call(handler, size: int, *operands):
    name = kernels.register(f"jaxinfer_test_{handler.__qualname__}_{id(handler)}", handler)
    return cpu_calls.call(name, jax.ShapeDtypeStruct((size,), jnp.float32), operands)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 50])
def test_every_part_runs_once(num_parts):
    found = jax.jit(lambda: jnp.stack([call(counting_handler, num_parts) for _ in range(20)]))()
    np.testing.assert_array_equal(found, np.ones((20, num_parts)))


@pytest.mark.slow
def test_calls_in_the_same_program_and_in_several_threads():
    """Tasks of a call may begin when another one runs."""
    from concurrent.futures import ThreadPoolExecutor

    function = jax.jit(lambda x: [call(counting_handler, 7, x + number) for number in range(30)])
    x = jnp.zeros(3)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(function, [x] * 24):
            np.testing.assert_array_equal(jnp.stack(found), np.ones((30, 7)))


def test_threads_are_counted():
    assert jax.jit(lambda: call(thread_handler, 1))()[0] >= 1
