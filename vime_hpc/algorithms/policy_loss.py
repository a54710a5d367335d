"""The policy objective, per token: what one trained token adds to the loss before its weight.

All tensors are packed, [tokens]; sequences follow one another and `segment_ids` tells them apart.
Masked places (prompt, tool output, padding) never influence anything: their inputs are replaced,
not multiplied by 0, so NaN there is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime_hpc.algorithms.kl import LOG_RATIO_BOUND, kl_per_token
from vime_hpc.algorithms.mismatch import (
    correction,
    masked_difference,
    mismatch_metrics,
    per_sequence,
)
from vime_hpc.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """loss: [tokens] float32 with gradient, 0 at masked places. metrics: [tokens] float32 each,
    detached, 0 there too.

    The step's loss is (loss * weight of the token's sample).sum(); a metric's mean is taken the
    same way or with the mask sum.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    config: AlgorithmConfig,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> PolicyLoss:
    """pg * correction - entropy_coef * entropy + kl_loss_coef * KL(policy || reference), per token.

    Args:
        logprobs: [tokens] of the sampled tokens under the policy being trained, natural log of
            temperature-scaled probabilities; carries the gradient.
        old_logprobs: [tokens] under the policy before this step's first update; no gradient is
            taken through it.
        advantages: [tokens].
        mask: [tokens], nonzero where trained.
        config: shape of the objective, clip ranges, coefficients.
        rollout_logprobs: [tokens] from the engine; needed for importance_correction.
        ref_logprobs: [tokens] of the reference; needed where kl_loss_coef > 0.
        entropy: [tokens] of the policy; needed where entropy_coef > 0, else only a metric.
        segment_ids: [tokens] int64, equal within a sequence; needed for gspo and sequence-level
            correction.
    Returns:
        PolicyLoss. Metrics: pg_loss, pg_clipfrac, ppo_kl (old - new), ois (new/old probability),
            and where their inputs
        are given kl_loss, entropy_loss, train_rollout_logprob_abs_diff, train_rollout_kl, tis
        (weight before its bounds), tis_clipped (after), tis_clipfrac, tis_abs (|tis - 1|).
    Raises:
        ValueError: a needed input is missing, shapes differ.
    """
    _check(
        logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        segment_ids=segment_ids,
    )
    trained = mask != 0
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    lp = torch.where(trained, logprobs.float(), zero)
    adv = torch.where(trained, advantages.float().detach(), zero)
    log_ratio = masked_difference(logprobs, old_logprobs.detach(), trained)
    if config.policy_loss == "gspo":
        if segment_ids is None:
            raise ValueError("policy_loss = gspo needs segment_ids")
        log_ratio = per_sequence(log_ratio, trained, segment_ids, mean=True)
    ratio = torch.exp(torch.clamp(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    pg, clipped = _objective(lp, ratio, adv, config)
    metrics = {
        "ppo_kl": -log_ratio.detach(),
        "ois": torch.where(trained, ratio.detach(), zero),
        "pg_clipfrac": torch.where(trained, clipped, zero),
    }
    if rollout_logprobs is not None:
        metrics |= mismatch_metrics(old_logprobs, rollout_logprobs, mask)
    if config.importance_correction != "none":
        pg = _corrected(pg, lp, old_logprobs, rollout_logprobs, mask, segment_ids, config, metrics)
    loss = torch.where(trained, pg, zero)
    metrics["pg_loss"] = loss.detach()
    if entropy is not None:
        h = torch.where(trained, entropy.float(), zero)
        metrics["entropy_loss"] = h.detach()
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * h
    if ref_logprobs is not None:
        kl = kl_per_token(config.kl_estimator, lp, torch.where(trained, ref_logprobs.float(), zero))
        metrics["kl_loss"] = kl.detach()
        if config.kl_loss_coef > 0:
            loss = loss + config.kl_loss_coef * kl
    return PolicyLoss(loss, metrics)


def sft_loss(logprobs: Tensor, mask: Tensor) -> PolicyLoss:
    """Negative log-likelihood of the given tokens, [tokens], 0 at masked places."""
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    loss = torch.where(mask != 0, -logprobs.float(), zero)
    return PolicyLoss(loss, {})


def _objective(
    lp: Tensor, ratio: Tensor, adv: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The uncorrected policy term and, as 0/1, where a clip decided it. Both [tokens].

    Sources: ppo arXiv:1707.06347, clip-higher arXiv:2503.14476, dual clip arXiv:1912.09729, gspo
        arXiv:2507.18071 (the
    ratio is the sequence's already), cispo arXiv:2506.13585.
    """
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    if config.policy_loss == "reinforce":
        return -adv * lp, torch.zeros_like(ratio)
    bounded = torch.clamp(ratio, 1.0 - config.eps_clip, 1.0 + high)
    if config.policy_loss == "cispo":
        return -bounded.detach() * adv * lp, (bounded != ratio).float().detach()
    plain, limited = -ratio * adv, -bounded * adv
    pg = torch.maximum(plain, limited)
    clipped = limited > plain
    if config.dual_clip is not None:
        ceiling = -config.dual_clip * adv
        pg = torch.where(adv < 0, torch.minimum(ceiling, pg), pg)
    return pg, clipped.float().detach()


def _corrected(
    pg: Tensor,
    lp: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    mask: Tensor,
    segment_ids: Tensor | None,
    config: AlgorithmConfig,
    metrics: dict[str, Tensor],
) -> Tensor:
    """The policy term times its importance weight; adds the tis metrics."""
    if rollout_logprobs is None:
        raise ValueError(
            f"importance_correction = {config.importance_correction} needs rollout_logprobs"
        )
    # reinforce has no ratio of its own to the old policy, so its weight carries the present one.
    numerator = lp.detach() if config.policy_loss == "reinforce" else old_logprobs
    c = correction(
        numerator,
        rollout_logprobs,
        mask,
        mode=config.importance_correction,
        low=config.importance_low,
        high=config.importance_high,
        level=config.importance_level,
        segment_ids=segment_ids,
    )
    flags = (mask != 0).float()
    metrics |= {
        "tis": c.raw * flags,
        "tis_clipped": c.weight * flags,
        "tis_clipfrac": c.clipped,
        "tis_abs": (c.raw - 1.0).abs() * flags,
    }
    return pg * c.weight


def _check(logprobs: Tensor, **others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None and value.shape != logprobs.shape:
            raise ValueError(
                f"{name} is {list(value.shape)}, logprobs is {list(logprobs.shape)}; all are [tokens]"
            )
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs is {list(logprobs.shape)}, expected packed [tokens]")
