"""The models that a server may load: those of the command line, or those on this machine; and what each will need."""

import asyncio
import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer import parallel
from jaxinfer.api.arguments import checked_options
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.api.options import LLMOptions
from jaxinfer.cache.policy.kinds import extends_length
from jaxinfer.checks import format_bytes
from jaxinfer.engine.adapter_stacks import widened, with_room
from jaxinfer.engine.memory import OutOfMemoryError, activation_bytes, available_bytes
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.loaded_weights import weights_key
from jaxinfer.loading import for_length, load_draft_shapes, load_shapes
from jaxinfer.models import fit_to_mesh
from jaxinfer.quantization.on_device import Copies, float32_copies
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.server.models import ModelNeeds, ModelSource
from jaxinfer.server.names import is_path, public_name
from jaxinfer.server.options import ServerOptions
from jaxinfer.speculative import names_kind
from jaxinfer.store import FoundModel, find_model, list_models

_LOG = logging.getLogger("jaxinfer.server")


@dataclass(frozen=True)
class LocalModels:
    """Models of this machine, each with the same options of `LLM`.

    Attributes:
      given: the models that may be used, by their names; None for all that are stored. arguments: of `LLM`.
      compiled: those whose programs this process has, so that loading them again is loading weights.
    """

    given: Mapping[str, str] | None
    arguments: Mapping[str, Any]
    options: ServerOptions
    compiled: set[str] = field(default_factory=set)

    @property
    def is_store(self) -> bool:
        return self.given is None

    def names(self) -> Sequence[str]:
        if self.given is not None:
            return tuple(self.given)
        return [stored.name for stored in list_models() if stored.kind != "adapter"]

    def find(self, name: str) -> ModelSource | None:
        if name not in self.names() and not (self.options.allow_any and "://" not in name):
            return None
        model = (self.given or {}).get(name, name)
        located = locate(model)
        if located is None or located.path is None:
            return None
        own = {"options": dict(located.options), "sampling": dict(located.sampling), "system": located.system}
        key = json.dumps([str(located.path.resolve()), own], sort_keys=True, default=repr)
        return ModelSource(
            (name,),
            public_name(model),
            open=partial(self._open, name, model, self.arguments),
            count=partial(count_needs, model, self.arguments),
            key=key,
            given=model,
            paths=paths_of(model, located),
        )

    def budget(self) -> int | None:
        """Raises ValueError where the device does not report its memory, and none was given."""
        if self.options.memory_bytes is not None:
            return self.options.memory_bytes
        available = available_bytes(jax.local_devices()[0])
        if available is None:
            raise ValueError("the device does not report its memory: give --model-memory")
        fraction = self.arguments.get("memory_fraction", LLMOptions.memory_fraction)
        return int(fraction * available)

    def _open(self, name: str, model: str, arguments: Mapping[str, Any], needs: ModelNeeds) -> AsyncEngine:
        check_is_here(model, arguments)
        engine = AsyncEngine(model, **{**arguments, "num_pages": needs.num_pages})
        try:
            num_bytes = resident_bytes(engine)
            if num_bytes > needs.num_bytes:  # it is loaded: to load it again would count the same
                counted = format_bytes(needs.num_bytes)
                _LOG.warning("%s holds %s, and %s were counted beforehand", name, format_bytes(num_bytes), counted)
            if not self.options.lazy and name not in self.compiled:
                engine.llm.warm_up()
                self.compiled.add(name)
        except BaseException:
            asyncio.run(engine.close())
            raise
        return engine


def locate(name: str) -> FoundModel | None:
    """A model on this machine; None for one that is not here. Nothing is downloaded."""
    try:
        return find_model(name, offline=True, fetch=False)
    except (ValueError, OSError):
        return None


def paths_of(model: str, located: FoundModel | None) -> tuple[str, ...]:
    """How errors may spell where a model lies: as it was given, and in full. () for a repository that is not here."""
    paths = [] if located is None or located.path is None else [str(located.path), str(located.path.resolve())]
    if "://" in model or is_path(model):
        paths += [model, str(Path(model))]
    return tuple(dict.fromkeys(path for path in paths if path not in (".", "..")))


