"""One process of the job, from its environment to its exit code: read the configuration, find the role, run it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from vime_hpc.cluster.rank import Role, rank_info
from vime_hpc.cluster.signal_flag import SignalFlag
from vime_hpc.config.load import read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import RequeueRequested, VimeError
from vime_hpc.launch.record import write_node
from vime_hpc.observe.failure import tail, write_failure
from vime_hpc.observe.logging import start_logging
from vime_hpc.roles.context import RoleContext

log = logging.getLogger(__name__)
TERM_GRACE_S = 2.0


class Terminated(BaseException):
    """TERM arrived: unwind, so that every `finally` ends what it started."""


def run_role(run_directory: str, warning: SignalFlag) -> int:
    """Run this process's role to its end; returns the exit code. Failures are recorded before it returns."""
    paths = RunPaths(Path(run_directory))
    try:
        context = _context(paths, warning)
    except Exception as error:  # noqa: BLE001 - recorded with its traceback
        # No rank yet: what the batch script knows has to do for a place and a name.
        attempt = os.environ.get("VIME_ATTEMPT")
        name = f"task-{os.environ.get('SLURM_PROCID', os.environ.get('VIME_GLOBAL_RANK', '?'))}"
        return _failed(error, Path(attempt) if attempt else None, name)
    try:
        if context.rank.local_rank == 0:
            write_node(context.attempt_directory, context.rank.name)
        _main_of(context.rank.role)(context)
    except Terminated:
        log.info("ended by TERM")
        sys.stderr.flush()
        os._exit(
            128 + signal.SIGTERM
        )  # everything is unwound; torch's own end would take two seconds more
    except RequeueRequested as stop:
        log.info("%s", stop)
        return stop.exit_code
    except Exception as error:  # noqa: BLE001 - recorded with its traceback
        return _failed(error, context.attempt_directory, context.rank.name)
    finally:
        sys.stdout.flush()
    return 0


def _context(paths: RunPaths, warning: SignalFlag) -> RoleContext:
    config = read_resolved(paths.config)
    rank = rank_info(config)
    start_logging(rank.name, config.observe.log_level)
    _end_soon_after_term()
    log.info(
        "rank %d of %d on %s, start %s, CPUs %s",
        *(rank.global_rank, rank.world_size, socket.gethostname(), rank.attempt),
        ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    )
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the launcher decides; a terminal's Ctrl-C reaches everyone
    token = bytes.fromhex(paths.token.read_text().strip())
    return RoleContext(config, paths, rank, warning, token)


def _failed(error: Exception, attempt_directory: Path | None, name: str) -> int:
    """Record a failure and return the exit code. The log's last lines are those before the traceback."""
    lines = tail(attempt_directory / "logs" / f"{name}.log") if attempt_directory else []
    log.error("%s failed", name, exc_info=error)
    if attempt_directory:
        write_failure(attempt_directory / "failures", name, error, last_lines=lines)
    return error.exit_code if isinstance(error, VimeError) else 1


def _end_soon_after_term() -> None:
    """TERM unwinds the main thread; where that sits in a collective and cannot, the process ends after a grace time.

    A Python signal handler waits for the interpreter's main thread. The wake-up file descriptor does not: the kernel's
    own handler writes to it at once, and a thread of ours reads it.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _on_term)

    def watch() -> None:
        while signal.SIGTERM not in os.read(read_end, 64):
            pass
        time.sleep(TERM_GRACE_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="term-watch", daemon=True).start()


def _on_term(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _main_of(role: Role):  # type: ignore[no-untyped-def]  # three modules, each imported only where its role runs
    if role is Role.TRAINER:
        from vime_hpc.roles.trainer import run_trainer

        return run_trainer
    if role is Role.ENGINE:
        from vime_hpc.roles.engine import run_engine_host

        return run_engine_host
    from vime_hpc.roles.rollout import run_rollout

    return run_rollout
