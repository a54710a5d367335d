"""An engine that ends in the midst of a run is started again, gets the weights, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vime_hpc.buffer.store import RolloutBuffer

from .conftest import STEPS, Job, Task
from .test_job import EXACT, _processes, samples_of, weights_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def log_of(run: Path, name: str) -> str:
    path = run / "attempts" / "local.0" / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def servers_of(run: Path) -> list[int]:
    """The engines' servers: the children of their keepers."""
    mark = "vime_hpc.engine.serve --child"
    return sorted(
        pid
        for pid, command in _processes(run).items()
        if mark in command and "vllm_router" not in command
    )


def only(found: list[int]) -> int:
    assert len(found) == 1, found
    return found[0]


def host_of(run: Path) -> int:
    """The engine's host: the parent of the keeper, a rank of the job."""
    return parent_of(parent_of(only(servers_of(run))))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_run_whose_engine_and_then_its_host_are_killed_is_bit_for_bit_the_uninterrupted_one(
    reference: Job, task: Task, wait_until: Callable[..., None]
) -> None:
    run = task.root / "rejoined"
    # Grading takes a while, so that there is a run left to kill something in once a version is seen to be held.
    process = task.start(run, "--rollout.reward=vime_hpc.testing.rewards:unhurried_share_of_ascii")
    wait_until(lambda: "hold version 1 " in log_of(run, "rollout-0"), 200, process)
    host = host_of(run)
    os.kill(only(servers_of(run)), signal.SIGKILL)
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


STUB_OPTIONS = (
    "--engine.server=vime_hpc.testing.stub_engine",
    "--engine.num_engines=2",
    "--engine.max_restarts=9",
    "--weights.verify_interval=0",  # the stub's logprobs are nobody's
    "--run.num_steps=8",
    "--trainer.num_ranks=1",
    "--data.eval=",
    "--observe.tensorboard=false",
)


def test_stub_engines_killed_at_random_moments_behind_the_router_change_nothing(
    task: Task, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JOB_KILLS and JOB_SEED repeat it with others: amid generation, updates, and each other's restarts."""
    knobs = {"vocab_size": 250, "latency_s": 0.004}
    monkeypatch.setenv("VIME_STUB_KNOBS", json.dumps(knobs))
    reference = task.run(task.root / "stub-two", *STUB_OPTIONS)
    assert reference.code == 0, reference.output
    run, rng = task.root / "stub-rejoined", random.Random(int(os.environ.get("JOB_SEED", "1")))
    process = task.start(
        run, *STUB_OPTIONS, "--rollout.reward=vime_hpc.testing.rewards:unhurried_share_of_ascii"
    )
    for number in range(int(os.environ.get("JOB_KILLS", "3"))):
        held = f"hold version {1 + number} "
        wait_until(lambda held=held: held in log_of(run, "rollout-0"), 200, process)
        time.sleep(rng.uniform(0, 1.2))  # a step takes one second and a bit
        os.kill(rng.choice(servers_of(run)), signal.SIGKILL)
    job = Job(run, process.wait(280), run.with_suffix(".out").read_text())
    assert job.code == 0, job.output
    assert job.metrics[-1]["weights/epoch"] > 1
    assert samples_of(run) == samples_of(reference.run)
    assert weights_of(run) == weights_of(reference.run)
    exact = [key for key in EXACT if key in reference.metrics[0]]
    assert [[m[key] for key in exact] for m in job.metrics] == [
        [m[key] for key in exact] for m in reference.metrics
    ]


def test_rollouts_without_a_trainer_go_on_with_a_killed_engine_at_once_when_it_is_up(
    task: Task, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIME_STUB_KNOBS", json.dumps({"vocab_size": 250, "latency_s": 0.004}))
    run = task.root / "stub-alone"
    process = task.start(
        run, *STUB_OPTIONS, "--engine.num_engines=1", "--run.mode=rollout_only", "--run.until=5",
        "--rollout.reward=vime_hpc.testing.rewards:unhurried_share_of_ascii",
    )  # fmt: skip
    wait_until((run / "metrics.jsonl").exists, 200, process)
    os.kill(only(servers_of(run)), signal.SIGKILL)
    job = Job(run, process.wait(280), run.with_suffix(".out").read_text())
    assert job.code == 0, job.output
    assert "begins life 2" in log_of(run, "engine-0")
    samples = [sample for _, sample in RolloutBuffer.open(run).samples()]
    assert len({s.sample_id for s in samples}) == len(samples) == 5 * 8 * 4
    assert {s.attempt for s in samples} == {0}  # handed out again with their seeds
    assert {span.version for s in samples for span in s.versions} == {0}
