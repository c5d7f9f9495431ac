"""Products with weights that are stored as they are multiplied: XLA's, and on CPUs a kernel for float32."""

from pallas_kernels.dense_matmul.api import IMPLEMENTATIONS, DenseSpec, choose, dense_matmul, make_spec

__all__ = ["IMPLEMENTATIONS", "DenseSpec", "choose", "dense_matmul", "make_spec"]
