"""The trainer's view of the buffer: rank 0 waits for a step's commit, all ranks go on with the same one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vime_hpc.buffer.reader import BufferReader, StepBatch
from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.errors import DeadlineError, RoleDiedError, VimeError

log = logging.getLogger(__name__)
POLL_S = 1.0
KEY = "batch/{step}"


class SharedBatches:
    """protocols.BatchSource for trainer ranks: one of them looks at the file system, whatever their number.

    Args:
        root: the run directory whose buffer is read.
        rendezvous: tells the other ranks that a commit is there (a collective would time out while they wait).
        is_stopping: whether this process or the job was told to stop.
        timeout_s: longest wait for one step.
    """

    def __init__(
        self,
        root: Path,
        rendezvous: Rendezvous,
        is_stopping: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._root = root
        self._reader = BufferReader(root)
        self._rendezvous = rendezvous
        self._is_stopping = is_stopping
        self._timeout_s = timeout_s

    def wait_for(self, step: int) -> StepBatch | None:
        """The committed step, or None on every rank when a stop was asked for first."""
        key = KEY.format(step=step)
        if dist.get_rank() == 0:
            try:
                found: dict[str, Any] | None = self._poll(step)
            except VimeError as error:
                self._rendezvous.put("failed", f"trainer-0 ({error})")
                raise
            self._rendezvous.put(key, True)
        else:
            self._rendezvous.wait(
                key,
                timeout_s=self._timeout_s + 60.0,
                who="trainer-0",
                phase=f"batch of step {step}",
            )
            found = None
        box = [found]
        dist.broadcast_object_list(box, src=0)
        return StepBatch.from_commit(self._root, box[0]) if box[0] is not None else None

    def _poll(self, step: int) -> dict[str, Any] | None:
        end = time.monotonic() + self._timeout_s
        while True:
            if self._is_stopping():
                return None
            try:
                return self._reader.wait_for_commit(step, timeout_s=min(POLL_S, self._timeout_s))
            except DeadlineError:
                if self._rendezvous.has("failed"):
                    raise RoleDiedError(
                        f"batch of step {step}: {self._rendezvous.get('failed')} failed"
                    ) from None
                if time.monotonic() > end:
                    raise
