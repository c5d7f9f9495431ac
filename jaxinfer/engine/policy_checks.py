"""What an engine with a policy of its cache (`kv_policy`) does not do."""

from jaxinfer.cache.policies import KeptPages
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig
from jaxinfer.speculative import Draft, LayersDraft


def check_policy(
    config: ModelConfig, draft: Draft | None, num_devices: int, options: EngineOptions, kept: KeptPages | None
) -> None:
    """Raises ValueError, with the policy and what it cannot be combined with, for models with latent attention or
    states, with a window that is longer than the policy's, for several devices, drafts by the model's own layers, and
    sequences longer than the model's."""
    if kept is None:
        return
    name = f"kv_policy={options.kv_policy!r}"
    if config.mla is not None:
        raise ValueError(f"{name}: {config.architecture} has latent attention, whose cache is kept whole")
    if config.recurrent_layers:
        raise ValueError(f"{name}: {config.architecture} has recurrent layers, whose states are of all tokens")
    if num_devices > 1:
        raise ValueError(f"{name} runs on one device, not {num_devices}")
    if isinstance(draft, LayersDraft):
        raise ValueError(f"{name} cannot be combined with draft='layers:{draft.num_layers}': use a model or 'ngram'")
    size = kept.num_window * kept.page_size
    if longer := [window for window in config.sliding_windows if window is not None and window > size]:
        raise ValueError(f"{name} keeps {size} tokens, fewer than the model's own window of {max(longer)}")
    if options.max_model_len is not None and options.max_model_len > config.max_length:
        raise ValueError(
            f"{name}: max_model_len={options.max_model_len} is more than the {config.max_length} tokens that "
            f"{config.architecture} was trained for"
        )
