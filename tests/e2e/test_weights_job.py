"""The whole job with its weights going through version directories, and those directories afterwards."""

from __future__ import annotations

import json
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


def test_experts_trained_on_two_ranks_are_served_on_two_which_receive_what_they_hold(
    task: Task,
) -> None:
    model, run = task.root / "moe", task.root / "experts"
    sizes = ("--experts", "4", "--hidden", "64", "--intermediate", "64", "--layers", "2")
    command("data", "model", "--out", model, *sizes, "--initializer-range", "0.1")
    options = (f"--model.path={model}", "--run.num_steps=2", "--trainer.ep=2", "--engine.tp=2")
    job = task.run(run, *options)
    assert job.code == 0, job.output
    for metrics in job.metrics:  # of the engine's own samples, after every publish
        assert metrics["train/train_rollout_logprob_max_diff"] < 1e-4
        assert metrics["weights/received_over_held"] == 1.0
        assert metrics["train/grad_norm"] > 0
    # The fixed prompt after the first publish: above weights.verify_tolerance, 1e-4 here, the job would have ended.
    recorded = json.loads(command("plan", run, "--json"))
    arguments = task.arguments(run, *options)
    expected = json.loads(command("plan", *arguments[arguments.index("run") + 1 :], "--json"))
    assert recorded["kind"] == "recorded"
    same = recorded.keys() - {"kind", "file"}
    assert {k: recorded[k] for k in same} == {k: expected[k] for k in same}


def weights(*arguments: object) -> str:
    return command("weights", *arguments)


def command(*arguments: object) -> str:
    words = [sys.executable, "-m", "vime_hpc", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
