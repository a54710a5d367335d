"""The real job under Slurm: Megatron-Core on two nodes, vLLM and rollout worker on a third, each with its own address.

Set VIME_KILL_SEED to repeat the moments of a run that failed; the seed is printed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_jobs import Job, slurm, wait_until

from vime_hpc.cli.submit_command import submit_spec
from vime_hpc.config.load import load_config
from vime_hpc.launch.job import job_spec

ROOT = Path(__file__).parents[2]
STEPS = 12
pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny policy and prompts, and the options of a run of STEPS steps on them."""
    made = tmp_path_factory.mktemp("made")
    vime_hpc = [sys.executable, "-m", "vime_hpc", "data"]
    subprocess.run(
        [
            *vime_hpc,
            "make",
            "--task",
            "arithmetic",
            "--out",
            str(made),
            "--num-train",
            "64",
            "--num-eval",
            "8",
        ],
        check=True,
    )
    subprocess.run([*vime_hpc, "model", "--seed", "1", "--out", str(made / "model")], check=True)
    return [
        f"--model.path={made / 'model'}",
        f"--data.train={made / 'train.jsonl'}",
        "--data.eval=",
        f"--run.num_steps={STEPS}",
        "--rollout.prompts_per_step=4",
        "--rollout.group_size=4",
        "--checkpoint.interval=3",
        "--rollout.reward=random",
        "--data.max_prompt_tokens=200",
        "--run.startup_timeout_s=600.0",
        "--trainer.num_ranks=2",
    ]


@pytest.fixture(scope="session")
def uninterrupted(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the last checkpoint of the same run on this machine, never stopped."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "vime_hpc",
            "run",
            str(ROOT / "configs/recipes/quickstart.toml"),
            *options,
            f"--run.dir={run}",
        ],
        check=True,
        timeout=900,
    )
    return digests(run)


def digests(run: Path) -> dict[str, str]:
    commit = json.loads((run / "checkpoints" / f"step-{STEPS:06d}" / "commit.json").read_text())
    return {entry["name"]: entry["xxh3_128"] for entry in commit["files"]}


@pytest.fixture
def job(
    cluster: Path, options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Job]:
    """Submitted; more options by indirect parameters."""
    run = tmp_path / "run"
    config = load_config(
        [ROOT / "configs/recipes/quickstart.toml", ROOT / "configs/clusters/local_test.toml"],
        [
            *options,
            f"--run.dir={run}",
            "--cluster.components.trainer.nodes=2",
            "--cluster.components.trainer.nodelist=n[2-3]",
            "--cluster.time=00:20:00",
            *getattr(request, "param", []),
        ],
    )
    spec = job_spec(config)
    job = Job(submit_spec(spec), run, spec)
    yield job
    slurm("scancel", job.id, check=False)


@pytest.mark.parametrize("job", [["--cluster.mpi=pmi2"]], indirect=True, ids=["meeting-over-mpi"])
def test_a_run_stopped_and_requeued_ends_bit_for_bit_like_one_that_was_not(
    uninterrupted: dict[str, str], job: Job
) -> None:
    job.wait_steps(2, timeout_s=600)
    slurm("scancel", "--signal=USR2", job.id)
    assert job.finish(timeout_s=600) == {"COMPLETED"}, job.log
    assert [attempt.cause for attempt in job.attempts] == ["asked to stop", "finished"]
    assert 0 < job.attempts[1].at_begin.checkpoint_step < STEPS
    assert digests(job.run) == uninterrupted
    nodes = (job.paths.attempt(f"{job.id}.1") / "nodes").glob("*.json")
    assert {json.loads(path.read_text())["host"] for path in nodes} >= {"n2", "n3"}


@pytest.mark.parametrize("job", [["--engine.max_restarts=0"]], indirect=True, ids=["no-rejoin"])
def test_killed_part_by_part_at_lag_0_it_ends_bit_for_bit_like_a_run_that_was_not(
    uninterrupted: dict[str, str], job: Job
) -> None:
    """SIGKILL of the engine and of the rollout worker amid the steps, of a trainer rank at a random moment; then
    requeue by hand while the job starts up."""
    seed = int(os.environ.get("VIME_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"VIME_KILL_SEED={seed}")
    rng = random.Random(seed)

    after_steps(job, start=0, count=4)  # past the first checkpoint
    kill(process(job, 0, lambda command: "vime_hpc.engine.serve\0--child" in command))
    after_steps(job, start=1, count=1)
    kill(rank(job, 1, "rollout-0"))
    victim = f"trainer-{rng.randrange(2)}"
    up = rank(job, 2, victim)
    # Anywhere between the first import and the first steps of the loop: 30 s on an idle machine with two cores.
    moment = time.monotonic() + rng.uniform(0, 35)
    wait_until(lambda: time.monotonic() > moment or steps_of(job, 2) >= 3, f"{victim}'s moment", 60)
    kill(up)
    rank(job, 3, "rollout-0")
    time.sleep(rng.uniform(0, 10))
    slurm("scontrol", "requeue", job.id)

    assert job.finish(timeout_s=600) == {"COMPLETED"}, job.log
    causes = [attempt.cause for attempt in job.attempts]
    assert causes == ["crash", "crash", "crash", "killed from outside", "finished"], job.log
    first, second, third = (attempt.reason for attempt in job.attempts[:3])
    assert 0 < job.attempts[1].at_begin.checkpoint_step < STEPS
    # Its own host's record, or, where the job ended before that was written, the record of a process that lost it.
    assert "engine-0" in first or "engine 0" in first
    assert "rollout-0 was killed by SIGKILL" in second
    assert f"{victim} was killed by SIGKILL" in third
    assert digests(job.run) == uninterrupted


def steps_of(job: Job, start: int) -> int:
    """Lines in metrics.jsonl that a start wrote."""
    if not job.paths.metrics.exists():
        return 0
    return job.paths.metrics.read_text().count(f'"attempt": "{job.id}.{start}"')


def after_steps(job: Job, start: int, count: int) -> None:
    what = f"start {start} trained {count} steps"
    job.nudge_until(lambda: steps_of(job, start) >= count, what, 300)


def rank(job: Job, start: int, name: str) -> int:
    """The process of a rank of a start, once it is there."""
    first = {"trainer": 0, "engine": 2, "rollout": 3}[name.partition("-")[0]]
    number = first + int(name.rpartition("-")[2])
    return process(
        job,
        start,
        lambda command: command.split("\0")[1:4] == ["-P", "-m", "vime_hpc.roles"],
        f"SLURM_PROCID={number}",
    )


def process(job: Job, start: int, is_it: Callable[[str], bool], *variables: str) -> int:
    """The process of a start that has this command line and environment; tasks hand their variables on to children."""
    wanted = {f"VIME_ATTEMPT={job.paths.attempt(f'{job.id}.{start}')}", *variables}

    def find() -> int:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if not is_it((folder / "cmdline").read_text(errors="replace")):
                    continue
                environment = set((folder / "environ").read_text(errors="replace").split("\0"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            if wanted <= environment:
                return int(folder.name)
        return 0

    job.nudge_until(find, f"the process of start {start} with {sorted(wanted)}", 300)
    return find()


def kill(pid: int) -> None:
    assert pid, "the process ended before it could be killed"
    os.kill(pid, signal.SIGKILL)
