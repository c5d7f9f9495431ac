"""Copies of pages and states between places of an engine's caches, and of pages to host memory and back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.cache import PagedCache, StateCache
from jaxinfer.engine.host_pages import Caches, HostPages
from jaxinfer.engine.lockstep import operation
from jaxinfer.engine.page_tables import HostTables
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.plans import DispatchPlan
from jaxinfer.engine.programs import paged as programs


class CacheCopies:
    """The part of `ModelRunner` that copies. It owns the caches: of the model, of a draft model, and saved states."""

    publish: Callable[[str, Sequence[Any]], None] | None
    placement: DevicePlacement
    host_pages: HostPages
    _cache: PagedCache
    _draft_cache: PagedCache | None
    _saved: StateCache | None

    def _move_pages(self, plan: DispatchPlan) -> None:
        """Pages that leave for the host, then those that come back; in one process, so it is no operation."""
        if plan.to_host or plan.from_host:
            self._caches = self.host_pages.move(self._caches, plan.to_host, plan.from_host)

    @property
    def caches(self) -> Caches:
        """What pages and saved states lie in, until the next dispatch."""
        return self._caches

    @property
    def _caches(self) -> Caches:
        return Caches(self._cache, self._draft_cache, self._saved)

    @_caches.setter
    def _caches(self, caches: Caches) -> None:
        self._cache, self._draft_cache, self._saved = caches

    @operation
    def _copy_states(self, saves: bool, copies: HostTables) -> None:
        """Saves states of slots, or restores them: `state_copies`."""
        if self._saved is None or self._cache.states is None:
            return
        copies = self.placement.put(copies)
        if saves:
            self._saved = programs.copy_states(self._saved, self._cache.states, *copies)
        else:
            restored = programs.copy_states(self._cache.states, self._saved, *copies)
            self._cache = dataclasses.replace(self._cache, states=restored)

    @operation
    def _copy_pages(self, sources: HostTables, destinations: HostTables) -> None:
        arguments = self.placement.put((sources, destinations))
        self._cache = programs.copy_pages(self.placement.mesh, self._cache, *arguments)
        first = tuple(ids[:1] for ids in arguments)  # where a draft's keys are
        self._draft_cache = self._draft_cache and programs.copy_pages(self.placement.mesh, self._draft_cache, *first)
