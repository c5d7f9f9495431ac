"""JAX's coordination service in a process of its own, beside host 0.

Inside host 0, as `jax.distributed.initialize` starts it, the service would end with that process, and XLA aborts every
other process at once, with a stack trace and before any of our code runs. Here it outlives host 0 for `GRACE` seconds,
in which the others notice the loss by themselves and say so.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

GRACE = 40.0  # seconds; more than it takes to notice a lost host
_START = "get_distributed_runtime_service"


class ServiceProcess:
    """The service, started with the arguments of jaxlib's own; it ends with `shutdown`, or `GRACE` seconds after the
    process that started it.

    Raises RuntimeError, with what it said, where it does not start.
    """

    def __init__(self, address: str, num_nodes: int, **options: Any):
        known = {name: value for name, value in options.items() if value is not None}
        self._process = subprocess.Popen(
            # As a file: importing the package would take seconds.
            [sys.executable, "-P", __file__, json.dumps([address, num_nodes, known])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for those whom it serves
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        stdout = self._process.stdout
        assert stdout is not None
        said = stdout.readline().decode().strip()
        stdout.close()
        if said != "ready":
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"the coordinator cannot listen on {address}: {said or 'it ended'}")

    def shutdown(self) -> None:
        """Ends the service; once all hosts have left it."""
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
    """While it lasts, `jax.distributed.initialize` starts the service as a `ServiceProcess`. A JAX that starts it
    otherwise is left alone."""
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
    os._exit(0)  # whoever still calls, nobody waits for an answer


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
