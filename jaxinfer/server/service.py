"""What the routes share: the engine and whether it takes requests, the queue, the metrics, the log."""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

from jaxinfer import __version__
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.llm import LLM
from jaxinfer.server.admission import Admission
from jaxinfer.server.errors import unavailable
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.record import Record
from jaxinfer.text.reasoning import Family, family_of, hidden_tokens

State = Literal["loading", "ready", "draining", "stopped"]
_REQUEST_LOG = logging.getLogger("jaxinfer.server.requests")
_LOG = logging.getLogger("jaxinfer.server")
_PROBES = ("/health", "/ready", "/metrics")
_MAX_LOGGED_NAMES = 1000


class Service:
    """Args:
    name: of the model, as requests name it; also its folder or hub id may be used, if it is `alias`.
    """

    def __init__(self, options: ServerOptions, name: str, alias: str | None = None):
        self.options = options
        self.names: tuple[str, ...] = tuple(dict.fromkeys((name, alias or name)))
        self.created = int(time.time())
        self.state: State = "loading"
        self.metrics = Metrics(name)
        self.admission = Admission(1, options.max_queued, options.max_queued_tokens)
        self.generations: set[object] = set()  # those that have not ended
        self.num_body_bytes = 0  # of large bodies that are being received
        self.fingerprint = ""
        self.tags: Family | None = None
        self.hidden: tuple[str, ...] | None = None  # special tokens beside the tags, where the tags are special too
        self._engine: AsyncEngine | None = None
        self._secret = secrets.token_bytes(32)
        self._unknown_fields: set[str] = set()
        self.on_finish: Callable[[Record], None] | None = None  # makes a trace

    @property
    def name(self) -> str:
        return self.names[0]

    # The engine.

    def attach(self, engine: AsyncEngine) -> None:
        """Takes requests from now on."""
        llm = engine.llm
        spec = llm.engine.spec
        num_slots = spec.max_seqs * (len(getattr(llm.engine, "engines", ())) or 1)
        # A few more than run at once, so that no slot stays free until the next turn.
        self.admission.capacity = num_slots + max(1, num_slots // 4)
        if num_slots >= 16:  # of few slots one would be too much
            self.admission.num_unreserved = num_slots - num_slots // 16
        facts = [llm.fingerprint(), llm.acceptance, spec.dtype.name, spec.options.deterministic, __version__]
        self.fingerprint = "fp_" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        template = None if llm.tokenizer is None else llm.tokenizer.chat_template
        self.tags = family_of(self.options.reasoning, template)
        self.hidden = hidden_tokens(self.tags, llm.tokenizer)
        self._engine = engine
        self.metrics.watch(engine, lambda: self.admission.num_waiting)
        self.state = "ready"

    @property
    def engine(self) -> AsyncEngine:
        """Raises APIError 503 where there is none that works."""
        if self._engine is None or not self._engine.is_alive:
            raise unavailable(self._why_not() or "the server has no engine", 5)
        return self._engine

    @property
    def llm(self) -> LLM:
        """As `engine`."""
        return self.engine.llm

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread runs, or is still to be started."""
        return self._engine is None or self._engine.is_alive

    @property
    def is_resumable(self) -> bool:
        """Whether an answer is a function of its request, so that it can be computed again."""
        return self.llm.acceptance == "exact"

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

    # What is logged.

    def log_unknown(self, names: Sequence[str], route: str) -> None:
        """Logs each ignored field once."""
        for name in names:
            entry = f"{route} {name:.80}"
            if entry not in self._unknown_fields and len(self._unknown_fields) < _MAX_LOGGED_NAMES:
                self._unknown_fields.add(entry)
                _LOG.warning("%s: the field %r is not known and ignored", route, name[:80])

    def finish(self, record: Record) -> None:
        """Counts and logs a request that has been answered."""
        self.metrics.count_request(record)
        if self.on_finish is not None:
            self.on_finish(record)
        level = logging.DEBUG if record.route in _PROBES else logging.INFO
        if _REQUEST_LOG.isEnabledFor(level):
            _REQUEST_LOG.log(level, "%s", json.dumps(record.facts(), ensure_ascii=True))
