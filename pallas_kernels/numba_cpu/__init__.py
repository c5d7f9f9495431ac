"""What the kernels for CPUs share: Numba compiles them, and XLA programs call them through its foreign function
interface (FFI). `calls` imports no Numba; `frames` and `vectors` do, so kernels import them on first use."""
