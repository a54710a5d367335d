"""What one step promises: denominators of the whole step, masks that hold, refusals instead of NaN,
honest metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import MemoryBatch, make_model, make_samples, with_rollout_logprobs

from vime_hpc.config.algorithm import AlgorithmConfig, OptimizerConfig
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.errors import DamagedDataError, VimeError
from vime_hpc.testing.ranks import run_ranks
from vime_hpc.types import Sample


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=2)


def build(
    path: Path,
    *,
    temperature: float = 1.0,
    layout: dict[str, Any] | None = None,
    max_tokens: int = 60,
    lr: float = 1e-3,
    dtype: str = "float32",
    **algorithm: Any,
) -> Any:
    """Inside a rank."""
    from vime_hpc.trainer.model import build_model
    from vime_hpc.trainer.step import MegatronTrainer

    parts = TrainerConfig(
        max_tokens_per_microbatch=max_tokens, logit_chunk_tokens=7, **(layout or {})
    )
    model = ModelConfig(path=str(path), dtype=dtype)  # type: ignore[arg-type]
    config = AlgorithmConfig(**algorithm)
    return MegatronTrainer(
        build_model(model, parts),
        algorithm=config,
        optimizer=OptimizerConfig(lr=lr),
        trainer=parts,
        temperature=temperature,
        num_steps=10,
    )


def steps(
    rank: int, path: Path, batches: list[list[Sample]], **options: Any
) -> list[dict[str, float]]:
    trainer = build(path, **options)
    return [trainer.step(MemoryBatch(samples, step=i)) for i, samples in enumerate(batches)]


def in_ranks(function: Callable[..., Any], *args: Any, num_ranks: int = 1, **kwargs: Any) -> Any:
    return run_ranks(function, num_ranks, *args, megatron=True, **kwargs)[0]


def two_rows() -> list[Sample]:
    """One and three trained tokens, advantages +1 and -1 (Dr. GRPO, rewards 1 and -1)."""
    base = make_samples(1, 2)
    return [
        replace(
            sample,
            tokens=np.arange(5, 5 + 2 + n, dtype=np.int32),
            response_length=n,
            loss_mask=np.ones(n, np.uint8),
            rollout_logprobs=np.zeros(n, np.float32),
            reward=reward,
        )
        for sample, n, reward in zip(base, (1, 3), (1.0, -1.0), strict=True)
    ]


@pytest.mark.parametrize(("aggregation", "expected"), [("token_mean", 0.5), ("rollout_mean", 0.0)])
def test_the_loss_does_not_depend_on_microbatches_or_ranks(
    path: Path, aggregation: str, expected: float
) -> None:
    """Ratio 1, so the loss is -(1 * 1 - 3) / 4 = 0.5 over tokens and 0 over rollouts (case C15)."""
    options = {"advantage": "grpo_no_std", "aggregation": aggregation}
    for max_tokens in (1, 60):
        got = in_ranks(steps, path, [two_rows()], max_tokens=max_tokens, **options)
        assert got[0]["train/loss"] == pytest.approx(expected, abs=1e-7)
        assert got[0]["train/num_microbatches"] == (2 if max_tokens == 1 else 1)
    both = in_ranks(steps, path, [two_rows()], num_ranks=2, layout={"num_ranks": 2}, **options)
    assert both[0]["train/loss"] == pytest.approx(expected, abs=1e-7)


def test_samples_without_a_trained_token_change_nothing_not_even_a_denominator(path: Path) -> None:
    """Case C18: an empty response and a fully masked one beside an ordinary group."""
    good = make_samples(1, 3)
    empty = replace(
        good[0],
        sample_id=900,
        rollout_id=9,
        group_id=0,
        response_length=0,
        loss_mask=np.zeros(0, np.uint8),
        rollout_logprobs=np.zeros(0, np.float32),
        reward=None,
        reward_cause="empty",
    )
    masked = replace(
        good[1],
        sample_id=901,
        rollout_id=10,
        group_id=0,
        loss_mask=np.zeros_like(good[1].loss_mask),
        reward=None,
    )
    options = {"entropy_coef": 0.1}
    alone = in_ranks(steps, path, [good], **options)[0]
    mixed = in_ranks(steps, path, [[empty, *good, masked]], **options)[0]
    for name in ("train/loss", "train/grad_norm", "train/tokens", "train/entropy_loss"):
        assert mixed[name] == alone[name], name
    assert mixed["train/samples_without_signal"] == 2


@pytest.mark.parametrize("loss", ["policy", "sft"])
def test_a_step_with_no_trained_token_at_all_is_refused(path: Path, loss: str) -> None:
    def refused(rank: int) -> str:
        samples = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in make_samples(1, 2)]
        with pytest.raises(VimeError) as error:
            build(path, loss=loss).step(MemoryBatch(samples, step=7))
        return str(error.value)

    message = in_ranks(refused)
    assert "step 7" in message
    assert "0 trainable tokens in 2 samples" in message


def test_equal_rewards_skip_the_update_and_say_so(path: Path) -> None:
    """Neither NaN nor a step of pure weight decay: the weights stay bit for bit, the engine check
    still runs.
    """

    def skip(rank: int) -> tuple[dict[str, float], bool]:
        trainer = build(path, entropy_coef=0.1)
        before = [p.clone() for p in trainer.model.module.parameters()]
        metrics = trainer.step(MemoryBatch(make_samples(equal_rewards=True)))
        return metrics, all(
            bool((a == b).all())
            for a, b in zip(before, trainer.model.module.parameters(), strict=True)
        )

    metrics, same = in_ranks(skip)
    assert same
    assert metrics["train/skipped_update"] == 1
    assert metrics["train/loss"] == 0
    assert metrics["train/grad_norm"] == 0
    assert metrics["train/train_rollout_logprob_abs_diff"] > 1
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_group_of_equal_rewards_leaves_the_step_as_if_it_were_not_there(path: Path) -> None:
    good = make_samples(2, 4)
    flat = [
        replace(
            s,
            group_id=77,
            rollout_id=s.rollout_id + 770_000,
            sample_id=s.sample_id + 10**9,
            reward=1.0,
        )
        for s in make_samples(1, 4, seed=9)
    ]
    alone, beside = in_ranks(steps, path, [good]), in_ranks(steps, path, [good + flat])
    assert beside[0]["train/loss"] == alone[0]["train/loss"]
    assert beside[0]["train/grad_norm"] == alone[0]["train/grad_norm"]
    assert beside[0]["train/samples_without_signal"] == 4


def test_nan_and_infinity_at_masked_places_reach_nothing(path: Path) -> None:
    clean = make_samples()
    dirty = [
        replace(
            s,
            rollout_logprobs=np.where(s.loss_mask == 1, s.rollout_logprobs, bad).astype(np.float32),
        )
        for s, bad in zip(clean, [np.nan, np.inf, -np.inf] * 4, strict=True)
    ]
    options = {"importance_correction": "truncated", "updates_per_step": 2}
    a, b = (
        in_ranks(steps, path, [clean], **options)[0],
        in_ranks(steps, path, [dirty], **options)[0],
    )
    assert {k: v for k, v in a.items() if k.startswith("train/")} == {
        k: v for k, v in b.items() if k.startswith("train/")
    }


def test_eos_trains_and_padding_ids_mean_nothing(path: Path) -> None:
    """Masks come from lengths (case C19): token 2, pad and eos at once, is trained where it was
    sampled.
    """
    base = make_samples(1, 2)
    samples = [
        replace(
            s,
            tokens=np.array(t, np.int32),
            response_length=3,
            loss_mask=np.ones(3, np.uint8),
            rollout_logprobs=np.zeros(3, np.float32),
            reward=r,
        )
        for s, t, r in zip(base, ([5, 6, 7, 8, 2], [5, 6, 7, 8, 9]), (1.0, 0.0), strict=True)
    ]
    assert in_ranks(steps, path, [samples])[0]["train/tokens"] == 6


def test_logprob_j_belongs_to_response_token_j(path: Path) -> None:
    """Case C26: shifting by one token is seen."""

    def shifted(rank: int) -> tuple[float, float]:
        trainer = build(path)
        samples = make_samples(2, 3)
        exact = with_rollout_logprobs(samples, trainer.logprobs(samples))
        off = with_rollout_logprobs(samples, [np.roll(lp, 1) for lp in trainer.logprobs(samples)])
        return (
            trainer.step(MemoryBatch(exact))["train/train_rollout_logprob_abs_diff"],
            build_again(trainer, off),
        )

    def build_again(trainer: Any, samples: list[Sample]) -> float:
        return float(
            trainer.step(MemoryBatch(samples, step=1))["train/train_rollout_logprob_abs_diff"]
        )

    right, wrong = in_ranks(shifted)
    assert right < 1e-6
    assert wrong > 0.1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_of_temperature_scaled_logits(path: Path, temperature: float) -> None:
    """Case C22: the trainer agrees with an engine that reports processed logprobs, and only with
    it.
    """

    def compare(rank: int) -> tuple[float, float]:
        scaled, raw = build(path, temperature=temperature), build(path, temperature=1.0)
        samples = make_samples(1, 3)
        engine = with_rollout_logprobs(samples, scaled.logprobs(samples))
        return (
            scaled.step(MemoryBatch(engine))["train/train_rollout_logprob_max_diff"],
            raw.step(MemoryBatch(engine))["train/train_rollout_logprob_max_diff"],
        )

    same, other = in_ranks(compare)
    assert same < 1e-5
    assert (other > 0.1) == (temperature != 1.0)


def test_metrics_divide_by_the_mask_not_by_the_response(path: Path) -> None:
    """Case C16: ten response tokens, four trained, every correction weight 1: the mean is 1.0, not
    0.4.
    """

    def weights(rank: int) -> dict[str, float]:
        trainer = build(path, importance_correction="truncated")
        mask = np.array([1, 1, 0, 0, 0, 1, 0, 0, 0, 1], np.uint8)
        samples = [
            replace(
                s,
                tokens=np.arange(3, 15, dtype=np.int32) + i,
                response_length=10,
                loss_mask=mask,
                rollout_logprobs=np.zeros(10, np.float32),
                reward=float(i),
            )
            for i, s in enumerate(make_samples(1, 2))
        ]
        samples = with_rollout_logprobs(samples, trainer.logprobs(samples))
        return trainer.step(MemoryBatch(samples))  # type: ignore[no-any-return]

    metrics = in_ranks(weights)
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/tokens"] == 8


def test_on_policy_steps_have_no_kl_and_more_updates_do(path: Path) -> None:
    one = in_ranks(steps, path, [make_samples()])[0]
    assert one["train/ppo_kl"] == 0.0
    assert one["train/pg_clipfrac"] == 0.0
    assert "perf/log_probs_time" not in one
    four = in_ranks(steps, path, [make_samples()], updates_per_step=4, lr=1e-2)[0]
    assert four["train/ppo_kl"] != 0.0
    assert four["perf/log_probs_time"] > 0


def test_old_logprobs_are_those_before_the_first_update(path: Path) -> None:
    """The difference to the engine, measured before any update, does not see the updates between."""
    exact = in_ranks(
        lambda rank: with_rollout_logprobs(make_samples(), build(path).logprobs(make_samples()))
    )
    metrics = in_ranks(steps, path, [exact], updates_per_step=4, lr=1e-2)[0]
    assert metrics["train/train_rollout_logprob_max_diff"] < 1e-6
    assert abs(metrics["train/ppo_kl"]) > 1e-4


def test_a_rank_without_samples_keeps_step_with_the_others(path: Path) -> None:
    samples = make_samples(1, 2)
    one = in_ranks(steps, path, [samples, samples])
    three = in_ranks(steps, path, [samples, samples], num_ranks=3, layout={"num_ranks": 3})
    for a, b in zip(one, three, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=1e-6)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "layout", [{}, {"num_ranks": 2}, {"num_ranks": 2, "tp": 2}, {"num_ranks": 2, "pp": 2}]
)
def test_the_same_run_twice_is_the_same_bit_for_bit(path: Path, layout: dict[str, Any]) -> None:
    batches = [make_samples(seed=seed) for seed in (1, 2, 3)]
    runs = [
        in_ranks(
            steps,
            path,
            batches,
            num_ranks=layout.get("num_ranks", 1),
            layout=layout,
            updates_per_step=2,
        )
        for _ in range(2)
    ]
    a, b = (
        [{k: v for k, v in step.items() if k.startswith("train/")} for step in run] for run in runs
    )
    assert a == b


def test_bfloat16_trains_with_float32_masters(path: Path) -> None:
    losses = [
        m["train/loss"]
        for m in in_ranks(steps, path, [make_samples()] * 4, loss="sft", dtype="bfloat16")
    ]
    assert losses[-1] < losses[0] - 0.3


def test_a_sample_without_a_prompt_is_refused_by_name(path: Path) -> None:
    def refused(rank: int) -> str:
        sample = make_samples(1, 1)[0]
        n = len(sample.tokens)
        bare = replace(
            sample,
            response_length=n,
            loss_mask=np.ones(n, np.uint8),
            rollout_logprobs=np.zeros(n, np.float32),
        )
        with pytest.raises(DamagedDataError) as error:
            build(path).logprobs([bare])
        return str(error.value)

    assert f"sample {make_samples(1, 1)[0].sample_id}:" in in_ranks(refused)
