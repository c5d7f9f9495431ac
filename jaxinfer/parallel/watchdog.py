"""Detects lost hosts by missing heartbeats, and ends the job with one line."""

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
class LossDetector:
    """Decides from the hosts' heartbeats whether one is lost. Plain Python; `now` is monotonic seconds.

    Attributes:
      index, count: index of this host, and number of hosts.
      is_waiting: whether this host currently waits for the others, so that one that has ended counts as lost.
    """

    index: int
    count: int
    is_waiting: Callable[[], bool] = lambda: True
    _beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    _changed: dict[int, float] = field(default_factory=dict)
    _received_at: float = 0.0
    _checked_at: float = 0.0
    _missed_since: float | None = None

    def start(self, now: float) -> None:
        self._received_at = self._checked_at = now
        self._changed = dict.fromkeys((host for host in range(self.count) if host != self.index), now)

    def record(self, beats: dict[int, dict[str, Any]], now: float) -> None:
        """Records the heartbeats of all hosts, as read from the coordinator."""
        self._received_at = now
        for host in self._changed:
            beat = beats.get(host)
            if beat is not None and beat != self._beats.get(host):
                self._beats[host], self._changed[host] = beat, now

    @property
    def have_ended(self) -> bool:
        """True if all other hosts have announced their end."""
        return all(self._beats.get(host, {}).get("ended") for host in self._changed)

    def failure(self, now: float) -> str | None:
        """A message if the job cannot continue, else None."""
        if now - self._checked_at > LOST_SECONDS / 3:  # this process was suspended: start over
            self.start(now)
        self._checked_at = now
        for host, beat in self._beats.items():
            if beat.get("lost"):
                return beat["lost"]
            if beat.get("error"):
                return f"host {host} of {self.count} failed: {beat['error']}. {_AGAIN}"
        ended = [host for host, beat in self._beats.items() if beat.get("ended")]
        if not ended or not self.is_waiting():
            self._missed_since = None
        elif self._missed_since is None:
            self._missed_since = now
        elif now - self._missed_since > LOST_SECONDS / 3:
            return f"host {ended[0]} of {self.count} has ended while host {self.index} still worked. {_AGAIN}"
        silence = {host: now - when for host, when in self._changed.items() if host not in ended}
        for host, seconds in silence.items():
            if seconds > LOST_SECONDS:
                if now - self._received_at > LOST_SECONDS:
                    return (
                        f"host 0 of {self.count}, or the network to it, was lost: no answer from the coordinator for "
                        f"{seconds:.0f} s. {_AGAIN}"
                    )
                return f"host {host} of {self.count} was lost: no sign of it for {seconds:.0f} s. {_AGAIN}"
        return None


class Watchdog:
    """Sends a heartbeat every `BEAT_SECONDS`; if another host is lost, ends the process with exit code `LOST_EXIT_CODE`
    and one line on standard error.

    Args:
      client: client of JAX's coordination service. beat: returns further content of a heartbeat, JSON.
      on_beats: called with the heartbeats of all hosts.
    """

    def __init__(
        self,
        client: Any,
        detector: LossDetector,
        prefix: str,
        beat: Callable[[], dict[str, Any]],
        on_beats: Callable[[dict[int, dict[str, Any]]], None],
    ):
        self._client, self._detector, self._prefix = client, detector, prefix
        self._beat, self._on_beats = beat, on_beats
        self._lock = threading.Lock()
        self._number, self._state = 0, {}
        self._is_closed = threading.Event()
        detector.start(time.monotonic())
        # Two threads: a call to a host that lost power may hang.
        self._threads = [
            threading.Thread(target=target, name="jaxinfer watchdog", daemon=True)
            for target in (self._send_beats, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, error: str | None = None) -> None:
        """Announces that this process ends; `error` is the reason if it failed."""
        if not self._state:
            self._state = {"error": error} if error else {"ended": True}
        self._try_beat()

    def await_others(self) -> None:
        """Waits until all other hosts have ended; meanwhile a lost host still ends this process."""
        while not self._detector.have_ended:
            time.sleep(END_POLL_SECONDS)
            self._try_beat()

    def close(self) -> None:
        """Stops the threads. A thread that returns from a call of the client while Python shuts down would abort the
        process: Python unwinds it through C++ frames that do not allow that."""
        self._is_closed.set()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _send_beats(self) -> None:
        while not self._is_closed.wait(BEAT_SECONDS):
            self._try_beat()

    def _try_beat(self) -> None:
        with self._lock:
            try:
                self._number += 1
                beat = {"number": self._number, **self._state, **self._beat()}
                key = f"{self._prefix}/{self._detector.index}"
                self._client.key_value_set(key, json.dumps(beat), allow_overwrite=True)
                entries = self._client.key_value_dir_get(f"{self._prefix}/")
                beats = {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}
                self._on_beats(beats)
            except Exception:  # nothing was received, which the detector handles
                return
            self._detector.record(beats, time.monotonic())

    def _watch(self) -> None:
        while not self._is_closed.wait(0.5):
            message = self._detector.failure(time.monotonic())
            if message is not None:
                self._lose(message)

    def _lose(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os.write(2, f"error: {message}\n".encode())
        # The other hosts then report the same host, not this one, which ends as well.
        self._state = {"lost": message}
        last = threading.Thread(target=self._try_beat, daemon=True)
        last.start()
        last.join(BEAT_SECONDS)
        # The main thread may be blocked in a collective with the lost host; only this ends it.
        os._exit(LOST_EXIT_CODE)
