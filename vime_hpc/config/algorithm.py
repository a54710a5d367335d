"""[algorithm] and [optimizer]: what is optimised and how."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vime_hpc.config.section import Section
from vime_hpc.errors import ConfigError

ADVANTAGES = ("grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline", "reinforce_pp")
"""Built-in values of algorithm.advantage; here because a login node without torch checks the name."""


class AlgorithmConfig(Section):
    """What is optimised."""

    loss: Literal["policy", "sft"] = "policy"
    """policy: reinforcement learning on graded rollouts; sft: negative log-likelihood of the data set's own labels."""
    advantage: str = "grpo"
    """grpo, grpo_no_std (Dr. GRPO), rloo, reinforce_pp, reinforce_pp_baseline, or a dotted path."""
    advantage_table: dict[str, Any] = Field(default_factory=dict)
    """Handed to a custom advantage function."""
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """Shape of the policy objective."""
    aggregation: Literal["rollout_mean", "token_mean"] = "rollout_mean"
    """One vote per rollout (its token mean), or one vote per token; denominators are those of the whole step."""
    eps_clip: PositiveFloat = 0.2
    """Lower clip range of the probability ratio."""
    eps_clip_high: PositiveFloat | None = None
    """Upper clip range; none = eps_clip."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the loss of negative advantages (dual-clip PPO); none = off."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL term to the reference; 0 = no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var"] = "k3"
    """Estimator of the KL term."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    mask_zero_spread: bool = True
    """A group with equal rewards contributes nothing at all: no policy, KL or entropy term, not in a denominator."""
    importance_correction: Literal["none", "truncated", "icepop"] = "none"
    """Weight by exp(old - rollout logprob), capped (truncated) or zeroed outside the range (icepop)."""
    importance_level: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    """Ratio per token, or per sequence as the geometric mean or the product of its tokens' ratios."""
    importance_low: NonNegativeFloat = 0.0
    """Lower bound of the correction weight."""
    importance_high: PositiveFloat = 2.0
    """Upper bound of the correction weight."""
    use_rollout_logprobs: bool = False
    """Take the engine's logprobs as old logprobs instead of recomputing them."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates on one step's batch, each on a share of its rollouts."""
    ref_update_interval: NonNegativeInt = 0
    """Replace the reference by the policy every so many steps; 0 = never."""


class OptimizerConfig(Section):
    """Adam, and its learning-rate schedule in optimizer updates."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    warmup_updates: NonNegativeInt = 0
    """Linear warm-up from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over run.num_steps * algorithm.updates_per_step."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Adam's first moment decay."""
    beta2: float = Field(default=0.98, ge=0.0, lt=1.0)
    """Adam's second moment decay."""
    eps: PositiveFloat = 1e-8
    """Adam's denominator floor."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Global gradient norm bound; 0 = off."""


def check_schedule(config: OptimizerConfig, num_updates: int) -> None:
    """Refuse a schedule that a run of so many optimizer updates cannot have.

    Raises:
        ConfigError: min_lr is above lr, or the warm-up is longer than the run.
    """
    if config.min_lr > config.lr:
        raise ConfigError(f"optimizer.min_lr = {config.min_lr} is above optimizer.lr = {config.lr}")
    if config.warmup_updates > num_updates:
        raise ConfigError(
            f"optimizer.warmup_updates = {config.warmup_updates}, but the run has only {num_updates} updates "
            f"(run.num_steps * algorithm.updates_per_step). To try a few steps of a longer run: --run.until=N beside its "
            f"run.num_steps; else --optimizer.warmup_updates=N"
        )
