"""Several hosts that run the same program: host 0 publishes what to run, the others follow.

Messages go through the key-value store of JAX's coordination service, not through the devices, where they would queue
behind the steps in flight.
"""

import atexit
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from jaxinfer.parallel.coordinator import in_own_process
from jaxinfer.parallel.meshes import replicas
from jaxinfer.parallel.sharding import DATA
from jaxinfer.parallel.watchdog import LOST_SECONDS, LossDetector, Watchdog
from jaxinfer.parallel.wire import Codec

_PREFIX = "jaxinfer"
_POLL_MS = 2000
_GATHER_SECONDS = 600  # hosts may load at different speeds
_FLUSH_SECONDS = 10.0
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class HostOptions:
    """Address of the coordinator, number of processes, and this process's index. None reads the environment:
    JAXINFER_COORDINATOR (host:port), JAXINFER_NUM_PROCESSES and JAXINFER_PROCESS_ID, else JAX's detection of TPU pods,
    Slurm and Open MPI."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    @classmethod
    def of_environment(cls) -> "HostOptions":
        """From environment variables. Raises ValueError for a value that is not a number."""
        numbers: dict[str, int | None] = {}
        for name in ("NUM_PROCESSES", "PROCESS_ID"):
            text = os.environ.get(f"JAXINFER_{name}")
            if text is not None and not text.isdecimal():
                raise ValueError(f"JAXINFER_{name}={text!r} is not a number")
            numbers[name.lower()] = None if text is None else int(text)
        return cls(os.environ.get("JAXINFER_COORDINATOR"), **numbers)

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in vars(self).values())


class Hosts:
    """Connection of this host to the others: an ordered log that host 0 writes and the others read, and gathers.

    Attributes:
      index: this host's index. count: number of hosts.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client, self.index, self.count = client, index, count
        self._num_waiting = 0  # running calls that need the other hosts
        self._num_gathered = 0
        self._next, self._frames = 0, []  # of the log: next entry to read, and unread messages of the last one
        self._deleted = 0
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._send_error: Exception | None = None
        detector = LossDetector(index, count, is_waiting=lambda: self._num_waiting > 0)
        self._watchdog = Watchdog(
            client, detector, f"{_PREFIX}/beat", lambda: {"read": self._next}, self._delete_read_entries
        )
        if self.is_leader:
            self._sender = threading.Thread(target=self._send, name="jaxinfer log", daemon=True)
            self._sender.start()

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    # The log.

    def publish(self, message: bytes) -> None:
        """Appends a message to the log, without waiting. Host 0 only."""
        if self._send_error is not None:
            self.await_verdict(self._send_error)
            raise RuntimeError(f"cannot send to the other hosts: {self._send_error}")
        self._outgoing.put(message)

    def receive(self) -> bytes:
        """The next message of the log; waits for it while host 0 is alive. Not on host 0."""
        while not self._frames:
            entry = self._get(f"{_PREFIX}/log/{self._next}")
            self._next += 1
            self._frames = _frames(entry)[::-1]
        return self._frames.pop()

    def _send(self) -> None:
        number = 0
        while (message := self._outgoing.get()) is not None:
            batch, is_last = [message], False
            while not self._outgoing.empty():  # messages queued meanwhile form one entry
                if (message := self._outgoing.get()) is None:
                    is_last = True
                    break
                batch.append(message)
            entry = b"".join(len(message).to_bytes(8, "little") + message for message in batch)
            try:
                self._client.key_value_set_bytes(f"{_PREFIX}/log/{number}", entry)
            except Exception as error:
                self._send_error = error
                return
            number += 1
            if is_last:
                return

    def _delete_read_entries(self, beats: dict[int, dict[str, Any]]) -> None:
        """Deletes the log entries that all hosts have read. Host 0 only."""
        if not self.is_leader or len(beats) < self.count:
            return
        read = min(beat["read"] for host, beat in beats.items() if host != self.index)
        while self._deleted < read:
            self._client.key_value_delete(f"{_PREFIX}/log/{self._deleted}")
            self._deleted += 1

    # Collective calls.

    def gather(self, value: bytes) -> list[bytes]:
        """The values of all hosts, by index. All hosts must make the same sequence of calls."""
        number, self._num_gathered = self._num_gathered, self._num_gathered + 1
        self._client.key_value_set_bytes(f"{_PREFIX}/gather/{number}/{self.index}", value)
        with self.needing():
            return [
                self._get(f"{_PREFIX}/gather/{number}/{host}", time.monotonic() + _GATHER_SECONDS)
                for host in range(self.count)
            ]

    def least(self, value: int | None) -> int | None:
        """The minimum of all hosts' values; None if any host's is None."""
        values = [int(text) if text else None for text in self.gather(b"" if value is None else str(value).encode())]
        known = [value for value in values if value is not None]
        return min(known) if len(known) == len(values) else None

    def _get(self, key: str, until: float | None = None) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self.await_verdict(error)
                    raise RuntimeError(f"host 0 does not answer: {str(error).partition(chr(10))[0]}") from error
            if until is not None and time.monotonic() > until:
                raise RuntimeError(f"{key} did not come within {_GATHER_SECONDS} s: do all hosts run the same program?")

    # Lost hosts.

    def needing(self) -> "_Needing":
        """Context in which this host waits for the others: a host that has ended then counts as lost."""
        return _Needing(self)

    def await_verdict(self, error: BaseException) -> None:
        """Waits, after an error that a lost host may have caused, for the watchdog to detect the loss and end this
        process. Returns if no host is lost."""
        with self.needing():
            time.sleep(LOST_SECONDS + 5)

    def end(self, error: str | None = None) -> None:
        """Announces that this process ends, after all messages are sent; `error` is the reason if it failed."""
        if self._sender is not None and self._sender.is_alive():
            self._outgoing.put(None)
            self._sender.join(_FLUSH_SECONDS)
        self._watchdog.end(error)

    def close(self) -> None:
        """Waits until all hosts have ended, and stops the threads. Called after `end`."""
        self._watchdog.await_others()
        self._watchdog.close()


