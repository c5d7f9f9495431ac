"""RMSNorm and LayerNorm of hidden states, with the addition to the residual stream before them."""

from pallas_kernels.norm.api import IMPLEMENTATIONS, NormSpec, choose, make_spec, norm

__all__ = ["IMPLEMENTATIONS", "NormSpec", "choose", "make_spec", "norm"]
