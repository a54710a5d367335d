"""The local launcher: starts every rank of the job as a process of this machine and ends all when one ends badly.

An engine's host that was killed is started again, as the host itself does with its server (roles/engine.py).
The ranks run the same program that srun starts (`python -m vime_hpc.roles RUN`); only the environment differs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import vime_hpc
from vime_hpc.cluster.import_path import IMPORT_FROM
from vime_hpc.cluster.rank import HOST_RESTARTS, RankInfo, Role, layout, place
from vime_hpc.cluster.temporary import temporary_of_start
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import RequeueRequested, RoleDiedError, VimeError
from vime_hpc.launch.job import RANK_PROGRAM
from vime_hpc.launch.record import command_line, write_machine, write_submitted
from vime_hpc.launch.run_directory import claimed, next_restart_count
from vime_hpc.observe.failure import first_failure
from vime_hpc.observe.progress import Progress, make_progress

TERM_GRACE_S = 5.0  # the ranks' own grace is 2 s
POLL_S = 0.1


@dataclass
class _Rank:
    info: RankInfo
    process: subprocess.Popen[bytes]
    log_path: Path
    num_restarts: int = 0
    temporary: Mapping[str, str] = field(default_factory=dict)
    """Environment that sends its temporary files to the start's own directory."""


def run_local(config: RunConfig, job_id: str = "local") -> RunPaths:
    """Run the whole job on this machine and wait for its end.

    Raises:
        VimeError: of the kind and with the message of the first role that failed.
        RequeueRequested: stopped on request, everything saved.
        NothingToDoError: the run is complete already.
    """
    root = Path(config.run.dir).absolute()
    restart = next_restart_count(root, job_id)
    with claimed(config, job_id, restart) as paths:
        write_submitted(paths, config, layout=None, command=command_line())
        write_machine(paths.attempt(f"{job_id}.{restart}"))
        progress = make_progress(config.observe.progress, config.run.end_step)
        ranks: list[_Rank] = []
        stopping = _StopOnSignals()
        try:
            with temporary_of_start() as temporary:
                try:
                    ranks = _start(config, paths, job_id, restart, temporary)
                    _watch(ranks, config, paths, progress, stopping)
                finally:
                    _end(ranks)
        finally:
            stopping.restore()
            progress.close()
        if stopping.received is not None:
            raise StoppedError(
                f"stopped by {signal.Signals(stopping.received).name}; committed rollouts and checkpoints in "
                f"{root} are whole: start the same command again to go on",
                stopping.received,
            )
        _raise_for(ranks, paths)
    return paths


class StoppedError(VimeError):
    """The user ended the job; exit code 128 + signal, as a shell has it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class _StopOnSignals:
    """First Ctrl-C or TERM: end all roles now. (The warning signal USR2 asks for a checkpoint first.)"""

    def __init__(self) -> None:
        self.received: int | None = None
        self._old = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self.warned = False
        self._old[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self._on_warning)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.received = number

    def _on_warning(self, number: int, frame: Any) -> None:
        self.warned = True

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def _start(
    config: RunConfig, paths: RunPaths, job_id: str, restart: int, temporary: Mapping[str, str]
) -> list[_Rank]:
    world = sum(size for _, size in layout(config))
    ranks = []
    for number in range(world):
        info = place(config, number, world, local_rank=number, job_id=job_id, restart_count=restart)
        log_path = paths.attempt(info.attempt) / "logs" / f"{info.name}.log"
        process = _process(info, config, paths, log_path, temporary)
        ranks.append(_Rank(info, process, log_path, temporary=temporary))
    return ranks


def _process(
    info: RankInfo,
    config: RunConfig,
    paths: RunPaths,
    log_path: Path,
    temporary: Mapping[str, str],
    num_restarts: int = 0,
) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, *RANK_PROGRAM, str(paths.root)],
            env={**_environment(info, config), **temporary, HOST_RESTARTS: str(num_restarts)},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def _start_again(rank: _Rank, config: RunConfig, paths: RunPaths) -> bool:
    """Start an engine's host again that was killed; False where this rank's end is the job's."""
    killed = (rank.process.returncode or 0) < 0
    if (
        not killed
        or rank.info.role is not Role.ENGINE
        or rank.num_restarts >= config.engine.max_restarts
    ):
        return False
    rank.num_restarts += 1
    rank.process = _process(
        rank.info, config, paths, rank.log_path, rank.temporary, rank.num_restarts
    )
    return True


