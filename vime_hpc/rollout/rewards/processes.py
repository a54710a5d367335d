"""Worker processes for blocking verifiers: one call at a time each, killed alone when it is stuck.

Not concurrent.futures: there a call that hangs can only be ended with every other call of its pool.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vime_hpc.errors import ConfigError, VimeError

START_TIMEOUT_S = 120.0
"""For a worker to come up and import what it needs (sympy: 25 s on a busy machine)."""

Call = Callable[..., Any]


class ProcessWorkers:
    """Up to `num_workers` processes, started when first needed. For one event loop."""

    def __init__(self, num_workers: int, load: Callable[[], Call]) -> None:
        """
        Args:
            load: called once in every worker; returns the function to call there. Must be picklable.
        """
        self._load = load
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        for _ in range(num_workers):
            self._idle.put_nowait(None)

    async def call(self, *arguments: Any, timeout_s: float) -> Any:
        """The function's result. The limit runs while the function does, not while the call waits.

        Raises:
            TimeoutError: it took longer; its worker is gone, and the next call gets a new one.
            VimeError: it raised (with type and text), or its process died (with the exit code).
            ConfigError: it raised that.
        """
        worker = await self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._load)
                async with asyncio.timeout(START_TIMEOUT_S):
                    await worker.receive()
            worker.send(arguments)
            async with asyncio.timeout(timeout_s):
                kind, value = await worker.receive()
        except BaseException:
            if worker is not None:
                worker.kill()
            self._idle.put_nowait(None)
            raise
        self._idle.put_nowait(worker)
        if kind == "config":
            raise ConfigError(value)
        if kind == "error":
            raise VimeError(value)
        return value

    def close(self) -> None:
        """End idle workers now; one in a call ends with it, or with this process."""
        while not self._idle.empty():
            worker = self._idle.get_nowait()
            if worker is not None:
                worker.kill()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, load: Callable[[], Call]) -> None:
        # spawn: a fork of a process with threads and an event loop may deadlock
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, load), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, arguments: tuple[Any, ...]) -> None:
        self._pipe.send(arguments)

    async def receive(self) -> tuple[str, Any]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        descriptor = self._pipe.fileno()
        loop.add_reader(descriptor, _note, arrived)
        try:
            await arrived
        finally:
            loop.remove_reader(descriptor)
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(5.0)
            raise VimeError(
                f"the verifier's process ended with exit code {self._process.exitcode}"
            ) from error
        return str(kind), value

    def kill(self) -> None:
        self._process.kill()
        self._pipe.close()


def _note(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


def _serve(pipe: Connection, load: Callable[[], Call]) -> None:
    """In the worker: calls until the pipe closes, as it does when the other side dies however it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    try:
        function = load()
        pipe.send(("ready", None))
        while True:
            arguments = pipe.recv()
            try:
                answer = ("value", function(*arguments))
            except ConfigError as error:
                answer = ("config", str(error))
            except Exception as error:  # noqa: BLE001 - a user's function; the text goes to the sample
                answer = ("error", f"{type(error).__name__}: {error}"[:500])
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        return