class _Needing:
    def __init__(self, hosts: Hosts):
        self._hosts = hosts

    def __enter__(self) -> None:
        self._hosts._num_waiting += 1

    def __exit__(self, *exception: object) -> None:
        self._hosts._num_waiting -= 1


_current: Hosts | None = None


def current() -> Hosts | None:
    """The connection to the other hosts; None on a single host."""
    if _current is None and jax.process_count() > 1:
        _connect()
    return _current


def initialize_hosts(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Hosts | None:
    """Connects to the other hosts, which run the same program. Must be called before any other use of JAX.

    Args:
      coordinator: "host:port" of host 0, with a free port. num_processes: number of hosts. process_id: index of this
        one, from 0. None reads JAXINFER_COORDINATOR, JAXINFER_NUM_PROCESSES and JAXINFER_PROCESS_ID, else the
        environment of a TPU pod, Slurm or Open MPI.

    Returns the connection, or None for a single host. When a host is lost, the processes of all others end within 30
    seconds, with one line on standard error and exit code 1.

    Raises RuntimeError if JAX is already in use or a host does not join, ValueError for inconsistent arguments.
    """
    given, stored = HostOptions(coordinator, num_processes, process_id), HostOptions.of_environment()
    options = {**vars(stored), **{name: value for name, value in vars(given).items() if value is not None}}
    address, count, index = options["coordinator"], options["num_processes"], options["process_id"]
    if address is not None and not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"coordinator={address!r} is not of the form HOST:PORT")
    if count is not None and count < 1:
        raise ValueError(f"num_processes must be at least 1, got {count}")
    if index is not None and (index < 0 or (count is not None and index >= count)):
        raise ValueError(f"process_id={index} is not one of {count} processes, from 0")
    if index is not None and count is None:
        raise ValueError(f"process_id={index} needs num_processes")
    if _is_used():
        raise RuntimeError("hosts join before JAX is used: call initialize_hosts before anything that asks for devices")
    if count == 1:
        return None
    # XLA:CPU could otherwise run two programs at once, whose collectives would be in a different order on other hosts.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)
    is_loopback = address is not None and address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    bind: dict[str, Any] = {"coordinator_bind_address": address} if is_loopback else {}
    try:
        with in_own_process():
            jax.distributed.initialize(address, count, index, **bind)
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        host = f"host {index} of {count}" if index is not None else "this host"
        raise RuntimeError(f"{host} cannot join at {address}: {str(error).partition(chr(10))[0]}") from error
    except ValueError as error:
        raise ValueError(f"{error} Give --coordinator HOST:PORT, --num-processes and --process-id") from error
    return current()


