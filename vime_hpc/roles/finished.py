"""Group filters over steps that are committed already: groups that were dropped are not there, others can be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from vime_hpc.config.load import read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.protocols import BatchSource, GroupFilter, Metrics, StepBatch
from vime_hpc.rollout.filters import reason_to_drop
from vime_hpc.rollout.metrics import drop_metrics
from vime_hpc.types import IntArray, PromptGroup, Sample, SampleTable


def later_filters(config: RunConfig) -> list[str]:
    """Filters of rollout.filters that the run which filled the buffer did not have; they are applied before training."""
    if not config.run.train_from:
        return []
    source = read_resolved(RunPaths(Path(config.run.train_from)).config)
    return [name for name in config.rollout.filters if name not in source.rollout.filters]


class FilteredBatches:
    """protocols.BatchSource that leaves out the prompt groups which filters drop. Collective over the trainer ranks.

    Rank 0 reads every sample and decides: a user's filter may look at anything, and must not decide differently elsewhere.
    """

    def __init__(self, batches: BatchSource, filters: Sequence[GroupFilter]) -> None:
        self._batches, self._filters = batches, filters

    def wait_for(self, step: int) -> StepBatch | None:
        batch = self._batches.wait_for(step)
        if batch is None:
            return None
        box = [self._dropped(batch) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        reasons = box[0]
        assert reasons is not None
        kept = np.flatnonzero(~np.isin(batch.table.group_id, list(reasons)))
        return PartOfBatch(batch, kept, drop_metrics(reasons.values()))

    def _dropped(self, batch: StepBatch) -> dict[int, str]:
        """Group id to reason."""
        groups: dict[int, list[Sample]] = {}
        for sample in batch.read(range(len(batch.table))):
            groups.setdefault(sample.group_id, []).append(sample)
        reasons = {
            group_id: reason_to_drop(
                PromptGroup(group_id, samples[0].prompt_id, tuple(samples)), self._filters
            )
            for group_id, samples in groups.items()
        }
        return {group_id: reason for group_id, reason in reasons.items() if reason is not None}


class PartOfBatch:
    """protocols.StepBatch of some rows of another.

    Args:
        rows: [kept] rising rows of `batch.table`.
        metrics: added to the stats of the whole.
    """

    def __init__(self, batch: StepBatch, rows: IntArray, metrics: Metrics) -> None:
        self.step = batch.step
        self.table: SampleTable = replace(
            batch.table,
            **{f.name: getattr(batch.table, f.name)[rows] for f in fields(batch.table)},
        )
        self.stats: Mapping[str, float] = {**batch.stats, **metrics}
        self._batch, self._rows = batch, rows

    def read(self, indices: Sequence[int], *, layers: slice | None = None) -> list[Sample]:
        return self._batch.read([int(self._rows[i]) for i in indices], layers=layers)
