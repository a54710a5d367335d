"""Claiming a run directory: one live job owns it, its configuration and secret lie in it, a dead owner is replaced."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime_hpc.cluster.slurm_says import ask, waiting_jobs
from vime_hpc.config.cluster import ClusterConfig
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError, DamagedDataError, NothingToDoError, RunLockedError
from vime_hpc.launch.attempts import close_killed, frontier

log = logging.getLogger(__name__)

HELD_BY_FLOCK, HELD_BY_JOB = "process", "job"
LIVE_STATES = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
)

# What may differ between the configuration a run was started with and the one it goes on with: how long, where and
# on what machine, not what is computed.
MAY_CHANGE = frozenset(
    {"cluster", "observe", "engine", "trainer", "router", "vllm", "checkpoint", "weights", "eval"}
)
MAY_CHANGE_IN_SECTION = {
    "run": frozenset(
        {
            "dir",
            "num_steps",
            "until",
            "train_from",
            "wait_timeout_s",
            "startup_timeout_s",
            "share_with_group",
            "mode",
        }
    ),
    "rollout": frozenset({"num_workers"}),
}
BUFFER_MADE_WITH = ("buffer.columns ", "rollout.temperature ")
"""What an empty buffer fixes already (roles/schema.py)."""


@contextmanager
def claimed(config: RunConfig, job_id: str, restart_count: int) -> Iterator[RunPaths]:
    """Own the run directory while the block runs.

    Raises:
        RunLockedError: a live job owns it; nothing in it was touched.
        ConfigError: it cannot be written, or it was started with another configuration.
        NothingToDoError: the run is complete; this start leaves nothing in it.
    """
    paths = RunPaths(Path(config.run.dir).absolute())
    make_root(paths.root, config.run.share_with_group)
    with _lock(paths, job_id, restart_count, holder=HELD_BY_FLOCK):
        try:
            _prepare(paths, config, f"{job_id}.{restart_count}")
            yield paths
        finally:
            release(paths, job_id)


def claim_for_job(config: RunConfig, job_id: str, restart_count: int) -> RunPaths:
    """Own the run directory for a Slurm job: the record stays when this process ends, and Slurm says whether it lives.

    Earlier starts that left no end are closed: they were killed.

    Raises:
        RunLockedError: a live job owns it; nothing in it was touched.
        ConfigError: it cannot be written, or it was started with another configuration.
        NothingToDoError: the run is complete; this start leaves nothing in it.
    """
    paths = RunPaths(Path(config.run.dir).absolute())
    make_root(paths.root, config.run.share_with_group)
    name = f"{job_id}.{restart_count}"
    with _lock(paths, job_id, restart_count, holder=HELD_BY_JOB):
        try:
            close_killed(paths, frontier(paths), except_name=name)
            _prepare(paths, config, name)
        except BaseException:
            release(paths, job_id)
            raise
    return paths


def release(paths: RunPaths, job_id: str) -> None:
    """Give the run directory back, if it is this job's."""
    owner = read_owner(paths)
    if owner and owner["job_id"] == job_id:
        paths.lock.write_text("")


def read_owner(paths: RunPaths) -> dict[str, Any] | None:
    """The recorded owner, alive or not."""
    try:
        return _owner(paths.lock.read_text(), paths.lock)
    except FileNotFoundError:
        return None


def _owner(text: str, lock: Path) -> dict[str, Any] | None:
    try:
        owner: dict[str, Any] | None = json.loads(text or "null")
    except ValueError as error:
        raise DamagedDataError(
            f"{lock} is not JSON ({error}); its writer was probably killed, or the disk was full. If no job runs in that "
            f"directory (squeue --me), empty it: : > {shlex.quote(str(lock))}"
        ) from None
    return owner


def refuse_live_owner(paths: RunPaths) -> None:
    """Raise RunLockedError where a live job or process owns the directory (a look from outside: nothing is touched)."""
    owner = read_owner(paths)
    if owner is None:
        return
    if owner.get("held_by") == HELD_BY_JOB:
        lives = _slurm_job_runs(owner["job_id"])
    else:
        lives = owner["host"] == socket.gethostname() and Path(f"/proc/{owner['pid']}").exists()
    if lives:
        raise RunLockedError(_locked(paths.root, owner))


