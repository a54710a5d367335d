"""What a step says about itself, counted by rollout and by whole group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vime_hpc.errors import ConfigError
from vime_hpc.rollout.evaluate import eval_metrics, pass_at_k
from vime_hpc.rollout.filters import reason_to_drop, resolve_filters, unusable, zero_spread
from vime_hpc.rollout.generate import failed_sample
from vime_hpc.rollout.metrics import repeats_itself, rollout_metrics
from vime_hpc.types import (
    GroupRequest,
    Prompt,
    PromptGroup,
    Sample,
    Status,
    VersionSpan,
    rollout_id_of,
    sample_id_of,
)


def rollout(group: int, index: int, reward: float | None, *, segments: int = 1, length: int = 2,
            status: Status = Status.COMPLETED, version: int = 0) -> list[Sample]:  # fmt: skip
    prompt = Prompt(group, np.array([1], dtype=np.int32), "p")
    base = failed_sample(GroupRequest(group, prompt, 2), index, cause="", version=version)
    return [
        replace(base, sample_id=sample_id_of(rollout_id_of(group, index), k), status=status, reward=reward,
                tokens=np.arange(1 + length, dtype=np.int32), response_length=length,
                versions=(VersionSpan(version, 0),), response_text="x")
        for k in range(segments)
    ]  # fmt: skip


def group(number: int, *rollouts: list[Sample]) -> PromptGroup:
    return PromptGroup(number, number, tuple(s for r in rollouts for s in r))


def simple(number: int, *rewards: float | None) -> PromptGroup:
    return group(number, *(rollout(number, i, r) for i, r in enumerate(rewards)))


@pytest.mark.parametrize("rewards", [[0.35] * 7, [0.7] * 7, [1 / 3] * 7, [0.9999999] * 6])
def test_equal_rewards_are_dropped_however_their_deviation_rounds(rewards: list[float]) -> None:
    assert str(zero_spread(simple(0, *rewards), {})).startswith("zero_std")
    assert zero_spread(simple(0, 1, 0, 0, 0), {}) is None


def test_filters_count_rollouts_not_rows() -> None:
    fan_out = group(0, rollout(0, 0, 1.0, segments=2), rollout(0, 1, 0.0))
    assert zero_spread(fan_out, {}) is None
    alone = group(0, rollout(0, 0, 1.0, segments=2))
    assert zero_spread(alone, {}) == "zero_std_1"


def test_one_aborted_row_makes_the_rollout_unusable() -> None:
    first, second = rollout(0, 0, 1.0, segments=2)
    broken = group(0, [replace(first, status=Status.ABORTED), second], rollout(0, 1, 0.0))
    assert unusable(broken, {}) == "unusable"
    assert zero_spread(broken, {}) == "zero_std_0", "one usable rollout is left"
    assert unusable(simple(0, 1, 0), {}) is None


def test_the_first_filter_that_objects_gives_the_reason() -> None:
    filters = resolve_filters(["unusable", "zero_spread"])
    assert reason_to_drop(simple(0, 1, None), filters) == "unusable"
    assert reason_to_drop(simple(0, 1, 1), filters) == "zero_std_1"
    with pytest.raises(ConfigError, match="zero_spread, unusable"):
        resolve_filters(["none"])


def test_shares_are_over_whole_groups_and_rewards_over_usable_rollouts() -> None:
    metrics = rollout_metrics([simple(0, 1, 0), simple(1, 1, 1), simple(2, None, 0.5)], step=0)
    assert metrics["rollout/raw_reward"] == pytest.approx(3.5 / 5)
    assert metrics["rollout/unusable_share"] == pytest.approx(1 / 6)
    assert metrics["rollout/zero_std/share"] == pytest.approx(2 / 3)
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert metrics["rollout/zero_std/count_0.5"] == 1
    assert metrics["rollout/solve_all_share"] == pytest.approx(1 / 3)


def test_solve_all_of_one_in_two_groups() -> None:
    metrics = rollout_metrics([simple(0, 1, 0), simple(1, 1, 1)], step=0)
    assert metrics["rollout/zero_std/share"] == 0.5
    assert metrics["rollout/solve_all_share"] == 0.5
    assert metrics["rollout/solve_none_share"] == 0.0


def test_a_split_rollout_counts_its_reward_once_and_its_lengths_apart() -> None:
    groups = [group(0, rollout(0, 0, 1.0, segments=3, length=4), rollout(0, 1, 0.0, length=2))]
    metrics = rollout_metrics(groups, step=0)
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/response_lengths_mean"] == 3.5
    assert metrics["rollout/response_tokens"] == 14


def test_lengths_statuses_and_staleness() -> None:
    groups = [
        group(
            0,
            rollout(0, 0, 1.0, length=2, version=3),
            rollout(0, 1, 0.0, length=6, status=Status.TRUNCATED, version=5),
        )
    ]
    metrics = rollout_metrics(groups, step=5)
    assert [metrics[f"rollout/response_lengths_{k}"] for k in ("mean", "median", "max", "min")] == [
        4,
        4,
        6,
        2,
    ]
    assert metrics["rollout/truncated_ratio"] == 0.5
    assert metrics["staleness/mean"] == 1.0
    assert metrics["staleness/max"] == 2.0


def test_no_usable_reward_gives_no_mean() -> None:
    metrics = rollout_metrics([simple(0, None, None)], step=0)
    assert "rollout/raw_reward" not in metrics
    assert metrics["rollout/unusable_share"] == 1.0


def test_repetition_is_seen_at_the_end_of_a_response() -> None:
    assert repeats_itself("abc" * 1000)
    assert not repeats_itself("the quick brown fox jumps over the lazy dog")
    assert not repeats_itself("")


@pytest.mark.parametrize(
    ("rewards", "k", "expected"),
    [
        ([1, 0, 0, 0], 1, 0.25),
        ([1, 0, 0, 0], 2, 0.5),
        ([1, 0, 0, 0], 4, 1.0),
        ([0, 0], 2, 0.0),
        ([1, None], 2, None),
    ],
)
def test_pass_at_k_is_the_chance_of_a_solved_one_among_k(
    rewards: list[float | None], k: int, expected: float | None
) -> None:
    assert pass_at_k(rewards, k) == expected


def test_evaluation_reports_powers_of_two_up_to_the_group_size() -> None:
    groups = [list(simple(0, 1, 0, 0, 0).samples), list(simple(1, 1, 1, 1, None).samples)]
    metrics = eval_metrics(groups, 4)
    assert metrics["eval/reward"] == pytest.approx(4 / 7)
    assert metrics["eval/pass@1"] == pytest.approx((0.25 + 1.0) / 2)
    assert metrics["eval/pass@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["eval/pass@4"] == 1.0, "only the group with four usable rollouts counts"
    assert metrics["eval/unusable_share"] == 0.125
