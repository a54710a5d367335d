"""What follows the end of a start, decided from what its tasks left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.config.cluster import ClusterConfig
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch.attempts import Attempt, Frontier, killed_first
from vime_hpc.launch.requeue import Evidence, decide

GOOD = {"trainer-0": 0, "engine-0": 0, "rollout-0": 0}
FAILURE = {
    "rank": "engine-0",
    "host": "n1",
    "error": "EngineError",
    "message": "out of memory",
    "exit_code": 1,
}


def start(**more: Any) -> Attempt:
    values: dict[str, Any] = {
        "name": "7.0",
        "began": 0.0,
        "at_begin": Frontier(2, 2),
        "ended": 1000.0,
        "at_end": Frontier(2, 2),
        "end_time": 3600.0,
        "warning_s": 300.0,
    }
    return Attempt(**(values | more))


def left(**more: Any) -> Evidence:
    return Evidence(
        **(
            {"srun_code": 0, "exits": GOOD, "world_size": 3, "failure": None, "forced": False}
            | more
        )
    )


@pytest.mark.parametrize(
    ("evidence", "attempt", "verdict", "cause", "code"),
    [
        (left(), start(), "done", "finished", 0),
        (left(exits=GOOD | {"trainer-0": 4}), start(), "done", "nothing to do", 4),
        (left(exits=dict.fromkeys(GOOD, 75)), start(), "again", "asked to stop", 75),
        (left(exits=dict.fromkeys(GOOD, 75)), start(ended=3350.0), "again", "time limit", 75),
        (
            left(exits=GOOD | {"engine-0": 1}, failure=FAILURE, srun_code=143),
            start(),
            "again",
            "crash",
            75,
        ),
        (
            left(exits=GOOD | {"engine-0": 2}, failure=FAILURE | {"exit_code": 2}),
            start(),
            "stop",
            "cannot go on",
            2,
        ),
        (
            left(exits=GOOD | {"engine-0": 3}, failure=FAILURE | {"exit_code": 3}),
            start(),
            "stop",
            "cannot go on",
            3,
        ),
        (left(exits=GOOD | {"trainer-0": 137}, srun_code=143), start(), "again", "crash", 75),
        (left(exits={"trainer-0": 0}, srun_code=143), start(), "again", "crash", 75),
        (left(exits={}, srun_code=1), start(), "again", "crash", 75),
        (
            left(exits=dict.fromkeys(GOOD, 143), forced=True, srun_code=143),
            start(),
            "again",
            "time limit",
            75,
        ),
        # a task that saved beside one that crashed is a crash
        (left(exits=GOOD | {"trainer-0": 75, "engine-0": 137}), start(), "again", "crash", 75),
        # all tasks wrote 0 and srun says otherwise: not a good end
        (left(srun_code=1), start(), "again", "crash", 75),
        # told to stop amid the last step: nothing is left to come back for
        (left(exits=GOOD | {"rollout-0": 75}, complete=True), start(), "done", "finished", 0),
        (left(exits=dict.fromkeys(GOOD, 75), complete=True), start(), "done", "finished", 0),
        (
            left(exits=GOOD | {"rollout-0": 137}, complete=True, srun_code=143),
            start(),
            "again",
            "crash",
            75,
        ),
        # cancelled: must stay away
        (
            left(exits=dict.fromkeys(GOOD, 143), srun_code=143, job_state="CANCELLED"),
            start(),
            "stop",
            "killed from outside",
            143,
        ),
    ],
)
def test_verdict(evidence: Evidence, attempt: Attempt, verdict: str, cause: str, code: int) -> None:
    found = decide(evidence, attempt, [], ClusterConfig())
    assert (found.verdict, found.cause, found.exit_code) == (verdict, cause, code)


def test_the_reason_names_the_task_that_was_killed_not_those_srun_ended_after_it() -> None:
    found = decide(
        left(exits={"engine-0": 143, "rollout-0": 137, "trainer-0": 143}, srun_code=143),
        start(),
        [],
        ClusterConfig(),
    )
    assert found.reason.startswith("rollout-0 was killed by SIGKILL")


CRASH = left(exits=GOOD | {"engine-0": 1}, failure=FAILURE)


def test_starts_without_progress_stop_after_the_allowed_number_and_say_so() -> None:
    cluster = ClusterConfig(max_restarts_without_progress=2)
    idle = start(cause="crash", verdict="again")
    assert decide(CRASH, start(), [idle], cluster).verdict == "again"
    found = decide(CRASH, start(), [idle, idle], cluster)
    assert (found.verdict, found.exit_code) == ("stop", 1)
    assert "3 starts in a row without a new step or checkpoint" in found.reason


def test_progress_clears_the_row_and_preemption_neither_counts_nor_clears() -> None:
    cluster = ClusterConfig(max_restarts_without_progress=1)
    idle, taken = start(cause="crash"), start(cause="killed from outside")
    moved = start(cause="crash", at_end=Frontier(3, 2))
    assert decide(CRASH, start(), [idle, moved], cluster).verdict == "again"
    assert decide(CRASH, start(), [idle, taken, taken], cluster).verdict == "stop"
    assert decide(CRASH, start(), [taken, taken, taken], cluster).verdict == "again"
    assert (
        decide(left(exits=dict.fromkeys(GOOD, 75)), start(), [idle, idle, idle], cluster).verdict
        == "again"
    )


def test_the_budget_of_restarts_is_not_used_up_by_preemption() -> None:
    cluster = ClusterConfig(max_restarts=1)
    moved = replace(start(at_end=Frontier(9, 9)), cause="time limit")
    taken = replace(moved, cause="killed from outside")
    now = start(at_end=Frontier(9, 9))
    assert decide(CRASH, now, [taken, taken], cluster).verdict == "again"
    assert decide(CRASH, now, [moved, taken], cluster).verdict == "stop"


def test_never_means_never() -> None:
    found = decide(left(exits=dict.fromkeys(GOOD, 75)), start(), [], ClusterConfig(requeue="never"))
    assert found.verdict == "stop"
    assert found.exit_code != 0


def test_a_rank_that_was_killed_is_the_cause_and_the_others_records_are_not(
    tmp_path: Path,
) -> None:
    """The peer's "connection closed" is written at once; Slurm's own SIGKILL of who does not end comes by KillWait."""
    paths = RunPaths(tmp_path)
    directory = paths.attempt("7.0")
    for name in ("exits", "failures"):
        (directory / name).mkdir(parents=True)
    codes = {"trainer-0": 1, "trainer-1": 137, "engine-0": 137, "rollout-0": 143}
    for (rank, code), died in zip(codes.items(), (101.0, 100.0, 130.0, 101.0), strict=True):
        (directory / "exits" / rank).write_text(f"{code}\n")
        os.utime(directory / "exits" / rank, (died, died))
    failure = {
        "rank": "trainer-0",
        "host": "n1",
        "error": "RuntimeError",
        "message": "connection closed by peer",
        "exit_code": 1,
    }
    (directory / "failures" / "trainer-0.json").touch()
    assert killed_first(paths, "7.0", failure | {"time": 100.2}) == "trainer-1"
    assert killed_first(paths, "7.0", failure | {"time": 90.0}) is None
    verdict = decide(
        Evidence(143, codes, 4, failure, False, "RUNNING", "trainer-1"),
        Attempt("7.0", 0.0, Frontier(), ended=131.0, at_end=Frontier(1, 0)),
        [],
        ClusterConfig(),
    )
    assert (verdict.verdict, verdict.cause) == ("again", "crash")
    assert verdict.reason.startswith("trainer-1 was killed by SIGKILL")