def refuse_waiting_job(paths: RunPaths, cluster: ClusterConfig) -> None:
    """Raise RunLockedError where an earlier job of this directory is still in the queue: the command was given twice.

    A job that is told to wait for another one (a dependency of the user's) is let through.
    """
    if "dependency" in cluster.slurm:
        return
    waiting = waiting_jobs(
        [path.name.partition("_")[0] for path in paths.submitted.glob("*_submission.sh")]
    )
    if waiting:
        raise RunLockedError(
            f"{paths.root}: job {waiting[0]} is in the queue for it already. To replace it: scancel {waiting[0]}; to "
            f"have another one follow it: --cluster.slurm.dependency=afterany:{waiting[0]}"
        )


def _prepare(paths: RunPaths, config: RunConfig, attempt: str) -> None:
    _refuse_other_config(paths, config)
    refuse_finished(paths, config)
    _store_config(paths, config)
    if not paths.token.exists():
        _write_private(paths.token, secrets.token_hex(32))
    if not paths.identity.exists():
        _write_private(paths.identity, f"{paths.root.name}-{secrets.token_hex(4)}")
    for directory in ("logs", "failures", "exits"):
        (paths.attempt(attempt) / directory).mkdir(parents=True, exist_ok=True)


def next_restart_count(root: Path, job_id: str) -> int:
    """The number of earlier starts of this job in this run directory (Slurm counts its own; a local run needs ours)."""
    attempts = root / "attempts"
    counts = (
        [int(path.name.rpartition(".")[2]) for path in attempts.glob(f"{job_id}.*")]
        if attempts.is_dir()
        else []
    )
    return max(counts, default=-1) + 1


def refuse_finished(paths: RunPaths, config: RunConfig) -> None:
    """Raise NothingToDoError when nothing is left of run.num_steps (or run.until) steps, before any role starts."""
    end = config.run.end_step
    if config.run.mode == "rollout_only":
        if (paths.buffer / "steps" / f"{end - 1:06d}.json").exists():
            raise NothingToDoError(
                f"nothing to do: {paths.buffer} holds all steps up to {end}; raise --run.num_steps to go on"
            )
        return
    commits = _commits(paths)
    trained = commits and json.loads(commits[-1].read_text())["next_step"] >= end
    if trained and not lacks_export(paths, config):
        raise NothingToDoError(
            f"nothing to do: {paths.root} is trained to step {end} "
            f"({commits[-1].parent.name}); raise --run.num_steps to go on"
        )


def lacks_export(paths: RunPaths, config: RunConfig) -> bool:
    """Whether the job was killed between its newest checkpoint and the export of the policy in it."""
    commits = _commits(paths)
    if not config.checkpoint.export_hf or not commits:
        return False
    return (
        not paths.export.exists()
        or paths.export.stat().st_mtime_ns < commits[-1].stat().st_mtime_ns
    )


def _commits(paths: RunPaths) -> list[Path]:
    """Of the complete checkpoints, oldest first."""
    return sorted(
        path
        for path in paths.checkpoints.glob("step-*/commit.json")
        if path.parent.suffix != ".tmp"
    )


def make_root(root: Path, share: bool) -> None:
    """Make the run directory, or see that an existing one is ours and can be written.

    Raises:
        ConfigError: it cannot be written, or others could change what lies in it.
    """
    os.umask(0o027 if share else 0o077)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".write-test-") as probe:
            private = not os.fstat(probe.fileno()).st_mode & stat.S_IWOTH
    except OSError as error:
        raise ConfigError(
            f"run.dir {root} cannot be written ({error.strerror}); choose another with "
            f"--run.dir=PATH"
        ) from error
    if (
        private
    ):  # else a file system without modes (a mounted Windows disk), where every file reads 777
        refuse_foreign(root, root.stat(), os.getuid())


def refuse_foreign(root: Path, found: os.stat_result, uid: int) -> None:
    """Raise ConfigError where another user owns a directory or all may write to it: they could replace the token.

    A process of root (a container) writes where it is told to.
    """
    if uid and found.st_uid not in (0, uid):
        raise ConfigError(
            f"run.dir {root} belongs to user id {found.st_uid}, this process to {uid}; its owner could change the run. "
            f"Choose a directory of yours with --run.dir=PATH"
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"run.dir {root} can be written by every user of this machine, who could change the run: "
            f"chmod o-w {shlex.quote(str(root))}, or choose another with --run.dir=PATH"
        )