def _environment(info: RankInfo, config: RunConfig) -> dict[str, str]:
    threads = {"trainer": config.trainer.num_threads, "engine": config.engine.num_threads}.get(
        info.role, 1
    )
    return {
        **os.environ,
        "VIME_GLOBAL_RANK": str(info.global_rank),
        "VIME_WORLD_SIZE": str(sum(size for _, size in layout(config))),
        "VIME_LOCAL_RANK": str(info.local_rank),
        "VIME_JOB_ID": info.job_id,
        "VIME_RESTART_COUNT": str(info.restart_count),
        "VIME_LAUNCHER_PID": str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        **_import_path(),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _import_path() -> dict[str, str]:
    """Ranks run with -P: this package, and last of all the user's modules in the current directory, are named to them."""
    package = str(Path(vime_hpc.__file__).parents[1])
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package)))}
    return path if os.environ.get("PYTHONSAFEPATH") else path | {IMPORT_FROM: os.getcwd()}


def _watch(
    ranks: list[_Rank],
    config: RunConfig,
    paths: RunPaths,
    progress: Progress,
    stopping: _StopOnSignals,
) -> None:
    """Until every rank has ended well, one has ended badly, or we are told to stop."""
    with _MetricsTail(paths.metrics) as tail:
        warned = False
        while True:
            for record in tail.new_records():
                progress.step(record)
            if stopping.received is not None:
                progress.note("stopping: ending all roles")
                return
            if stopping.warned and not warned:
                warned = True
                progress.note("warning signal: saving, then stopping")
                for rank in ranks:
                    _signal(rank, signal.SIGUSR2)
            codes = [rank.process.poll() for rank in ranks]
            if all(code is not None for code in codes):
                for record in tail.new_records():
                    progress.step(record)
                return
            bad = [
                rank
                for rank, code in zip(ranks, codes, strict=True)
                if code not in (None, 0, RequeueRequested.exit_code)
            ]
            for rank in bad:
                how = f"{rank.info.name} {_how(rank.process.returncode)}"
                if not _start_again(rank, config, paths):
                    return
                progress.note(f"{how}; started again")
            time.sleep(POLL_S)


def _end(ranks: list[_Rank]) -> None:
    """TERM to the process groups, KILL to what is left after the grace time."""
    for rank in ranks:
        if rank.process.poll() is None:
            _signal(rank, signal.SIGTERM)
    end = time.monotonic() + TERM_GRACE_S
    for rank in ranks:
        try:
            rank.process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(rank, signal.SIGKILL)
            rank.process.wait()


def _signal(rank: _Rank, number: int) -> None:
    if rank.process.poll() is None:
        os.killpg(rank.process.pid, number)


def _raise_for(ranks: list[_Rank], paths: RunPaths) -> None:
    """The job's end as one exception, or nothing when every rank ended well."""
    codes = [rank.process.returncode for rank in ranks]
    if all(code == 0 for code in codes):
        return
    failures = paths.attempt(ranks[0].info.attempt) / "failures"
    failure = first_failure(failures)
    if failure is None:
        if all(code in (0, RequeueRequested.exit_code) for code in codes):
            raise RequeueRequested(
                "stopped on request, everything is saved; start the same command again"
            )
        bad = [r for r in ranks if r.process.returncode not in (0, RequeueRequested.exit_code)]
        # Those that we ended by TERM are consequences.
        rank = next((r for r in bad if r.process.returncode != -signal.SIGTERM), bad[0])
        raise RoleDiedError(
            f"{rank.info.name} {_how(rank.process.returncode)} without a word; the end of {rank.log_path}:\n"
            f"{_last_lines(rank.log_path)}"
        )
    error = VimeError(
        f"{failure['rank']} on {failure['host']}: {failure['error']}: {failure['message']}\n"
        f"(traceback in {failures / (failure['rank'] + '.json')}, logs in {failures.parent / 'logs'})"
    )
    error.exit_code = failure["exit_code"]
    raise error


def _how(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )


def _last_lines(path: Path, count: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


class _MetricsTail:
    """New whole lines of the metrics file since it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = ""

    def __enter__(self) -> _MetricsTail:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file:
            self._file.close()

    def new_records(self) -> list[dict[str, Any]]:
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open()
            self._file.seek(self._offset)
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return [json.loads(line) for line in lines if line]
