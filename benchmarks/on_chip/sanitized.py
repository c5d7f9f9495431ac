"""Small calls of the attention kernels, to be run under compute-sanitizer."""

import sys
from functools import partial

import jax

from benchmarks.on_chip import child
from benchmarks.on_chip.parity import own_kernel, random_arguments
from pallas_kernels.paged_attention import layout, paged_attention, platform_layout
from pallas_kernels.paged_attention.shapes import decode_shape
from pallas_kernels.platform import current_platform

DTYPES = {"bfloat16": 16, "int8": 32}  # of the cache, and tokens of a page


def main() -> None:
    child.end_with_parent()
    q_dtype = "float32" if "--tiny" in sys.argv else "bfloat16"
    num_calls = 0
    for dtype, page_size in DTYPES.items():
        for num_new in (1, 4):
            options = {"cache_dtype": dtype, "page_size": page_size, "dtype": q_dtype, "num_new": num_new}
            shape = decode_shape("qwen3-0.6b", 2, 50, **options)
            arguments = random_arguments(shape)
            name = platform_layout(current_platform(), dtype, has_values=True)
            arguments["pages"] = layout.pack(arguments["pages"], name)
            call = partial(paged_attention, **shape.options, implementation=own_kernel() or "xla")
            jax.block_until_ready(jax.jit(lambda given, call=call: call(**given))(arguments))
            num_calls += 1
    print(f"{num_calls} calls ran")


if __name__ == "__main__":
    main()
