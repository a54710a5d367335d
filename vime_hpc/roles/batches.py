"""The trainer's view of the buffer: rank 0 waits for a step's commit, all ranks go on with the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from vime_hpc.buffer.reader import BufferReader, StepBatch
from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.errors import DeadlineError, RoleDiedError, VimeError

POLL_S = 1.0
KEY = "batch/{step}/{turn}"
"""Rendezvous key: what rank 0 saw while waiting for the step; PUBLISH, or READY (a commit, or a stop)."""
PUBLISH, READY = "publish", "ready"


class Republisher(Protocol):
    """Gives weights to engines that were started again while the trainer waits for their batch."""

    def is_called(self) -> bool: ...

    def publish_again(self) -> None:
        """Collective over the trainer ranks."""
        ...


class SharedBatches:
    """protocols.BatchSource for trainer ranks: one of them looks at the file system, whatever their number.

    Args:
        root: the run directory whose buffer is read.
        rendezvous: tells the other ranks that a commit is there (a collective would time out while they wait).
        is_stopping: whether this process or the job was told to stop.
        timeout_s: longest wait for one step.
        weights: serves engines that come back meanwhile; none = they need no weights.
    """

    def __init__(
        self,
        root: Path,
        rendezvous: Rendezvous,
        is_stopping: Callable[[], bool],
        timeout_s: float,
        weights: Republisher | None = None,
    ) -> None:
        self._root = root
        self._reader = BufferReader(root)
        self._rendezvous = rendezvous
        self._is_stopping = is_stopping
        self._timeout_s = timeout_s
        self._weights = weights

    def wait_for(self, step: int) -> StepBatch | None:
        """The committed step, or None on every rank when a stop was asked for first."""
        turn, box = 0, [self._turn(step, 0)]
        while box[0] == PUBLISH:
            assert self._weights is not None
            self._weights.publish_again()
            turn += 1
            box = [self._turn(step, turn)]
        dist.broadcast_object_list(box, src=0)
        return StepBatch.from_commit(self._root, box[0]) if box[0] is not None else None

    def _turn(self, step: int, turn: int) -> Any:
        """What to do next, the same on all ranks: PUBLISH, or the commit (known on rank 0 only), or None to stop."""
        key = KEY.format(step=step, turn=turn)
        if dist.get_rank() != 0:
            seen = self._rendezvous.wait(
                key,
                timeout_s=self._timeout_s + 60.0,
                who="trainer-0",
                phase=f"batch of step {step}",
            )
            return seen if seen == PUBLISH else None
        try:
            found = self._poll(step)
        except VimeError as error:
            self._rendezvous.put("failed", f"trainer-0 ({error})")
            raise
        self._rendezvous.put(key, PUBLISH if found == PUBLISH else READY)
        return found

    def _poll(self, step: int) -> dict[str, Any] | str | None:
        end = time.monotonic() + self._timeout_s
        while True:
            if self._is_stopping():
                return None
            if self._weights is not None and self._weights.is_called():
                return PUBLISH
            try:
                return self._reader.wait_for_commit(step, timeout_s=min(POLL_S, self._timeout_s))
            except DeadlineError:
                if self._rendezvous.has("failed"):
                    raise RoleDiedError(
                        f"batch of step {step}: {self._rendezvous.get('failed')} failed"
                    ) from None
                if time.monotonic() > end:
                    raise
