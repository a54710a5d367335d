"""The trainer's step on the GPU: against the CPU in float32, bfloat16 against float32, repeatable, no growing memory.

Needs 3 GiB of GPU memory and two minutes (five processes that import megatron-core, at the same time).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_cases import make_model
from trainer_process import Outcome, outcome, start

RUNS = {
    "cpu": {"gpu": False, "dtype": "float32", "steps": 3},
    "gpu": {"gpu": True, "dtype": "float32", "steps": 3},
    "bf16": {"gpu": True, "dtype": "bfloat16", "steps": 50},
    "bf16 again": {"gpu": True, "dtype": "bfloat16", "steps": 50},
    "bf16 sdpa": {"gpu": True, "dtype": "bfloat16", "steps": 3, "attention": "sdpa"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root = tmp_path_factory.mktemp("trainer")
    model = make_model(
        root / "model",
        vocab=2048,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        initializer_range=0.05,
    )
    started = {name: start(root / name, model, **options) for name, options in RUNS.items()}
    return {name: outcome(process, root / name) for name, process in started.items()}


def test_float32_steps_are_those_of_the_cpu(runs: dict[str, Outcome]) -> None:
    cpu, gpu = runs["cpu"], runs["gpu"]
    first = (cpu.tensors["logprobs/first"] - gpu.tensors["logprobs/first"]).abs().max()
    last = (cpu.tensors["logprobs/last"] - gpu.tensors["logprobs/last"]).abs().max()
    print(f"largest logprob difference: {first:.2e} before training, {last:.2e} after three steps")
    assert first < 1e-4
    assert last < 1e-3
    for mine, theirs in zip(gpu.metrics, cpu.metrics, strict=True):
        print(
            {
                name: (mine[name], theirs[name])
                for name in ("train/loss", "train/grad_norm", "train/entropy_loss")
            }
        )
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)
        assert mine["train/entropy_loss"] == pytest.approx(theirs["train/entropy_loss"], rel=1e-4)
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-4)
        assert mine["train/tokens"] == theirs["train/tokens"]


def test_bfloat16_logprobs_differ_from_float32_by_rounding_only(runs: dict[str, Outcome]) -> None:
    """Eight bits of mantissa: 2^-9 of logits of about 4 is 0.008."""
    difference = (
        runs["bf16"].tensors["logprobs/first"] - runs["gpu"].tensors["logprobs/first"]
    ).abs()
    plain = (
        runs["bf16 sdpa"].tensors["logprobs/first"] - runs["gpu"].tensors["logprobs/first"]
    ).abs()
    print(
        f"bfloat16 against float32: mean {difference.mean():.2e}, largest {difference.max():.2e}; "
        f"with sdpa {plain.mean():.2e}"
    )
    assert 0 < difference.mean() < 0.01
    assert difference.mean() < 1.5 * plain.mean()


def test_bfloat16_training_follows_float32(runs: dict[str, Outcome]) -> None:
    for mine, theirs in zip(runs["bf16"].metrics[:3], runs["gpu"].metrics, strict=True):
        print(mine["train/grad_norm"], theirs["train/grad_norm"])
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.05)


def test_fifty_steps_leave_no_more_memory_in_use_than_ten(runs: dict[str, Outcome]) -> None:
    """Three batches in turn; the allocator may keep what it reserved, what is allocated must not grow by a byte."""
    allocated, reserved = runs["bf16"].allocated, runs["bf16"].reserved
    print([round(n / 2**20, 2) for n in allocated[::7]], [round(n / 2**20) for n in reserved[::7]])
    assert len(allocated) == 50
    assert allocated[9:] == allocated[9:12] * 13 + allocated[9:11]
    assert reserved[-1] == reserved[9]


def test_the_same_steps_twice_give_the_same_bits(runs: dict[str, Outcome]) -> None:
    first, second = runs["bf16"].tensors, runs["bf16 again"].tensors
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} tensors differ, {different[:3]}"


def test_models_are_trained_at_all(runs: dict[str, Outcome], tmp_path: Path) -> None:
    moved = (
        (runs["gpu"].tensors["logprobs/last"] - runs["gpu"].tensors["logprobs/first"]).abs().mean()
    )
    assert moved > 1e-3
