"""The policy objective against closed forms, and what masked places may not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from vime_hpc.algorithms.kl import kl_per_token
from vime_hpc.algorithms.mismatch import correction, mismatch_metrics
from vime_hpc.algorithms.policy_loss import policy_loss, sft_loss
from vime_hpc.config.algorithm import AlgorithmConfig


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def per_token(ratio: float, adv: float, **config: Any) -> float:
    """Loss of one token whose probability ratio is `ratio`."""
    result = policy_loss(
        t(math.log(ratio)),
        t(0.0),
        t(adv),
        t(1),
        config=AlgorithmConfig(**config),
        segment_ids=torch.tensor([0]),
    )
    return float(result.loss)


@pytest.mark.parametrize(
    ("ratio", "adv", "expected"),
    [(1.0, 1.0, -1.0), (1.5, 1.0, -1.2), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8), (1.5, -1.0, 1.5)],
)
def test_ppo_clips_only_the_side_that_would_gain(ratio: float, adv: float, expected: float) -> None:
    assert per_token(ratio, adv) == pytest.approx(expected, rel=1e-6)


def test_clip_higher_moves_the_upper_bound_alone() -> None:
    assert per_token(1.5, 1.0, eps_clip_high=0.4) == pytest.approx(-1.4, rel=1e-6)
    assert per_token(0.5, -1.0, eps_clip_high=0.4) == pytest.approx(0.8, rel=1e-6)


def test_dual_clip_bounds_negative_advantages_and_leaves_positive_ones() -> None:
    assert per_token(10.0, -1.0, dual_clip=3.0) == pytest.approx(3.0, rel=1e-6)
    assert per_token(1.1, -1.0, dual_clip=3.0) == pytest.approx(1.1, rel=1e-6)
    assert per_token(0.5, 1.0, dual_clip=3.0) == pytest.approx(-0.5, rel=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    lp = t(math.log(0.5)).requires_grad_()
    result = policy_loss(
        lp, t(math.log(0.25)), t(2.0), t(1), config=AlgorithmConfig(policy_loss="cispo")
    )
    assert result.loss.tolist() == pytest.approx([-1.2 * 2.0 * math.log(0.5)], rel=1e-6)
    result.loss.sum().backward()
    assert float(lp.grad) == pytest.approx(-2.4, rel=1e-6)
    assert float(result.metrics["pg_clipfrac"]) == 1.0


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    assert per_token(0.5, 3.0, policy_loss="reinforce") == pytest.approx(
        -3.0 * math.log(0.5), rel=1e-6
    )


def test_gspo_uses_the_mean_log_ratio_of_each_sequence() -> None:
    # sequence 0: log-ratios 0.1 and 0.3 (one masked place between), sequence 1: -0.05
    result = policy_loss(
        t(0.1, 9.0, 0.3, -0.05),
        t(0, 0, 0, 0),
        t(1, 1, 1, 1),
        t(1, 0, 1, 1),
        config=AlgorithmConfig(policy_loss="gspo", eps_clip=0.5),
        segment_ids=torch.tensor([0, 0, 0, 1]),
    )
    expected = [-math.exp(0.2), 0.0, -math.exp(0.2), -math.exp(-0.05)]
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-6)


def test_kl_and_entropy_enter_with_their_coefficients() -> None:
    config = AlgorithmConfig(kl_loss_coef=0.1, kl_estimator="k1", entropy_coef=0.01)
    result = policy_loss(
        t(-1.0), t(-1.0), t(2.0), t(1), config=config, ref_logprobs=t(-1.5), entropy=t(3.0)
    )
    assert float(result.loss) == pytest.approx(-2.0 + 0.1 * 0.5 - 0.01 * 3.0, rel=1e-6)
    assert float(result.metrics["kl_loss"]) == 0.5
    assert float(result.metrics["entropy_loss"]) == 3.0


def test_the_first_update_has_no_kl_to_the_old_policy() -> None:
    lp = torch.randn(50, generator=torch.Generator().manual_seed(1))
    result = policy_loss(lp, lp.clone(), torch.ones(50), torch.ones(50), config=AlgorithmConfig())
    assert result.metrics["ppo_kl"].abs().max() == 0.0
    assert torch.equal(result.metrics["ois"], torch.ones(50))
    assert torch.equal(result.loss, -torch.ones(50))


@pytest.mark.parametrize(
    ("level", "raw", "weight"),
    [
        ("token", 1.0010005, 1.0010005),
        ("sequence_mean", 1.0010005, 1.0010005),
        ("sequence_sum", 54.598, 2.0),
    ],
)
def test_correction_reports_the_weight_before_and_after_its_bounds(
    level: str, raw: float, weight: float
) -> None:
    n = 4000
    old = torch.full((n,), 0.001)
    result = policy_loss(
        old,
        old,
        torch.ones(n),
        torch.ones(n),
        rollout_logprobs=torch.zeros(n),
        segment_ids=torch.zeros(n, dtype=torch.int64),
        config=AlgorithmConfig(importance_correction="truncated", importance_level=level),
    )  # type: ignore[arg-type]
    assert float(result.metrics["tis"][0]) == pytest.approx(raw, rel=2e-5)
    assert float(result.metrics["tis_clipped"][0]) == pytest.approx(weight, rel=1e-5)
    assert float(result.loss[0]) == pytest.approx(-weight, rel=1e-5)


def test_icepop_zeroes_tokens_outside_the_bounds_and_truncation_caps_them() -> None:
    log_ratio = t(math.log(4.0), math.log(0.25), math.log(1.5))
    ice = correction(log_ratio, torch.zeros(3), t(1, 1, 1), mode="icepop", low=0.5, high=2.0)
    assert ice.weight.tolist() == pytest.approx([0.0, 0.0, 1.5], rel=1e-6)
    cap = correction(log_ratio, torch.zeros(3), t(1, 1, 1), mode="truncated", low=0.5, high=2.0)
    assert cap.weight.tolist() == pytest.approx([2.0, 0.5, 1.5], rel=1e-6)
    assert cap.clipped.tolist() == [1.0, 1.0, 0.0]


def test_correction_gives_no_gradient_of_its_own() -> None:
    lp = t(-1.0).requires_grad_()
    config = AlgorithmConfig(policy_loss="reinforce", importance_correction="truncated")
    policy_loss(
        lp, t(-1.0), t(1.0), t(1), config=config, rollout_logprobs=t(-1.2)
    ).loss.sum().backward()
    assert float(lp.grad) == pytest.approx(-math.exp(0.2), rel=1e-6)


def test_metrics_divided_by_the_mask_sum_do_not_see_tool_tokens() -> None:
    mask = t(*([1] * 4 + [0] * 6))
    config = AlgorithmConfig(importance_correction="truncated")
    result = policy_loss(
        torch.zeros(10),
        torch.zeros(10),
        torch.ones(10),
        mask,
        config=config,
        rollout_logprobs=torch.zeros(10),
    )
    assert float(result.metrics["tis"].sum() / mask.sum()) == 1.0
    assert (
        float(
            mismatch_metrics(torch.ones(10), torch.zeros(10), mask)[
                "train_rollout_logprob_abs_diff"
            ].sum()
        )
        == 4.0
    )


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="rollout_logprobs"):
        policy_loss(t(0), t(0), t(1), t(1), config=AlgorithmConfig(importance_correction="icepop"))
    with pytest.raises(ValueError, match="segment_ids"):
        policy_loss(t(0), t(0), t(1), t(1), config=AlgorithmConfig(policy_loss="gspo"))
    with pytest.raises(ValueError, match=r"advantages is \[2\]"):
        policy_loss(t(0), t(0), t(1, 1), t(1), config=AlgorithmConfig())


CONFIGS = [
    AlgorithmConfig(
        policy_loss=p,
        kl_loss_coef=0.1,
        kl_estimator=k,
        entropy_coef=0.01,
        dual_clip=3.0,
        importance_correction=c,
        importance_level=level,
    )
    for p, k, c, level in [
        ("ppo", "k1", "truncated", "token"),
        ("gspo", "k3", "icepop", "sequence_mean"),
        ("cispo", "low_var", "truncated", "sequence_sum"),
        ("reinforce", "k2", "icepop", "token"),
    ]
]


@settings(max_examples=60, deadline=None)
@given(
    bad=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
    seed=st.integers(0, 1000),
    config=st.sampled_from(CONFIGS),
)
def test_nothing_at_masked_places_shows_in_losses_metrics_or_gradients(
    bad: float, seed: int, config: AlgorithmConfig
) -> None:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(12, generator=g) > 0.5).to(torch.uint8)
    inputs = [torch.randn(12, generator=g) * 0.3 - 1 for _ in range(6)]
    segments = torch.tensor([0] * 5 + [1] * 7)

    def evaluate(spoil: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        lp, old, adv, rollout, ref, ent = (
            torch.where(mask == 0, torch.full_like(x, bad), x) if spoil else x.clone()
            for x in inputs
        )
        lp.requires_grad_()
        out = policy_loss(
            lp,
            old,
            adv,
            mask,
            config=config,
            rollout_logprobs=rollout,
            ref_logprobs=ref,
            entropy=ent,
            segment_ids=segments,
        )
        out.loss.sum().backward()
        assert lp.grad is not None
        return out.loss.detach(), out.metrics, lp.grad

    clean, spoiled = evaluate(False), evaluate(True)
    assert torch.equal(clean[0], spoiled[0])
    assert torch.equal(clean[2], spoiled[2])
    assert all(torch.equal(clean[1][k], spoiled[1][k]) for k in clean[1])
    assert (clean[0][mask == 0] == 0).all()
    assert (clean[2][mask == 0] == 0).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 3), config=st.sampled_from(CONFIGS))
def test_splitting_between_sequences_changes_no_token(
    seed: int, cut: int, config: AlgorithmConfig
) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = [3, 5, 2]
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    lp, old, adv, rollout, ref, ent = (torch.randn(10, generator=g) * 0.2 - 1 for _ in range(6))
    mask = (torch.rand(10, generator=g) > 0.3).float()

    def evaluate(part: slice) -> Tensor:
        return policy_loss(
            lp[part],
            old[part],
            adv[part],
            mask[part],
            config=config,
            rollout_logprobs=rollout[part],
            ref_logprobs=ref[part],
            entropy=ent[part],
            segment_ids=segments[part],
        ).loss

    place = sum(lengths[:cut])
    joined = torch.cat([evaluate(slice(0, place)), evaluate(slice(place, 10))])
    assert torch.equal(joined, evaluate(slice(0, 10)))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", 0.5),
        ("k2", 0.125),
        ("k3", math.exp(-0.5) - 1 + 0.5),
        ("low_var", math.exp(-0.5) - 1 + 0.5),
    ],
)
def test_kl_estimators_have_their_closed_form(estimator: str, expected: float) -> None:
    assert float(kl_per_token(estimator, t(-1.0), t(-1.5))) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    a=st.floats(-1e4, 0, width=32),
    b=st.floats(-1e4, 0, width=32),
    estimator=st.sampled_from(["k2", "k3", "low_var"]),
)
def test_kl_is_never_negative_and_always_finite(a: float, b: float, estimator: str) -> None:
    lp = t(a).requires_grad_()
    value = kl_per_token(estimator, lp, t(b))
    value.sum().backward()
    assert float(value) >= 0
    assert math.isfinite(float(value))
    assert lp.grad is not None
    assert math.isfinite(float(lp.grad))


def test_low_var_is_bounded_and_k3_of_a_tiny_difference_is_not_negative() -> None:
    assert float(kl_per_token("low_var", t(-50.0), t(0.0))) == 10.0
    assert float(kl_per_token("k3", t(-1.0), t(-1.0 + 1e-5))) == pytest.approx(5e-11, rel=0.1)


def test_k3_averages_to_the_true_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    mean = (p * kl_per_token("k3", p.log(), q.log())).sum()
    assert float(mean) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_sft_loss_is_the_negative_logprob_of_trained_tokens() -> None:
    assert sft_loss(t(-1.0, math.nan, -2.0), t(1, 0, 1)).loss.tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, -0.407606), (0.5, -0.142932), (2.0, -0.680270)]
)
def test_logprobs_are_of_temperature_scaled_logits(temperature: float, expected: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    assert float(torch.log_softmax(logits / temperature, 0)[0]) == pytest.approx(expected, abs=1e-6)
