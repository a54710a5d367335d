"""One benchmark at a time on the GPU, while others already start their engines beside it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock file VIME_BENCH_LOCK names while measuring; nothing where it is not set."""
    path = os.environ.get("VIME_BENCH_LOCK")
    if not path:
        yield
        return
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
