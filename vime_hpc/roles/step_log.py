"""What the trainer writes down of a step: a line of metrics.jsonl, TensorBoard events, and a short line in its log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vime_hpc.observe.metrics import MetricsWriter
from vime_hpc.observe.progress import step_line
from vime_hpc.protocols import StepBatch
from vime_hpc.roles.context import RoleContext

log = logging.getLogger(__name__)


class StepLog:
    """protocols.TrainerLog: rank 0 writes trainer and rollout metrics of a step as one line, and a short one in its log."""

    def __init__(self, context: RoleContext) -> None:
        paths = context.paths
        self._num_steps = context.config.run.end_step
        self._writer = (
            MetricsWriter(
                paths.metrics,
                paths.tensorboard if context.config.observe.tensorboard else None,
                context.rank.attempt,
            )
            if context.rank.role_rank == 0
            else None
        )

    def log(self, step: int, metrics: Mapping[str, float], batch: StepBatch) -> None:
        if self._writer:
            lag = step - int(batch.table.weight_version.min()) if len(batch.table) else 0
            of_step = {**batch.stats, **metrics, "staleness/max": float(lag)}
            self._writer.write(step, of_step)
            log.info("%s", step_line(step, self._num_steps, of_step))
