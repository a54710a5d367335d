"""A byte-level tokenizer, a prompt file, and schedulers over an engine client that answers by seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.config.data import DataConfig
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.rollout.event_loop import BackgroundLoop
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.scheduler import RolloutScheduler
from vime_hpc.rollout.source import PromptSource, load_prompts
from vime_hpc.rollout.tiny_policy import byte_tokenizer
from vime_hpc.rollout.tokenizer import PromptTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(byte_tokenizer())


@pytest.fixture
def runner() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": f"p{i}", "label": str(i % 10)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_source(prompt_file: Path, tokenizer: PromptTokenizer) -> Callable[..., PromptSource]:
    def make(group_size: int = 2, **options: Any) -> PromptSource:
        prompts = load_prompts(str(prompt_file), DataConfig(train=str(prompt_file)), tokenizer)
        return PromptSource(
            prompts, **{"seed": 1, "group_size": group_size, "shuffle": False, **options}
        )

    return make


@pytest.fixture
def make_scheduler(
    make_source: Callable[..., PromptSource], tokenizer: PromptTokenizer, runner: BackgroundLoop
) -> Iterator[Callable[..., RolloutScheduler]]:
    graders: list[RewardRunner] = []

    def make(
        client: Any,
        *,
        source: PromptSource | None = None,
        hooks: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        config = RolloutConfig(
            **{
                "prompts_per_step": 2,
                "group_size": 2,
                "max_response_tokens": 4,
                "reward": "random",
                **options,
            }
        )
        graders.append(RewardRunner(config))
        return RolloutScheduler(
            source=source or make_source(config.group_size),
            client=client,
            rewards=graders[-1],
            config=config,
            run_seed=1,
            decode=tokenizer.decode,
            runner=runner,
            **(hooks or {}),
        )

    yield make
    for grader in graders:
        grader.close()
