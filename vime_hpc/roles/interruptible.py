"""An event loop whose callers stop waiting when the job stops."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from vime_hpc.rollout.event_loop import BackgroundLoop

T = TypeVar("T")
INTERRUPT_POLL_S = 0.2


class InterruptibleLoop(BackgroundLoop):
    """An event loop whose callers stop waiting when the job stops."""

    def __init__(self, interrupted: Callable[[], None]) -> None:
        super().__init__()
        self._interrupted = interrupted
        self.beside: Callable[[], None] = lambda: None
        """Called now and then while `run` waits; what it raises ends the wait."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; on a stop it is cancelled and RequeueRequested raised."""
        future = self.submit(coroutine)
        try:
            while True:
                try:
                    return future.result(INTERRUPT_POLL_S)
                except FutureTimeout:
                    if future.done():
                        raise
                    self._interrupted()
                    self.beside()
        except BaseException:
            future.cancel()
            raise

    def run_to_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, whatever happens meanwhile: for weight updates and for closing."""
        return super().run(coroutine)
