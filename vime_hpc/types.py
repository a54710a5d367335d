"""The values that travel between the parts: samples, groups, batches. Needs numpy, no torch.

Identity (all int64, readable in decimal):
    group_id     running number of the prompt group handed out by the prompt source, never reused in a run
    rollout_id   group_id * 10_000 + index_in_group
    sample_id    rollout_id * 100 + segment      (a rollout that splits into several samples numbers them)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

ROLLOUTS_PER_GROUP = 10_000
SAMPLES_PER_ROLLOUT = 100

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class Status(StrEnum):
    """Why a rollout ended."""

    COMPLETED = "completed"  # the model stopped by itself
    TRUNCATED = "truncated"  # the length limit stopped it
    ABORTED = "aborted"  # we stopped it
    FAILED = "failed"  # something broke; `reward_cause` says what


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens from `start` on (until the next span) were made by weights `version`."""

    version: int
    start: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token sequence. T = len(tokens), R = response_length, L MoE layers, K experts per token.

    `rollout_logprobs[j]` and `loss_mask[j]` belong to response token j, that is `tokens[T - R + j]`.
    """

    sample_id: int
    group_id: int
    rollout_id: int
    prompt_id: int
    """Index of the prompt's record in its data set."""
    index_in_group: int
    tokens: TokenArray
    """[T] int32, prompt then response."""
    response_length: int
    loss_mask: MaskArray
    """[R] uint8, 1 where a token is trained on."""
    rollout_logprobs: FloatArray
    """[R] float32, natural log, of the temperature-scaled distribution the engine sampled from."""
    status: Status
    finish_reason: str = ""
    """The engine's own word (stop, length, abort, ...)."""
    attempt: int = 0
    """How often this rollout was started before; part of the sampling seed."""
    seed: int = 0
    reward: float | None = None
    """None = unusable; `reward_cause` says why. Never 0 in place of a failure."""
    reward_cause: str = ""
    versions: tuple[VersionSpan, ...] = ()
    routed_experts: ExpertArray | None = None
    """[T - 1, L * K] expert ids, layer-major; row t is the routing of token t."""
    prompt_text: str = ""
    response_text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON-serialisable extras: extracted answer, timings, user fields."""
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Optional columns the buffer's schema declares: [R] each (old_logprobs, values, ...), but for the token sets, texts and
    digests that `vime_hpc.buffer.values` makes and reads."""

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def with_reward(self, reward: float | None, cause: str = "", /, **metadata: Any) -> Sample:
        """The same sample, graded."""
        return replace(
            self, reward=reward, reward_cause=cause, metadata={**self.metadata, **metadata}
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One record of a data set, ready to generate from."""

    prompt_id: int
    tokens: TokenArray
    text: str
    label: Any = None
    """What the verifier compares with (a string, a number or an object of the data set's own making)."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The rollouts of one prompt that GRPO compares with each other."""

    group_id: int
    prompt_id: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A prompt the source handed out: generate `group_size` rollouts for it."""

    group_id: int
    prompt: Prompt
    group_size: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Per-sample scalars of one step, [N] each, in sample_id order: what planning and advantages need.

    Reading it costs a few bytes a sample; the tokens are read later, by the rank that trains on them.
    """

    sample_id: IntArray
    group_id: IntArray
    rollout_id: IntArray
    prompt_length: IntArray
    response_length: IntArray
    mask_sum: IntArray
    """Number of trained tokens (sum of loss_mask)."""
    reward: npt.NDArray[np.float64]
    """NaN where unusable."""
    reward_usable: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    weight_version: IntArray
    """Oldest version that made any token of the sample."""

    def __len__(self) -> int:
        return len(self.sample_id)


def rollout_id_of(group_id: int, index_in_group: int) -> int:
    """The id all samples of one rollout share."""
    if not 0 <= index_in_group < ROLLOUTS_PER_GROUP:
        raise ValueError(f"index_in_group {index_in_group} is not in 0..{ROLLOUTS_PER_GROUP - 1}")
    return group_id * ROLLOUTS_PER_GROUP + index_in_group


def sample_id_of(rollout_id: int, segment: int = 0) -> int:
    """The id of the segment-th sample of a rollout."""
    if not 0 <= segment < SAMPLES_PER_ROLLOUT:
        raise ValueError(f"segment {segment} is not in 0..{SAMPLES_PER_ROLLOUT - 1}")
    return rollout_id * SAMPLES_PER_ROLLOUT + segment
