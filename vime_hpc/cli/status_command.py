"""`vime-hpc status`: Slurm's view and the run directory's own records, put together into one answer."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from vime_hpc.cli.find_run import find_run
from vime_hpc.cluster.slurm import JobState, job_state
from vime_hpc.config.load import read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch.attempts import Attempt, exit_codes, frontier, killed_first, read_attempts
from vime_hpc.launch.requeue import how_it_ended
from vime_hpc.launch.run_directory import LIVE_STATES, read_owner
from vime_hpc.observe.failure import first_failure, tail
from vime_hpc.observe.metrics import read_metrics

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
    seconds_per_step: float | None = None
    last_step_at: float | None = None
    frontier: dict[str, int] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None


def status(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc status`."""
    found = collect(find_run(arguments.target))
    print(json.dumps(asdict(found)) if arguments.json else words(found))
    return 0


def collect(run: Path) -> Status:
    """Read everything there is about a run."""
    paths = RunPaths(run.absolute())
    attempts = read_attempts(paths)
    job_id = _job_id(paths, attempts)
    slurm = job_state(job_id) if job_id and job_id.isdigit() else None
    config = read_resolved(paths.config) if paths.config.exists() else None
    now = frontier(paths)
    found = Status(
        run=str(paths.root),
        state="",
        next_action="",
        job_id=job_id,
        slurm=asdict(slurm) if slurm else None,
        num_steps=config.run.end_step if config else None,
        mode=config.run.mode if config else "train",
        frontier=asdict(now),
        attempts=[asdict(attempt) for attempt in attempts],
    )
    _add_steps(found, paths, attempts)
    newest = _newest_start(paths)
    if newest:
        found.failure = _failure(paths, newest)
    if newest and not attempts and slurm is None:
        found.state, found.next_action = _judge_local(found, paths)
    else:
        found.state, found.next_action = _judge(found, attempts, slurm, paths)
    return found


def _newest_start(paths: RunPaths) -> str | None:
    starts = sorted((paths.root / "attempts").glob("*.*"), key=lambda path: path.stat().st_mtime)
    return starts[-1].name if starts else None


def _judge_local(found: Status, paths: RunPaths) -> tuple[str, str]:
    """A run of `vime-hpc run`: there is no job, only the process that owns the directory."""
    owner = read_owner(paths)
    if owner and owner["host"] == socket.gethostname() and Path(f"/proc/{owner['pid']}").exists():
        return "running", f"none (process {owner['pid']} on this host)"
    if owner and owner["host"] != socket.gethostname():
        return (
            "running, or killed",
            f"look on {owner['host']}, where process {owner['pid']} started it",
        )
    reached = "committed_steps" if found.mode == "rollout_only" else "checkpoint_step"
    if found.num_steps and found.frontier[reached] >= found.num_steps:
        return "finished", "none"
    return (
        "stopped",
        f"go on: the same `vime-hpc run` command again (what would happen: vime-hpc resume-plan {quote(str(paths.root))})",
    )


def _job_id(paths: RunPaths, attempts: list[Attempt]) -> str | None:
    """The newest job: the last submitted, or the last that began (sbatch by hand leaves no submission)."""
    submitted = [
        (path.lstat().st_mtime, path.name.partition("_")[0])
        for path in paths.submitted.glob("*_submission.sh")
    ]
    begun = [(attempt.began, attempt.name.partition(".")[0]) for attempt in attempts]
    owner = read_owner(paths)
    if owner and not begun:
        return str(owner["job_id"])
    return max(submitted + begun, default=(0.0, None))[1]


def _add_steps(found: Status, paths: RunPaths, attempts: list[Attempt]) -> None:
    records = read_metrics(paths.metrics)
    if not records:
        return
    found.step, found.last_step_at = records[-1]["step"], records[-1]["time"]
    recent = [
        record["time"] for record in records if record.get("attempt") == records[-1].get("attempt")
    ][-20:]
    if len(recent) > 1:
        found.seconds_per_step = (recent[-1] - recent[0]) / (len(recent) - 1)


def _failure(paths: RunPaths, name: str) -> dict[str, Any] | None:
    """The first cause in a start: its failure record, or a task that was killed without one."""
    directory = paths.attempt(name)
    record = first_failure(directory / "failures")
    killed = killed_first(paths, name, record)
    if record and not killed:
        return {
            key: record.get(key)
            for key in ("rank", "host", "time", "phase", "error", "message", "exit_code")
        } | {"last_lines": record.get("last_lines", [])}
    bad = {
        rank: code for rank, code in exit_codes(paths, name).items() if code not in (0, 4, 75, 143)
    }
    if not bad:
        return None
    rank, code = (killed, bad[killed]) if killed else min(bad.items())
    return {
        "rank": rank,
        "host": None,
        "time": None,
        "phase": None,
        "error": how_it_ended(code),
        "message": "\n".join(tail(directory / "logs" / f"{rank}.log", 5)),
        "exit_code": code,
        "last_lines": tail(directory / "logs" / f"{rank}.log"),
    }


def _judge(
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
    if last.ended is None:
        return "killed from outside", (
            f"the start {last.name} left no end ({_slurm_says(slurm)}). {_last_word(slurm)}"
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
    if slurm.reason.startswith("JobHeld"):
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


def words(found: Status) -> str:
    """The answer for a person."""
    lines = [f"{found.run}: {found.state}"]
    if found.slurm:
        s = found.slurm
        lines.append(
            f"  job        {found.job_id} {s['state']} on {s['nodes'] or '-'}"
            + (f", {s['time_left']} left" if s["state"] == "RUNNING" else "")
        )
    elif found.job_id:
        lines.append(
            f"  job        {found.job_id} (Slurm does not know it any more, or is not here)"
        )
    if found.num_steps:
        rate = f", {found.seconds_per_step:.1f} s a step" if found.seconds_per_step else ""
        lines.append(
            f"  step       {0 if found.step is None else found.step + 1} of {found.num_steps}{rate}; "
            f"{found.frontier['committed_steps']} steps in the buffer, checkpoint at step "
            f"{found.frontier['checkpoint_step']}"
        )
    for attempt in found.attempts[-5:]:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt["began"]))
        end = (
            f"{attempt['ended'] - attempt['began']:.0f} s, {attempt['cause']}"
            if attempt["ended"]
            else "no end yet"
        )
        lines.append(f"  start      {attempt['name']} at {began} on {attempt['host']}: {end}")
    if found.failure:
        f = found.failure
        where = f"{f['rank']} on {f['host'] or '?'}" + (f" ({f['phase']})" if f["phase"] else "")
        lines.append(f"  failure    {where}: {f['error']}")
        lines += [f"             {line}" for line in str(f["message"]).splitlines()[:8]]
    lines.append(f"  next       {found.next_action}")
    return "\n".join(lines)
