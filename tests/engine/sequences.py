"""Sequences for tests that bring their own tokens."""

from collections.abc import Sequence

from jaxinfer import SamplingParams
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.request import Request, RequestOptions, SequenceState


def make_sequence(
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    priority: int = 0,
    salt: str = "",
    can_reuse: bool = True,
    leader: SequenceState | None = None,
    adapter: LoadedAdapter | None = None,
    **params,
) -> SequenceState:
    """An answer to a prompt of token ids; greedy unless `params`, of the sampler, say otherwise."""
    if not can_reuse:
        params["prompt_logprobs"] = 0
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **params})
    options = RequestOptions(priority=priority, cache_salt=salt)
    request = Request(
        list(prompt), sampling, max_tokens, seed=sampling.seed or 0, adapter=adapter or 0, options=options
    )
    return SequenceState(request, leader=leader)
