"""Advantages: from the rewards of one step to one number per sample.

Rules every estimator keeps:
    groups are given by id, never guessed from counts or positions, and rows may come in any order;
    a rollout votes once: the samples it was split into share its reward and get the same advantage;
    unusable rewards take no part and get 0;
    equal rewards give exactly 0: equality decides, not a standard deviation that rounding made
        positive;
    a group of one usable rollout says nothing about itself and gets 0 (where the group is the
    baseline).
Sums are exact (math.fsum) and rounded once, so the result does not depend on the order of rows, bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vime_hpc.config.algorithm import ADVANTAGES
from vime_hpc.config.plugin import is_dotted, load_plugin
from vime_hpc.errors import ConfigError

STD_FLOOR = 1e-6
"""Added to the sample standard deviation (n - 1), in reward units."""

GROUP_RELATIVE = ("grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline")
"""Estimators whose baseline is the prompt group: a group of equal rewards gives no signal."""

BUILT_IN = ADVANTAGES


class AdvantageFunction(Protocol):
    """A custom estimator named by a dotted path; receives the rows as they lie in the step and its
    own table.
    """

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        rollout_ids: Tensor,
        usable: Tensor,
        table: Mapping[str, Any],
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Votes:
    """One vote per rollout: rewards of usable rollouts by group, and which rows a rollout owns."""

    groups: dict[int, dict[int, float]]
    """group_id -> rollout_id -> reward, usable rollouts only."""
    row_rollouts: list[int]
    """rollout_id of every row."""


def compute(
    name: str,
    rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    usable: Tensor,
    table: Mapping[str, Any] | None = None,
) -> Tensor:
    """Advantages of one step's samples.

    Args:
        name: grpo, grpo_no_std, rloo, reinforce_pp, reinforce_pp_baseline, or a dotted path to an
            AdvantageFunction.
        rewards: [N] float64, in reward units; anything (NaN too) where not usable.
        group_ids: [N] int64; equal ids are rollouts of one prompt.
        rollout_ids: [N] int64; equal ids are samples of one rollout and must share group and
            reward.
        usable: [N] bool; a rollout with one unusable sample is unusable as a whole.
        table: handed to a custom estimator.
    Returns:
        [N] float32, unitless for estimators that divide by a deviation, else in reward units; 0
        where unusable.
    Raises:
        ConfigError: unknown name.
        ValueError: shapes differ, a usable reward is not finite, or samples of a rollout disagree.
    """
    _check_shapes(rewards, group_ids, rollout_ids, usable)
    if is_dotted(name):
        return _custom(name, rewards, group_ids, rollout_ids, usable, table or {})
    estimators = {
        "grpo": _grpo,
        "grpo_no_std": _grpo_no_std,
        "rloo": _rloo,
        "reinforce_pp": _reinforce_pp,
        "reinforce_pp_baseline": _reinforce_pp_baseline,
    }
    if name not in estimators:
        raise ConfigError(
            f'algorithm.advantage = "{name}" is unknown; built in are {", ".join(BUILT_IN)}, and a dotted '
            f'path "pkg.module:name" names your own'
        )
    votes = _collect(rewards, group_ids, rollout_ids, usable)
    by_rollout = estimators[name](votes.groups)
    values = [by_rollout.get(rollout, 0.0) for rollout in votes.row_rollouts]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32)


def grpo(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> Tensor:
    """(reward - group mean) / (group deviation + 1e-6). Shapes as in `compute`. Source:
    arXiv:2402.03300.
    """
    return compute("grpo", rewards, group_ids, rollout_ids, usable)


def grpo_no_std(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> Tensor:
    """reward - group mean (Dr. GRPO). Shapes as in `compute`. Source: arXiv:2503.20783."""
    return compute("grpo_no_std", rewards, group_ids, rollout_ids, usable)


def rloo(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> Tensor:
    """reward - mean of the group's other rewards; 0 for a group of one. Source:
    arXiv:2402.14740.
    """
    return compute("rloo", rewards, group_ids, rollout_ids, usable)


def reinforce_pp(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> Tensor:
    """(reward - step mean) / (step deviation + 1e-6), over the rollouts of the step. Source:
    arXiv:2501.03262.
    """
    return compute("reinforce_pp", rewards, group_ids, rollout_ids, usable)


def reinforce_pp_baseline(
    rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor
) -> Tensor:
    """(reward - group mean) / (step deviation of that + 1e-6). Source: arXiv:2501.03262, the
    baseline form.

    The mean over the step is 0 by construction and is not subtracted again, so groups of equal
    rewards stay at 0.
    """
    return compute("reinforce_pp_baseline", rewards, group_ids, rollout_ids, usable)


def zero_spread(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> Tensor:
    """[N] bool: the sample's group has fewer than two different usable rewards (equality decides).

    Shapes as in `compute`. A group without any usable reward counts as zero spread as well.
    """
    _check_shapes(rewards, group_ids, rollout_ids, usable)
    groups = _collect(rewards, group_ids, rollout_ids, usable).groups
    flat = {group: len(set(votes.values())) < 2 for group, votes in groups.items()}
    return torch.tensor([flat.get(group, True) for group in group_ids.tolist()], dtype=torch.bool)


def contributing(
    name: str,
    advantages: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    usable: Tensor,
    mask_sums: Tensor,
    *,
    mask_zero_spread: bool,
) -> Tensor:
    """Which samples enter the loss and its denominators.

    Left out are samples of unusable rollouts, samples without a trained token, and, with
    mask_zero_spread, groups whose advantages are all exactly 0, so that no KL or entropy term pulls
    where there is no signal. reinforce_pp has no group baseline, so mask_zero_spread does not touch
    it.

    Args:
        name: the estimator that made the advantages.
        advantages: [N] float32 from `compute`.
        group_ids, rollout_ids: [N] int64.
        usable: [N] bool.
        mask_sums: [N] int64, trained tokens of each sample.
        mask_zero_spread: algorithm.mask_zero_spread.
    Returns:
        [N] bool.
    """
    rollouts = rollout_ids.tolist()
    spoiled = {r for r, ok in zip(rollouts, usable.tolist(), strict=True) if not ok}
    groups = group_ids.tolist()
    live = {g for g, a in zip(groups, advantages.tolist(), strict=True) if a != 0.0}
    flat_counts = not mask_zero_spread or name == "reinforce_pp"
    return torch.tensor(
        [
            r not in spoiled and tokens > 0 and (flat_counts or g in live)
            for r, g, tokens in zip(rollouts, groups, mask_sums.tolist(), strict=True)
        ],
        dtype=torch.bool,
    )


def _grpo(groups: dict[int, dict[int, float]]) -> dict[int, float]:
    result: dict[int, float] = {}
    for votes in groups.values():
        centered = _centered(list(votes.values()))
        deviation = _deviation(centered)
        result.update(zip(votes, (c / (deviation + STD_FLOOR) for c in centered), strict=True))
    return result


def _grpo_no_std(groups: dict[int, dict[int, float]]) -> dict[int, float]:
    result: dict[int, float] = {}
    for votes in groups.values():
        result.update(zip(votes, _centered(list(votes.values())), strict=True))
    return result


def _rloo(groups: dict[int, dict[int, float]]) -> dict[int, float]:
    result: dict[int, float] = {}
    for votes in groups.values():
        count = len(votes)
        scale = count / (count - 1) if count > 1 else 0.0
        result.update(zip(votes, (c * scale for c in _centered(list(votes.values()))), strict=True))
    return result


def _reinforce_pp(groups: dict[int, dict[int, float]]) -> dict[int, float]:
    votes = {rollout: reward for group in groups.values() for rollout, reward in group.items()}
    centered = _centered(list(votes.values()))
    deviation = _deviation(centered)
    return dict(zip(votes, (c / (deviation + STD_FLOOR) for c in centered), strict=True))


def _reinforce_pp_baseline(groups: dict[int, dict[int, float]]) -> dict[int, float]:
    centered = _grpo_no_std(groups)
    deviation = _deviation(list(centered.values()))
    return {rollout: c / (deviation + STD_FLOOR) for rollout, c in centered.items()}


def _centered(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean; exactly 0 where all are equal, whatever the mean rounds to."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _deviation(centered: Sequence[float]) -> float:
    """Sample standard deviation (n - 1) of centered values; 0 for fewer than two."""
    if len(centered) < 2:
        return 0.0
    return math.sqrt(math.fsum(c * c for c in centered) / (len(centered) - 1))


def _collect(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> _Votes:
    rows = list(
        zip(
            rewards.to(torch.float64).tolist(),
            group_ids.tolist(),
            rollout_ids.tolist(),
            usable.tolist(),
            strict=True,
        )
    )
    bad = [i for i, (reward, _, _, ok) in enumerate(rows) if ok and not math.isfinite(reward)]
    if bad:
        raise ValueError(
            f"rewards of samples {bad[:20]} are marked usable but are not finite "
            f"({[rows[i][0] for i in bad[:20]]}); an unusable reward must be marked so where it is made"
        )
    spoiled = {rollout for _, _, rollout, ok in rows if not ok}
    owner: dict[int, int] = {}
    groups: dict[int, dict[int, float]] = {}
    for i, (reward, group, rollout, _) in enumerate(rows):
        if owner.setdefault(rollout, group) != group:
            raise ValueError(
                f"sample {i}: rollout {rollout} is in group {group} and in group {owner[rollout]}"
            )
        if rollout in spoiled:
            continue
        known = groups.setdefault(group, {}).setdefault(rollout, reward)
        if known != reward:
            raise ValueError(
                f"sample {i}: rollout {rollout} has rewards {known} and {reward}; the samples of one rollout "
                f"share its reward"
            )
    return _Votes(groups, [row[2] for row in rows])


def _custom(
    name: str,
    rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    usable: Tensor,
    table: Mapping[str, Any],
) -> Tensor:
    function: AdvantageFunction = load_plugin(name, option="algorithm.advantage")
    result = torch.as_tensor(function(rewards, group_ids, rollout_ids, usable, table)).to(
        torch.float32
    )
    if result.shape != rewards.shape:
        raise ValueError(
            f"{name} returned shape {list(result.shape)} for {len(rewards)} samples; one value per sample "
            f"is expected"
        )
    bad = torch.nonzero(usable & ~torch.isfinite(result)).flatten().tolist()
    if bad:
        raise ValueError(f"{name} returned values that are not finite for samples {bad[:20]}")
    return torch.where(usable, result, torch.zeros_like(result))


def _check_shapes(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor) -> None:
    shapes = {
        "rewards": rewards.shape,
        "group_ids": group_ids.shape,
        "rollout_ids": rollout_ids.shape,
        "usable": usable.shape,
    }
    if len(set(shapes.values())) != 1 or rewards.dim() != 1:
        raise ValueError(
            "expected one value per sample, got "
            + ", ".join(f"{k} {list(v)}" for k, v in shapes.items())
        )
    if usable.dtype != torch.bool:
        raise ValueError(f"usable is {usable.dtype}, expected torch.bool")
