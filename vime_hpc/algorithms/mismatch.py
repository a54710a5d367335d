"""How far the trainer's logprobs are from the engine's, and the weights that correct for it.

Weight = exp(old - rollout), without gradient: what the trainer holds likely over what the engine
sampled from. The value before the bounds is always reported beside the bounded one, because a bound
that bites everywhere silently rescales the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime_hpc.algorithms.kl import LOG_RATIO_BOUND

LEVELS = ("token", "sequence_mean", "sequence_sum")


@dataclass(frozen=True, slots=True)
class Correction:
    """[tokens] float32 each, detached; 1 (raw, weight) and 0 (clipped) at masked places."""

    raw: Tensor
    """exp of the log-ratio, before the bounds."""
    weight: Tensor
    """What the loss is multiplied with."""
    clipped: Tensor
    """1 where the bounds changed the weight."""


def correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: str,
    low: float,
    high: float,
    level: str = "token",
    segment_ids: Tensor | None = None,
) -> Correction:
    """Importance weights from the engine's distribution to the trainer's.

    Args:
        old_logprobs, rollout_logprobs: [tokens], natural log; anything at masked places.
        mask: [tokens], nonzero where trained.
        mode: truncated (clamp into [low, high]) or icepop (0 outside [low, high]).
        low, high: bounds of the weight.
        level: token; sequence_mean (geometric mean of the sequence's ratios); sequence_sum (their
            product: grows with length, 0.001 a token is 54.6 after 4,000 tokens).
        segment_ids: [tokens] int64, equal within a sequence; needed for the sequence levels.
    Returns:
        Correction.
    Raises:
        ValueError: unknown mode or level, or segment_ids missing.
    Source: truncated: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
        RL training";
        icepop: Ling team 2025, "Small leak can sink a great ship".
    """
    trained = mask != 0
    log_ratio = masked_difference(old_logprobs, rollout_logprobs, trained).detach()
    if level in ("sequence_mean", "sequence_sum"):
        if segment_ids is None:
            raise ValueError(f"importance level {level} needs segment_ids")
        log_ratio = per_sequence(log_ratio, trained, segment_ids, mean=level == "sequence_mean")
    elif level != "token":
        raise ValueError(f'importance level "{level}" is unknown; there are {", ".join(LEVELS)}')
    raw = torch.exp(torch.clamp(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    outside = (raw < low) | (raw > high)
    if mode == "truncated":
        weight = torch.clamp(raw, low, high)
    elif mode == "icepop":
        weight = torch.where(outside, torch.zeros_like(raw), raw)
    else:
        raise ValueError(
            f'importance correction "{mode}" is unknown; there are none, truncated and icepop'
        )
    one = torch.ones_like(raw)
    return Correction(
        torch.where(trained, raw, one),
        torch.where(trained, weight, one),
        (outside & trained).float(),
    )


def masked_difference(a: Tensor, b: Tensor, trained: Tensor) -> Tensor:
    """a - b in float32 where trained, 0 elsewhere; NaN or infinity at other places neither shows
    nor gets a gradient.
    """
    zero = torch.zeros((), dtype=torch.float32, device=a.device)
    return torch.where(trained, a.float(), zero) - torch.where(trained, b.float(), zero)


def per_sequence(values: Tensor, trained: Tensor, segment_ids: Tensor, *, mean: bool) -> Tensor:
    """[tokens]: at every trained token the sum (or mean over trained tokens) of its sequence; 0
    elsewhere.

    Added up in float64: 4,000 float32 log-ratios of 0.001 otherwise sum to 3.9999 and exp of it is
        1e-4 off.
    """
    _, index = torch.unique(segment_ids, return_inverse=True)
    size = int(index.max()) + 1 if index.numel() else 0
    flags = trained.to(torch.float64)
    totals = torch.zeros(size, dtype=torch.float64, device=values.device)
    totals = totals.index_add(0, index, values.double() * flags)
    if mean:
        counts = torch.zeros(size, dtype=torch.float64, device=values.device).index_add(
            0, index, flags
        )
        totals = totals / torch.clamp(counts, min=1.0)
    return (totals[index] * flags).to(values.dtype)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Per-token measures of trainer against engine; [tokens] float32, 0 at masked places.

    Returns:
        train_rollout_logprob_abs_diff: |old - rollout|; train_rollout_kl: k3 of KL(engine ||
            trainer), the tokens being the
        engine's. Average with the mask sum, never with the response length.
    """
    trained = mask != 0
    d = masked_difference(old_logprobs, rollout_logprobs, trained).detach()
    bounded = torch.clamp(d, max=LOG_RATIO_BOUND)
    kl = torch.clamp(torch.expm1(bounded) - d, min=0.0)
    return {
        "train_rollout_logprob_abs_diff": d.abs(),
        "train_rollout_kl": torch.where(trained, kl, torch.zeros_like(kl)),
    }
