"""An engine that ends in the midst of a run is started again, gets the weights, and the run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import STEPS, Job, Task
from .test_job import _processes, samples_of, weights_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def log_of(run: Path, name: str) -> str:
    path = run / "attempts" / "local.0" / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def only(found: list[int]) -> int:
    assert len(found) == 1, found
    return found[0]


def server_of(run: Path) -> int:
    """vLLM's server: the child of its keeper."""
    mark = "vime_hpc.engine.serve --child"
    return only([pid for pid, command in _processes(run).items() if mark in command])


def host_of(run: Path) -> int:
    """The engine's host: the parent of the keeper, a rank of the job."""
    keeper = int(Path(f"/proc/{server_of(run)}/stat").read_text().rpartition(")")[2].split()[1])
    return int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_run_whose_engine_and_then_its_host_are_killed_is_bit_for_bit_the_uninterrupted_one(
    reference: Job, task: Task, wait_until: Callable[..., None]
) -> None:
    run = task.root / "rejoined"
    # Grading takes a while, so that there is a run left to kill something in once a version is seen to be held.
    process = task.start(run, "--rollout.reward=vime_hpc.testing.rewards:unhurried_share_of_ascii")
    wait_until(lambda: "hold version 1 " in log_of(run, "rollout-0"), 200, process)
    host = host_of(run)
    os.kill(server_of(run), signal.SIGKILL)
    wait_until(lambda: "begins life 2" in log_of(run, "engine-0"), 60, process)
    os.kill(host, signal.SIGKILL)  # while its engine starts
    job = Job(run, process.wait(280), run.with_suffix(".out").read_text())
    assert job.code == 0, job.output
    assert "engine-0 was killed by SIGKILL; started again" in job.output
    assert "begins life 2: engine 0 ended with code" in log_of(run, "engine-0")
    assert "bridge 2 with engines in lives [3] is whole" in log_of(run, "rollout-0")
    for bridge in (1, 2):  # what the engine serves after its return was probed
        assert f"over bridge {bridge}: logprobs of the fixed prompt differ by" in log_of(
            run, "trainer-0"
        )
    assert samples_of(run) == samples_of(reference.run)  # each once, with the same seeds
    assert weights_of(run) == weights_of(reference.run)
    assert [m["step"] for m in job.metrics] == list(range(STEPS))
    assert job.metrics[-1]["weights/epoch"] == 2
    for m in job.metrics:
        assert m["train/train_rollout_logprob_max_diff"] < 1e-4
