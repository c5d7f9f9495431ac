"""Several models in one server: loaded when a request names them, within a budget of bytes, unloaded when idle.

One model is loaded at a time, in a thread, in the order in which requests first named them. A model that needs room
takes that of the model that was used least recently and is idle; if all are busy, those used least recently take no new
requests until they are idle, so that a model in steady use cannot keep the others out for ever. A busy or pinned model
is never unloaded for another one. Everything here runs in the event loop.
"""

import asyncio
import contextlib
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.checks import format_bytes
from jaxinfer.engine.memory import OutOfMemoryError
from jaxinfer.server.admission import Admission
from jaxinfer.server.api_error import APIError, unavailable
from jaxinfer.server.errors import drop_locals, load_error
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.models import Catalogue, Lease, ModelNeeds, ModelSource, OneModel, ServedModel, bytes_together
from jaxinfer.server.options import ServerOptions

_LOG = logging.getLogger("jaxinfer.server")
_MAX_KNOWN = 1000  # names that are remembered; those that are loaded always are
_COLLECT_SECONDS = 5.0  # after a model was unloaded
_FIRST_LOAD_SECONDS = 10.0  # told to clients before a load has been timed


class ModelPool:
    """Args:
    default: the name that requests mean which name none; None where they have to.
    """

    def __init__(self, catalogue: Catalogue, options: ServerOptions, metrics: Metrics, default: str | None):
        self._catalogue, self._options, self._metrics = catalogue, options, metrics
        self.default_name = default
        self._models: dict[str, ServedModel] = {}  # by each of their names
        self._by_key: dict[str, ServedModel] = {}
        self._admissions: list[Admission] = []
        self._line: list[ServedModel] = []  # to be loaded
        self._waiters: dict[ServedModel, set[asyncio.Future[None]]] = {}
        self._loader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # a model became idle, or a request gave up waiting
        self._lock = asyncio.Lock()  # of loading and unloading
        self._tasks: set[asyncio.Task[Any]] = set()
        self._load_start = 0.0  # of the load that runs
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._collecting: asyncio.TimerHandle | None = None
        self.budget: int | None = None
        self.is_store = catalogue.is_store
        self.compiling: list[threading.Thread] = []  # programs of models that answer already

    # Names.

    @property
    def models(self) -> list[ServedModel]:
        """Those that requests have named, or that were loaded at the start."""
        return list(dict.fromkeys(self._models.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all models that are loaded, or about to be."""
        return bytes_together(model.needs for model in self.models)

    def add(self, source: ModelSource) -> ServedModel:
        """A model from where it comes; the one that is known already where it is the same under another name."""
        model = self._by_key.get(source.key) if source.key else None
        if model is None:
            model = ServedModel(source, self._options, self._metrics, self._admissions)
            seconds = self._options.keep_alive_seconds
            model.keep_alive = next(seconds[name] for name in (*model.names, "") if name in seconds)
            if source.key:
                self._by_key[source.key] = model
        elif model.is_resting:
            self._renew(model, source)
        model.names = list(dict.fromkeys((*model.names, *source.names)))
        model.is_pinned |= bool({*source.names} & {*(self._options.pin or ())}) or isinstance(self._catalogue, OneModel)
        self._models |= dict.fromkeys(source.names, model)
        return model

    async def find(self, name: str | None) -> ServedModel:
        """Raises APIError: 404 for a name that is not served, 400 where a name is needed."""
        if not name:
            if self.default_name is None:
                raise APIError(400, f"model is missing; {await self._served()}", param="model")
            name = self.default_name
        model = self._models.get(name)
        if model is not None and not model.is_resting:
            return model
        source = await asyncio.to_thread(self._catalogue.find, name)
        model = self._models.get(name)
        if model is not None and not model.is_resting:  # another request has come for it meanwhile
            return model
        if source is None:
            self._forget(name)
            message = f"the model {name!r:.80} is not served here; {await self._served()}"
            raise APIError(404, message, param="model", code="model_not_found")
        if len(self._models) >= _MAX_KNOWN:
            for other in [known for known, other in self._models.items() if other.is_resting]:
                self._forget(other)
            model = self._models.get(name)
        if model is None or model.source.key != source.key:
            self._forget(name)
            return self.add(source)
        self._renew(model, source)
        return model

    def _renew(self, model: ServedModel, source: ModelSource) -> None:
        """Drops the names that `source` lacks: they may be gone, or name other models."""
        for name in {*model.names} - {*source.names}:
            self._models.pop(name, None)
        model.source, model.names = source, list(source.names)
        model.metrics = self._metrics.of(model.name)
        if model.state == "failed":  # its files may have changed
            model.counted = None

    def _forget(self, name: str) -> None:
        """A name that is no longer served, or means another model."""
        model = self._models.pop(name, None)
        if model is None:
            return
        if model not in self._models.values():
            self._by_key.pop(model.source.key, None)
            if model.admission in self._admissions and not model.num_users:
                self._admissions.remove(model.admission)
        elif name in model.names:
            model.names.remove(name)

    def seconds_left(self, model: ServedModel) -> float | None:
        """Until a loaded model is unloaded, if no request comes after those that use it; None where it stays."""
        if model.is_pinned or math.isinf(model.keep_alive):
            return None
        return model.keep_alive if model.expires is None else max(model.expires - time.monotonic(), 0.0)

    async def _served(self) -> str:
        names = await asyncio.to_thread(self._catalogue.names)
        more = f" and {len(names) - 5} others" if len(names) > 5 else ""
        return f"served are {', '.join(repr(name) for name in names[:5])}{more}" if names else "no model is known"

    async def all(self) -> list[ServedModel]:
        """Every model that may be named, known ones first, without loading any."""
        names = await asyncio.to_thread(self._catalogue.names)
        gone = [name for name, model in self._models.items() if model.is_resting and name not in names]
        for name in [*gone, *(name for name in names if name not in self._models)]:
            with contextlib.suppress(Exception):  # it was removed, or its files are broken
                await self.find(name)
        return self.models

    # Use.

    async def acquire(
        self,
        name: str | None,
        *,
        key: str = "",
        num_tokens: int = 0,
        priority: int = 0,
        timeout: float | None = None,
        keep_alive: float | None = None,
        request_id: str = "",
    ) -> Lease:
        """The use of a model, which is loaded first if it is not. The caller releases it.

        Args:
          key, num_tokens, priority: as of `Admission.enter`, in whose queue the request counts while it waits.
          timeout: seconds that the request has. keep_alive: seconds that the model stays after it.
          request_id: what the log calls a request that waits; "" for the server's own.

        Raises APIError: as `find`; 429 where too many wait; 503 where the model cannot be ready in time, with the
        seconds until it may be; 500, with the reason, where it cannot be loaded.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        model = await self.find(name)
        if model.is_usable:
            model.num_users += 1
        else:
            with model.admission.enter(key, 1, num_tokens, priority):
                if request_id:
                    _LOG.info("%s waits for %s, which is %s", request_id, model.name, self._progress(model))
                await self._wait_for(model, timeout)
        model.last_used = time.monotonic()
        model.set_expiry(None)
        return Lease(model, deadline, lambda: self._release(model, keep_alive))

    async def unload(self, name: str) -> ServedModel:
        """Unloads a model when its requests have ended; those that come later load it again. Raises APIError: 404
        for an unknown name, 400 for the only model of a server and for one that is pinned."""
        model = await self.find(name)
        self._check_leaves(model)
        await self._stop(model)
        return model

    async def drop(self, name: str, remove: Callable[[], object]) -> None:
        """Removes a model from where it is stored, in a thread, then unloads it unless it has other names. Raises what
        `remove` does, and as `unload`."""
        model = await self.find(name)
        if is_last := model.names == [name]:
            self._check_leaves(model)
        await asyncio.to_thread(remove)
        if is_last:
            await self._stop(model)
        if self._models.get(name) is model and (not is_last or model.is_resting):
            self._forget(name)

    def _check_leaves(self, model: ServedModel) -> None:
        if isinstance(self._catalogue, OneModel):
            raise APIError(400, f"{model.name} is the only model of this server: it stays", param="model")
        if model.is_pinned:
            raise APIError(400, f"{model.name} is one of --pin: it stays", param="model")

    async def _stop(self, model: ServedModel) -> None:
        try:
            while model.state in ("ready", "loading", "unloading"):
                model.is_leaving = model.state == "ready"
                if model.state == "ready" and not model.num_users:
                    async with self._lock:
                        if model.state == "ready" and not model.num_users:
                            await self._unload(model, "it was stopped")
                    continue  # it may have changed while others held the lock
                self._changed.clear()
                await self._changed.wait()
        finally:
            model.is_leaving = False
            self._changed.set()

    def _release(self, model: ServedModel, keep_alive: float | None) -> None:
        if keep_alive is not None:
            model.keep_alive = keep_alive
        model.num_users -= 1
        model.last_used = time.monotonic()
        self._changed.set()
        self._set_expiry(model)

    def _set_expiry(self, model: ServedModel) -> None:
        if model.num_users or model.state != "ready":
            return
        if model.is_pinned or math.isinf(model.keep_alive):
            model.set_expiry(None)
        else:
            model.set_expiry(model.last_used + model.keep_alive, lambda: self._start(self._expire(model)))

    async def _expire(self, model: ServedModel) -> None:
        async with self._lock:
            is_due = model.expires is not None and time.monotonic() >= model.expires - 1e-3
            if model.state == "ready" and is_due and not model.num_users:
                await self._unload(model, f"it was idle for {model.keep_alive:g} s")

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Waiting.

    async def _wait_for(self, model: ServedModel, timeout: float | None) -> None:
        """Waits until the model is loaded, and counts as its user then."""
        if self._is_closed:
            raise unavailable("the server is shutting down", 5)
        if timeout is not None and self._seconds_ahead(model) > timeout:
            raise self._late(model, timeout)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(model, set()).add(future)
        model.num_waiting += 1
        if model not in self._line:
            self._line.append(model)
            self._changed.set()
        if self._loader is None or self._loader.done():
            self._loader = asyncio.ensure_future(self._load_line())
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(future)
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(model, None)
            if isinstance(error, TimeoutError):
                raise self._late(model, timeout or 0) from None
            raise
        finally:
            self._waiters.get(model, set()).discard(future)
            model.num_waiting -= 1
            future.cancel()
            self._changed.set()

    def _progress(self, model: ServedModel) -> str:
        """A few words for the log on a model that a request has to wait for."""
        if model in self._line:
            return "being loaded" if model.state == "loading" else "waiting for other models to be loaded"
        return f"loaded after {self._line[-1].name}" if self._line else "loaded now"

    def _late(self, model: ServedModel, timeout: float) -> APIError:
        message = f"the model {model.name!r:.80} is not loaded, and cannot be within the {timeout:g} s of the request"
        own = _FIRST_LOAD_SECONDS if model.load_seconds is None else model.load_seconds
        return unavailable(message, self._seconds_ahead(model) + own)

    def _seconds_ahead(self, model: ServedModel) -> float:
        """Until the model's own load begins, as far as the loads before it are known. How long its own takes is no
        reason to refuse it: its last one may have compiled, or read from a colder disk."""
        before = self._line[: self._line.index(model)] if model in self._line else self._line
        left = 0.0
        for earlier in before:
            elapsed = time.monotonic() - self._load_start if earlier.state == "loading" else 0.0
            left += max((earlier.load_seconds or 0.0) - elapsed, 0.0)
        return left

    def _answer_waiters(self, model: ServedModel, error: Exception | None) -> None:
        for future in self._waiters.pop(model, ()):
            if future.done():
                continue
            if error is None:
                model.num_users += 1
                future.set_result(None)
            else:
                future.set_exception(error)

    # Loading, one model at a time.

    async def _load_line(self) -> None:
        while self._line:
            error = None
            stopping = [
                item for item in self._line if item.is_leaving and item.state == "ready" and self._is_wanted(item)
            ]
            model = next((waiting for waiting in self._line if waiting not in stopping), None)
            if model is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                async with self._lock:
                    if not model.is_usable and self._is_wanted(model):
                        await self._load(model)
            except Exception as failure:
                _LOG.warning("the model %s could not be loaded: %s", model.name, failure)
                error = load_error(model.name, failure, model.source.without_paths(str(failure)))
            self._line.remove(model)
            if error is not None or model.is_usable:
                self._answer_waiters(model, error)
            elif self._is_wanted(model):  # it is being stopped, or was unloaded meanwhile
                self._line.append(model)
            self._set_expiry(model)
            self._changed.set()

    def _is_wanted(self, model: ServedModel) -> bool:
        return bool(self._waiters.get(model)) and not self._is_closed

    async def _load(self, model: ServedModel) -> None:
        if model.state == "ready":  # it died, or was told to leave
            if not model.is_dead:
                return
            await self._unload(model, "its engine has died")
        if self.budget is None:
            self.budget = await asyncio.to_thread(self._catalogue.budget)
        try:
            needs = ModelNeeds({})
            if self.budget is not None:
                if model.counted is None:
                    model.counted = await asyncio.to_thread(model.source.count, self.budget)
                needs = model.counted
                if not await self._make_room(model, needs):
                    return
            model.state, model.needs = "loading", needs
            self._load_start = time.monotonic()
            engine = await asyncio.to_thread(model.source.open, needs)
            if isinstance(self._catalogue, OneModel):
                # What loading has made stays: the collector need not look at it again.
                gc.collect()
                gc.freeze()
            await self._attach(model, engine)
            if self._options.lazy and model.load_seconds is None:
                self.compiling.append(engine.compile_ahead())
        except Exception as error:
            drop_locals(error)
            model.state, model.needs = "failed", ModelNeeds({})
            model.error = model.source.without_paths(str(error))
            raise
        model.load_seconds = time.monotonic() - self._load_start
        model.last_used = time.monotonic()
        model.metrics.loads.inc()
        model.metrics.load_seconds.inc(model.load_seconds)
        _LOG.info("loaded %s in %.2f s, %s", model.name, model.load_seconds, format_bytes(needs.num_bytes))

    async def _attach(self, model: ServedModel, engine: AsyncEngine) -> None:
        try:
            await asyncio.to_thread(model.attach, engine)
        except BaseException:
            model.detach()
            await engine.close()
            raise

    async def _make_room(self, model: ServedModel, needs: ModelNeeds) -> bool:
        """Unloads other models until this one has room; False where no request waits for it any more.

        Raises OutOfMemoryError where it can never have room.
        """
        assert self.budget is not None
        others = [other for other in self.models if other is not model]
        staying = [other.needs for other in others if other.is_pinned]
        if bytes_together([needs, *staying]) > self.budget:
            kept = format_bytes(bytes_together(staying))
            beside = f" beside {kept} of the models that are always kept" if staying else ""
            raise OutOfMemoryError(
                f"{model.name} needs {format_bytes(needs.num_bytes)}, and the budget of all models is "
                f"{format_bytes(self.budget)}{beside}: raise --model-memory, or lower --max-seqs, --max-model-len or "
                f"--num-pages"
            )
        leaving: set[ServedModel] = set()
        budget = self.budget

        def is_full(gone: set[ServedModel]) -> bool:
            needed = [needs, *(other.needs for other in self.models if other not in {model, *gone})]
            return bytes_together(needed) > budget

        try:
            while is_full(set()):
                if not self._is_wanted(model):
                    return False
                loaded = [other for other in others if other.state == "ready" and not other.is_pinned]
                loaded.sort(key=lambda other: other.last_used)
                idle = next((other for other in loaded if not other.num_users), None)
                if idle is not None:
                    await self._unload(idle, f"{model.name} needs its room")
                    continue
                going: set[ServedModel] = set()
                for other in loaded:  # all are busy
                    if is_full(going):
                        other.is_leaving = True
                        going.add(other)
                leaving |= going
                self._changed.clear()
                await self._changed.wait()
            return self._is_wanted(model)
        finally:
            for other in leaving:
                other.is_leaving = False

    async def _unload(self, model: ServedModel, why: str) -> None:
        engine = model.detach()
        model.state = "unloading"
        model.set_expiry(None)
        if engine is not None:
            await engine.close()  # frees the arrays; the rest is collected when the next model has been loaded
            if self._collecting is None:
                self._collecting = asyncio.get_running_loop().call_later(_COLLECT_SECONDS, self._collect)
        model.state, model.needs = "unloaded", ModelNeeds({})
        self._changed.set()
        _LOG.info("unloaded %s: %s", model.name, why)

    def _collect(self) -> None:
        self._collecting = None
        self._start(asyncio.to_thread(gc.collect))

    # The end.

    def refuse_waiting(self, error: APIError) -> None:
        """Those that wait for a model are told that none will be loaded."""
        self._is_closed = True
        for model in list(self._waiters):
            self._answer_waiters(model, error)
        self._changed.set()

    async def close(self) -> None:
        """Ends every engine: readers of running answers are told of an abort. Then a load that runs is waited for. A
        second call waits for the first, which goes on though a caller gives up."""
        if self._closing is None:
            self.refuse_waiting(unavailable("the server is shutting down", 5))
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._close_engines()
        if self._loader is not None:
            await self._loader
        async with self._lock:
            await self._close_engines()  # of the one that was loaded meanwhile

    async def _close_engines(self) -> None:
        for model in self.models:
            if (engine := model.detach()) is not None:
                model.set_expiry(None)
                await engine.close()
                model.state = "unloaded"

    @property
    def is_loading(self) -> bool:
        """True if a model is being loaded, which cannot be interrupted."""
        return any(model.state == "loading" for model in self.models)
