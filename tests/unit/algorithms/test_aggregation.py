"""Denominators of the whole step: the loss does not depend on how the step is split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from vime_hpc.algorithms.aggregation import require_trained_tokens, token_weights
from vime_hpc.algorithms.value_loss import discounted_returns, generalized_advantages, value_loss
from vime_hpc.errors import DamagedDataError


def weights(
    masks: list[int], rollouts: list[int], contributes: list[bool], mode: str
) -> list[float]:
    return token_weights(
        torch.tensor(masks), torch.tensor(rollouts), torch.tensor(contributes), mode
    ).tolist()


def test_two_rows_of_one_and_three_tokens() -> None:
    # losses -1 and +1 per token: token mean (-1 + 3) / 4 = 0.5, rollout mean (-1 + 1) / 2 = 0
    per_token = weights([1, 3], [0, 1], [True, True], "token_mean")
    assert -1 * per_token[0] * 1 + 1 * per_token[1] * 3 == 0.5
    per_rollout = weights([1, 3], [0, 1], [True, True], "rollout_mean")
    assert -1 * per_rollout[0] * 1 + 1 * per_rollout[1] * 3 == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("mode", ["token_mean", "rollout_mean"])
def test_empty_and_left_out_samples_enter_no_denominator(mode: str) -> None:
    alone = weights([3], [1], [True], mode)[0]
    assert weights([0, 3, 5], [0, 1, 2], [True, True, False], mode) == [0.0, alone, 0.0]


def test_samples_of_one_rollout_share_its_vote() -> None:
    assert weights([1, 3, 4], [7, 7, 8], [True] * 3, "rollout_mean") == [1 / 8, 1 / 8, 1 / 8]
    assert weights([2, 2, 1], [7, 7, 8], [True] * 3, "rollout_mean") == [1 / 8, 1 / 8, 1 / 2]


def test_nothing_contributing_gives_zeros_and_no_division() -> None:
    assert weights([2, 2], [0, 1], [False, False], "rollout_mean") == [0.0, 0.0]


def test_a_batch_without_any_trained_token_is_refused_by_name() -> None:
    with pytest.raises(DamagedDataError, match=r"step-000003.*0 trainable tokens"):
        require_trained_tokens(torch.tensor([0, 0]), where="step-000003")
    require_trained_tokens(torch.tensor([0, 1]), where="step-000003")


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans()), min_size=1, max_size=20
    ),
    mode=st.sampled_from(["token_mean", "rollout_mean"]),
)
def test_weights_of_contributing_tokens_sum_to_one(
    rows: list[tuple[int, int, bool]], mode: str
) -> None:
    masks, rollouts, contributes = ([r[k] for r in rows] for k in range(3))
    got = weights(masks, rollouts, contributes, mode)
    total = sum(m * w for m, w in zip(masks, got, strict=True))
    live = any(c and m > 0 for m, c in zip(masks, contributes, strict=True))
    assert total == pytest.approx(1.0 if live else 0.0)


def test_returns_cross_tool_tokens_without_a_decay_step() -> None:
    got = discounted_returns(torch.tensor([0.0, 0, 1]), torch.tensor([1, 0, 1]), gamma=0.5)
    assert got.tolist() == [0.5, 0.0, 1.0]


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    rewards, values = torch.tensor([0.0, 9.0, 1.0]), torch.tensor([0.2, 7.0, 0.4])
    adv, returns = generalized_advantages(
        rewards, values, torch.tensor([1, 0, 1]), gamma=0.5, lam=1.0
    )
    assert adv.tolist() == pytest.approx([0.5 - 0.2, 0.0, 1.0 - 0.4])
    assert returns.tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_value_loss_takes_the_larger_of_plain_and_clipped() -> None:
    loss, clipped = value_loss(
        torch.tensor([1.0, 5.0, 9.0]),
        torch.tensor([0.0, 5.0, 0.0]),
        torch.tensor([1.0, 4.0, float("nan")]),
        torch.tensor([1, 1, 0]),
        clip=0.2,
    )
    assert loss.tolist() == pytest.approx([0.64, 1.0, 0.0])
    assert clipped.tolist() == [1.0, 0.0, 0.0]
