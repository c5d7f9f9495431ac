"""The choice of layers for the host's memory, before weights are loaded."""

from dataclasses import fields
from typing import Any

import jax

from jaxinfer.engine.memory import available_bytes
from jaxinfer.engine.offload import DISK, layers_for_host
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.llm_options import LLMOptions
from jaxinfer.loading import ChooseLayers, for_length, load_draft_shapes
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import Draft, ModelDraft


def layers_chooser(options: LLMOptions) -> ChooseLayers | None:
    """What `load_model` asks for the layers that `options.offload` moves to the host; None for none."""
    if not options.offload or options.offload == DISK:
        return None
    is_live = isinstance(options.draft, tuple)

    def choose(config: ModelConfig, params: Params) -> tuple[int, ...]:
        config, length = for_length(config, options.max_model_len)
        own = {field.name: getattr(options, field.name) for field in fields(EngineOptions)}
        draft = _draft(options, config, params, length)
        platform = jax.default_backend()
        spec = EngineSpec(config, params, EngineOptions(**{**own, "max_model_len": length}), platform, None, draft)
        total = available_bytes(jax.devices()[0]) if options.offload == "auto" else None
        if total is not None and is_live:
            total += sum(num_bytes(params) for _, params in draft.own)
        return layers_for_host(spec, options.offload, total)

    return choose


def is_from_disk(options: LLMOptions, *, is_live: bool) -> bool:
    """Whether layers stay in the files of a checkpoint. Raises ValueError for live parameters and devices but a CPU."""
    if options.offload != DISK:
        return False
    if is_live:
        raise ValueError("offload='disk' is for the files of a checkpoint, not for live parameters")
    if (platform := jax.default_backend()) != "cpu":
        raise ValueError(f"offload='disk' is for a CPU, not for {platform}; offload='auto' is")
    return True


def _draft(options: LLMOptions, config: ModelConfig, params: Params, length: int) -> Draft:
    draft: Any = options.draft
    if not isinstance(draft, tuple):
        return load_draft_shapes(draft, config, params, length, options.dtype)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), draft[1])
    return ModelDraft("live parameters", draft[0], shapes)
