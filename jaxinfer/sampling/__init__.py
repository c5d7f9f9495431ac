"""Sampling: request parameters, logit transforms, noise addressed by seed and position, and the sampler.

Names are imported when first used, so that `SamplingParams`, which is plain Python, does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxinfer.lazy_names import first_with

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
    from jaxinfer.sampling.processors import BoundProcessors, Processor, ProcessorRows, TokenHistory, as_processors
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
    from jaxinfer.sampling.state import SamplingState, advance, make_state, rewind, with_sequences
    from jaxinfer.sampling.transforms import transform

__all__ = [
    "BoundProcessors",
    "GenerationDefaults",
    "Processor",
    "ProcessorRows",
    "SampleOutput",
    "SamplingBatch",
    "SamplingParams",
    "SamplingParamsError",
    "SamplingRow",
    "SamplingState",
    "TokenHistory",
    "TokenLogprobs",
    "advance",
    "as_processors",
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
    "with_sequences",
]

# Those that need no JAX come first.
__getattr__ = first_with(
    __name__,
    __all__,
    "params",
    "seeds",
    "generation_config",
    "keys",
    "processors",
    "transforms",
    "state",
    "batch",
    "sampler",
)
