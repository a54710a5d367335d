"""A whole job on one GPU, killed and started again: trainer and engine share the device, weights by CUDA IPC.

Needs 30 GiB of GPU memory and three minutes: three starts of an engine, two of them at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
STEPS = 6
KILLED_AT = 3


@dataclass
class Runs:
    """Folders of the uninterrupted run, of the one that was killed, and of one whose engine sleeps; what the second start said."""

    whole: Path
    killed: Path
    asleep: Path
    output: str


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def responses(run: Path, step: int) -> list[list[int]]:
    from vime_hpc.buffer.reader import BufferReader

    batch = BufferReader(run / "buffer").wait_for(step, timeout_s=1.0)
    return [sample.tokens.tolist() for sample in batch.read(range(len(batch.table)))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("job")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    rng = np.random.default_rng(0)
    records = [
        {"prompt": f"Calculate {a} + {b} + {c}.", "label": str(a + b + c)}
        for a, b, c in rng.integers(1, 9, (64, 3))
    ]
    (root / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "vime_hpc",
            "data",
            "model",
            "--out",
            str(root / "model"),
            "--hidden",
            "256",
            "--layers",
            "4",
            "--intermediate",
            "512",
            "--head-dim",
            "64",
            "--initializer-range",
            "0.05",
        ],
        check=True,
        env=env,
    )

    def start(name: str, *options: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "vime_hpc",
            "run",
            "configs/ci/tiny.toml",
            "configs/recipes/one_gpu.toml",
            f"--model.path={root / 'model'}",
            f"--data.train={root / 'train.jsonl'}",
            f"--run.dir={root / name}",
            f"--run.num_steps={STEPS}",
            "--checkpoint.interval=1",
            "--optimizer.lr=1e-4",
            "--vllm-gpu-memory-utilization=0.1",
            "--vllm-kv-cache-memory-bytes=1073741824",
            "--vllm-enforce-eager=true",
            *options,
        ]
        with (root / f"{name}.out").open("a") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    whole, killed = start("whole"), start("killed")
    started, again = [whole, killed], killed
    try:
        while len(metrics(root / "killed")) < KILLED_AT:
            assert killed.poll() is None, (root / "killed.out").read_text()
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        again = start("killed")
        assert again.wait(280) == 0, (root / "killed.out").read_text()
        assert whole.wait(280) == 0, (root / "whole.out").read_text()
        # Alone on the device: vLLM checks that free memory does not shrink while it goes to sleep.
        asleep = start("asleep", "--engine.sleep_level=2")
        started.append(asleep)
        assert asleep.wait(280) == 0, (root / "asleep.out").read_text()
    finally:
        for process in (*started, again):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return Runs(root / "whole", root / "killed", root / "asleep", (root / "killed.out").read_text())


def test_the_weights_went_through_shared_gpu_memory(runs: Runs) -> None:
    logs = "".join(path.read_text() for path in runs.whole.glob("attempts/*/logs/trainer-0.log"))
    assert "over ipc" in logs


def test_a_killed_run_goes_on_and_trains_every_step_once(runs: Runs) -> None:
    """A step that was trained but not yet in a checkpoint may be written twice; the last line counts."""
    steps = [record["step"] for record in metrics(runs.killed)]
    print(steps, [record["attempt"] for record in metrics(runs.killed)])
    assert sorted(set(steps)) == list(range(STEPS))
    assert steps[-1] == STEPS - 1
    assert len(steps) <= STEPS + 1


def test_the_engine_holds_the_resumed_weights(runs: Runs) -> None:
    """Trainer against engine logprobs, bfloat16 both; stale or mixed weights are off by far more."""
    for run in (runs.whole, runs.killed):
        differences = [record["train/train_rollout_logprob_abs_diff"] for record in metrics(run)]
        print(differences)
        assert max(differences) < 0.02


def test_how_far_the_resumed_run_equals_the_uninterrupted_one(runs: Runs) -> None:
    """The first step starts from the same weights with the same seeds; its responses are the same tokens."""
    last = {record["step"]: record for record in metrics(runs.killed)}
    whole = {record["step"]: record for record in metrics(runs.whole)}
    for step in range(STEPS):
        a, b = responses(runs.whole, step), responses(runs.killed, step)
        same = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
        names = ("train/loss", "train/grad_norm", "rollout/raw_reward")
        print(
            step, f"equal responses {same:.3f}", {n: (whole[step][n], last[step][n]) for n in names}
        )
        if step == 0:
            assert same > 0.9
    assert last[STEPS - 1]["rollout/raw_reward"] == pytest.approx(
        whole[STEPS - 1]["rollout/raw_reward"], abs=0.2
    )


def test_an_engine_that_sleeps_between_steps_frees_its_memory_and_changes_nothing(
    runs: Runs,
) -> None:
    """At least its KV cache of 1 GiB and its weights are free while it sleeps; all else is as in the run without."""
    asleep, whole = metrics(runs.asleep), metrics(runs.whole)
    logs = "".join(p.read_text() for p in runs.asleep.glob("attempts/*/logs/engine-0.vllm.log"))
    freed = [float(gib) for gib in re.findall(r"Sleep mode freed ([0-9.]+) GiB", logs)]
    print("GiB freed:", freed)
    assert len(freed) == STEPS
    assert min(freed) > 1.0
    assert [record["step"] for record in asleep] == list(range(STEPS))
    for mine, other in zip(asleep, whole, strict=True):
        print({n: mine[n] for n in mine if "asleep" in n or "sleep" in n or "update_weights" in n})
        assert mine["train/train_rollout_logprob_abs_diff"] < 0.02
        assert mine["rollout/raw_reward"] == pytest.approx(other["rollout/raw_reward"], abs=0.2)
