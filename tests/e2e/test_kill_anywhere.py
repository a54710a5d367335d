"""The whole job with the stub engine, killed with SIGKILL anywhere and started again until it is done.

The stub's tokens are a function of the weights it received, the prompt and the seed, so a lost or repeated group, a step
trained twice or a stale weight version changes samples, metrics and the exported policy. A start costs 10 s here, 30 s with
a real engine (test_job.py); JOB_KILLS and JOB_SEED repeat it as often as wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.buffer.store import RolloutBuffer

from .conftest import Job, Task
from .test_job import pids_of, samples_of, weights_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
KNOBS = {
    "vocab_size": 250,
    "latency_s": 0.004,
}  # below the end-of-sequence id of the tiny tokenizer
OPTIONS = (
    "--engine.server=vime_hpc.testing.stub_engine",
    "--weights.verify_interval=0",  # the stub's logprobs are nobody's
    "--run.num_steps=6",
    "--rollout.max_weight_lag=0",
    "--rollout.over_sampling=1.5",
    "--rollout.generate=vime_hpc.testing.rollouts:with_columns",
    "--buffer.columns=['values','trace']",
    "--rollout.filters=['vime_hpc.testing.filters:even_group']",
    "--checkpoint.interval=1",
    "--trainer.num_ranks=1",
    "--data.eval=",
    "--observe.tensorboard=false",
)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_STUB_KNOBS", json.dumps(KNOBS))


def names_below(run: Path) -> set[str]:
    """What lies in buffer and checkpoints now; a name that comes or goes is a step of some protocol."""
    return {
        os.path.join(folder, name)
        for part in ("buffer", "checkpoints")
        for folder, _, names in os.walk(run / part)
        for name in names
    }


def follow(process: subprocess.Popen[str], run: Path, limit: int | None) -> int:
    """Wait for the end of the job, or until `limit` changes of names were seen; returns how many were."""
    before, changes = names_below(run), 0
    while process.poll() is None and (limit is None or changes < limit):
        now = names_below(run)
        changes += len(now ^ before)
        before = now
        time.sleep(0.002)
    return changes


def kill(process: subprocess.Popen[str], run: Path) -> bool:
    """SIGKILL to every process of the job, and to what those had just started; True unless it had ended before."""
    was_alive = process.poll() is None
    end = time.monotonic() + 60
    while pids := pids_of(run):
        assert time.monotonic() < end, pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # a launcher that nobody waits for would stay in the list
        time.sleep(0.01)
    process.wait(60)
    return was_alive


def columns_of(run: Path) -> list[tuple[str, bytes]]:
    """The optional columns of every sample."""
    return [
        (name, values.tobytes())
        for _, sample in RolloutBuffer.open(run).samples()
        for name, values in sorted(sample.columns.items())
    ]


def computed(record: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step that must be the same bit for bit; times, and what was made for a later step, are not."""
    kept, of_the_moment = (
        ("train/", "rollout/", "staleness/"),
        ("rollout/groups_", "rollout/surplus_"),
    )
    return {
        name: value
        for name, value in record.items()
        if name.startswith(kept) and not name.startswith(of_the_moment)
    }


@pytest.mark.usefixtures("stub")
def test_a_stub_job_killed_anywhere_ends_like_the_uninterrupted_one(
    task: Task, wait_until: Callable[..., None]
) -> None:
    kills = int(os.environ.get("JOB_KILLS", "3"))
    rng, run = random.Random(int(os.environ.get("JOB_SEED", "1"))), task.root / "stub-killed"
    reference = task.start(task.root / "stub", *OPTIONS)
    changes = follow(reference, task.root / "stub", None)
    assert reference.returncode == 0, (task.root / "stub.out").read_text()
    killed = 0
    for number in range(kills):
        process = task.start(run, *OPTIONS)
        if number == 0:  # while it starts; the later ones somewhere in buffer or checkpoints
            wait_until(lambda: (run / "attempts" / "local.0").exists(), 100, process)
            time.sleep(rng.uniform(0, 2))
        else:
            follow(process, run, rng.randint(1, max(changes // kills, 1)))
            time.sleep(rng.uniform(0, 0.02))
        killed += kill(process, run)
    # On a busy machine fewer of the changes are seen, so the last of the kills may come behind the end.
    assert killed >= min(kills, 2), run.with_suffix(".out").read_text()
    last = task.run(run, *OPTIONS)
    assert last.code == (0 if killed == kills else 4), last.output
    shutil.rmtree(run / "export")  # as if killed between the last checkpoint and the export
    assert task.run(run, *OPTIONS).code == 0
    assert task.run(run, *OPTIONS).code == 4
    assert samples_of(run) == samples_of(task.root / "stub")
    assert columns_of(run) == columns_of(task.root / "stub") != []
    assert weights_of(run) == weights_of(task.root / "stub")
    wanted = [computed(record) for record in Job(task.root / "stub", 0, "").metrics]
    assert len(wanted) == 6
    assert any(record["train/grad_norm"] > 0 for record in wanted)
    assert {record["step"] for record in last.metrics} == set(range(6))
    for record in last.metrics:  # a step killed behind its line and before its checkpoint has two
        assert computed(record) == wanted[record["step"]]
