"""What trainer-0's log says of a step."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime_hpc.cluster.rank import RankInfo, Role
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.observe.metrics import read_metrics
from vime_hpc.roles.context import RoleContext
from vime_hpc.roles.step_log import StepLog

METRICS = {
    "train/loss": -0.01234,
    "train/grad_norm": 0.5,
    "perf/train_tokens_per_rank_per_sec": 1234.4,
    "perf/train_wait_time": 1.5,
    "perf/train_time": 2.25,
    "perf/update_weights_time": 0.25,
    "perf/save_time": 0.75,
    "perf/step_time": 4.0,
}
LINE = (
    "step 12/40  version 12  reward 0.500  loss -0.0123  grad norm 0.500  tokens/s a rank 1234  seconds 4.00 "
    "(waiting 1.50, training 2.25, weights 0.25, checkpoint before it 0.75)"
)


@pytest.fixture
def context(tmp_path: Path) -> RoleContext:
    config = load_config(
        [],
        ["--model.path=m", "--data.train=t", "--run.num_steps=40", "--observe.tensorboard=false"],
    )
    rank = RankInfo(0, 2, Role.TRAINER, 0, 2, 0, "local", 0)
    warning: Any = None  # it would block a signal in this process
    return RoleContext(config, RunPaths(tmp_path), rank, warning, b"")


@pytest.fixture
def batch() -> Any:
    return SimpleNamespace(table=_Table(np.array([11, 10])), stats={"rollout/raw_reward": 0.5})


class _Table:
    def __init__(self, weight_version: np.ndarray[Any, Any]) -> None:
        self.weight_version = weight_version

    def __len__(self) -> int:
        return len(self.weight_version)


def test_rank_0_logs_a_short_line_a_step_beside_the_metrics(
    context: RoleContext, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        StepLog(context).log(11, METRICS, batch)
    assert [record.getMessage() for record in caplog.records] == [LINE]
    assert read_metrics(context.paths.metrics)[0]["staleness/max"] == 1.0


def test_a_step_before_a_stop_published_no_version_and_the_line_names_none(
    context: RoleContext, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {name: value for name, value in METRICS.items() if "weights" not in name}
    with caplog.at_level(logging.INFO):
        StepLog(context).log(11, metrics, batch)
    assert "version" not in caplog.text
    assert "(waiting 1.50, training 2.25, checkpoint before it 0.75)" in caplog.text


def test_other_ranks_say_nothing(
    context: RoleContext, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank = dataclasses.replace(context.rank, role_rank=1)
    with caplog.at_level(logging.INFO):
        StepLog(dataclasses.replace(context, rank=rank)).log(11, METRICS, batch)
    assert caplog.records == []
