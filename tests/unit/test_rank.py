"""Which role a global rank has."""

from __future__ import annotations

import pytest

from vime_hpc.cluster.rank import Role, place, rank_info
from vime_hpc.config.load import load_config
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError

NEEDED = ["--model.path=m", "--data.train=t"]


def config(*overrides: str) -> RunConfig:
    return load_config([], [*NEEDED, *overrides])


def test_ranks_run_trainer_engines_rollout_workers() -> None:
    c = config("--trainer.num_ranks=2", "--engine.num_engines=2", "--rollout.num_workers=1")
    names = [place(c, r, 5, local_rank=r, job_id="7", restart_count=1).name for r in range(5)]
    assert names == ["trainer-0", "trainer-1", "engine-0", "engine-1", "rollout-0"]


def test_sft_has_no_engine_and_train_only_no_rollout() -> None:
    sft = config("--algorithm.loss=sft", "--engine.num_engines=3")
    assert place(sft, 1, 2, local_rank=0, job_id="7", restart_count=0).role is Role.ROLLOUT
    alone = config("--run.mode=train_only", "--trainer.num_ranks=2")
    assert place(alone, 1, 2, local_rank=0, job_id="7", restart_count=0).role is Role.TRAINER


def test_a_wrong_number_of_tasks_is_refused_with_the_sum() -> None:
    with pytest.raises(
        ConfigError,
        match=r"4 tasks, the configuration needs 3 \(1 trainer \+ 1 engine \+ 1 rollout\)",
    ):
        place(config(), 0, 4, local_rank=0, job_id="7", restart_count=0)


def test_the_local_launchers_variables_give_the_place() -> None:
    environment = {
        "VIME_GLOBAL_RANK": "2",
        "VIME_WORLD_SIZE": "3",
        "VIME_LOCAL_RANK": "0",
        "VIME_JOB_ID": "local",
        "VIME_RESTART_COUNT": "4",
    }
    info = rank_info(config(), environment)
    assert (info.name, info.attempt) == ("rollout-0", "local.4")


def test_a_process_without_a_rank_is_told_how_to_start() -> None:
    with pytest.raises(ConfigError, match="vime-hpc run CONFIG"):
        rank_info(config(), {})