def check_mesh(hosts: Hosts, mesh: Mesh | None) -> None:
    """Raises ValueError for a mesh that does not use devices of all hosts in each replica."""
    count = jax.device_count()
    if mesh is None:
        raise ValueError(
            f"a model on {hosts.count} hosts needs a mesh of their {count} devices, such as 'model={count}'"
        )
    for replica in replicas(mesh):
        missing = set(range(hosts.count)) - {device.process_index for device in replica.devices.flat}
        if not missing:
            continue
        sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
        if mesh.shape.get(DATA, 1) > 1:
            raise ValueError(
                f"mesh {sizes!r} on {hosts.count} hosts: every replica needs devices of every host, and one has none "
                f"of host {min(missing)}. Take 'model={count}', or run one job on each host, with its part of the rows"
            )
        raise ValueError(
            f"mesh {sizes!r} leaves host {min(missing)} of {hosts.count} without work: take all {count} devices"
        )


def needing(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function in which this host waits for the others, if there are any; see `Hosts.needing`."""

    @functools.wraps(method)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        if _current is None:
            return method(*arguments, **keywords)
        with _current.needing():
            try:
                return method(*arguments, **keywords)
            except jax.errors.JaxRuntimeError as error:
                _current.await_verdict(error)
                raise

    return run


def _connect() -> None:
    """Creates `Hosts` from the client of `jax.distributed.initialize`, called by us or by the user."""
    global _current
    from jax._src import distributed

    client = getattr(getattr(distributed, "global_state", None), "client", None)
    needed = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_delete", "key_value_dir_get")
    missing = [name for name in needed if not hasattr(client, name)]
    if missing:
        raise RuntimeError(
            f"JAX {jax.__version__} offers no key-value store between hosts (without {missing[0]}): several hosts "
            "need JAX 0.10 to 0.12"
        )
    if jax.default_backend() == "cpu":
        # XLA:CPU keeps no order between the collectives of a program that was read from the cache: those of one host
        # would meet others of the next. (jaxlib 0.10.2; gloo ends the process where their sizes differ.)
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()
    _current = Hosts(client, jax.process_index(), jax.process_count())
    atexit.register(_at_exit)


def _at_exit() -> None:
    # Registered after JAX's own, so it runs before JAX disconnects.
    if _current is not None and jax.distributed.is_initialized():
        _current.end()
        _current.close()


def _is_used() -> bool:
    from jax._src import xla_bridge

    check = getattr(xla_bridge, "backends_are_initialized", None)
    return check is not None and check()


def _frames(entry: bytes) -> list[bytes]:
    frames, start = [], 0
    while start < len(entry):
        end = start + 8 + int.from_bytes(entry[start : start + 8], "little")
        frames.append(entry[start + 8 : end])
        start = end
    return frames


def fetch(
    hosts: Hosts | None, wanted: Sequence[tuple[jax.Array, Sequence[tuple[int | slice, ...]]]]
) -> list[list[np.ndarray]]:
    """Copies small parts of arrays on several hosts' devices to every host, without running a program.

    An index has an integer, or a slice with start and stop, for each dimension. All hosts must call it together.
    """
    codec = Codec()
    own = [[_parts(array, index) for index in indices] for array, indices in wanted]
    everyone = [own] if hosts is None else [codec.decode(text) for text in hosts.gather(codec.encode(own))]
    copies = []
    for number, (array, indices) in enumerate(wanted):
        copies.append([])
        for place, index in enumerate(indices):
            ranges = [_range(part) for part in index]
            whole = np.zeros([stop - start for start, stop in ranges], array.dtype)
            for host in everyone:
                for starts, part in host[number][place]:
                    at = (slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
                    whole[tuple(at)] = part
            kept = tuple(0 if isinstance(part, int) else slice(None) for part in index)
            copies[-1].append(whole[kept])
    return copies


def _parts(array: jax.Array, index: tuple[int | slice, ...]) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """The shards of `array[index]` on this host: their start within the part, and their values."""
    wanted, parts = [_range(part) for part in index], []
    for shard in array.addressable_shards:
        held = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
        if shard.replica_id == 0 and all(start < stop for start, stop in both):
            local = (slice(start - c, stop - c) for (start, stop), (c, _) in zip(both, held, strict=True))
            starts = tuple(start - a for (start, _), (a, _) in zip(both, wanted, strict=True))
            parts.append((starts, np.asarray(shard.data[tuple(local)])))
    return parts


def _range(index: int | slice) -> tuple[int, int]:
    return (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
