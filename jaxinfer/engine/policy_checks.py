"""What an engine with a policy of its cache (`kv_policy`) does not do."""

from typing import Any

from jaxinfer.cache import is_rotated, kv_dtype_name
from jaxinfer.cache.policies import BestPages, HeavyPages, KeptPages, PromptBudget
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import ModelConfig
from jaxinfer.speculative import Draft, LayersDraft


def check_policy(
    config: ModelConfig,
    draft: Draft | None,
    num_devices: int,
    options: EngineOptions,
    pages: KeptPages | BestPages | None,
    kv_dtype: Any,
) -> None:
    """Raises ValueError, with the policy and what it cannot be combined with, for models with latent attention or
    states, without a layer to which it applies or with a window that is longer than the policy's, for several devices
    and drafts by the model's own layers, and as `_check_positions`."""
    if pages is None:
        return
    name = _check_kinds(config, num_devices, options)
    if isinstance(draft, LayersDraft):
        raise ValueError(f"{name} cannot be combined with draft='layers:{draft.num_layers}': use a model or 'ngram'")
    windows = [window for window in map(config.window, config.attention_layers) if window is not None]
    if len(windows) == len(config.attention_layers):
        raise ValueError(f"{name}: all layers of {config.architecture} have a window already, of {max(windows)} tokens")
    if isinstance(pages, BestPages):
        later = [layer for layer in config.attention_layers if layer >= pages.num_dense_layers]
        if all(config.window(layer) is not None for layer in later):
            first = pages.num_dense_layers
            raise ValueError(
                f"{name} is for layers after the first {first}: {config.architecture} has none without a window"
            )
        return
    kept = pages
    size = kept.num_window * kept.page_size
    if windows and max(windows) > size:
        raise ValueError(f"{name} keeps {size} tokens, fewer than the model's own window of {max(windows)}")
    if kept.trained is not None:
        if is_rotated(kv_dtype):
            raise ValueError(
                f"{name} with sequences of more than {kept.trained} tokens moves keys, which would round those of "
                f"kv_dtype={kv_dtype_name(kv_dtype)!r} once more"
            )
        _check_positions(config, name, kept)


def check_prompt_budget(
    config: ModelConfig, draft: Draft | None, num_devices: int, options: EngineOptions, max_model_len: int
) -> None:
    """Raises ValueError for a policy that compacts prompts, with its name and what it cannot be combined with."""
    if not isinstance(options.policy, PromptBudget):
        return
    name = f"kv_policy={options.kv_policy!r}"
    if max_model_len > config.max_length:
        raise ValueError(
            f"{name}: positions stay those of the whole sequence, so max_model_len={max_model_len} may be at most the "
            f"{config.max_length} tokens that {config.architecture} was trained for"
        )
    for is_refused, reason in (
        (config.mla is not None, "has latent attention, whose keys are of all heads"),
        (bool(config.recurrent_layers), "has recurrent layers, whose states are of all tokens"),
        (any(config.window(layer) is not None for layer in config.attention_layers), "has layers with a window"),
        (config.attention_chunk is not None, "attends within chunks"),
        (config.has_sinks, "has attention sinks, which scores do not count"),
        (not all(map(config.caches_keys, config.attention_layers)), "has layers that read the keys of others"),
        (len(config.attention_layers) < config.num_layers, "has layers without attention"),
        (
            options.policy.observes_prompt and config.attention_softcap is not None,
            "caps its scores, of which no expectation is known",
        ),
    ):
        if is_refused:
            raise ValueError(f"{name}: {config.architecture} {reason}")
    if num_devices > 1:
        raise ValueError(f"{name} runs on one device, not {num_devices}")
    if isinstance(draft, LayersDraft):
        raise ValueError(f"{name} cannot be combined with draft='layers:{draft.num_layers}': use a model or 'ngram'")


def check_heavy(
    config: ModelConfig,
    draft: Draft | None,
    num_devices: int,
    options: EngineOptions,
    heavy: HeavyPages | None,
    max_model_len: int,
) -> None:
    """Raises ValueError, with the policy and what it cannot be combined with, where a policy keeps what queries attend
    to most: for models with latent attention or states, with windows, or with layers that read another one's keys, for
    several devices, drafts, caches of beginnings in host memory, and sequences longer than the model's."""
    if heavy is None:
        return
    name = _check_kinds(config, num_devices, options)
    if draft is not None:
        raise ValueError(f"{name} cannot be combined with a draft: rejected tokens would count among the queries")
    if windows := [window for window in map(config.window, config.attention_layers) if window is not None]:
        raise ValueError(f"{name}: layers of {config.architecture} have a window of {max(windows)} tokens")
    if any(config.kv_source(layer) != layer for layer in config.attention_layers):
        raise ValueError(f"{name}: layers of {config.architecture} read the keys of other layers")
    if options.host_cache_gib is not None:
        raise ValueError(
            f"{name} reuses no prefixes, as it adds up what all queries attend to: it cannot be combined with "
            f"host_cache_gib={options.host_cache_gib}"
        )
    if max_model_len > config.max_length:
        raise ValueError(
            f"{name}: {config.architecture} was trained for {config.max_length} tokens, and positions are those of the "
            f"whole sequence: max_model_len={max_model_len} is more"
        )


def _check_kinds(config: ModelConfig, num_devices: int, options: EngineOptions) -> str:
    """Raises ValueError for what no policy can be combined with; returns its name."""
    name = f"kv_policy={options.kv_policy!r}"
    if config.mla is not None:
        raise ValueError(f"{name}: {config.architecture} has latent attention, whose cache is kept whole")
    if config.recurrent_layers:
        raise ValueError(f"{name}: {config.architecture} has recurrent layers, whose states are of all tokens")
    if num_devices > 1:
        raise ValueError(f"{name} runs on one device, not {num_devices}")
    return name


def _check_positions(config: ModelConfig, name: str, kept: KeptPages) -> None:
    """Raises ValueError for sequences longer than the model's where what a token attends to is longer too, and where
    a key cannot be moved by a rotation."""
    name, limit = f"{name} with sequences of more than {kept.trained} tokens", kept.trained or 0
    if kept.num_tokens > limit:
        raise ValueError(f"{name}, for which {config.architecture} was trained, attends to {kept.num_tokens}")
    if config.has_position_embedding:
        raise ValueError(f"{name}: {config.architecture} has an embedding of each position, and no more of them")
    if config.attention_chunk is not None:
        raise ValueError(f"{name}: {config.architecture} attends within chunks of {config.attention_chunk}")
    if config.is_qk_norm_after_rotation:
        raise ValueError(f"{name}: {config.architecture} normalizes keys after their rotation")
    for rope in config.ropes:
        if rope.depends_on_length or rope.query_scale_beta is not None:
            raise ValueError(f"{name}: rotations of kind {rope.kind!r} depend on the length of a sequence")
    if config.query_temperature is not None:
        raise ValueError(f"{name}: {config.architecture} scales queries by their position")
