"""One served model: its names, its engine while it is loaded, and what answers say of it."""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, Protocol

from jaxinfer import __version__
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.api.llm import LLM
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.weights import WeightsError
from jaxinfer.openai.requests import TextModel
from jaxinfer.server.admission import Admission
from jaxinfer.server.api_error import unavailable
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.names import check_adapter_name
from jaxinfer.server.options import ServerOptions
from jaxinfer.text.reasoning import Family, family_of
from jaxinfer.tool_calls import AnswerFormat

ModelState = Literal["unloaded", "loading", "ready", "unloading", "failed"]


@dataclass(frozen=True)
class ModelNeeds:
    """Bytes of a device that a model needs, by part, counted before it is loaded; `num_pages` are those of its cache.
    A model that is not counted has no parts. `shared` are the bytes of weights, contained in the parts, by what they
    are loaded from: models with the same ones share them."""

    parts: dict[str, int]
    num_pages: int | None = None
    shared: dict[Hashable, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


def bytes_together(needs: Iterable[ModelNeeds]) -> int:
    """Bytes that models need which are loaded at once."""
    needs = list(needs)
    own = sum(model_needs.num_bytes - sum(model_needs.shared.values()) for model_needs in needs)
    return own + sum({key: size for model_needs in needs for key, size in model_needs.shared.items()}.values())


@dataclass(frozen=True)
class ModelSource:
    """The source of a served model.

    Attributes:
      names: of the model in requests; answers have the first.
      root: what clients see of where it comes from: a hub id, an alias, or the name of a folder or a file.
      open: loads it, in a thread. count: what it will need, of a budget in bytes, in a thread; raises
        OutOfMemoryError where it needs more than the budget.
      key: equal for names of the same weights, options and defaults, which share one engine.
      given: what loads it; "" where that is its name. paths: where it lies on this machine, as errors may spell it;
        clients see its name instead.
    """

    names: tuple[str, ...]
    root: str
    open: Callable[[ModelNeeds], AsyncEngine]
    count: Callable[[int], ModelNeeds] = lambda budget: ModelNeeds({})
    key: str = ""
    given: str = ""
    paths: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        return any(path.endswith(".gguf") for path in (*self.paths, self.root))

    def without_paths(self, text: str) -> str:
        """A text for clients, with the model's name in place of its paths."""
        for path in sorted(self.paths, key=len, reverse=True):
            text = text.replace(path, self.names[0])
        return text


class Catalogue(Protocol):
    """The models that may be named. Its methods may read files: they are called in threads."""

    @property
    def is_store(self) -> bool:
        """True if they are those stored on this machine, whichever these are."""
        ...

    def names(self) -> Sequence[str]:
        """All of them, as far as they can be listed."""
        ...

    def find(self, name: str) -> ModelSource | None:
        """The model of that name; None for an unknown one."""
        ...

    def budget(self) -> int | None:
        """Bytes of a device that all models together may need; None where they are not counted."""
        ...


class OneModel:
    """The catalogue of a server of one model."""

    is_store = False

    def __init__(self, source: ModelSource):
        self.source = source

    def names(self) -> Sequence[str]:
        return self.source.names[:1]

    def find(self, name: str) -> ModelSource | None:
        return self.source if name in self.source.names else None

    def budget(self) -> int | None:
        return None


class ServedModel:
    """A model by its names, loaded or not.

    Attributes:
      state: "ready" while it is loaded. error: why it could not be loaded, until the next try.
      needs: what it holds, or is about to. num_users: requests that hold it. num_waiting: those that wait for it to be
        loaded. is_leaving: whether requests that come now wait until it has been unloaded and loaded again.
      last_used: when a request last came or ended. load_seconds: what the last load took, None before the first.
      keep_alive: seconds after the last request until it is unloaded. expires: when that is, None while it is in use.
      adapter: with which it answers; None but in an `AdaptedModel`.
    """

    adapter: LoadedAdapter | None = None

    def __init__(self, source: ModelSource, options: ServerOptions, metrics: Metrics, admissions: list[Admission]):
        self.source = source
        self.names = list(source.names)
        self.created = int(time.time())
        self.admission = Admission(1, options.max_queued, options.max_queued_tokens, together=admissions)
        self.metrics = metrics.of(self.name)
        self.state: ModelState = "unloaded"
        self.error: str | None = None
        self.needs = ModelNeeds({})
        self.counted: ModelNeeds | None = None  # of the last load
        self.num_users = self.num_waiting = 0
        self.is_leaving = False
        self.is_pinned = False
        self.last_used = 0.0
        self.load_seconds: float | None = None
        self.keep_alive = float("inf")
        self.expires: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fingerprint = -1, ""  # of weights of that version
        self.answers = AnswerFormat(None)
        self._reasoning, self._pooling, self._all_metrics = options.reasoning, options.pooling, metrics
        self._engine: AsyncEngine | None = None
        self._watched = self.name

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def texts(self) -> TextModel:
        """The model as the texts of its requests are read."""
        return self.llm.text_model(self.adapter)

    @property
    def base_name(self) -> str:
        """The name of the model without an adapter."""
        return self.name

    @property
    def template(self) -> str:
        """The chat template, "" where there is none."""
        return (None if self.llm.tokenizer is None else self.llm.tokenizer.chat_template) or ""

    @property
    def tags(self) -> Family | None:
        """The tags of the model's reasoning, where it has any."""
        return self.answers.reasoning

    @property
    def fingerprint(self) -> str:
        """A short hash of what answers depend on besides the request; "" before the model is loaded."""
        if self._engine is not None and not self.is_dead:
            llm = self._engine.llm
            weights, spec = llm.engine.weights, llm.engine.spec
            version = weights.version
            with contextlib.suppress(WeightsError):  # an update has begun: the next request asks again
                if version != self._fingerprint[0] and weights.is_whole:
                    model = llm.fingerprint_of(llm.weights_version) or llm.fingerprint()  # kept, for coordinates
                    facts = [model, llm.acceptance, spec.dtype.name, spec.determinism.rows, __version__]
                    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
                    if weights.version == version:
                        self._fingerprint = version, "fp_" + digest[:16]
        return self._fingerprint[1]

    def attach(self, engine: AsyncEngine) -> None:
        """The model is loaded. Raises ValueError for an adapter with a name of the model."""
        llm = engine.llm
        for name in llm.adapters:
            check_adapter_name(name, self.names)
        llm.client.name = self.name  # in what clients are told, where it would be a path
        llm.embedder.default_pooling = self._pooling
        spec = llm.engine.spec
        num_slots = spec.max_seqs * len(llm.engine.engines)
        # A few more than run at once, so that no slot stays free until the next turn.
        self.admission.capacity = num_slots + max(1, num_slots // 4)
        if num_slots >= 16:  # of few slots one would be too much
            self.admission.num_unreserved = num_slots - num_slots // 16
        template = None if llm.tokenizer is None else llm.tokenizer.chat_template
        own, family = llm.answer_format, family_of(self._reasoning, template)
        self.answers = own if own.reasoning == family else AnswerFormat(llm.tokenizer, own.parser, family)
        self._engine = engine
        _ = self.fingerprint  # before requests need it
        self._watched = self.name  # it may lose this name
        self._all_metrics.watch(self._watched, engine, self.admission)
        self.metrics.adapter_loads.inc(len(llm.adapters))
        self.state, self.error = "ready", None

    def set_expiry(self, expires: float | None, on_expiry: Callable[[], None] = lambda: None) -> None:
        """When it is to be unloaded, on the clock of time.monotonic(), in place of what was set before; None for not
        at all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.expires = expires
        if expires is not None:
            delay = max(expires - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, on_expiry)

    def detach(self) -> AsyncEngine | None:
        """Takes the engine away, which the caller closes."""
        engine, self._engine = self._engine, None
        self._all_metrics.unwatch(self._watched)
        return engine

    @property
    def engine(self) -> AsyncEngine:
        """Raises APIError 503 where there is none that works."""
        if self._engine is None or not self._engine.is_alive:
            raise unavailable("the engine has stopped; the server is restarting or going away", 5)
        return self._engine

    @property
    def llm(self) -> LLM:
        """As `engine`."""
        return self.engine.llm

    @property
    def is_dead(self) -> bool:
        """True if its engine's thread has ended without being closed."""
        return self._engine is not None and not self._engine.is_alive

    @property
    def is_resting(self) -> bool:
        """True if no request uses it or waits for it, so that it may be forgotten, or come from elsewhere."""
        return self.state in ("unloaded", "failed") and not self.num_waiting

    @property
    def is_usable(self) -> bool:
        """True if a request that comes now can use it at once."""
        return self.state == "ready" and not self.is_leaving and not self.is_dead

    @property
    def is_resumable(self) -> bool:
        """True if an answer is a function of its request, so that it can be computed again."""
        return self.llm.acceptance == "exact"

    def facts(self) -> dict[str, Any]:
        """The model in the list of models."""
        about: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "jaxinfer",
            "root": self.source.root,
        }
        if self.state == "ready" and not self.is_dead:
            about["max_model_len"] = self.llm.max_model_len
        return about

    def status(self, now: float) -> dict[str, Any]:
        """The facts that `jaxinfer ps` shows; seconds are None where they do not apply."""
        left = None if self.expires is None else max(self.expires - now, 0.0)
        return {
            "value": self.state,
            "is_pinned": self.is_pinned,
            "bytes": self.needs.num_bytes,
            "requests": self.num_users,
            "waiting": self.num_waiting,
            "idle_seconds": round(now - self.last_used, 3) if self.state == "ready" and not self.num_users else None,
            "keep_alive_seconds": None if left in (None, float("inf")) else round(left, 3),
            "load_seconds": None if self.load_seconds is None else round(self.load_seconds, 3),
            "error": None if self.error is None else self.error[:1000],
        }


class AdaptedModel(ServedModel):
    """A loaded model with one of its adapters, as a request has it: with a name and a fingerprint of its own."""

    def __init__(self, base: ServedModel, adapter: LoadedAdapter):
        self._base, self.adapter = base, adapter
        self.names = [adapter.name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    @property
    def fingerprint(self) -> str:
        """As of the model, with the adapter."""
        assert self.adapter is not None
        digest = hashlib.sha256(f"{self._base.fingerprint} {self.adapter.identity}".encode())
        return "fp_" + digest.hexdigest()[:16]

    @property
    def base_name(self) -> str:
        """The name of the model without the adapter."""
        return self._base.name

    def facts(self) -> dict[str, Any]:
        """The adapter in the list of models, in vLLM's form. `root` is the last part of its folder's path, if any."""
        assert self.adapter is not None
        root = PurePath(self.adapter.source).name or self.name
        return {**self._base.facts(), "id": self.name, "root": root, "parent": self.base_name}


class Lease:
    """The use of a model by one request: it is not unloaded before `release`.

    Attributes:
      deadline: of the request, on the clock of time.monotonic(); None for none.
    """

    def __init__(self, model: ServedModel, deadline: float | None, on_release: Callable[[], None]):
        self.model, self.deadline, self._on_release = model, deadline, on_release
        self._is_released = False

    def release(self) -> None:
        """A second call does nothing."""
        if not self._is_released:
            self._is_released = True
            self._on_release()

    def __enter__(self) -> ServedModel:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.release()
