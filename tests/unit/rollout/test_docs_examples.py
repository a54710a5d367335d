"""The examples of docs/extending.md run as they stand there."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from seeded_client import Answer, SeededClient

from vime_hpc.algorithms import advantage
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.scheduler import RolloutScheduler

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """All Python blocks of the page in one module that dotted paths can name."""
    module = types.ModuleType("docs_examples")
    monkeypatch.setitem(sys.modules, "docs_examples", module)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
    module.__dict__["answer_tokens"] = lambda call: [61, 51]
    return module


def test_the_rollout_the_reward_and_the_filter_make_a_step(
    examples: types.ModuleType, make_scheduler: Callable[..., RolloutScheduler]
) -> None:
    client = SeededClient(
        fault=lambda p, s: Answer([49, 61] if 51 not in p else [51], [-1.0] * (1 + (51 not in p)))
    )
    scheduler = make_scheduler(
        client,
        prompts_per_step=1,
        reward="docs_examples:length_aware",
        reward_key="score",
        reward_table={"price": 0.001},
        generate="docs_examples:with_calculator",
        generate_table={"max_turns": 3},
    )
    groups, _ = scheduler.generate(0, 0)
    sample = groups[0].samples[0]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert sample.metadata["verdict"]["acc"] == 0.0
    assert sample.reward == pytest.approx(-0.005)
    assert examples.solvable(groups[0], {}) == "unsolved"


def test_the_reward_example_grades(examples: types.ModuleType) -> None:
    runner = RewardRunner(
        RolloutConfig(
            reward="docs_examples:length_aware", reward_key="acc", reward_table={"price": 0}
        )
    )
    from test_rewards import prompt, sample

    try:
        assert asyncio.run(runner.grade(sample(" 42 "), prompt("42"))).reward == 1.0
    finally:
        runner.close()


def test_the_advantage_example_is_an_estimator(examples: types.ModuleType) -> None:
    got = advantage.compute(
        "docs_examples:centered",
        torch.tensor([1.0, 0.0, float("nan")], dtype=torch.float64),
        torch.tensor([0, 0, 0]),
        torch.arange(3),
        torch.tensor([True, True, False]),
        {"scale": 0.5},
    )
    assert got.tolist() == [0.25, -0.25, 0.0]
