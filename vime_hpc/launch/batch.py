"""The batch script's two calls: `begin` claims the run directory and plans this start, `end` says what it came to.

    python -m vime_hpc.launch.batch begin RUN < config.toml
    python -m vime_hpc.launch.batch end RUN SRUN_EXIT_CODE

Everything printed goes to RUN/slurm-<job>.log. The last word on a job is also put into its comment, where the site
lets users do that, so that squeue and scontrol show it.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vime_hpc.cluster.slurm import component_hosts, expand_hosts
from vime_hpc.cluster.slurm_says import COMMENT_MARK, ask, job_end_time, show_job
from vime_hpc.config.load import build_config, read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import NothingToDoError, VimeError
from vime_hpc.launch.attempts import (
    Attempt,
    exit_codes,
    frontier,
    killed_first,
    read_attempts,
    write_attempt,
)
from vime_hpc.launch.job import job_spec
from vime_hpc.launch.record import write_machine
from vime_hpc.launch.requeue import Evidence, decide
from vime_hpc.launch.run_directory import claim_for_job, refuse_finished, release
from vime_hpc.observe.failure import first_failure

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
COMMENT_LENGTH = 400


def main(arguments: list[str]) -> int:
    match arguments:
        case ["begin", run]:
            return _told(Path(run), lambda: begin(Path(run), sys.stdin.read()))
        case ["end", run, code]:
            return _told(Path(run), lambda: end(Path(run), int(code)))
    print(__doc__, file=sys.stderr)
    return 2


def _told(run: Path, action: Callable[[], int]) -> int:
    """Run `action`; what goes wrong is told in the log and in the job's comment, which needs no room on the disk."""
    try:
        return action()
    except VimeError as error:
        text, code = str(error), error.exit_code
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        text = (
            f"stopping: {error.filename or run} on {socket.gethostname()}: {error.strerror}. Nothing committed is lost; "
            f"make room (or the directory writable), then submit again with --run.dir={shlex.quote(str(run))}"
        )
        code = VimeError.exit_code
    _comment(text)
    try:
        print(f"vime-hpc: {text}", flush=True)
    except OSError:
        os._exit(code)  # the log is on the same full disk; the flush at exit would fail as well
    return code


def begin(run: Path, config_text: str) -> int:
    """Claim, write attempt.json and job.env (and the host of every rank).

    Raises:
        RunLockedError: another live job has the run directory.
        NothingToDoError: the run is complete.
    """
    tree = tomllib.loads(config_text)
    tree.setdefault("run", {})["dir"] = str(run)
    config = build_config(tree)
    job_id, restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    name = f"{job_id}.{restart}"
    paths = claim_for_job(config, job_id, restart)
    now = frontier(paths)
    end_time = job_end_time(os.environ)
    write_attempt(
        paths,
        Attempt(
            name,
            time.time(),
            now,
            socket.gethostname(),
            end_time,
            float(config.cluster.signal_delay_s),
        ),
    )
    write_machine(paths.attempt(name))
    (paths.attempt(name) / "job.env").write_text(_job_env(config, end_time))
    _write_hosts(config, paths.attempt(name) / "hosts")
    print(
        f"vime-hpc: start {name} on {os.environ.get('SLURM_JOB_NODELIST', '?')}, {now.committed_steps} steps committed, "
        f"checkpoint at step {now.checkpoint_step} of {config.run.num_steps}"
        + (f", {int(end_time - time.time())} s to the limit" if end_time else ""),
        flush=True,
    )
    return 0


def _job_env(config: RunConfig, end_time: float | None) -> str:
    """Shell lines the script reads: when to stop. Without a limit both stay away."""
    if end_time is None:
        return "force_after_s=infinity\n"
    force = max(1, int(end_time - time.time()) - config.cluster.end_margin_s)
    # Slurm looks at limits every 30 s and sends the warning with that slack; our own clock covers a lost one.
    return f"force_after_s={force}\nexport VIME_STOP_AT={int(end_time) - config.cluster.signal_delay_s}\n"


def _write_hosts(config: RunConfig, path: Path) -> None:
    """A line per rank, for the single step of a plain allocation (SLURM_HOSTFILE)."""
    spec = job_spec(config)
    groups = component_hosts(os.environ)
    hosts = [host for group in groups for host in group]
    lines: dict[int, str] = {}
    for component in spec.ranked:
        own = (
            expand_hosts(component.options.nodelist)
            if component.options.nodelist and not spec.is_het
            else hosts[: component.nodes]
        )
        hosts = [host for host in hosts if host not in own]
        for host, ranks in zip(own, component.ranks_of_nodes(), strict=False):
            lines |= dict.fromkeys(ranks, host)
    path.write_text("".join(f"{lines[rank]}\n" for rank in sorted(lines)))


def end(run: Path, srun_code: int) -> int:
    """Decide what follows, record and print it; returns the batch script's exit code (75 = start again)."""
    paths = RunPaths(run)
    config = read_resolved(paths.config)
    job_id = os.environ["SLURM_JOB_ID"]
    name = f"{job_id}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    attempts = read_attempts(paths)
    attempt = replace(
        next(a for a in attempts if a.name == name), ended=time.time(), at_end=frontier(paths)
    )
    directory = paths.attempt(name)
    failure = first_failure(directory / "failures")
    evidence = Evidence(
        srun_code,
        exit_codes(paths, name),
        job_spec(config).world_size,
        failure,
        (directory / "forced").exists(),
        os.environ.get("VIME_JOB_STATE") or show_job(job_id).get("JobState", ""),
        killed_first(paths, name, failure),
        _is_complete(paths, config),
    )
    verdict = decide(evidence, attempt, [a for a in attempts if a.name != name], config.cluster)
    write_attempt(
        paths, replace(attempt, cause=verdict.cause, reason=verdict.reason, verdict=verdict.verdict)
    )
    if verdict.verdict != "again":
        release(paths, job_id)
    action = {"done": "done", "again": "starting again", "stop": "stopping"}[verdict.verdict]
    print(f"vime-hpc: {action}: {verdict.reason}", flush=True)
    _comment(f"{action}: {verdict.reason}")
    return verdict.exit_code


def _is_complete(paths: RunPaths, config: RunConfig) -> bool:
    try:
        refuse_finished(paths, config)
    except NothingToDoError:
        return True
    return False


def _comment(text: str) -> None:
    """Best effort: sites may forbid it, and it is only a convenience."""
    job = os.environ.get("SLURM_JOB_ID")
    if job and shutil.which("scontrol"):
        text = " ".join(text.split())[:COMMENT_LENGTH]
        ask("scontrol", "update", f"jobid={job}", f"comment={COMMENT_MARK}{text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
