"""Protocol of what takes requests: one engine, or several behind one queue."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from jaxinfer.cache import KVScales
from jaxinfer.engine.compiling import Report
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.events import Observer, Snapshot
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.weights import ModelWeights
from jaxinfer.models import Params
from jaxinfer.speculative import SpeculationStats


class AnyEngine(Protocol):
    """The methods of `Engine`, which says what they do, and of `Replicas`."""

    @property
    def engines(self) -> Sequence[Engine]:
        """Each engine over devices of its own, with a scheduler and a cache of its own."""
        ...

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def weights(self) -> ModelWeights: ...

    @property
    def kv_scales(self) -> KVScales | None: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def unfinished(self) -> list[SequenceState]: ...

    def replace_draft(self, params: Params) -> None: ...

    def drop_draft(self) -> None: ...

    def come_to_rest(self, *, retains: bool = False) -> list[SequenceState]: ...

    @property
    def program_names(self) -> list[str]: ...

    @property
    def speculation_stats(self) -> SpeculationStats | None: ...

    def check_fits(self, num_prompt: int, max_tokens: int) -> None: ...

    def add(self, sequence: SequenceState) -> None: ...

    def step(self, max_steps: int | None = None) -> list[SequenceState]: ...

    def finish(self, sequence: SequenceState, reason: str, stop_reason: int | str | None = None) -> None: ...

    def observe(self, observer: Observer) -> AbstractContextManager[None]: ...

    def snapshot(self) -> Snapshot: ...

    def hidden_states(self, request: Request, taps: tuple[str, ...]) -> dict[str, np.ndarray]: ...

    def warm_up(self, num_jobs: int | None = None, report: Report = lambda name: None) -> int: ...

    def compile_ahead(self, is_stopped: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...
