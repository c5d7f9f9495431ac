"""JAX's coordination service in a separate process on host 0.

`jax.distributed.initialize` starts the service inside host 0's process. If that process ends, XLA aborts all other
processes at once, with a stack trace and before any of our code runs. In a separate process the service outlives host 0
by `GRACE` seconds, in which the other hosts detect the loss and report it.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

GRACE = 40.0  # seconds; more than the time to detect a lost host
_START = "get_distributed_runtime_service"


class ServiceProcess:
    """The coordination service, with the arguments of jaxlib's; ends at `shutdown`, or `GRACE` seconds after its
    parent.

    Raises RuntimeError, with the service's message, if it does not start.
    """

    def __init__(self, address: str, num_nodes: int, **options: Any):
        known = {name: value for name, value in options.items() if value is not None}
        self._process = subprocess.Popen(
            # Run as a file: importing the package would take seconds.
            [sys.executable, "-P", __file__, json.dumps([address, num_nodes, known])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to its clients only
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        stdout = self._process.stdout
        assert stdout is not None
        reply = stdout.readline().decode().strip()
        stdout.close()
        if reply != "ready":
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"the coordinator cannot listen on {address}: {reply or 'it ended'}")

    def shutdown(self) -> None:
        """Ends the service, after all hosts have disconnected."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.write(b"stop\n")
                stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def in_own_process() -> Iterator[None]:
    """Context in which `jax.distributed.initialize` starts the service as a `ServiceProcess`. No effect with a JAX that
    starts it in another way."""
    from jax._src import distributed

    library = getattr(distributed, "_jax", None)
    original = getattr(library, _START, None)
    if original is None:
        yield
        return
    setattr(library, _START, ServiceProcess)
    try:
        yield
    finally:
        setattr(library, _START, original)


def _serve(address: str, num_nodes: int, options: dict[str, Any]) -> None:
    import importlib

    try:
        service = getattr(importlib.import_module("jaxlib._jax"), _START)(address, num_nodes, **options)
    except Exception as error:
        print(str(error).partition("\n")[0], flush=True)
        return
    print("ready", flush=True)
    if sys.stdin.readline().strip() == "stop":
        service.shutdown()
    else:
        time.sleep(GRACE)
    os._exit(0)  # pending calls need no answer


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
