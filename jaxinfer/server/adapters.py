"""Adapters of a server's model: which requests may name them, and the folders that they are read from over HTTP."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.adapters import TooManyAdaptersError
from jaxinfer.server.api_error import APIError, refused
from jaxinfer.server.folders import Folders
from jaxinfer.server.models import ServedModel
from jaxinfer.server.names import check_adapter_name
from jaxinfer.server.record import Record

_LOG = logging.getLogger("jaxinfer.server")
_NAME, _PATH = "lora_name", "lora_path"


class ServedAdapters:
    """The adapters of a model as its clients see them. All but the reading of files runs in the event loop."""

    def __init__(self, model: ServedModel, folders: Folders):
        self._model, self._folders = model, folders
        # Names of API keys that may name an adapter; it is for all of them if it is not here.
        self._keys: WeakKeyDictionary[LoadedAdapter, frozenset[str]] = WeakKeyDictionary()
        self._before: dict[str, LoadedAdapter | None] = {}  # by name, what it means until its load has ended
        self._lock = asyncio.Lock()  # one is loaded at a time
        self._tasks: set[asyncio.Task[None]] = set()

    # What requests may name.

    def find(self, name: str, record: Record) -> LoadedAdapter | None:
        """The adapter of a name; None where there is none that the request's key may name."""
        adapter = self._meant(name)
        return adapter if adapter is not None and self.is_seen(adapter, record) else None

    def seen_by(self, record: Record) -> list[LoadedAdapter]:
        """The adapters that a request's key may name."""
        names = list(self._model.llm.adapters) if self._is_ready else []
        return [adapter for name in names if (adapter := self.find(name, record)) is not None]

    def is_seen(self, adapter: LoadedAdapter, record: Record) -> bool:
        """True if the request's key may name the adapter."""
        keys = self._keys.get(adapter)
        return keys is None or record.is_admin or record.key in keys

    def _meant(self, name: str) -> LoadedAdapter | None:
        if name in self._before:
            return self._before[name]
        return self._model.llm.adapters.get(name) if self._is_ready else None

    @property
    def _is_ready(self) -> bool:
        return self._model.state == "ready" and not self._model.is_dead

    # What administrators change.

    async def load(self, name: str, path: str, keys: Sequence[str] | None, *, replaces: bool) -> None:
        """Loads an adapter from a folder, in a thread; a caller that leaves does not interrupt it. Without `keys` it
        has those of the adapter that it replaces, or is for all.

        Raises APIError 400, and then nothing has changed.
        """
        task = asyncio.ensure_future(self._load(name, path, keys, replaces))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, path: str, keys: Sequence[str] | None, replaces: bool) -> None:
        async with self._lock:
            model, start = self._model, time.perf_counter()
            llm = model.llm
            self._check_name(name, replaces)
            if not llm.engine.spec.options.max_adapters:
                raise APIError(400, "there is no room for adapters: start the server with --max-adapters 8")
            folder = await asyncio.to_thread(self._folders.folder, path)
            former = self._before[name] = llm.adapters.get(name)
            try:
                options = {
                    "replace": replaces,
                    "uses_tokenizer": False,
                }  # of a client no template
                adapter = await asyncio.to_thread(partial(llm.load_adapter, name, folder, **options))
                if keys is not None:
                    self._keys[adapter] = frozenset(keys)
                elif former is not None and former in self._keys:
                    self._keys[adapter] = self._keys[former]
            except TooManyAdaptersError as error:
                raise APIError(400, str(error), param=_NAME, code="too_many_adapters") from error
            except (ValueError, OSError) as error:
                told = model.source.without_paths(str(error).replace(str(folder), path))
                raise refused(_PATH, told) from error
            finally:
                del self._before[name]
            model.metrics.adapter_loads.inc()
            _LOG.info("loaded the adapter %s from %s in %.2f s", name, folder, time.perf_counter() - start)

    def _check_name(self, name: str, replaces: bool) -> None:
        try:
            check_adapter_name(name, {*self._model.names, *self._model.source.names})
        except ValueError as error:
            raise refused(_NAME, str(error)) from None
        if name in self._model.llm.adapters and not replaces:
            raise refused(_NAME, f"the adapter {name!r:.80} is loaded already; load_inplace=true replaces it")

    async def unload(self, name: str) -> None:
        """Takes an adapter away; requests that named it go on with it. Raises APIError 404 for an unknown one."""
        async with self._lock:
            if name not in self._model.llm.adapters:
                raise APIError(404, f"the adapter {name!r:.80} is not loaded", param=_NAME, code="adapter_not_found")
            self._model.llm.unload_adapter(name)
            _LOG.info("unloaded the adapter %s", name)
