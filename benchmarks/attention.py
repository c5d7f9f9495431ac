"""Attention kernels against the memory and matrix rates of the chip they run on, measured in the same run.

    python -m benchmarks.attention [--quick] [--only decode|verify|prefill] [--json FILE]

Decode moves bytes: every key and value in use once, the queries and the output. Its rate is printed as a share of a
large device copy (bytes read + bytes written). Prefill does FLOPs: its rate is a share of a large matrix product. Peers
in the same run: XLA, and cuDNN where there is one. A case is looped inside one program, over as many layers' caches as
exceed the chip's cache, each step fed by the one before; figures are medians of the slope between two loop lengths.
"""

import argparse
import functools
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.measure import (
    CALLS_PER_PASS,
    MIN_CACHE_BYTES,
    flash_calls,
    flash_loop,
    ideal_bytes,
    num_layers,
    paged_loop,
    seconds_per_step,
)
from pallas_kernels.paged_attention.shapes import PagedShape, decode_shape
from pallas_kernels.platform import current_platform


@dataclass(frozen=True)
class Measurement:
    """One measured case. `share` is of the copy (decode, verify) or matrix (prefill) rate of the same run."""

    case: str
    implementation: str
    cache_dtype: str
    microseconds: float | None
    rate: float | None
    unit: str
    share: float | None
    note: str = ""


