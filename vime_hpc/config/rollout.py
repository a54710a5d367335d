"""[rollout]: how samples are generated and graded."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vime_hpc.config.section import Section


class RolloutConfig(Section):
    """How samples are generated and graded."""

    num_workers: PositiveInt = 1
    """Rollout worker processes; each writes its own file of every step."""
    prompts_per_step: PositiveInt = 32
    """Prompt groups in one step's batch."""
    group_size: PositiveInt = 8
    """Rollouts of one prompt that are compared with each other."""
    max_response_tokens: PositiveInt = 512
    """Response length at which a rollout is truncated."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; logprobs on both sides are of the logits divided by it."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling; below 1 the engine's logprobs are renormalised over the kept tokens, the trainer's are not."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 = all."""
    max_weight_lag: NonNegativeInt = 0
    """0 = on-policy; n = a batch may come from weights up to n versions older than the step that trains on it."""
    pause_mode: Literal["wait", "abort", "keep"] = "wait"
    """What happens to requests in flight when weights change: finish them, abort and redo them, or go on with new weights."""
    concurrency: PositiveInt = 256
    """Requests in flight per rollout worker."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest a single request may take."""
    max_attempts: PositiveInt = 3
    """Tries per rollout before it counts as failed."""
    max_failed_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """Share of a step's rollouts that may be unusable before the run stops."""
    over_sampling: float = Field(default=1.0, ge=1.0)
    """Groups started per group wanted, when a filter drops some; surplus finished groups are used in the next step."""
    generate: str = "vime_hpc.rollout.generate:single_turn"
    """Dotted path pkg.module:name of the generate function."""
    generate_table: dict[str, Any] = Field(default_factory=dict)
    """Handed to the generate function as its own table."""
    reward: str = "exact"
    """Built-in verifier (exact, math, reasoning_gym, dapo, f1, random, remote) or a dotted path."""
    reward_key: str = ""
    """Which entry of a dict reward is the reward."""
    reward_table: dict[str, Any] = Field(default_factory=dict)
    """Handed to the reward function as its own table."""
    reward_processes: NonNegativeInt = 0
    """Worker processes for blocking verifiers; 0 = a thread."""
    reward_timeout_s: PositiveFloat = 30.0
    """Longest one reward may take; over it the reward is unusable."""
    filters: list[str] = Field(default_factory=list)
    """Group filters, in order: built-in names (zero_spread, unusable) or dotted paths."""


class EvalConfig(Section):
    """Evaluation on held-out prompts with the engine's weights at that moment."""

    interval: NonNegativeInt = 0
    """Every so many steps, and after the last one; 0 = only before the first and after the last step."""
    num_prompts: PositiveInt = 200
    """The first so many prompts of data.eval."""
    group_size: PositiveInt = 1
    """Rollouts per prompt; pass@k is reported for powers of two up to it."""
    temperature: float = Field(default=1.0, ge=0.0)
    """0 = greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling in evaluation."""
    max_response_tokens: PositiveInt | None = None
    """Response limit; none = rollout.max_response_tokens."""
