"""Slurm's variables to ranks (every launch shape, foreign launchers too), host lists, states."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vime_hpc.cluster.rank import Role, rank_info
from vime_hpc.cluster.slurm import expand_hosts, first_host, task_place
from vime_hpc.cluster.slurm_says import job_end_time, read_states
from vime_hpc.config.load import load_config
from vime_hpc.errors import ConfigError

HET = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS_HET_GROUP_0": "16",
    "SLURM_NTASKS_HET_GROUP_1": "8",
}


def step(rank: int, tasks: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_LOCALID": "3",
        **more,
    }


@pytest.mark.parametrize(
    ("environment", "rank", "world"),
    [
        # one srun per component: the step's numbers, not the job's SLURM_NTASKS
        ({**HET, **step(3, 8, SLURM_NTASKS="24")}, 19, 24),
        ({**HET, **step(3, 16, SLURM_NTASKS="24")}, 3, 24),
        # one step over both: Slurm counts through
        ({**HET, **step(19, 24, SLURM_NTASKS="24")}, 19, 24),
        # components of equal size need the component's number
        ({**HET, **step(3, 8, VIME_COMPONENT="1", VIME_COMPONENT_TASKS="8,8")}, 11, 16),
        ({**HET, **step(11, 16, VIME_COMPONENT="1", VIME_COMPONENT_TASKS="8,8")}, 11, 16),
        # a third het component that is a service does not count
        (
            {
                **HET,
                "SLURM_HET_SIZE": "3",
                "SLURM_NTASKS_HET_GROUP_2": "4",
                **step(5, 8, VIME_COMPONENT="1", VIME_COMPONENT_TASKS="16,8"),
            },
            21,
            24,
        ),
        # plain allocation: heterogeneous step, or one step for all
        (step(5, 6, VIME_COMPONENT="1", VIME_COMPONENT_TASKS="2,4"), 5, 6),
        (step(5, 6, VIME_COMPONENT_TASKS="2,4"), 5, 6),
        # somebody else's srun
        (step(5, 6, SLURM_NTASKS="6", SLURM_NTASKS_PER_NODE="4"), 5, 6),
    ],
)
def test_rank_is_first_of_component_plus_rank_in_step(
    environment: dict[str, str], rank: int, world: int
) -> None:
    place = task_place(environment)
    assert (place.global_rank, place.world_size, place.local_rank, place.job_id) == (
        rank,
        world,
        3,
        "7",
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            step(0, 1, SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE="2"),
            "SLURM_NTASKS=1 but SLURM_NTASKS_PER_NODE=2",
        ),
        (step(8, 8), "SLURM_PROCID=8 is outside the step's SLURM_STEP_NUM_TASKS=8"),
        ({**HET, **step(3, 8), "SLURM_NTASKS_HET_GROUP_0": "8"}, "does not say which component of"),
        (
            {**HET, **step(3, 7, VIME_COMPONENT="1", VIME_COMPONENT_TASKS="16,8")},
            "neither the job's 24 tasks nor the 8",
        ),
        (
            {**HET, **step(3, 24, VIME_COMPONENT="1", VIME_COMPONENT_TASKS="16,8")},
            "not in the order of the job's",
        ),
        (
            step(3, 8, VIME_COMPONENT="2", VIME_COMPONENT_TASKS="4,4"),
            "VIME_COMPONENT=2 but the job has 2",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "this is the batch script",
        ),
        ({**HET, **step(0, 24), "SLURM_HET_SIZE": "3"}, "SLURM_NTASKS_HET_GROUP_2 is not set"),
        (step(0, 1) | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID='x' is not a number"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_naming_both(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        task_place(environment)


def test_the_role_follows_from_the_rank_and_the_restart_count_is_the_attempt() -> None:
    config = load_config(
        [],
        [
            "--model.path=m",
            "--data.train=t",
            "--trainer.num_ranks=16",
            "--engine.num_engines=4",
            "--rollout.num_workers=4",
        ],
    )
    rank = rank_info(config, {**HET, **step(3, 8, SLURM_NTASKS="24", SLURM_RESTART_COUNT="2")})
    assert (rank.global_rank, rank.role, rank.role_rank, rank.attempt) == (
        19,
        Role.ENGINE,
        3,
        "7.2",
    )
    with pytest.raises(ConfigError, match="the job has 6 tasks, the configuration needs 24"):
        rank_info(config, step(5, 6))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("linux[1,2]", ["linux1", "linux2"]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("n[001-003,007],g[1-2]", ["n001", "n002", "n003", "n007", "g1", "g2"]),
        ("r1i[0-1]n[2-3]", ["r1i0n2", "r1i0n3", "r1i1n2", "r1i1n3"]),
        ("rack-iscb-[36-37]", ["rack-iscb-36", "rack-iscb-37"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("n[9-10],n3", ["n9", "n10", "n3"]),
        ("login", ["login"]),
        ("", []),
    ],
)
def test_host_lists_expand_in_slurms_order(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n1-2]", "n[3-1]", "n[a-b]", "n[1[2]]", "n[]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no Slurm host list"):
        expand_hosts(text)


def test_the_first_host_is_that_of_component_0_not_of_the_sorted_list() -> None:
    environment = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "n[0-3]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n3",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[0-1]",
    }
    assert first_host(environment) == "n3"


def test_a_job_is_in_the_worst_state_of_its_components() -> None:
    states = read_states(
        "7+0|RUNNING|n3|None|2026-01-01T00:00:00|5:00\n7+1|PENDING|||N/A|5:00\n8|CANCELLED by 0|n1\n"
    )
    assert (states["7"].state, states["7"].nodes, states["8"].state) == (
        "PENDING",
        "n3",
        "CANCELLED",
    )


def test_the_end_time_comes_from_the_environment_where_scontrol_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert job_end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"}) == 1800000000.0
    assert job_end_time({"SLURM_JOB_ID": "7"}) is None
    asked = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000", "VIME_JOB_END": "1700000000"}
    assert job_end_time(asked) == 1700000000.0, "the batch script asked scontrol: limits change"


STOP_PROGRAM = """
import os, time
os.environ["VIME_STOP_AT"] = str(time.time() + 0.5)
from vime_hpc.cluster.signal_flag import SignalFlag
flag = SignalFlag()
early, end = flag.is_set(), time.time() + 20
while not flag.is_set() and time.time() < end:
    time.sleep(0.05)
print(early, flag.is_set())
"""


def test_the_time_limit_sets_the_warning_without_any_signal() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", STOP_PROGRAM], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["False", "True"]
