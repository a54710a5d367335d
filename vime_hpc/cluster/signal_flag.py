"""The warning signal (USR2) as a flag. Imports nothing heavy: it must be set up before numpy and torch.

The signal is blocked and taken by a thread in sigwait, so that it is seen while the main thread sits in a collective,
and so that it kills no child: a blocked mask is inherited. Not USR1, which NCCL takes for itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time

WARNING_SIGNAL = signal.SIGUSR2
STOP_AT = "VIME_STOP_AT"
"""Environment variable of the batch script: when the warning is due, seconds since 1970."""


class SignalFlag:
    """Set once the warning signal arrived. Build it first thing in a process, before numpy and torch are imported."""

    def __init__(self) -> None:
        self._event = threading.Event()
        signal.pthread_sigmask(signal.SIG_BLOCK, {WARNING_SIGNAL})
        signal.signal(WARNING_SIGNAL, signal.SIG_DFL)
        threading.Thread(target=self._wait, name="warning-signal", daemon=True).start()
        if STOP_AT in os.environ:
            threading.Thread(
                target=self._wait_until,
                args=(float(os.environ[STOP_AT]),),
                name="stop-time",
                daemon=True,
            ).start()

    def _wait(self) -> None:
        while True:
            signal.sigwait({WARNING_SIGNAL})
            self._event.set()

    def _wait_until(self, when_s: float) -> None:
        """The time limit, known from Slurm: a signal that is lost on the way does not cost the run."""
        time.sleep(max(0.0, when_s - time.time()))
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()
