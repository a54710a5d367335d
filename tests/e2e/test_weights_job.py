"""The whole job with its weights going through version directories, and those directories afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import STEPS, Job, Task
from .test_job import samples_of, weights_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_deltas_train_and_serve_what_the_bridge_does_bit_for_bit(
    reference: Job, task: Task
) -> None:
    run = task.root / "delta"
    more = ("--weights.transport=delta", "--weights.max_deltas=1", "--weights.keep_versions=9")
    job = task.run(run, *more)
    assert job.code == 0, job.output
    for metrics in job.metrics:
        assert metrics["train/train_rollout_logprob_max_diff"] < 1e-4
    assert samples_of(run) == samples_of(reference.run)
    assert weights_of(run) == weights_of(reference.run)
    kinds = [line.split()[1] for line in weights("ls", run).splitlines()[1:]]
    assert kinds == ["full", "delta"] * ((STEPS + 1) // 2)
    assert weights("verify", run).count(": good;") == STEPS + 1
    newest = run / "weights" / f"v{STEPS:06d}"
    assert "0 of 24 tensors differ" in weights("diff", newest, run / "export")


def weights(*arguments: object) -> str:
    command = [sys.executable, "-m", "vime_hpc", "weights", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
