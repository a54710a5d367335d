"""Advantages against numbers that can be checked by hand, and the rules every estimator keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from vime_hpc.algorithms import advantage
from vime_hpc.errors import ConfigError


def run(
    name: str,
    rewards: list[float],
    groups: list[int],
    rollouts: list[int] | None = None,
    usable: list[bool] | None = None,
) -> Tensor:
    n = len(rewards)
    return advantage.compute(
        name,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups),
        torch.tensor(rollouts if rollouts is not None else list(range(n))),
        torch.tensor(usable if usable is not None else [True] * n),
    )


GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
REWARDS = [1.0, 0, 1, 0, 5, 5, 5, 2, 4, 2, 4]
CENTERED = [0.5, -0.5, 0.5, -0.5, 0, 0, 0, -1, 1, -1, 1]


def test_groups_of_different_size_are_centered_each_on_its_own_mean() -> None:
    assert run("grpo_no_std", REWARDS, GROUPS).tolist() == CENTERED


@pytest.mark.parametrize("name", advantage.BUILT_IN)
def test_row_order_does_not_change_a_bit(name: str) -> None:
    order = [7, 0, 4, 1, 8, 5, 2, 9, 6, 3, 10]
    straight = run(name, REWARDS, GROUPS)
    shuffled = run(name, [REWARDS[i] for i in order], [GROUPS[i] for i in order])
    assert torch.equal(shuffled, straight[order])


def test_grpo_divides_by_the_sample_deviation() -> None:
    got = run("grpo", [1, 0, 0, 0], [0] * 4)
    deviation = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    expected = [0.75 / (deviation + 1e-6)] + [-0.25 / (deviation + 1e-6)] * 3
    assert got.tolist() == pytest.approx(expected, rel=1e-7)
    assert got.tolist() == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)


@pytest.mark.parametrize(
    "rewards", [[0.35] * 7, [0.7] * 7, [1 / 3] * 7, [0.9999999] * 6, [0.1] * 3]
)
@pytest.mark.parametrize("name", advantage.BUILT_IN)
def test_equal_rewards_give_exactly_zero(name: str, rewards: list[float]) -> None:
    assert run(name, rewards, [3] * len(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", advantage.GROUP_RELATIVE)
def test_a_group_of_one_gives_zero_and_leaves_its_neighbour_alone(name: str) -> None:
    assert run(name, [1.0], [0]).tolist() == [0.0]
    both = run(name, [1, 1, 0], [0, 1, 1])
    assert both[0] == 0.0
    assert both[1] > 0 > both[2]
    if name == "grpo":
        assert both.tolist() == pytest.approx([0.0, 0.707106, -0.707106], abs=1e-6)


def test_a_rollout_split_into_samples_votes_once() -> None:
    # rollout 0 came apart into three samples: the mean is (1 + 0) / 2, not 3/4
    got = run("grpo_no_std", [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1])
    assert got.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_unusable_rewards_take_no_part_and_get_zero() -> None:
    got = run("grpo_no_std", [1, math.nan, 0], [0, 0, 0], usable=[True, False, True])
    assert got.tolist() == [0.5, 0.0, -0.5]


def test_one_unusable_sample_makes_its_rollout_unusable() -> None:
    got = run("grpo_no_std", [1, 1, 0, 1], [0] * 4, [0, 0, 1, 2], [True, False, True, True])
    assert got.tolist() == [0.0, 0.0, -0.5, 0.5]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert run("rloo", [3, 0, 0], [0] * 3).tolist() == [3.0, -1.5, -1.5]


def test_reinforce_pp_normalises_over_the_step() -> None:
    got = run("reinforce_pp", [1, 1, 0, 0], [0, 0, 1, 1])
    deviation = math.sqrt(4 * 0.25 / 3)
    assert got.tolist() == pytest.approx(
        [0.5 / (deviation + 1e-6)] * 2 + [-0.5 / (deviation + 1e-6)] * 2, rel=1e-6
    )


def test_reinforce_pp_baseline_centers_on_the_group_and_scales_by_the_step() -> None:
    got = run("reinforce_pp_baseline", [1, 0, 4, 0, 7, 7], [0, 0, 1, 1, 2, 2])
    deviation = math.sqrt((2 * 0.25 + 2 * 4.0) / 5)
    expected = [c / (deviation + 1e-6) for c in (0.5, -0.5, 2.0, -2.0, 0.0, 0.0)]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_usable_rewards_that_are_not_finite_are_refused_with_their_indices() -> None:
    with pytest.raises(ValueError, match=r"\[1\]"):
        run("grpo", [1, math.nan], [0, 0])


def test_samples_of_a_rollout_with_different_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="share its reward"):
        run("grpo", [1, 0], [0, 0], [5, 5])


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="reinforce_pp_baseline"):
        run("grop", [1, 0], [0, 0])


def half(
    rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, usable: Tensor, table: dict[str, float]
) -> Tensor:
    return rewards * table["scale"]


def test_a_dotted_path_names_a_custom_estimator() -> None:
    got = advantage.compute(
        f"{__name__}:half",
        torch.tensor([2.0, 4.0]),
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
        torch.tensor([True, False]),
        {"scale": 0.5},
    )
    assert got.tolist() == [1.0, 0.0]


def test_zero_spread_is_decided_by_equality() -> None:
    got = advantage.zero_spread(
        torch.tensor([0.35] * 7 + [1.0, 0.0]),
        torch.tensor([0] * 7 + [1, 1]),
        torch.arange(9),
        torch.ones(9, dtype=torch.bool),
    )
    assert got.tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize(
    ("switch", "expected"), [(True, [False, False, True, True]), (False, [True] * 4)]
)
def test_zero_spread_groups_leave_the_loss_only_with_the_switch(
    switch: bool, expected: list[bool]
) -> None:
    groups, rollouts = torch.tensor([0, 0, 1, 1]), torch.arange(4)
    adv = run("grpo", [1, 1, 1, 0], [0, 0, 1, 1])
    got = advantage.contributing(
        "grpo",
        adv,
        groups,
        rollouts,
        torch.ones(4, dtype=torch.bool),
        torch.tensor([2, 2, 2, 2]),
        mask_zero_spread=switch,
    )
    assert got.tolist() == expected


def test_samples_without_trained_tokens_or_usable_reward_never_contribute() -> None:
    got = advantage.contributing(
        "grpo",
        torch.tensor([1.0, -1.0, 1.0]),
        torch.tensor([0, 0, 0]),
        torch.arange(3),
        torch.tensor([True, True, False]),
        torch.tensor([0, 2, 2]),
        mask_zero_spread=True,
    )
    assert got.tolist() == [False, True, False]


rows = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32), st.booleans()),
    min_size=1,
    max_size=24,
)


@settings(max_examples=150, deadline=None)
@given(rows=rows, name=st.sampled_from(advantage.BUILT_IN), data=st.data())
def test_any_permutation_gives_the_permuted_result(
    rows: list[tuple[int, float, bool]], name: str, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    groups, rewards, usable = ([r[k] for r in rows] for k in range(3))
    straight = run(name, rewards, groups, usable=usable)
    shuffled = run(
        name,
        [rewards[i] for i in order],
        [groups[i] for i in order],
        list(order),
        [usable[i] for i in order],
    )
    assert torch.equal(shuffled, straight[list(order)])
    assert torch.isfinite(straight).all()


@settings(max_examples=100, deadline=None)
@given(rows=rows, copies=st.integers(1, 4), name=st.sampled_from(advantage.BUILT_IN))
def test_splitting_a_rollout_changes_nobodys_advantage(
    rows: list[tuple[int, float, bool]], copies: int, name: str
) -> None:
    groups, rewards, usable = ([r[k] for r in rows] for k in range(3))
    whole = run(name, rewards, groups, usable=usable)
    ids = list(range(len(rows)))
    split = run(
        name,
        rewards + [rewards[0]] * copies,
        groups + [groups[0]] * copies,
        ids + [0] * copies,
        usable + [usable[0]] * copies,
    )
    assert torch.equal(split[: len(rows)], whole)
    assert torch.equal(split[len(rows) :], whole[0].expand(copies))
