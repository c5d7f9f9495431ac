"""The methods of `LLM` that change its weights while it runs: other ones, adapters, and memory that is given back."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from jaxinfer.api.arguments import as_one_of
from jaxinfer.api.coordinate import Fingerprints
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.adapters import AdapterRegistry
from jaxinfer.engine.client import Client
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.weights import ModelWeights, WeightsView
from jaxinfer.loading import LoadedModel, ReadAdapter
from jaxinfer.models import Params
from jaxinfer.models.adapter import Adapter
from jaxinfer.param_dict import refuse
from jaxinfer.progress import Stage

UpdateMode = Literal["wait", "keep", "abort"]
UPDATE_MODES = get_args(UpdateMode)
MAX_VERSION_CHARS = 256


def check_how(mode: UpdateMode, kv: Literal["recompute", "retain"] = "recompute") -> None:
    """Raises ValueError, with its name, for an argument of `LLM.update_params` that is none of its values."""
    as_one_of("mode", mode, UPDATE_MODES)
    as_one_of("kv", kv, ("recompute", "retain"))
    if kv == "retain" and mode != "keep":
        raise ValueError(f"kv='retain' is for mode='keep', got mode={mode!r}")


def check_version(version: str | None) -> None:
    """Raises ValueError for what cannot name weights: answers, files and logs have the name."""
    if version is None:
        return
    if not isinstance(version, str) or not 0 < len(version) <= MAX_VERSION_CHARS or not version.isprintable():
        told = f"{len(version)} characters, {version!r:.60}" if isinstance(version, str) else f"{version!r:.60}"
        raise ValueError(f"version must be a text of 1 to {MAX_VERSION_CHARS} printable characters, got {told}")


class LiveWeights:
    """The part of `LLM` for weights that change."""

    name: str
    client: Client
    _params: WeightsView[Params]
    _weights: list[ModelWeights]  # of the model, and of a draft that has some
    _loaded: LoadedModel | None
    _draft: LoadedModel | None
    _lockstep: Any
    _fingerprints: Fingerprints
    _adapters: AdapterRegistry
    _read_adapter: Callable[..., ReadAdapter]

    @property
    def engine(self) -> AnyEngine:
        """The engine that runs the requests. Raises RuntimeError once closed."""
        return self.client.engine

    @property
    def params(self) -> Params:
        """The parameters, a nested dict that `bind` takes (docs/guides/own_code.md). It is read-only: `params.copy()`
        is one of the same arrays to change, for `update_params` or a new `LLM((config, params, tokenizer))`."""
        if self._weights:
            self._weights[0].check_whole()
        return self._params.value

    @params.setter
    def params(self, params: Params) -> None:
        refuse("llm.params = ...")

    @property
    def weights_version(self) -> str:
        """The name of the weights: "0" as they were loaded, then as `update_params` says."""
        return self.engine.weights.label

    def update_params(
        self,
        params: Params | str | Path,
        *,
        version: str | None = None,
        mode: UpdateMode = "wait",
        kv: Literal["recompute", "retain"] = "recompute",
        partial: bool = False,
        donate: bool = False,
        draft: bool = False,
    ) -> str:
        """Gives the model other weights, in place; returns their version. No program is compiled for them.

        A weight is brought into the form that is there (its place on a mesh, its dtype; rounded again by `quantize`,
        packed) and then frees the one before, so that besides the weights there is memory for one more. All are checked
        before the first is written. Cached prefixes are dropped, on disk too where they are of other weights; loaded
        adapters stay.

        Args:
          params: a tree like `llm.params`, of JAX or NumPy arrays, on any mesh; one of Tunix, Gemma in Flax or MaxText
            (docs/live_weights.md); or a folder with a checkpoint.
          version: what the weights are called in `CompletionOutput.weights`; by default their number.
          mode: of requests that run: "wait" ends them first, "abort" aborts them all, "keep" goes on with them.
          kv: with mode="keep", whether their keys and values are computed anew, or those in the cache are kept, of
            weights before; the spans of an answer say so. Scores and vectors are always computed anew.
          partial: whether weights that the tree lacks stay as they are.
          donate: whether the arrays are handed over: they are used as they are, where they fit, and must not be changed
            or deleted. Otherwise they are copied.
          draft: whether these are the draft's weights. Tokens do not depend on them.

        Raises ValueError, with the name of a weight, for a tree or files of another model, for a form that rounding to
        nearest does not give (GPTQ, AWQ), and for adapters with magnitudes or biases, which depend on the weights; then
        no weight has changed. After an error while weights are written nothing is answered until an update has ended.
        """
        check_version(version)
        self.begin_update(mode=mode, kv=kv, draft=draft)
        try:
            self.write_update(params, partial=partial, donate=donate, draft=draft)
            return self.finish_update(version, draft=draft)
        except BaseException:
            self._weights_of(draft).cancel()
            raise

    def begin_update(
        self, *, mode: UpdateMode = "wait", kv: Literal["recompute", "retain"] = "recompute", draft: bool = False
    ) -> None:
        """Begins an update of weights that come piece by piece: `write_update` takes them, as often as there are
        pieces, and `finish_update` ends it. Nothing is answered in between. One that has not ended is given up; what it
        wrote has to be written again. Arguments and errors as of `update_params`."""
        check_how(mode, kv)
        self.check_update(draft=draft)
        weights = self._weights_of(draft)
        if not draft and self._fingerprints.is_used and weights.is_whole:
            self._fingerprints.keep(weights.label)
        self.client.come_to_rest(mode, retains=kv == "retain")
        weights.begin()

    def check_update(self, *, draft: bool = False) -> None:
        """Raises as `update_params` for weights that cannot be replaced, whatever the new ones are."""
        if self._lockstep is not None:
            raise ValueError("update_params is for a model on one host")
        self._weights_of(draft).check_replaceable()

    def _weights_of(self, draft: bool) -> ModelWeights:
        if not self._weights:
            raise RuntimeError("this LLM is closed")
        if draft and len(self._weights) == 1:
            raise ValueError(f"draft=True: {self.name} has no draft with weights of its own")
        return self._weights[draft]

    def write_update(
        self, params: Params | str | Path, *, partial: bool = True, donate: bool = False, draft: bool = False
    ) -> None:
        """Replaces weights in an update that has begun: those of a tree, or all by those of a folder."""
        self._weights_of(draft)
        loaded = self._draft if draft else self._loaded
        assert loaded is not None
        if not isinstance(params, (str, Path)):
            loaded.write_tree(params, is_partial=partial, copies=not donate)
            return
        if donate:
            raise ValueError("donate=True is for a tree, not for files")
        with Stage(f"reading weights from {params}"):
            loaded.write_weights(params)

    def finish_update(self, version: str | None = None, *, draft: bool = False) -> str:
        """Ends an update; returns the version, which stays where nothing was written. Raises RuntimeError, with a name,
        for a weight that an update before has written which did not end, and this one has not, and for the version of
        an update that has written nothing; ValueError for a version that cannot be a name."""
        check_version(version)
        weights = self._weights_of(draft)
        number = weights.version
        weights.finish(version)
        if not draft and weights.version != number:
            self._fingerprints.named(weights.label)
        return weights.label

    def sleep(self, *, weights: Literal["keep", "drop"] | None = "keep", cache: bool = True) -> None:
        """Gives memory of the device back until `wake_up`. What runs is computed anew then, with the same tokens.

        Args:
          weights: "keep" moves them to the host's memory, "drop" frees them, after which `update_params` has to give
            all; a draft's are kept in either case. None leaves them.
          cache: whether the cache is freed; cached prefixes are lost.

        Raises RuntimeError while an update has not ended; nothing is given back then.
        """
        if weights is not None:
            as_one_of("weights", weights, ("keep", "drop"))
        if self._lockstep is not None:
            raise ValueError("sleep is for a model on one host")
        self.client.come_to_rest("keep", retains=False)
        keeps = [weights == "keep", True]  # a draft's are kept
        given = list(zip(self._weights, keeps, strict=False)) if weights is not None else []
        for own, is_kept in given:
            own.check_sleep(keeps=is_kept)
        for own, is_kept in given:
            own.sleep(keeps=is_kept)
        if cache:
            for engine in self.engine.engines:
                engine.free_cache()

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and `wake_up` of all that was given back."""
        caches = (engine.runner.is_without_cache for engine in self.engine.engines)
        return any(own.is_asleep for own in self._weights) or any(caches)

    def wake_up(self, *, weights: bool = True, cache: bool = True) -> None:
        """Takes the memory that `sleep` gave back. Harmless where nothing sleeps."""
        for own in self._weights if weights else ():
            own.wake_up()
        if cache:
            for engine in self.engine.engines:
                engine.take_cache()

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Adapters that requests can name."""
        return self._adapters

    def load_adapter(
        self,
        name: str,
        adapter: str | Path | Adapter,
        *,
        keep_on_device: bool = False,
        replace: bool = False,
        base_model: str | None = None,
        uses_tokenizer: bool = True,
    ) -> LoadedAdapter:
        """Loads a LoRA adapter, which requests then name with `adapter=name`. No program is compiled for it.

        Args:
          adapter: a folder as PEFT writes it, or an `Adapter` of arrays (`jaxinfer.models.adapter`), which are copied.
          keep_on_device: whether it stays on the device once it is there, unless all slots have such adapters.
          replace: whether an adapter of that name may be there; requests that named it go on with it.
          base_model: the model's name in the adapter's configuration, where that is not what it is opened by.
          uses_tokenizer: whether a tokenizer and chat template in its folder are for its requests; else the model's.

        Raises ValueError, with names and numbers, for a name that is taken, an adapter that does not fit the model, and
        one for which there is no room (`max_adapters`, `max_adapter_rank`, `adapter_modules`, `adapter_parts`,
        `max_adapter_tokens`); TooManyAdaptersError, a ValueError, where `max_loaded_adapters` are loaded;
        CheckpointError, a ValueError, for a folder that cannot be read. Nothing is loaded then.
        """
        self._adapters.check_new(name, replace=replace)
        read, source, tokenizer = self._read_adapter(adapter, name, base_model, uses_tokenizer=uses_tokenizer)
        more = {"keep_on_device": keep_on_device, "replace": replace}
        return self._adapters.load(name, read, source=source, tokenizer=tokenizer, **more)

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter away; requests that named it go on with it. Raises ValueError for one that is not loaded."""
        self._adapters.unload(name)
