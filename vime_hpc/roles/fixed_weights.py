"""run.mode = "rollout_only": engines that keep the weights of model.path (version 0), and the steps' metrics without a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.stats import merged_stats
from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import DeadlineError
from vime_hpc.observe.metrics import MetricsWriter, read_metrics
from vime_hpc.protocols import BatchSink
from vime_hpc.roles.meeting import raise_if_over
from vime_hpc.types import PromptGroup

POLL_S = 0.5


class FixedReceiver:
    """protocols.WeightReceiver of a job without a trainer: version 0 is all there is, so every wish is granted at once.

    Args:
        interrupted: raises RequeueRequested when the job was told to stop. Asked between steps: those of a small model are
            over before the wait inside a step looks for the first time.
    """

    version = 0

    def __init__(self, interrupted: Callable[[], None]) -> None:
        self._interrupted = interrupted

    def receive(self, at_least: int) -> int:
        del at_least
        self._interrupted()
        return self.version

    def leave(self) -> None:
        return


class RecordedSink:
    """protocols.BatchSink of rollout worker 0 that also writes the metrics of every committed step.

    With several workers a step is committed by the last of them, so a line may come later than this worker's own seal.
    """

    def __init__(self, sink: BatchSink, paths: RunPaths, config: RunConfig, attempt: str) -> None:
        """
        Args:
            attempt: name of this start of the job, stored in every line.
        """
        self._sink, self._reader = sink, BufferReader(paths.buffer)
        self._end, self._wait_s = config.run.end_step, config.run.wait_timeout_s
        recorded = read_metrics(paths.metrics)
        self._next = recorded[-1]["step"] + 1 if recorded else 0
        tensorboard = paths.tensorboard if config.observe.tensorboard else None
        self._writer = MetricsWriter(paths.metrics, tensorboard, attempt)

    @property
    def next_step(self) -> int:
        return self._sink.next_step

    def append(
        self,
        step: int,
        groups: Sequence[PromptGroup],
        *,
        resume_state: Mapping[str, Any],
        stats: Mapping[str, float],
    ) -> None:
        self._sink.append(step, groups, resume_state=resume_state, stats=stats)
        self.record()

    def record(self) -> None:
        """One line for every step that is committed and has none."""
        while self._next < self._reader.next_step:
            self._writer.write(self._next, merged_stats(self._reader.commit(self._next)))
            self._next += 1

    def finish(self, rendezvous: Rendezvous, interrupted: Callable[[], None]) -> None:
        """Wait until the other workers have sealed the last step, too.

        Args:
            interrupted: raises RequeueRequested when the job was told to stop.
        Raises:
            RoleDiedError: one of them failed.
            DeadlineError: names those that have not sealed.
        """
        end = time.monotonic() + self._wait_s
        while self._reader.next_step < self._end:
            raise_if_over(rendezvous, f"commit of step {self._end - 1}")
            interrupted()
            try:
                self._reader.wait_for_commit(self._end - 1, POLL_S)
            except DeadlineError:
                if time.monotonic() > end:
                    raise
        self.record()
        self._writer.close()
