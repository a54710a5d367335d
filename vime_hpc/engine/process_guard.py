"""Linux calls that tie a process's life to its parent's, and what is left in /dev/shm by a process session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = "/dev/shm/"


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process when the thread that started it ends (prctl(2))."""
    _prctl(PR_SET_PDEATHSIG, sig)


def adopt_orphans() -> None:
    """Make grandchildren whose parent died our children, so they can be waited for."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def session_pids(session: int) -> list[int]:
    """Live processes (no zombies) of a session, whatever their process group. Source: proc(5), field 6 of stat."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except (OSError, ValueError):
                continue  # ended while we looked
            if int(sid) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def shared_memory_of(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that these processes map or hold open.

    Found by inode: glibc makes a named semaphore under a temporary name, which is the one the kernel goes on showing.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended while we looked, or not ours
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(SHARED_MEMORY):
                    inodes.add(int(fields[4]))
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(fd).startswith(SHARED_MEMORY):
                    inodes.add(fd.stat().st_ino)
    found = set()
    for path in Path(SHARED_MEMORY).iterdir():
        with contextlib.suppress(OSError):  # unlinked while we looked
            if path.lstat().st_ino in inodes:
                found.add(path)
    return found
