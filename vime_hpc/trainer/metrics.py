"""Sums of a step over tokens, microbatches and ranks, under vime's metric names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from vime_hpc.protocols import Metrics
from vime_hpc.trainer.model import Ranks

WEIGHTED = (
    "loss",
    "pg_loss",
    "pg_clipfrac",
    "ppo_kl",
    "ois",
    "entropy_loss",
    "kl_loss",
    "tis",
    "tis_clipped",
    "tis_clipfrac",
    "tis_abs",
)
"""Averaged with the loss's own weights (a mean over rollouts or over tokens), and over the updates
of the step.
"""
COMPARED = ("train_rollout_logprob_abs_diff", "train_rollout_kl")
"""Averaged over trained tokens, before the step's first update; the last is k3 of KL(engine ||
trainer).
"""
_COUNTS = ("tokens", "compared")


class StepSums:
    """Collects on the rank that reports (tensor rank 0 of each last stage); `reduce` makes them
    known to all.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self._ranks = ranks
        self._names = (*WEIGHTED, *COMPARED, *_COUNTS)
        self._local = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._local_max = torch.zeros(1, dtype=torch.float64, device=device)
        self._seen = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._total = torch.zeros_like(self._local)
        self._known = torch.zeros_like(self._local)
        self._max = torch.zeros_like(self._local_max)

    def add(
        self,
        loss: Tensor,
        metrics: Mapping[str, Tensor],
        weights: Tensor,
        mask: Tensor,
        entropy: Tensor,
    ) -> None:
        """A microbatch: its summand of the loss, per-token metrics [R], the loss's weights [R]."""
        self._put("loss", loss)
        self._put("tokens", (mask & (weights > 0)).sum())
        for name, values in {"entropy_loss": entropy, **metrics}.items():
            if name not in COMPARED:
                self._put(name, torch.where(weights > 0, values.double() * weights, 0.0).sum())

    def compare(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
        """Trainer's logprobs (before the first update) against the engine's, [R] each, where
        trained.
        """
        difference = torch.where(mask, logprobs.double() - rollout_logprobs.double(), 0.0)
        self._put("train_rollout_logprob_abs_diff", difference.abs().sum())
        self._put(
            "train_rollout_kl", torch.where(mask, difference.exp() - 1 - difference, 0.0).sum()
        )
        self._put("compared", mask.sum())
        if len(difference):
            self._local_max = torch.maximum(self._local_max, difference.abs().max())

    def reduce(self) -> float:
        """Sum what came since the last call over all ranks; returns the loss of that part.
        Collective.
        """
        if not self._ranks.reports:
            self._local.zero_()
            self._seen.zero_()
            self._local_max.zero_()
        part = torch.cat([self._local, self._seen])
        dist.all_reduce(part)
        dist.all_reduce(self._local_max, op=dist.ReduceOp.MAX)
        values, seen = part.chunk(2)
        self._total += values
        self._known += seen
        self._max = torch.maximum(self._max, self._local_max)
        self._local.zero_()
        self._seen.zero_()
        self._local_max = torch.zeros_like(self._local_max)
        return float(values[self._names.index("loss")])

    def means(self, *, num_updates: int, sft: bool) -> Metrics:
        """train/... of the step; names that no microbatch gave (kl_loss without a reference) are
        left out.
        """
        total = dict(zip(self._names, self._total.tolist(), strict=True))
        known = dict(zip(self._names, self._known.tolist(), strict=True))
        result = {f"train/{name}": total[name] / num_updates for name in WEIGHTED if known[name]}
        result["train/tokens"] = total["tokens"]
        result.setdefault("train/loss", 0.0)
        if not sft:
            result |= {
                f"train/{name}": total[name] / max(1.0, total["compared"]) for name in COMPARED
            }
            result["train/train_rollout_logprob_max_diff"] = float(self._max)
        return result

    def _put(self, name: str, value: Tensor) -> None:
        at = self._names.index(name)
        self._local[at] += value
        self._seen[at] = 1.0
