"""`vime-hpc status`: Slurm's view and the run directory's own records, put together into one answer."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime_hpc.cli.find_run import find_run
from vime_hpc.cli.status_judge import Status, judge, judge_local
from vime_hpc.cluster.slurm_says import JobState, job_state
from vime_hpc.config.load import read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import SlurmSilentError
from vime_hpc.launch.attempts import Attempt, exit_codes, frontier, killed_first, read_attempts
from vime_hpc.launch.requeue import how_it_ended
from vime_hpc.launch.run_directory import LIVE_STATES, read_owner
from vime_hpc.observe.failure import first_failure, tail
from vime_hpc.observe.metrics import read_metrics


def status(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc status`."""
    found = collect(find_run(arguments.target))
    print(json.dumps(asdict(found)) if arguments.json else words(found))
    return 0


def collect(run: Path) -> Status:
    """Read everything there is about a run."""
    paths = RunPaths(run.absolute())
    attempts = read_attempts(paths)
    job_id, slurm, silent = _job(paths, attempts)
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
        exports=config is not None and _exports(config),
        frontier=asdict(now),
        attempts=[asdict(attempt) for attempt in attempts],
    )
    _add_steps(found, paths, attempts)
    newest = _newest_start(paths)
    if newest:
        found.failure = _failure(paths, newest)
    if silent and not (attempts and attempts[-1].ended):
        found.state, found.next_action = "not known", silent
    elif newest and not attempts and slurm is None:
        found.state, found.next_action = judge_local(found, paths)
    else:
        found.state, found.next_action = judge(found, attempts, slurm, paths)
    return found


def _exports(config: RunConfig) -> bool:
    return config.checkpoint.export_hf and config.run.mode != "rollout_only"


def _job(paths: RunPaths, attempts: list[Attempt]) -> tuple[str | None, JobState | None, str]:
    """The job that has the directory while it lives, else the newest one, which may be waiting for that one's end."""
    newest, owner = _job_id(paths, attempts), read_owner(paths)
    if owner and owner["job_id"] != newest:
        slurm, silent = _ask_slurm(owner["job_id"])
        if silent or (slurm and slurm.state in LIVE_STATES):
            return owner["job_id"], slurm, silent
    return newest, *_ask_slurm(newest)


def _ask_slurm(job_id: str | None) -> tuple[JobState | None, str]:
    """What Slurm says of the job, and why it says nothing where it should."""
    if not job_id or not job_id.isdigit():
        return None, ""
    try:
        return job_state(job_id), ""
    except SlurmSilentError as error:
        return None, str(error)


def _newest_start(paths: RunPaths) -> str | None:
    starts = sorted((paths.root / "attempts").glob("*.*"), key=lambda path: path.stat().st_mtime)
    return starts[-1].name if starts else None


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


def words(found: Status) -> str:
    """The answer for a person."""
    lines = [f"{found.run}: {found.state}"]
    if found.slurm:
        s = found.slurm
        lines.append(
            f"  job        {found.job_id} {s['state']} on {s['nodes'] or '-'}"
            + (f", {s['time_left']} left" if s["state"] == "RUNNING" else "")
        )
    elif found.job_id and not found.job_id.isdigit():
        lines.append("  job        none of Slurm's: `vime-hpc run`")
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
