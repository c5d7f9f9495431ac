"""Notices a host that is gone, and ends the job with one line."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BEAT_SECONDS, LOST_SECONDS = 2.0, 15.0
END_POLL_SECONDS, CLOSE_SECONDS = 0.1, 5.0
LOST_EXIT_CODE = 1
_AGAIN = "The job ends; start it again on all hosts: finished rows of a batch are kept"


@dataclass
class Judge:
    """Decides from the hosts' beats whether one is lost. Plain Python; `now` is monotonic seconds.

    Attributes:
      index, count: this host, and how many there are. is_needed: whether this host waits for the others just now, so
        that one that has ended is missed.
    """

    index: int
    count: int
    is_needed: Callable[[], bool] = lambda: True
    _beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    _changed: dict[int, float] = field(default_factory=dict)
    _heard: float = 0.0
    _judged: float = 0.0
    _missed: float | None = None

    def start(self, now: float) -> None:
        self._heard = self._judged = now
        self._changed = dict.fromkeys((one for one in range(self.count) if one != self.index), now)

    def hear(self, beats: dict[int, dict[str, Any]], now: float) -> None:
        """What the coordinator said of all hosts."""
        self._heard = now
        for host in self._changed:
            beat = beats.get(host)
            if beat is not None and beat != self._beats.get(host):
                self._beats[host], self._changed[host] = beat, now

    @property
    def have_ended(self) -> bool:
        """Whether all other hosts have said that they end."""
        return all(self._beats.get(host, {}).get("ended") for host in self._changed)

    def verdict(self, now: float) -> str | None:
        """What to say where the job cannot go on, else None."""
        if now - self._judged > LOST_SECONDS / 3:  # this process itself was stopped: it knows nothing of meanwhile
            self.start(now)
        self._judged = now
        for host, beat in self._beats.items():
            if beat.get("lost"):
                return beat["lost"]
            if beat.get("error"):
                return f"host {host} of {self.count} failed: {beat['error']}. {_AGAIN}"
        ended = [host for host, beat in self._beats.items() if beat.get("ended")]
        if not ended or not self.is_needed():
            self._missed = None
        elif self._missed is None:
            self._missed = now
        elif now - self._missed > LOST_SECONDS / 3:
            return f"host {ended[0]} of {self.count} has ended while host {self.index} still worked. {_AGAIN}"
        silent = {host: now - when for host, when in self._changed.items() if host not in ended}
        for host, seconds in silent.items():
            if seconds > LOST_SECONDS:
                if now - self._heard > LOST_SECONDS:
                    return (
                        f"host 0 of {self.count}, or the network to it, was lost: no answer from the coordinator for "
                        f"{seconds:.0f} s. {_AGAIN}"
                    )
                return f"host {host} of {self.count} was lost: no sign of it for {seconds:.0f} s. {_AGAIN}"
        return None


class Watchdog:
    """Tells the others every `BEAT_SECONDS` that this host lives, and ends the process with exit code
    `LOST_EXIT_CODE` and one line on standard error where another is lost.

    Args:
      client: of JAX's coordination service. beat: what to say beside, JSON. took: called with all hosts' beats.
    """

    def __init__(
        self,
        client: Any,
        judge: Judge,
        prefix: str,
        beat: Callable[[], dict[str, Any]],
        took: Callable[[dict[int, dict[str, Any]]], None],
    ):
        self._client, self._judge, self._prefix, self._beat, self._took = client, judge, prefix, beat, took
        self._lock = threading.Lock()
        self._number, self._state = 0, {}
        self._is_closed = threading.Event()
        judge.start(time.monotonic())
        # Two threads: a call to a host that has no power any more may hang.
        self._threads = [
            threading.Thread(target=target, name="jaxinfer watchdog", daemon=True)
            for target in (self._tell, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, error: str | None = None) -> None:
        """This process ends; cleanly unless `error` says why not."""
        if not self._state:
            self._state = {"error": error} if error else {"ended": True}
        self._try_beat()

    def await_others(self) -> None:
        """Waits until all other hosts end as well, and still ends this process where one is lost instead."""
        while not self._judge.have_ended:
            time.sleep(END_POLL_SECONDS)
            self._try_beat()

    def close(self) -> None:
        """Ends the threads. A thread that comes back from a call of the client while Python shuts down would end in an
        abort of the process: Python unwinds it through frames of C++ that do not allow that."""
        self._is_closed.set()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _tell(self) -> None:
        while not self._is_closed.wait(BEAT_SECONDS):
            self._try_beat()

    def _try_beat(self) -> None:
        with self._lock:
            try:
                self._number += 1
                beat = {"number": self._number, **self._state, **self._beat()}
                key = f"{self._prefix}/{self._judge.index}"
                self._client.key_value_set(key, json.dumps(beat), allow_overwrite=True)
                found = self._client.key_value_dir_get(f"{self._prefix}/")
                beats = {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}
                self._took(beats)
            except Exception:  # whatever is wrong, nothing was heard: that is for the judge
                return
            self._judge.hear(beats, time.monotonic())

    def _watch(self) -> None:
        while not self._is_closed.wait(0.5):
            message = self._judge.verdict(time.monotonic())
            if message is not None:
                self._lose(message)

    def _lose(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os.write(2, f"error: {message}\n".encode())
        # The others shall name the same host, not this one, which ends as well.
        self._state = {"lost": message}
        last = threading.Thread(target=self._try_beat, daemon=True)
        last.start()
        last.join(BEAT_SECONDS)
        # The main thread may wait for the lost host inside a collective: nothing but this ends it.
        os._exit(LOST_EXIT_CODE)
