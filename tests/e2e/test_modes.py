"""Trainer without engines, engines without trainer, and replays: the same files, the same programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.buffer.store import RolloutBuffer

from .conftest import STEPS, Job, Task

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def trainer_metrics(job: Job) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if k.startswith("train/")} for m in job.metrics]


def tree(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, to see that nothing was written."""
    return {
        str(p.relative_to(run)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(run.rglob("*"))
        if p.is_file()
    }


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vime_hpc", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(reference: Job, task: Task) -> Job:
    """A trainer alone on the reference's buffer, with a checkpoint at every step."""
    options = ["--run.mode=train_only", f"--run.train_from={reference.run}"]
    options += ["--checkpoint.interval=1", "--checkpoint.keep=3"]
    return task.run(task.root / "trained", *options)


def test_a_trainer_alone_repeats_the_run_whose_buffer_it_reads_bit_for_bit(
    reference: Job, trained: Job
) -> None:
    assert trained.code == 0, trained.output
    logs = {path.stem for path in (trained.run / "attempts" / "local.0" / "logs").iterdir()}
    assert logs == {"trainer-0", "trainer-1"}
    assert not (trained.run / "buffer").exists()
    assert trainer_metrics(trained) == trainer_metrics(reference)
    assert any(m["train/grad_norm"] > 0 for m in trained.metrics)
    name = "export/model.safetensors"
    assert (trained.run / name).read_bytes() == (reference.run / name).read_bytes()


def test_a_replay_from_a_checkpoint_is_equal_bit_for_bit_and_writes_nothing_into_the_run(
    trained: Job, reference: Job, task: Task
) -> None:
    before = tree(trained.run), tree(reference.run)
    out = task.root / "replayed"
    done = command("replay", trained.run, "--steps", "1:3", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["equal"], result["steps"], result["changed"]) == (True, [1, 3], [])
    assert {row["step"] for row in result["metrics"]} == {1, 2}
    assert {"train/loss", "train/grad_norm"} <= {row["metric"] for row in result["metrics"]}
    assert (tree(trained.run), tree(reference.run)) == before


def test_a_replay_with_other_settings_differs_and_they_win_over_the_checkpoint_s(
    trained: Job, task: Task
) -> None:
    out = task.root / "other"
    options = [
        "--algorithm.advantage=rloo",
        "--optimizer.lr=5e-4",
        "--optimizer.decay=linear",
        '--rollout.filters=["vime_hpc.testing.filters:even_group"]',
    ]
    done = command("replay", trained.run, "--steps", "1:2", "--out", out, *options)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "steps 1 to 1" in last
    assert "--algorithm.advantage=rloo" in last
    assert "metrics differ" in last
    (metrics,) = Job(out, 0, "").metrics
    assert metrics["train/grad_norm"] != trained.metrics[1]["train/grad_norm"]
    assert metrics["train/lr"] == 2.5e-4  # the second update of four, the last of which would be 0
    assert metrics["train/num_samples"] == 16
    assert metrics["rollout/dynamic_filter/drop_even"] == 4


def test_batch_plan_says_what_the_trainer_did(reference: Job) -> None:
    options = ["--step", "0", "--tokens-per-microbatch", "8192", "--json"]
    done = command("batch-plan", reference.run, *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["num_microbatches"] == reference.metrics[0]["train/num_microbatches"]
    assert plan["num_left_out"] == reference.metrics[0]["train/samples_without_signal"]
    assert (plan["dp"], plan["num_samples"]) == (2, reference.metrics[0]["train/num_samples"])


def test_rollouts_alone_are_all_of_version_0_and_go_on_where_they_ended(
    reference: Job, task: Task
) -> None:
    run = task.root / "generated"
    options = ["--run.mode=rollout_only", "--data.eval=", "--run.until=2"]
    options += ["--rollout.num_workers=2"]
    job = task.run(run, *options)
    assert job.code == 0, job.output
    logs = {path.name for path in (run / "attempts" / "local.0" / "logs").glob("*-?.log")}
    assert logs == {"engine-0.log", "rollout-0.log", "rollout-1.log"}
    first, *others = list(RolloutBuffer.open(run).samples())
    assert {span.version for _, s in [first, *others] for span in s.versions} == {0}
    assert len(others) == 2 * 8 * 4 - 1
    same = next(s for _, s in RolloutBuffer.open(reference.run).samples())
    assert first[1].tokens.tobytes() == same.tokens.tobytes()
    assert first[1].rollout_logprobs.tobytes() == same.rollout_logprobs.tobytes()
    assert [m["step"] for m in job.metrics] == [0, 1]
    assert all("rollout/raw_reward" in m for m in job.metrics)
    assert task.run(run, *options).code == 4, "nothing is left to generate"
    short = task.run(run, "--run.mode=train_only", "--data.eval=", "--rollout.num_workers=1")
    assert short.code == 2
    assert "is committed up to step 2" in short.output
    assert f"is to train up to step {STEPS} and generates nothing" in short.output
    assert "Traceback" not in short.output
