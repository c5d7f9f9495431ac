"""State that the routes share: the models, whether requests are taken, the metrics, the log."""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request

from jaxinfer.engine.request import Request as PreparedRequest
from jaxinfer.openai.requests import CHARS_PER_TOKEN, check_timeout
from jaxinfer.server.adapters import ServedAdapters
from jaxinfer.server.api_error import refused, unavailable
from jaxinfer.server.folders import Folders
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.models import AdaptedModel, Catalogue, Lease, OneModel, ServedModel
from jaxinfer.server.options import ServerOptions, parse_duration
from jaxinfer.server.pool import ModelPool
from jaxinfer.server.record import RECORD, Record

if TYPE_CHECKING:
    from jaxinfer.server.kv_events import PrefixNames

State = Literal["loading", "ready", "draining", "stopped"]
_REQUEST_LOG = logging.getLogger("jaxinfer.server.requests")
_LOG = logging.getLogger("jaxinfer.server")
_PROBES = ("/health", "/ready", "/metrics")
_MAX_LOGGED_NAMES = 1000
DEFAULT_MAX_MODEL_LEN = 4096  # of models that are not loaded


class Service:
    """Args:
    name: of the default model, which requests mean that name none. catalogue: the models that may be named.

    Attributes:
      default: the one model, where no other can be served. adapters: of it; None where several models are served.

    Raises ValueError for folders of adapters that are none, and for routes of adapters of several models.
    """

    def __init__(self, options: ServerOptions, name: str | None, catalogue: Catalogue):
        self.options = options
        self.state: State = "loading"
        self.metrics = Metrics(name or "")
        self.is_one = isinstance(catalogue, OneModel)
        self.models = ModelPool(catalogue, options, self.metrics, name)
        self.generations: set[object] = set()  # those that have not ended
        self.num_body_bytes = 0  # of large bodies that are being received
        self.max_model_len = DEFAULT_MAX_MODEL_LEN
        self.trees: dict[str, Any] = {}  # of a trainer in this process, by the name that /update_weights gives
        self.key_names: frozenset[str] = frozenset()  # of API keys
        self._secret = secrets.token_bytes(32)
        self._unknown_fields: set[str] = set()
        self.on_finish: Callable[[Record], None] | None = None  # makes a trace
        self.prefix_names: PrefixNames | None = None  # what events of cached blocks say; None without events
        self.adapters: ServedAdapters | None = None
        if isinstance(catalogue, OneModel):
            self.default = self.models.add(catalogue.source)
            limit = options.adapter_max_mib, "--adapter-max-mib"
            folders = Folders(options.adapter_roots, "--adapter-root", "lora_path", limit)
            self.adapters = ServedAdapters(self.default, folders)
        elif options.adapter_routes or options.weight_routes:
            raise ValueError("adapter_routes and weight_routes are for a server of one model")
        self.weights_folders = Folders(options.weights_roots, "--weights-root", "update_info.path")

    # The models.

    async def lease(self, request: Request, body: Any) -> Lease:
        """The use of the model that a body names, for as long as it says. Raises as `ModelPool.acquire`."""
        record: Record = request.scope[RECORD]
        timeout = getattr(body, "timeout", None)
        check_timeout(timeout)
        try:
            keep_alive = parse_duration(getattr(body, "keep_alive", None))
        except ValueError as error:
            raise refused("keep_alive", f"keep_alive: {error}") from None
        start = time.perf_counter()
        adapted = self.adapted(body.model, record)
        lease = await self.models.acquire(
            body.model if adapted is None else None,
            key=record.key,
            num_tokens=record.num_bytes // CHARS_PER_TOKEN + 1,
            priority=getattr(body, "priority", None) or 0,
            timeout=timeout,
            keep_alive=keep_alive,
            request_id=record.request_id,
        )
        record.model = lease.model.name
        record.load_seconds = time.perf_counter() - start
        if adapted is not None:
            lease.model, record.adapter = adapted, adapted.name
        return lease

    def adapted(self, name: str | None, record: Record) -> AdaptedModel | None:
        """The model with the adapter of a name; None for a name that is not one of an adapter, and where the request's
        key may not name it."""
        if self.adapters is None or not name or (adapter := self.adapters.find(name, record)) is None:
            return None
        return AdaptedModel(self.default, adapter)

    async def find(self, name: str | None, record: Record) -> ServedModel:
        """The model of a name, or one with an adapter. Raises APIError as `ModelPool.find`."""
        return self.adapted(name, record) or await self.models.find(name)

    async def all_models(self, record: Record) -> list[ServedModel]:
        """Every model that a request may name, then those with adapters."""
        adapters = () if self.adapters is None else self.adapters.seen_by(record)
        return [*await self.models.all(), *(AdaptedModel(self.default, adapter) for adapter in adapters)]

    def largest_model_len(self) -> int:
        """The largest max_model_len of the loaded models, and of others by default."""
        models = [model for model in self.models.models if model.state == "ready" and not model.is_dead]
        loaded = [model.llm.max_model_len for model in models]
        return max(loaded) if loaded and self.is_one else max([*loaded, self.max_model_len])

    @property
    def is_healthy(self) -> bool:
        """True if the engine's thread runs, or is still to be started. One of several models is loaded again."""
        return not (self.is_one and self.default.is_dead)

    @property
    def why_not_ready(self) -> str | None:
        """The reason why new requests are not answered now; None where they are."""
        if (why := self._why_not()) is not None or not self.is_one or self.default.state != "ready":
            return why
        return self.default.engine.why_not_ready

    def check_accepts(self) -> None:
        """Raises APIError 503 unless new requests are taken."""
        if (why := self._why_not()) is not None:
            raise unavailable(why, 5)

    def _why_not(self) -> str | None:
        if not self.is_healthy:
            return "the engine has stopped; the server is restarting or going away"
        return {
            "loading": "the model is being loaded",
            "draining": "the server is shutting down and takes no new requests",
            "stopped": "the server is shutting down",
        }.get(self.state)

    def salt(self, key: str, cache_salt: str) -> str:
        """The salt of cached prefixes: clients of different keys share none, so that their timing shows nothing."""
        if not key and not cache_salt:
            return ""
        return hmac.new(self._secret, json.dumps([key, cache_salt]).encode(), hashlib.sha256).hexdigest()

    def name_prefixes(self, requests: Iterable[PreparedRequest], key: str, cache_salt: str, model: ServedModel) -> None:
        """Tells events of cached blocks, if there are any, whose prefixes those of requests are: as clients and routers
        know them, who do not know `salt`. A router is a client too; with one key there is nobody else."""
        if self.prefix_names is not None:
            tenant = (f"key:{key}",) if len(self.key_names) > 1 else ()
            adapter = None if model.adapter is None else model.name
            self.prefix_names.add(requests, (*((cache_salt,) if cache_salt else ()), *tenant), adapter)

    # What is logged.

    def log_unknown(self, names: Sequence[str], route: str) -> None:
        """Logs each ignored field once."""
        for name in names:
            entry = f"{route} {name:.80}"
            if entry not in self._unknown_fields and len(self._unknown_fields) < _MAX_LOGGED_NAMES:
                self._unknown_fields.add(entry)
                _LOG.warning("%s: %r is not known and ignored", route, name[:80])

    def finish(self, record: Record) -> None:
        """Counts and logs a request that has been answered."""
        self.metrics.count_request(record)
        if self.on_finish is not None:
            self.on_finish(record)
        level = logging.DEBUG if record.route in _PROBES else logging.INFO
        if _REQUEST_LOG.isEnabledFor(level):
            _REQUEST_LOG.log(level, "%s", json.dumps(record.facts(), ensure_ascii=True))