@contextmanager
def _lock(paths: RunPaths, job_id: str, restart_count: int, *, holder: str) -> Iterator[None]:
    """flock decides between processes that are up now; the record inside names the owner, also of a Slurm job."""
    me = {
        "job_id": job_id,
        "restart_count": restart_count,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.time(),
        "held_by": holder,
    }
    with paths.lock.open("a+") as file:
        file.seek(0)
        owner = _owner(file.read(), paths.lock)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(_locked(paths.root, owner)) from None
        if owner and _alive(owner, job_id):
            raise RunLockedError(_locked(paths.root, owner))
        if owner and owner["job_id"] != job_id:
            log.warning(
                "%s was owned by job %s.%s on %s, which is gone; taking it over",
                paths.root,
                owner["job_id"],
                owner["restart_count"],
                owner["host"],
            )
        file.truncate(0)
        file.write(json.dumps(me))
        file.flush()
        yield


def _alive(owner: dict[str, Any], job_id: str) -> bool:
    """Whether the recorded owner still runs. A record of this very job is an earlier start of it, and dead."""
    if owner["job_id"] == job_id:
        return False
    if owner.get("held_by") == HELD_BY_JOB:
        return _slurm_job_runs(owner["job_id"])
    if owner["host"] == socket.gethostname():
        return False  # the flock of this host would have been refused
    return _slurm_job_runs(owner["job_id"])


def _slurm_job_runs(job_id: str) -> bool:
    """Whether Slurm says that a job is up. Not knowing is not the same as no: then we refuse."""
    if not job_id.isdigit():
        return False
    if not shutil.which("squeue"):
        raise RunLockedError(
            f"the run directory belongs to Slurm job {job_id}, and there is no squeue here to ask whether it "
            f"still runs; go on from a host with Slurm's commands, or empty RUN/lock.json if it is gone"
        )
    answer = ask("squeue", "-h", "-j", job_id, "-o", "%T")
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise RunLockedError(
            f"the run directory belongs to Slurm job {job_id}, and squeue does not say whether it still runs "
            f"({answer.stderr.strip()}); try again when Slurm answers"
        )
    return answer.returncode == 0 and bool(set(answer.stdout.split()) & LIVE_STATES)


def _locked(root: Path, owner: dict[str, Any] | None) -> str:
    who = (
        f"job {owner['job_id']}.{owner['restart_count']} on {owner['host']} (process {owner['pid']})"
        if owner
        else "another job"
    )
    return f"{root} is in use by {who}; wait for it, cancel it, or choose another directory with --run.dir=PATH"


def _refuse_other_config(paths: RunPaths, config: RunConfig) -> None:
    if not paths.config.exists():
        return
    changed = _changed(json.loads(paths.config.read_text()), config.model_dump(mode="json"))
    if not _has_results(paths):  # then only what an opened buffer was made with
        opened = (paths.buffer / "buffer.json").exists()
        changed = [text for text in changed if opened and text.startswith(BUFFER_MADE_WITH)]
    if changed:
        raise ConfigError(
            f"{paths.root} was started with another configuration: {'; '.join(changed)}. Go on with the "
            f"old values, or start afresh with --run.dir=PATH"
        )


def _store_config(paths: RunPaths, config: RunConfig) -> None:
    part = paths.config.with_suffix(".part")
    part.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
    part.rename(paths.config)


def _has_results(paths: RunPaths) -> bool:
    """Whether a start has made anything that depends on what is computed. One that failed before may be corrected."""
    made = {
        paths.buffer: ("steps/*.json", "journal/*/*.log"),
        paths.checkpoints: ("*",),
        paths.weights: ("*",),
        paths.eval: ("*",),
    }
    return (paths.metrics.exists() and paths.metrics.stat().st_size > 0) or any(
        any(place.glob(pattern)) for place, patterns in made.items() for pattern in patterns
    )


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    for section in sorted(set(old) | set(new)):
        if section in MAY_CHANGE:
            continue
        before, after = old.get(section, {}), new.get(section, {})
        for option in sorted(after):
            if option in MAY_CHANGE_IN_SECTION.get(section, ()):
                continue
            # An option that the run's first version did not have yet was at its default, whatever it does; one that this
            # version has no more does nothing.
            was = before[option] if option in before else _default(section, option)
            if was != after[option]:
                found.append(f"{section}.{option} was {was!r}, now {after[option]!r}")
    return found


def _default(section: str, option: str) -> Any:
    field = RunConfig.model_fields[section].annotation
    fields = getattr(field, "model_fields", {})
    if option not in fields or fields[option].is_required():
        return None
    return fields[option].get_default(call_default_factory=True)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
