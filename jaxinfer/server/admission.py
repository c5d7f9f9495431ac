"""The queue of answers: limits on how many wait, and fair turns over API keys, counted in tokens.

Only as many answers as the engine can run, and a few more, are handed to it; the others wait here, where their order
can still change. The turn goes to the key that has been served the fewest tokens, in its queue to the lowest priority
number and then to the first (start-time fair queueing, Goyal, Vin and Cheng 1996, with tokens as the work). A ticket's
`rank` keeps this order in the engine, for those few that wait there.

A full queue refuses the keys that have their share of it: what one key sends does not keep out the others.

An answer that another server began does not wait here again: it goes on as soon as the engine has room.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from jaxinfer.server.api_error import APIError

_NUM_REMEMBERED = 64  # ends of answers, from which the drain rate is estimated
_MAX_RETRY_SECONDS = 120
_RECENT_SECONDS = 60.0  # that a key counts as one that may send another request


class Ticket:
    """A request's place: waiting from `Admission.enter` on, running from its turn on, left with the `with` block."""

    def __init__(
        self, admission: "Admission", key: str, num_answers: int, num_tokens: int, priority: int, adapter: Any = None
    ):
        self._admission, self.key, self.priority, self.adapter = admission, key, priority, adapter
        self.num_answers, self.num_tokens = num_answers, num_tokens
        self.is_running = self.is_continued = False
        self.rank, self.expected = 0, 0.0  # from its turn on: lower goes first; tokens that it was counted with
        self.turned = asyncio.Event()

    async def turn(self) -> None:
        """Waits for this request's turn."""
        self._admission._wait(self)
        await self.turned.wait()

    def leave(self, num_output: int = 0) -> None:
        """The request has ended, or was given up; `num_output` tokens were made for it. A second call does nothing."""
        self._admission._leave(self, num_output)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


@dataclass
class _Key:
    """Requests of one API key. `served`: tokens of those that have ended. `promised`: of those that run, estimated."""

    served: float = 0.0
    promised: float = 0.0
    rank: int = 0
    entered: float = 0.0
    num_inside: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    queue: list[tuple[int, int, Ticket]] = field(default_factory=list)

    @property
    def work(self) -> float:
        return self.served + self.promised


