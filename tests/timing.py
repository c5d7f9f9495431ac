"""Bounds on time that hold on a busy machine."""

import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def processor_seconds(less_than: float) -> Iterator[None]:
    """What is inside takes less processor time of this thread. Other threads of the test process do not count, nor does
    collecting what earlier tests left."""
    gc.freeze()
    start = time.thread_time()
    try:
        yield
        taken = time.thread_time() - start
    finally:
        gc.unfreeze()
    assert taken < less_than, f"{taken:.3f} s"
