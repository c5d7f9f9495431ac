"""The adapters that requests of an engine can name."""

import threading
from collections.abc import Iterator, Mapping

from jaxinfer.engine.adapter_slots import LoadedAdapter, not_loaded
from jaxinfer.engine.protocol import AnyEngine
from jaxinfer.engine.weights import WeightsView
from jaxinfer.models import Params
from jaxinfer.models.adapter import Adapter
from jaxinfer.text import Tokenizer


class TooManyAdaptersError(ValueError):
    """As many adapters are loaded as `max_loaded_adapters` allows."""


class AdapterRegistry(Mapping[str, LoadedAdapter]):
    """Adapters in the host's memory, by name. Any thread may call its methods.

    Args:
      engine: whose weights have room for them, or have none. params: of the base, as the engine runs them.
      taken: names of the base model, which no adapter may have.
    """

    def __init__(self, engine: AnyEngine, params: WeightsView[Params], taken: tuple[str, ...] = ()):
        self._engine, self._params, self._taken = engine, params, taken
        self._loaded: dict[str, LoadedAdapter] = {}
        self.max_loaded = engine.engines[0].spec.options.max_loaded_adapters  # None for any number
        self._lock = threading.Lock()
        params.root.add_user(self)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)

    @property
    def has_begun(self) -> bool:
        """False: the engine has the requests."""
        return False

    def drop_prefixes(self) -> None:
        """Nothing was computed with the weights."""

    def check_replaced(self) -> None:
        """Raises ValueError while adapters are loaded whose arrays were computed from the weights."""
        used = (sequence.request.adapter for sequence in self._engine.unfinished)  # unloaded, but in use
        adapters = [*self._loaded.values(), *(adapter for adapter in used if isinstance(adapter, LoadedAdapter))]
        if names := [adapter.name for adapter in adapters if adapter.host.depends_on_base]:
            raise ValueError(
                f"adapter {names[0]!r} has magnitudes or biases for the weights as they are: unload it first"
            )

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._loaded))

    def __len__(self) -> int:
        return len(self._loaded)

    def find(self, name: str) -> LoadedAdapter:
        """The adapter of a name. Raises ValueError, with the nearest one, for a name that is not loaded."""
        if (adapter := self._loaded.get(name)) is None:
            raise ValueError(not_loaded(name, list(self._loaded)))
        return adapter

    def load(
        self,
        name: str,
        adapter: Adapter,
        *,
        source: str = "",
        tokenizer: Tokenizer | None = None,
        keep_on_device: bool = False,
        replace: bool = False,
    ) -> LoadedAdapter:
        """Loads an adapter into the host's memory, from where it moves to the device when requests name it.

        Requests that name an adapter which is replaced go on with it. `tokenizer`: of texts for it; None for the
        model's. Raises ValueError for a name that is taken or is loaded already, unless `replace`, and as
        `AdapterStacks.prepared`, TooManyAdaptersError where there are as many as may be; nothing has changed then.
        """
        self.check_new(name, replace=replace)
        stacks = self._engine.engines[0].adapter_stacks
        if stacks is None:
            raise ValueError(f"adapter {name!r}: there is room for none; give max_adapters=8, or adapters at the start")
        weights, told = self._params.root, f"adapter {name!r}: the weights are being updated; load it again then"
        version, params = weights.version, self._params.value
        if not weights.is_whole or params is None:
            raise ValueError(told)
        host = stacks.prepared(adapter, params, what=repr(name))
        more = {"num_added": host.num_added, "tokenizer": tokenizer, "owner": self}
        loaded = LoadedAdapter(name, host.fingerprint, host, source, adapter.invocation_tokens, keep_on_device, **more)
        with self._lock:
            self.check_new(name, replace=replace)  # others may have been loaded meanwhile
            if host.depends_on_base and not (weights.is_whole and weights.version == version):
                raise ValueError(told)
            old, self._loaded[name] = self._loaded.get(name), loaded
        if old is not None:
            self._forget(old)
        return loaded

    @property
    def host_bytes(self) -> int:
        """Bytes of the loaded adapters in the host's memory."""
        return sum(adapter.host.num_bytes for adapter in list(self._loaded.values()))

    def unload(self, name: str) -> None:
        """Takes an adapter away: requests that name it already go on with it, and then its memory is free. Raises
        ValueError for a name that is not loaded."""
        with self._lock:
            adapter = self.find(name)
            del self._loaded[name]
        self._forget(adapter)

    def check_new(self, name: str, *, replace: bool = False) -> None:
        """Raises as `load`, as far as no tensor is needed: call it before files are read."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name must be a text, got {name!r:.60}")
        if name in self._taken:
            raise ValueError(f"adapter {name!r} would have the name of the model itself")
        if name in self._loaded and not replace:
            raise ValueError(f"adapter {name!r} is loaded already; unload it first, or give replace=True")
        if name not in self._loaded and self.max_loaded is not None and len(self._loaded) >= self.max_loaded:
            raise TooManyAdaptersError(
                f"adapter {name!r:.80}: {len(self._loaded)} adapters are loaded, and max_loaded_adapters="
                f"{self.max_loaded} may be; unload one first, or raise it"
            )

    def _forget(self, adapter: LoadedAdapter) -> None:
        adapter.is_unloaded = True
        for engine in self._engine.engines:
            engine.scheduler.adapters.forget(adapter)
