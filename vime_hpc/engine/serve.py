"""`python -m vime_hpc.engine.serve FD PRIVATE_DIR MODULE ARG…`: run a server so that nothing of it outlives us.

This is the keeper: a small process, leader of its own session, without vLLM in it. It starts MODULE (vLLM's API server
or the router) as its child and holds the read end of a pipe (FD) whose write end only its owner has. When the owner
closes the pipe or dies, by SIGKILL too, or when the child ends, the keeper ends every process of the session (SIGTERM,
then SIGKILL), unlinks the shared memory they used and PRIVATE_DIR, and ends with the child's exit code.
Should the keeper itself be killed, the kernel kills the child (PR_SET_PDEATHSIG), and the engine core with it (worker.py).
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from vime_hpc.cluster.import_path import add_users_modules
from vime_hpc.engine.process_guard import (
    adopt_orphans,
    die_with_parent,
    session_pids,
    shared_memory_of,
)

GRACE_S = 2.0
POLL_S = 0.2
CHILD = "--child"


def main(argv: list[str]) -> int:
    if argv[0] == CHILD:
        return _child(int(argv[1]), argv[2], argv[3:])
    fd, private_dir, module, args = int(argv[0]), Path(argv[1]), argv[2], argv[3:]
    owner = os.getppid()
    adopt_orphans()
    stop = {"asked": False}
    signal.signal(signal.SIGTERM, lambda *_: stop.update(asked=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the owner's to answer
    command = [
        sys.executable,
        "-P",
        "-m",
        "vime_hpc.engine.serve",
        CHILD,
        str(os.getpid()),
        module,
        *args,
    ]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and not stop["asked"]:
        readable, _, _ = select.select([fd], [], [], POLL_S)
        if readable and not os.read(fd, 1):
            break
        if os.getppid() != owner:  # a child the owner forked may hold the pipe open
            break
    clean_up(os.getpid(), private_dir)
    child.poll()
    return (
        child.returncode
        if child.returncode is not None and child.returncode >= 0
        else 128 - (child.returncode or -15)
    )


def clean_up(session: int, private_dir: Path) -> None:
    """End every other process of the session, then remove what they left."""

    def others() -> list[int]:
        return [p for p in session_pids(session) if p != os.getpid()]

    shared = shared_memory_of(others())
    deadline = time.monotonic() + GRACE_S
    for pid in others():
        _signal(pid, signal.SIGTERM)
    while (left := others()) and time.monotonic() < deadline:
        shared |= shared_memory_of(left)
        _reap()
        time.sleep(0.05)
    while left := others():
        for pid in left:
            _signal(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.05)
    for path in shared:
        path.unlink(missing_ok=True)
    shutil.rmtree(private_dir, ignore_errors=True)


def _signal(pid: int, sig: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended by itself
        os.kill(pid, sig)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):  # none left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _child(keeper: int, module: str, args: list[str]) -> int:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != keeper:  # it died before prctl took hold
        return 1
    add_users_modules()
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
