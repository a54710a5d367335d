"""From per-token losses to the step's loss: denominators of the whole step, fixed before anything
is split.

The step's loss is sum over all tokens of loss[token] * weight[its sample]. Microbatches, ranks and
padding only decide where a summand is computed, so they cannot change the result.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from vime_hpc.errors import DamagedDataError


def token_weights(mask_sums: Tensor, rollout_ids: Tensor, contributes: Tensor, mode: str) -> Tensor:
    """The weight every trained token of a sample has in the step's loss.

    Args:
        mask_sums: [N] int64, trained tokens per sample.
        rollout_ids: [N] int64; the samples of a rollout share one vote.
        contributes: [N] bool, from `advantage.contributing`; others get weight 0 and enter no
            denominator.
        mode: rollout_mean: 1 / (contributing rollouts * trained tokens of the rollout);
            token_mean: 1 / trained tokens of all contributing samples.
    Returns:
        [N] float64. All zeros where nothing contributes: the step then has no gradient and the
        update is skipped.
    Raises:
        ValueError: unknown mode, shapes that differ, a negative count.
    """
    if (
        mask_sums.shape != rollout_ids.shape
        or mask_sums.shape != contributes.shape
        or mask_sums.dim() != 1
    ):
        raise ValueError(
            f"expected one value per sample, got mask_sums {list(mask_sums.shape)}, rollout_ids "
            f"{list(rollout_ids.shape)}, contributes {list(contributes.shape)}"
        )
    tokens = [int(t) for t in mask_sums.tolist()]
    if any(t < 0 for t in tokens):
        raise ValueError(f"mask_sums has a negative count: {min(tokens)}")
    counts = [bool(c) and t > 0 for c, t in zip(contributes.tolist(), tokens, strict=True)]
    rollouts = rollout_ids.tolist()
    per_rollout: dict[int, int] = defaultdict(int)
    for rollout, count, t in zip(rollouts, counts, tokens, strict=True):
        if count:
            per_rollout[rollout] += t
    if mode == "rollout_mean":
        weights = [
            1.0 / (len(per_rollout) * per_rollout[r]) if c else 0.0
            for r, c in zip(rollouts, counts, strict=True)
        ]
    elif mode == "token_mean":
        total = sum(per_rollout.values())
        weights = [1.0 / total if c else 0.0 for c in counts]
    else:
        raise ValueError(f'aggregation "{mode}" is unknown; there are rollout_mean and token_mean')
    return torch.tensor(weights, dtype=torch.float64)


def require_trained_tokens(mask_sums: Tensor, *, where: str) -> None:
    """Refuse a batch that has nothing to train on at all (every response empty or fully masked).

    Args:
        mask_sums: [N] int64.
        where: the file or step, for the message.
    Raises:
        DamagedDataError: the sum is 0.
    """
    if int(mask_sums.sum()) == 0:
        raise DamagedDataError(
            f"{where}: 0 trainable tokens in {len(mask_sums)} samples; every response is empty or masked. The generate "
            f"function or the loss masks are the likely cause: look at them with vime-hpc buffer show"
        )