class Admission:
    """Args:
    capacity: answers that the engine takes at once. max_queued: answers that may wait beyond them.
    max_queued_tokens: prompt tokens of those that wait.

    together: the admissions of all models of a server, whose limits on what waits are common; this one is added.

    Attributes:
      num_unreserved: where several keys send requests, one that has its even share of the engine gets a turn only while
        fewer answers than this run, so that a key at a low rate finds a free slot; None for no such limit.
    """

    def __init__(
        self,
        capacity: int,
        max_queued: int,
        max_queued_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        together: "list[Admission] | None" = None,
    ):
        self.capacity, self.max_queued, self.max_queued_tokens = capacity, max_queued, max_queued_tokens
        self.num_unreserved: int | None = None
        self.num_running = self.num_waiting = self.num_waiting_tokens = 0
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._inside: set[Ticket] = set()
        self._orders = itertools.count()
        self._ends: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)
        self._mean_output = 64.0
        self._together = [] if together is None else together
        self._together.append(self)

    def enter(
        self,
        key: str,
        num_answers: int,
        num_tokens: int,
        priority: int = 0,
        adapter: Any = None,
        *,
        is_continued: bool = False,
    ) -> Ticket:
        """A place for a request, which `adapter` answers. Raises APIError 429, with the seconds after which to try
        again, if too much waits, unless it continues an answer (`is_continued`)."""
        own = self._keys.setdefault(key, _Key())
        if not is_continued:
            self._check_room(key, num_answers, num_tokens)
        ticket = Ticket(self, key, num_answers, num_tokens, priority, adapter)
        ticket.is_continued = is_continued
        if own.num_inside == 0:  # it does not save turns up while it is away
            others = [other.served for other in self._keys.values() if other.num_inside]
            own.served = max(own.served, min(others, default=own.served))
        own.num_inside += 1
        own.entered = self._clock()
        self._inside.add(ticket)
        self._count_waiting(ticket, 1)
        return ticket

    def _check_room(self, key: str, num_answers: int, num_tokens: int) -> None:
        """Raises APIError 429."""
        names = {name for admission in self._together for name, its in admission._keys.items() if its.num_inside}
        num_keys = len(names | {key})
        owns = [admission._keys[key] for admission in self._together if key in admission._keys]
        num_waiting = sum(admission.num_waiting for admission in self._together)
        total = self.num_running + num_waiting + num_answers
        has_share = num_keys == 1 or sum(its.num_waiting for its in owns) + num_answers > self.max_queued // num_keys
        if total > self.capacity + self.max_queued and names and has_share:
            raise self._refusal("queue_full", f"{num_waiting} answers wait already")
        num_waiting = sum(admission.num_waiting_tokens for admission in self._together)
        own_tokens = sum(its.num_waiting_tokens for its in owns) + num_tokens
        has_share = num_keys == 1 or own_tokens > self.max_queued_tokens // num_keys
        if num_waiting and num_waiting + num_tokens > self.max_queued_tokens and has_share:
            raise self._refusal("queue_full", f"{num_waiting} prompt tokens wait already")

    @property
    def waiting_adapters(self) -> set[Any]:
        """Adapters of the requests that wait."""
        return {ticket.adapter for ticket in self._inside if ticket.adapter is not None and not ticket.is_running}

    @property
    def retry_after(self) -> int:
        """Seconds until what waits has drained, at the rate of the last minute's ends."""
        now = self._clock()
        while self._ends and now - self._ends[0][0] > 60:
            self._ends.popleft()
        if len(self._ends) < 2:
            return 5
        num_ended = sum(count for _, count in itertools.islice(self._ends, 1, None))
        rate = num_ended / max(now - self._ends[0][0], 1e-3)
        return min(max(math.ceil(self.num_waiting / rate), 1), _MAX_RETRY_SECONDS)

    def _refusal(self, code: str, why: str) -> APIError:
        seconds = self.retry_after
        message = f"the server is busy: {why}; try again in {seconds} s"
        return APIError(429, message, code=code, headers={"retry-after": str(seconds)})

    def _wait(self, ticket: Ticket) -> None:
        if ticket.is_continued:
            ticket.rank = -1  # before all that were not begun
            self._start(ticket)
            return
        heapq.heappush(self._keys[ticket.key].queue, (ticket.priority, next(self._orders), ticket))
        self._give_turns()

    def _give_turns(self) -> None:
        while self.num_running < self.capacity:
            waiting = sorted((key for key in self._keys.values() if key.queue), key=lambda key: key.work)
            if waiting and not self._fits(waiting[0]) and self._is_reserved:
                waiting = [key for key in waiting if not self._has_share(key)]
            if not waiting or not self._fits(waiting[0]):
                return  # smaller ones do not overtake it for ever
            self._give_turn(waiting[0])

    def _give_turn(self, key: _Key) -> None:
        ticket = heapq.heappop(key.queue)[2]
        ticket.rank = key.rank = max(key.rank, round(key.work))
        self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        key = self._keys[ticket.key]
        ticket.expected = ticket.num_tokens + ticket.num_answers * self._mean_output
        key.promised += ticket.expected
        self._count_waiting(ticket, -1)
        for counts in (self, key):
            counts.num_running += ticket.num_answers
        ticket.is_running = True
        ticket.turned.set()

    @property
    def _is_reserved(self) -> bool:
        """True if free places are kept for keys that have less than their share."""
        return self.num_unreserved is not None and self.num_running >= self.num_unreserved

    def _fits(self, key: _Key) -> bool:
        """True if the first request of a key's queue may run."""
        num_answers, limit = key.queue[0][2].num_answers, self.capacity
        if self.num_unreserved is not None and num_answers <= self.num_unreserved and self._has_share(key):
            limit = self.num_unreserved
        return not self.num_running or self.num_running + num_answers <= limit

    def _has_share(self, key: _Key) -> bool:
        """True if as much of a key runs as an even share among the keys that have sent requests lately."""
        since = self._clock() - _RECENT_SECONDS
        others = (other for other in self._keys.values() if other is not key)
        num_others = sum(other.num_inside > 0 or other.entered > since for other in others)
        return num_others > 0 and key.num_running >= max(self.capacity // (num_others + 1), 1)

    def _count_waiting(self, ticket: Ticket, sign: int) -> None:
        for counts in (self, self._keys[ticket.key]):
            counts.num_waiting += sign * ticket.num_answers
            counts.num_waiting_tokens += sign * ticket.num_tokens

    def _leave(self, ticket: Ticket, num_output: int) -> None:
        if ticket not in self._inside:
            return
        self._inside.remove(ticket)
        key = self._keys[ticket.key]
        key.num_inside -= 1
        if ticket.is_running:
            key.promised -= ticket.expected
            key.served += ticket.num_tokens + num_output
            for counts in (self, key):
                counts.num_running -= ticket.num_answers
            self._ends.append((self._clock(), ticket.num_answers))
            self._mean_output += 0.1 * (num_output / ticket.num_answers - self._mean_output)
        else:
            key.queue = [entry for entry in key.queue if entry[2] is not ticket]
            heapq.heapify(key.queue)
            self._count_waiting(ticket, -1)
        self._give_turns()
