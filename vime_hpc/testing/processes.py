"""Processes of a test's scenario: started from a server without threads, heard one by one, never waited for without end.

A fork of the test process copies the locks that its other threads (earlier tests' pools, C++ libraries) hold at that
moment, and the child may wait for one of them for ever. The server has imported what the members need and has no threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(["vime_hpc.testing.transport_suite", "pytest"])


class MemberLost(AssertionError):
    """A member ended without a word, or did not end; the message holds its exit code or where it stands."""


class Members:
    """Named processes, each with a pipe of its own to the test.

    A member's target gets `say` (anything picklable to the test) before its own arguments, and all of it must be picklable.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="members-")
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Connection] = {}

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start one member; it ends when its target returns."""
        receiver, sender = CLEAN.Pipe(duplex=False)
        stacks = str(Path(self._folder.name) / name)
        process = CLEAN.Process(target=_run, args=(target, sender, stacks, args), daemon=True)
        process.start()
        sender.close()
        self._processes[name], self._pipes[name] = process, receiver

    def kill(self, name: str) -> None:
        """SIGKILL one member and wait until it is gone."""
        self._processes[name].kill()
        self._processes[name].join()

    def alive(self, name: str) -> bool:
        """Whether the member's process is still there."""
        return bool(self._processes[name].is_alive())

    def hear(self, name: str, timeout_s: float) -> Any:
        """The next thing this member says. Raises MemberLost."""
        heard = self.hear_all({name}, timeout_s)
        return next(heard)[1]

    def hear_all(
        self, names: set[str], timeout_s: float, *, may_die: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, Any]]:
        """(member, what it said) in the order of arrival, until each of `names` has ended.

        Args:
            timeout_s: for all of it. may_die: members that may end without a word (they are no part of `names`).
        Raises:
            MemberLost: one of `names` was killed or crashed, or there was still one at the deadline.
        """
        deadline, left = time.monotonic() + timeout_s, set(names)
        open_pipes = {self._pipes[n]: n for n in names | may_die}
        while left:
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MemberLost(
                    f"{sorted(left)} had not ended after {timeout_s:g} s:\n{self._stacks(left)}"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                name = open_pipes[pipe]
                try:
                    said = pipe.recv()
                except EOFError:
                    del open_pipes[pipe]
                    self._ended(name, required=name in left)
                    left.discard(name)
                else:
                    yield name, said

    def _ended(self, name: str, *, required: bool) -> None:
        process = self._processes[name]
        process.join()
        if required and process.exitcode != 0:
            raise MemberLost(f"{name} ended with exit code {process.exitcode}, without its result")

    def _stacks(self, names: set[str]) -> str:
        for name in names:
            os.kill(self._processes[name].pid, signal.SIGUSR1)
        time.sleep(1.0)
        files = [Path(self._folder.name) / n for n in sorted(names)]
        return "\n".join(f"{f.name}:\n{f.read_text() if f.exists() else '?'}" for f in files)

    def close(self) -> None:
        """Kill whoever is left."""
        for process in self._processes.values():
            process.kill()
            process.join()
        for pipe in self._pipes.values():
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(
    target: Callable[..., None], sender: Connection, stacks: str, args: tuple[Any, ...]
) -> None:
    file = open(stacks, "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    target(sender.send, *args)
    with contextlib.suppress(OSError):
        sender.close()
    os._exit(0)  # no wait for C++ threads of process groups whose other members are gone
