"""Products of rows with low-rank adapters (LoRA, Hu et al. 2021), of which each row has its own."""

from pallas_kernels.adapter_matmul.api import IMPLEMENTATIONS, AdapterSpec, add_adapters, choose, make_spec

__all__ = ["IMPLEMENTATIONS", "AdapterSpec", "add_adapters", "choose", "make_spec"]
