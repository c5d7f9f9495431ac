"""Sampling: request parameters, logit transforms, noise addressed by seed and position, and the sampler.

Names are imported when first used, so that `SamplingParams`, which is plain Python, does not import JAX.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.sampling.batch import (
        SamplingBatch,
        SamplingRow,
        make_batch,
        mask_inactive_rows,
        set_row,
        tokenize_bad_words,
    )
    from jaxinfer.sampling.generation_config import GenerationDefaults, from_generation_config
    from jaxinfer.sampling.keys import gumbel_noise, seed_words, uniform_noise
    from jaxinfer.sampling.params import SamplingParams, SamplingParamsError
    from jaxinfer.sampling.sampler import (
        SampleOutput,
        TokenLogprobs,
        choose,
        choose_several,
        is_stop,
        processed_logprobs,
        sample,
        token_logprobs,
    )
    from jaxinfer.sampling.seeds import derive_seed, sample_seed
    from jaxinfer.sampling.state import SamplingState, advance, make_state, rewind
    from jaxinfer.sampling.transforms import transform

_MODULES = {
    "batch": ("SamplingBatch", "SamplingRow", "make_batch", "mask_inactive_rows", "set_row", "tokenize_bad_words"),
    "generation_config": ("GenerationDefaults", "from_generation_config"),
    "keys": ("gumbel_noise", "seed_words", "uniform_noise"),
    "params": ("SamplingParams", "SamplingParamsError"),
    "sampler": (
        "SampleOutput",
        "TokenLogprobs",
        "choose",
        "choose_several",
        "is_stop",
        "processed_logprobs",
        "sample",
        "token_logprobs",
    ),
    "seeds": ("derive_seed", "sample_seed"),
    "state": ("SamplingState", "advance", "make_state", "rewind"),
    "transforms": ("transform",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "GenerationDefaults",
    "SampleOutput",
    "SamplingBatch",
    "SamplingParams",
    "SamplingParamsError",
    "SamplingRow",
    "SamplingState",
    "TokenLogprobs",
    "advance",
    "choose",
    "choose_several",
    "derive_seed",
    "from_generation_config",
    "gumbel_noise",
    "is_stop",
    "make_batch",
    "make_state",
    "mask_inactive_rows",
    "processed_logprobs",
    "rewind",
    "sample",
    "sample_seed",
    "seed_words",
    "set_row",
    "token_logprobs",
    "tokenize_bad_words",
    "transform",
    "uniform_noise",
]


def __getattr__(name: str) -> Any:
    if name == "quiet":  # its former name, for one release
        warnings.warn("jaxinfer.sampling.quiet is now mask_inactive_rows", DeprecationWarning, stacklevel=2)
        name = "mask_inactive_rows"
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
