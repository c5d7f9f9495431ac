"""Kernels for CPUs that Numba compiles and XLA programs call through its foreign function interface (FFI).

They read and write memory by its address. `kernels`, and the constants in `packed_matmul.forms` and
`paged_attention.masks`, import no Numba; the other modules do, and are imported when a kernel is first used.
"""
