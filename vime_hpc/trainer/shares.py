"""What every sample of a step counts for, and which samples each optimizer update holds: from the step's table alone.

Needs torch, no process group and no model, so that `vime-hpc batch-plan` can ask what a trainer would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_hpc.algorithms import advantage
from vime_hpc.algorithms.aggregation import token_weights
from vime_hpc.config.algorithm import AlgorithmConfig
from vime_hpc.trainer.packing import Microbatches, plan_update, split_updates
from vime_hpc.types import IntArray, SampleTable


@dataclass(frozen=True)
class Share:
    """One optimizer update's part of a step."""

    rows: IntArray
    """Rows of the step's table that are computed: those with weight, or all of the update's where none has any."""
    advantages: Tensor
    """[samples of the step] float32."""
    weights: Tensor
    """[samples of the step] float64: factor of every trained token of the sample in this update's loss."""

    def plan(self, table: SampleTable, dp_size: int, max_tokens: int) -> list[Microbatches]:
        """Microbatches of every data parallel rank, as rows of the step's table."""
        lengths = (table.prompt_length + table.response_length)[self.rows]
        plan = plan_update(lengths, table.rollout_id[self.rows], dp_size, max_tokens)
        return [[[int(self.rows[i]) for i in part] for part in mine] for mine in plan]


def step_shares(table: SampleTable, algorithm: AlgorithmConfig) -> Iterator[Share]:
    """The updates of one step, in order. Denominators are those of a whole update, fixed before anything is packed.

    Raises:
        ConfigError: fewer rollouts than algorithm.updates_per_step.
    """
    rollout_ids, mask_sums = torch.from_numpy(table.rollout_id), torch.from_numpy(table.mask_sum)
    advantages, counts = _advantages(table, algorithm)
    for rows in split_updates(table.rollout_id, algorithm.updates_per_step):
        inside = torch.zeros(len(table), dtype=torch.bool)
        inside[torch.from_numpy(rows)] = True
        weights = token_weights(mask_sums, rollout_ids, counts & inside, algorithm.aggregation)
        weighted = rows[weights.numpy()[rows] > 0]
        yield Share(weighted if len(weighted) else rows, advantages, weights)


def _advantages(table: SampleTable, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Advantage of every sample, and whether it counts at all."""
    mask_sums = torch.from_numpy(table.mask_sum)
    if algorithm.loss == "sft":
        return torch.zeros(len(table)), mask_sums > 0
    group_ids, rollout_ids = torch.from_numpy(table.group_id), torch.from_numpy(table.rollout_id)
    usable = torch.from_numpy(table.reward_usable)
    advantages = advantage.compute(
        algorithm.advantage,
        torch.from_numpy(table.reward),
        group_ids,
        rollout_ids,
        usable,
        algorithm.advantage_table,
    )
    counts = advantage.contributing(
        algorithm.advantage,
        advantages,
        group_ids,
        rollout_ids,
        usable,
        mask_sums,
        mask_zero_spread=algorithm.mask_zero_spread,
    )
    return advantages, counts
