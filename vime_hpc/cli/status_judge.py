"""What `vime-hpc status` concludes: the state in a word or two, and what a person should do."""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from vime_hpc.cluster.slurm_says import JobState
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch.attempts import Attempt
from vime_hpc.launch.run_directory import LIVE_STATES, read_owner

STUCK_FACTOR = 10.0
STUCK_LEAST_S = 300.0
# Reasons for which a job as it was asked for never starts, whatever ends before it (manual of squeue, JOB REASON CODES).
NEVER_STARTS = frozenset(
    {
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
    }
)


@dataclass
class Status:
    """What `vime-hpc status` knows. Times are seconds since 1970."""

    run: str
    state: str
    next_action: str
    job_id: str | None = None
    slurm: dict[str, Any] | None = None
    step: int | None = None
    num_steps: int | None = None
    mode: str = "train"
    exports: bool = False
    seconds_per_step: float | None = None
    last_step_at: float | None = None
    frontier: dict[str, int] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None


def _is_complete(found: Status) -> bool:
    """Whether every step is saved, however the last start ended."""
    reached = "committed_steps" if found.mode == "rollout_only" else "checkpoint_step"
    return bool(found.num_steps) and found.frontier[reached] >= (found.num_steps or 0)


def _saved(found: Status, paths: RunPaths) -> tuple[str, str]:
    """A run whose last start did not end well, after its last step was saved."""
    if not found.exports or (paths.export / "config.json").exists():
        return "finished", "none"
    return "every step is saved, the policy is not exported", (
        f"the last start ended before it wrote {paths.export}. To have it written, train a step more: submit again with "
        f"--run.num_steps={(found.num_steps or 0) + 1}"
    )


def judge_local(found: Status, paths: RunPaths) -> tuple[str, str]:
    """A run of `vime-hpc run`: there is no job, only the process that owns the directory."""
    owner = read_owner(paths)
    if owner and owner["host"] == socket.gethostname() and Path(f"/proc/{owner['pid']}").exists():
        return "running", f"none (process {owner['pid']} on this host)"
    if owner and owner["host"] != socket.gethostname():
        return (
            "running, or killed",
            f"look on {owner['host']}, where process {owner['pid']} started it",
        )
    if _is_complete(found):
        return "finished", "none"
    return (
        "stopped",
        f"go on: the same `vime-hpc run` command again (what would happen: vime-hpc resume-plan {quote(str(paths.root))})",
    )


def judge(
    found: Status, attempts: list[Attempt], slurm: JobState | None, paths: RunPaths
) -> tuple[str, str]:
    """State in a word or two, and what a person should do."""
    last = attempts[-1] if attempts else None
    live = slurm is not None and slurm.state in LIVE_STATES
    if slurm and slurm.state == "PENDING":
        why = "its restart" if last else "its first start"
        return f"waiting for {why}", _waiting(slurm)
    if last is None:
        return _not_begun(found, slurm, paths)
    if slurm and slurm.state == "COMPLETING":
        return "ending", "wait: Slurm is ending the job's tasks; ask again in a minute"
    if last.ended is None and live:
        return _running(found, last, paths)
    if last.ended is None and slurm is None and not shutil.which("squeue"):
        return (
            "running, or killed",
            "ask again on a host with Slurm's commands: there is no squeue here",
        )
    if last.verdict != "done" and _is_complete(found):
        return _saved(found, paths)
    if last.ended is None and slurm and slurm.last_word.startswith("stopping: "):
        return "stopped, and could not write down why", slurm.last_word.removeprefix("stopping: ")
    if last.ended is None:
        return "killed from outside", (
            f"the start {last.name} left no end ({_slurm_says(slurm)}). "
            f"Nothing committed is lost; go on: sbatch {_script(paths, last)}"
        )
    if last.verdict == "done":
        return "finished" if last.cause == "finished" else str(last.cause), "none"
    if last.verdict == "again":
        return "stopped, to be started again", (
            f"{last.reason}. If no job follows: sbatch {_script(paths, last)}"
        )
    if last.cause == "cannot go on":
        return f"stopped: {last.cause}", (
            f"mend what the failure names, then submit again with --run.dir={quote(str(paths.root))}; "
            f"starting the same again would end the same way"
        )
    return f"stopped: {last.cause}", (
        f"{last.reason}. To go on: sbatch {_script(paths, last)} "
        f"(what would happen: vime-hpc resume-plan {quote(str(paths.root))})"
    )


def _waiting(slurm: JobState) -> str:
    """What to do about a job that has not begun."""
    if slurm.reason in NEVER_STARTS:
        return (
            f"Slurm says {slurm.reason}: as it was asked for it will never start. scancel {slurm.job_id}, compare the "
            f"request with the partition (vime-hpc doctor CONFIG --cluster FILE), submit again"
        )
    if "held" in slurm.reason.lower():  # JobHeldUser, JobHeldAdmin, launch failed requeued held
        return f"Slurm says {slurm.reason}: to let it start, scontrol release {slurm.job_id}"
    return f"wait: Slurm says {slurm.reason or 'PENDING'}" + (
        f", expected start {slurm.start}" if slurm.start not in ("", "N/A") else ""
    )


def _not_begun(found: Status, slurm: JobState | None, paths: RunPaths) -> tuple[str, str]:
    """A run of which no start has written its record."""
    if found.job_id is None:
        return "not submitted", "no job was ever accepted for it: vime-hpc submit says why"
    log = paths.root / f"slurm-{found.job_id}.log"
    see = f"see {log}" if log.exists() else f"there is no {log.name}"
    if slurm and slurm.state in LIVE_STATES:
        return "starting", f"wait; its log is {log}"
    return "not started", (
        f"job {found.job_id} ended before it claimed the directory ({_slurm_says(slurm)}); {see}. "
        f"{_last_word(slurm)}Then submit again with --run.dir={quote(str(paths.root))}"
    )


def _script(paths: RunPaths, attempt: Attempt) -> str:
    """As it is given to a shell: paths have spaces."""
    return quote(str(paths.attempt(attempt.name) / "job.sbatch"))


def _last_word(slurm: JobState | None) -> str:
    return f"Its last word: {slurm.last_word}. " if slurm and slurm.last_word else ""


def _slurm_says(slurm: JobState | None) -> str:
    if slurm is None:
        return "cancelled, node failure, batch script killed"
    return f"Slurm says {slurm.state}"


def _running(found: Status, last: Attempt, paths: RunPaths) -> tuple[str, str]:
    quiet = time.time() - max(found.last_step_at or 0.0, last.began)
    usual = found.seconds_per_step
    if found.failure:
        return (
            "running, but a task has failed",
            f"wait a minute; if it does not end by itself: scancel {found.job_id}",
        )
    if usual and quiet > max(STUCK_FACTOR * usual, STUCK_LEAST_S):
        return "running, but quiet", (
            f"no step for {quiet:.0f} s (a step usually takes {usual:.1f} s): vime-hpc logs {quote(str(paths.root))}; "
            f"to save and start again: scancel --signal=USR2 {found.job_id}"
        )
    return "running", "none"
