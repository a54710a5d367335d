"""Who this process is: its rank in the job, its role, its attempt.

Global ranks run trainer first, then engine hosts, then rollout workers, so rank 0 is always the first trainer rank
(or, without trainers, the first rank there is) and hosts the rendezvous store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from vime_hpc.cluster.slurm import task_place
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError

HOST_RESTARTS = "VIME_HOST_RESTARTS"
"""How often the local launcher started this engine host again."""


class Role(StrEnum):
    """What a process of the job does."""

    TRAINER = "trainer"
    ENGINE = "engine"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One process of the job. All ranks count from 0."""

    global_rank: int
    world_size: int
    role: Role
    role_rank: int
    role_size: int
    local_rank: int
    job_id: str
    restart_count: int

    @property
    def attempt(self) -> str:
        """Name of this start of the job: `<job id>.<restart count>`."""
        return f"{self.job_id}.{self.restart_count}"

    @property
    def name(self) -> str:
        """Short name in logs and messages: trainer-0."""
        return f"{self.role}-{self.role_rank}"


def layout(config: RunConfig) -> list[tuple[Role, int]]:
    """Roles and their process counts, in the order of global ranks."""
    trains = config.run.mode != "rollout_only"
    generates = config.run.mode != "train_only"
    uses_engines = generates and config.algorithm.loss != "sft"
    sizes = [
        (Role.TRAINER, config.trainer.num_ranks if trains else 0),
        (Role.ENGINE, config.engine.num_engines if uses_engines else 0),
        (Role.ROLLOUT, config.rollout.num_workers if generates else 0),
    ]
    return [(role, size) for role, size in sizes if size]


def rank_info(config: RunConfig, environment: Mapping[str, str] = os.environ) -> RankInfo:
    """This process's place, from the local launcher's variables or from Slurm's.

    Raises:
        ConfigError: neither is set, or the number of tasks is not what the configuration needs.
    """
    if "VIME_GLOBAL_RANK" in environment:
        rank, world = int(environment["VIME_GLOBAL_RANK"]), int(environment["VIME_WORLD_SIZE"])
        local = int(environment["VIME_LOCAL_RANK"])
        job, restart = environment["VIME_JOB_ID"], int(environment["VIME_RESTART_COUNT"])
    elif "SLURM_PROCID" in environment:
        task = task_place(environment)
        rank, world, local = task.global_rank, task.world_size, task.local_rank
        job, restart = task.job_id, task.restart_count
    else:
        raise ConfigError(
            "this process has no rank: neither VIME_GLOBAL_RANK nor SLURM_PROCID is set. Start roles with "
            "`vime-hpc run CONFIG` (this machine) or through srun"
        )
    return place(config, rank, world, local_rank=local, job_id=job, restart_count=restart)


def place(
    config: RunConfig, rank: int, world: int, *, local_rank: int, job_id: str, restart_count: int
) -> RankInfo:
    """The role of a global rank under the configuration's layout."""
    roles = layout(config)
    needed = sum(size for _, size in roles)
    if world != needed:
        parts = " + ".join(f"{size} {role}" for role, size in roles)
        raise ConfigError(
            f"the job has {world} tasks, the configuration needs {needed} ({parts}); "
            f"change the number of tasks or trainer.num_ranks / engine.num_engines / rollout.num_workers"
        )
    first = 0
    for role, size in roles:
        if rank < first + size:
            return RankInfo(
                rank, world, role, rank - first, size, local_rank, job_id, restart_count
            )
        first += size
    raise ConfigError(f"rank {rank} is outside the job's 0..{world - 1}")