def copy_rate(platform_name: str, num_bytes: int | None = None) -> float:
    """Bytes per second of a large device copy, or one of `num_bytes`, read and written counted."""
    num_bytes = num_bytes or MIN_CACHE_BYTES[platform_name] * (1 if platform_name == "cpu" else 4)
    x = jax.random.normal(jax.random.key(0), (num_bytes // 4,))  # zeros may be copied faster

    # A changing addend keeps the compiler from folding the steps into one.
    @jax.jit
    def loop(x, n):
        return lax.fori_loop(0, n, lambda i, x: x + i.astype(jnp.float32), x)[:8]

    return 2 * x.nbytes / seconds_per_step(loop, x, 10)


def matrix_rate(platform_name: str, size: int | None = None) -> float:
    """FLOP per second of a large matrix product, or one of `size` rows, in bfloat16 (float32 on a CPU)."""
    n, dtype = (1024, jnp.float32) if platform_name == "cpu" else (8192, jnp.bfloat16)
    n = size or n
    # Zeros and ones are multiplied up to 13 % faster. An orthogonal matrix, the DCT-IV, keeps the size of random rows.
    y = jax.random.normal(jax.random.key(0), (n, n)).astype(dtype)
    half = jnp.arange(n) + 0.5
    x = (jnp.cos(jnp.pi / n * jnp.outer(half, half)) * (2 / n) ** 0.5).astype(dtype)

    @jax.jit
    def loop(operands, steps):
        x, y = operands
        return lax.fori_loop(0, steps, lambda i, y: (y @ x).astype(dtype), y)[0, :8]

    return 2 * n**3 / seconds_per_step(loop, (x, y), 20)


def measure_paged(
    case: str, shape: PagedShape, implementation: str, rate: float, platform_name: str, *, layers: int | None = None
) -> Measurement:
    """One call of a layer, over the caches of `layers` layers; without, of as many as exceed the chip's cache."""
    num_bytes, layers = ideal_bytes(shape), layers or num_layers(shape, platform_name)
    try:
        loop, arguments = paged_loop(shape, implementation, layers)
        steps = 2 if platform_name == "cpu" else max(4, int(0.05 / (layers * num_bytes / rate)))
        seconds = seconds_per_step(loop, arguments, steps) / layers
    except NotImplementedError as error:
        return Measurement(case, implementation, shape.cache_dtype, None, None, "GB/s", None, str(error))
    return Measurement(
        case,
        implementation,
        shape.cache_dtype,
        seconds * 1e6,
        num_bytes / seconds / 1e9,
        "GB/s",
        num_bytes / seconds / rate,
    )


def measure_cudnn_decode(case: str, shape: PagedShape, rate: float) -> Measurement:
    """cuDNN over contiguous keys of the same lengths: the public peer that moves the same bytes."""
    batch, context = len(shape.lengths), shape.lengths[0][1]
    sizes = (2, batch, context, shape.heads[1], shape.head_dim)
    k, v = jax.random.normal(jax.random.key(0), sizes, jnp.bfloat16)
    sizes = (batch, shape.lengths[0][0], shape.heads[0], shape.head_dim)
    q = jax.random.normal(jax.random.key(1), sizes, jnp.bfloat16)

    @jax.jit
    def loop(operands, n):
        q, k, v = operands

        def step(_, carry):
            for _ in range(CALLS_PER_PASS):
                out = jax.nn.dot_product_attention(carry, k, v, implementation="cudnn")
                carry = q + out * jnp.asarray(1e-3, out.dtype)
            return carry

        return lax.fori_loop(0, n, step, q)[:1, :1, :1]

    num_bytes = ideal_bytes(shape)
    try:
        passes = max(4, int(0.05 * rate / num_bytes) // CALLS_PER_PASS)
        seconds = seconds_per_step(loop, (q, k, v), passes) / CALLS_PER_PASS
    except Exception as error:  # cuDNN refuses with exceptions of several kinds
        return Measurement(case, "cudnn contiguous", "bfloat16", None, None, "GB/s", None, str(error).splitlines()[0])
    return Measurement(
        case,
        "cudnn contiguous",
        "bfloat16",
        seconds * 1e6,
        num_bytes / seconds / 1e9,
        "GB/s",
        num_bytes / seconds / rate,
    )


def measure_prefill(
    length: int, heads: tuple[int, int, int], implementation: str, rate: float, platform_name: str
) -> Measurement:
    """Causal attention of one prompt; FLOPs of the visible half of the scores and of the weights times values."""
    num_q, _, head_dim = heads
    dtype = jnp.float32 if platform_name == "cpu" else jnp.bfloat16
    case = f"prefill {length}"
    flops = 4 * num_q * head_dim * length * (length + 1) / 2
    try:
        loop, arguments = flash_loop(length, heads, dtype.__name__, implementation)
        seconds = seconds_per_step(loop, arguments, 1 if platform_name == "cpu" else 2) / flash_calls(platform_name)
    except NotImplementedError as error:
        return Measurement(case, implementation, dtype.__name__, None, None, "TFLOP/s", None, str(error))
    return Measurement(
        case, implementation, dtype.__name__, seconds * 1e6, flops / seconds / 1e12, "TFLOP/s", flops / seconds / rate
    )


def paged_cases(platform_name: str, is_quick: bool) -> list[tuple[str, PagedShape]]:
    model = "llama-3-8b"
    if platform_name == "cpu":
        sizes = [(1, 1024), (16, 1024)] if is_quick else [(1, 1024), (1, 8192), (16, 1024), (64, 1024)]
        make = functools.partial(decode_shape, model, dtype="float32")
        dtypes = ["float32", "int8"]
    else:
        sizes = (
            [(1, 32768), (16, 8192), (64, 8192)]
            if is_quick
            else [
                (batch, context)
                for batch in (1, 16, 64, 256)
                for context in (1024, 4096, 8192, 32768)
                if batch * context <= 64 * 32768
            ]
        )
        make = functools.partial(decode_shape, model)
        dtypes = ["bfloat16", "float8_e4m3fn", "int8"]
    cases = [(f"decode b{b} c{c}", make(b, c, cache_dtype=d)) for b, c in sizes for d in dtypes]
    b, c = sizes[-1]
    return cases + [(f"verify 8 b{b} c{c}", make(b, c, cache_dtype=d, num_new=8)) for d in dtypes]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes instead of all")
    parser.add_argument("--only", choices=["decode", "verify", "prefill"], help="one kind of case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(argv)
    name = current_platform()
    copy, matrix = copy_rate(name), matrix_rate(name)
    device = jax.devices()[0].device_kind
    print(
        f"{device}: copy {copy / 1e9:.0f} GB/s, matrix product {matrix / 1e12:.2f} TFLOP/s, JAX {jax.__version__}",
        flush=True,
    )
    print(f"{'case':24}{'implementation':20}{'cache':16}{'us':>10}{'rate':>18}{'share':>8}")
    rows: list[Measurement] = []

    def add(row: Measurement) -> None:
        rows.append(row)
        if row.microseconds is None:
            figures = f"  {row.note[:120]}"
        else:
            figures = f"{row.microseconds:10.1f}{row.rate:10.1f} {row.unit:>7}{row.share:8.1%}"
        print(f"{row.case:24}{row.implementation:20}{row.cache_dtype:16}{figures}", flush=True)

    kernel = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}.get(name)
    for case, shape in paged_cases(name, options.quick):
        if options.only not in (None, case.split()[0]):
            continue
        for implementation in filter(None, (kernel, "xla")):
            add(measure_paged(case, shape, implementation, copy, name))
        if name == "gpu" and shape.cache_dtype == "bfloat16":
            add(measure_cudnn_decode(case, shape, copy))
    if options.only in (None, "prefill"):
        for length in (1024,) if name == "cpu" else (2048, 8192):
            for implementation in filter(None, (kernel, "cudnn" if name == "gpu" else None, "xla")):
                add(measure_prefill(length, (32, 8, 128), implementation, matrix, name))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "device": device,
            "copy_bytes_per_second": copy,
            "matrix_flops_per_second": matrix,
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "command": "python -m benchmarks.attention " + " ".join(sys.argv[1:] if argv is None else argv),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