def check_is_here(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises FileNotFoundError where a model, or what drafts for it, would have to be downloaded."""
    draft = checked_options(name, arguments).draft
    names = [name]
    if isinstance(draft, str) and not names_kind(draft):
        names.append(draft)
    for model in names:
        if find_model(model, offline=True, fetch=False).path is None:
            raise FileNotFoundError(f"{model} is not on this machine: jaxinfer pull {model}")


def count_needs(name: str, arguments: Mapping[str, Any], budget: int) -> ModelNeeds:
    """Bytes of a device that `LLM(name, **arguments)` will need, from configuration and headers alone, as
    `LLM.explain` tells them once it is loaded; those of a step's activations are estimated.

    Without num_pages, the cache has room for max_seqs sequences of max_model_len, or for fewer where the budget ends.

    Raises OutOfMemoryError where not even one sequence fits the budget, and as `check_is_here` and `load_shapes`.
    """
    check_is_here(name, arguments)
    options = checked_options(name, arguments)
    spec, copied, shared = _abstract_spec(name, options)
    parts = _parts(spec.with_pages(1), copied)
    num_pages, sizes = options.num_pages, spec.pool_sizes
    fixed = sum(parts.values()) - sizes.bytes_of(1)  # the caches' parts have the states of all slots too
    if num_pages is None:
        fitting = sizes.fitting(budget - fixed)
        if fitting < sizes.smallest:
            raise OutOfMemoryError(
                f"{name} needs {format_bytes(fixed)} and at least {format_bytes(sizes.bytes_of(sizes.smallest))} of "
                f"cache, and the budget is {format_bytes(budget)}: raise --model-memory, or lower --max-model-len"
            )
        num_pages = min(sizes.default, fitting)
    return ModelNeeds(_parts(spec.with_pages(num_pages), copied), num_pages, shared)


def _parts(spec: EngineSpec, copied: int) -> dict[str, int]:
    """Bytes of a device by what they are for, of a model that is counted or loaded. Packed weights take at most what
    is counted of their shapes: scales are stored in 16 bits where that is exact."""
    return {**spec.parts, "activations": activation_bytes(spec), "float32 copies": copied}


def _abstract_spec(name: str, options: LLMOptions) -> tuple[EngineSpec, int, dict[Hashable, int]]:
    """The spec that the model's engine will have, the bytes of weights that a CPU keeps beside their copies, and those
    of all weights by the key under which they are shared."""
    platform = jax.default_backend()
    has_mesh = options.mesh is not None
    dtype = "float32" if has_mesh and options.dtype == "auto" and platform == "cpu" else options.dtype
    config, params = load_shapes(
        name,
        dtype=dtype,
        revision=options.revision,
        quantize=options.quantize,
        requantize=options.requantize,
        is_here=not has_mesh,
        activations=options.activations,
    )
    config, length = for_length(config, options.max_model_len, has_policy=extends_length(options.kv_policy))
    if isinstance(options.draft, tuple):
        raise ValueError("a draft of live parameters cannot be counted")
    draft = load_draft_shapes(options.draft, name, config, params, length, dtype, is_here=not has_mesh)
    whole = None if options.mesh is None else parallel.make_mesh(options.mesh)
    mesh = None if whole is None else parallel.replicas(whole)[0]
    copied = draft_copied = 0
    if mesh is not None:
        config, params = _fitted(mesh, config, params)
        draft = draft.with_params(partial(_fitted, mesh))
    elif platform == "cpu":
        copied = _copied_bytes(params)
        draft_copied = sum(_copied_bytes(params) for _, params in draft.own)
    adapted = with_room(config, params, options.adapter_sizes, platform)
    config = widened(config, options.adapter_sizes)
    spec = EngineSpec(config, adapted, replace(options, max_model_len=length), platform, mesh, draft)
    how: Any = {"dtype": options.dtype, "verify": options.verify, "mesh": whole}
    opened = options.revision, options.quantize, options.requantize
    key = weights_key(name, *opened, **how, activations=options.activations)
    shared = {key: spec.parts["weights"] + copied}
    for _ in draft.own:
        shared[weights_key(str(options.draft), **how)] = spec.parts["draft weights"] + draft_copied
    return spec, copied + draft_copied, shared


def _fitted(mesh: Any, config: Any, params: Any) -> tuple[Any, Any]:
    fit = fit_to_mesh(mesh, config)
    return fit.config, jax.eval_shape(fit.resize, params)


def _copied_bytes(params: Any) -> int:
    """Bytes of the float32 copies that a CPU makes of quantized weights and keeps beside them."""
    all_copies: list[Copies] = []

    def copied(params: Any) -> Any:
        made, copies = float32_copies(params)
        all_copies.append(copies)
        return made

    jax.eval_shape(copied, params)
    return all_copies[0].num_bytes


def resident_bytes(engine: AsyncEngine) -> int:
    """Bytes of a device that a loaded model holds, with the estimate of a step's activations."""
    spec, copies = engine.llm.engine.spec, engine.llm._copies
    if copies is None:
        return sum(_parts(spec, 0).values())
    return sum({**_parts(spec, copies.num_bytes), "weights": num_bytes(engine.llm.params)}.values())
