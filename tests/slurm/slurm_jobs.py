"""Jobs on the test Slurm: submitting, waiting, looking. Every wait has a bound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch.attempts import Attempt, read_attempts
from vime_hpc.launch.job import JobSpec, job_spec

HERE = Path(__file__).parent
STUB = HERE / "stub_rank.py"
LIVE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "SIGNALING"}


def slurm(*words: str, check: bool = True) -> str:
    answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if check and answer.returncode:
        raise AssertionError(f"{' '.join(words)}: {answer.stderr}")
    return answer.stdout


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)
    return value


@dataclass
class Job:
    """A submitted job and its run directory."""

    id: str
    run: Path
    spec: JobSpec

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run)

    @property
    def log(self) -> str:
        return (self.run / f"slurm-{self.id}.log").read_text()

    @property
    def attempts(self) -> list[Attempt]:
        return read_attempts(self.paths)

    def states(self) -> set[str]:
        return set(slurm("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T").split())

    def wait_up(
        self, name: str = "trainer-0", restart: int = 0, timeout_s: float = 150
    ) -> dict[str, Any]:
        """Until a rank of a start is up; returns where it runs."""
        path = self.paths.attempt(f"{self.id}.{restart}") / "places" / f"{name}.json"
        self.nudge_until(path.exists, f"{name} of start {restart} is up", timeout_s)
        place: dict[str, Any] = json.loads(path.read_text())
        return place

    def wait_steps(self, count: int, timeout_s: float = 150) -> None:
        wait_until(
            lambda: (
                self.paths.metrics.exists()
                and len(self.paths.metrics.read_text().splitlines()) >= count
            ),
            f"{count} steps trained",
            timeout_s,
        )

    def nudge_until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        """Slurm makes a requeued job wait 121 s; a test asks it not to. Not before all nodes have ended the start before,
        nor within the same second: slurmd would take the new start for the one it has just been told to forget ("Job
        credential revoked")."""
        waiting_since: float | None = None

        def poll() -> Any:
            nonlocal waiting_since
            shown = slurm("squeue", "-h", "-j", self.id, "-o", "%T %r", check=False).splitlines()
            held_back = any("BeginTime" in line for line in shown)
            if not held_back or not all(line.startswith("PENDING") for line in shown):
                waiting_since = None
            elif waiting_since is None:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > 2:
                slurm("scontrol", "update", f"jobid={self.id}", "StartTime=now", check=False)
                waiting_since = None
            return condition()

        wait_until(poll, what, timeout_s)

    def finish(self, timeout_s: float = 180) -> set[str]:
        """Until the job has left the queue for good; returns its components' states."""
        try:
            self.nudge_until(lambda: not self.states() & LIVE, f"job {self.id} ended", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.states()}\n{self.log}") from None
        return self.states()

    def processes(self) -> dict[int, str]:
        """Command lines of this job's processes on this host, all nodes together."""
        mark = f"SLURM_JOB_ID={self.id}"
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_text(errors="replace").split("\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile
        return {pid: line.replace("\0", " ").strip() for pid, line in found.items() if line}

    def state_digest(self) -> str:
        """What the last checkpoint came to: equal only if every batch was trained once and in order."""
        commits = sorted(self.paths.checkpoints.glob("step-*/commit.json"))
        return str(json.loads(commits[-1].read_text())["state"])

    def kill_rank(self, name: str, restart: int = 0) -> None:
        os.kill(self.wait_up(name, restart)["pid"], signal.SIGKILL)


def stub_spec(run: Path, *overrides: str, program: Path = STUB) -> JobSpec:
    config = load_config(
        [],
        [
            "--model.path=m",
            "--data.train=t",
            f"--run.dir={run}",
            "--run.num_steps=6",
            "--checkpoint.interval=2",
            "--checkpoint.export_hf=false",  # the stub has no policy
            "--cluster.components.trainer.nodelist=n3",
            "--cluster.components.rollout.nodes=1",
            "--cluster.time=00:05:00",
            "--cluster.signal_delay_s=20",
            "--cluster.end_margin_s=20",
            *overrides,
        ],
    )
    return job_spec(config, program=(str(program),))
