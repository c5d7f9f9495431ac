"""Entry points of norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float

IMPLEMENTATIONS = ("pallas_gpu", "xla")
_BY_PLATFORM = {"tpu": ("xla",), "gpu": ("pallas_gpu", "xla"), "cpu": ("xla",)}
_MODULES = Implementations("pallas_kernels.norm", IMPLEMENTATIONS, _BY_PLATFORM)


@dataclass(frozen=True)
class NormSpec:
    """Static facts of one call.

    rows, width: of x. weight_axes: of the weight, 0 for none; more than one are a weight for each of several heads.
    dtypes: of x and of the weight ("" for none).
    has_term, has_bias: whether a term is added before, and whether there is a bias.
    """

    rows: int
    width: int
    dtypes: tuple[str, str]
    weight_axes: int
    kind: str
    eps: float
    has_term: bool = False
    has_bias: bool = False


def norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, "*heads D"] | None,
    bias: Float[Array, "*heads D"] | None = None,
    term: Float[Array, "*rows D"] | None = None,
    *,
    kind: str,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """x + term in x's dtype (x itself without a term), and its norm over the last axis.

    RMSNorm (Zhang & Sennrich 2019) rounds to x's dtype before it multiplies by the weight ("rms"), or multiplies in
    float32 by the weight ("rms_float32") or by 1 + weight ("rms_zero_centred"). LayerNorm (Ba et al. 2016) multiplies
    in float32. Statistics are float32.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the named implementation cannot run the call; the message has the reason.
    """
    spec = make_spec(x, weight, bias, term, kind=kind, eps=eps)
    name = _MODULES.take(spec, current_platform(), implementation)
    return _MODULES[name].norm(x, weight, bias, term, spec)


def make_spec(x, weight, bias=None, term=None, *, kind: str, eps: float) -> NormSpec:
    dtypes = x.dtype.name, "" if weight is None else weight.dtype.name
    axes = 0 if weight is None else weight.ndim
    return NormSpec(math.prod(x.shape[:-1]), x.shape[-1], dtypes, axes, kind, eps, term is not None, bias is not None)


def choose(spec: NormSpec, implementation: str | None = None, *, platform: str | None = None) -> KernelChoice:
    """The implementation that `norm` selects, and the reasons against the others."""
    return _MODULES.choose(spec, platform or current_platform(), implementation)
