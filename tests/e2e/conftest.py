"""A tiny task and a job of three steps on it, run once for all end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
STEPS = 3


@dataclass
class Job:
    """One `vime-hpc run` of the task."""

    run: Path
    code: int
    output: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


@dataclass
class Task:
    """Prompts and policy, and how to start jobs on them."""

    root: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def arguments(self, run: Path, *more: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "vime_hpc",
            "run",
            str(REPOSITORY / "configs" / "ci" / "tiny.toml"),
            f"--model.path={self.root / 'model'}",
            f"--data.train={self.root / 'data' / 'train.jsonl'}",
            f"--data.eval={self.root / 'data' / 'eval.jsonl'}",
            f"--run.dir={run}",
            *more,
        ]

    def start(self, run: Path, *more: str) -> subprocess.Popen[str]:
        """A job in a session of its own, its output in RUN.out."""
        run.parent.mkdir(parents=True, exist_ok=True)
        with run.with_suffix(".out").open("a") as output:
            process = subprocess.Popen(
                self.arguments(run, *more),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, run: Path, *more: str, timeout_s: float = 280) -> Job:
        process = self.start(run, *more)
        code = process.wait(timeout_s)
        return Job(run, code, run.with_suffix(".out").read_text())


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    root = tmp_path_factory.mktemp("task")
    command = [sys.executable, "-m", "vime_hpc", "data"]
    subprocess.run(
        [*command, "make", "--out", str(root / "data"), "--num-train", "64", "--num-eval", "8"],
        check=True,
    )
    subprocess.run(
        [
            *command,
            "model",
            "--out",
            str(root / "model"),
            "--hidden",
            "64",
            "--layers",
            "2",
            "--intermediate",
            "128",
            "--initializer-range",
            "0.1",
            "--tie-embeddings",
        ],
        check=True,
    )
    task = Task(root)
    yield task
    for process in task.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def reference(task: Task) -> Job:
    """The uninterrupted run that others are compared with."""
    return task.run(task.root / "reference")


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(
        what: Callable[[], bool], timeout_s: float, process: subprocess.Popen[str] | None = None
    ) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, "did not happen in time"
            assert process is None or process.poll() is None, "the job ended too early"
            time.sleep(0.05)

    return wait
