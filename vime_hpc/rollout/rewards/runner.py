"""Runs verifiers beside generation: in threads or processes, with a time limit, errors never turned
into a reward.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from vime_hpc.config.plugin import is_dotted, load_plugin
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.rollout.rewards import verifiers
from vime_hpc.rollout.rewards.processes import ProcessWorkers
from vime_hpc.types import Prompt, Sample, Status

NUM_THREADS = 4
NUM_WAITING_THREADS = 32
"""Verifiers hold the interpreter most of the time; more threads only help the one that waits: remote."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verifier's verdict: a reward, or None and why."""

    reward: float | None
    cause: str
    details: Mapping[str, Any]
    """The rest of what it returned (pred, ...), for the sample's metadata."""


class RewardRunner:
    """Grades samples with the verifier of the configuration; one per rollout worker."""

    def __init__(self, config: RolloutConfig) -> None:
        """Raises ConfigError where rollout.reward names nothing."""
        self._table = dict(config.reward_table)
        self._timeout_s = config.reward_timeout_s
        self._name = config.reward
        self._function = _resolve(config.reward)
        self._key = config.reward_key or ("" if is_dotted(config.reward) else "score")
        self._is_async = _is_async(self._function)
        self._num_processes = config.reward_processes
        self._threads: _DaemonThreads | None = None
        self._processes: ProcessWorkers | None = None
        if self._num_processes:
            load = functools.partial(_loaded, config.reward)
            self._processes = ProcessWorkers(self._num_processes, load)
        else:
            _import_library(config.reward)  # here, so that no sample's limit has to pay for it
        self._num_threads = NUM_WAITING_THREADS if config.reward == "remote" else NUM_THREADS
        self._free = asyncio.Semaphore(self._num_threads)

    async def grade(self, sample: Sample, prompt: Prompt) -> Grade:
        """The reward of one sample.

        Raises:
            ConfigError: the verifier cannot work with this configuration (reward_key is not in what
                it returns); an error of this one sample is a Grade without reward instead.
        """
        try:
            value = await self._call(sample, prompt)
        except TimeoutError:
            return Grade(None, f"{self._name}: longer than {self._timeout_s:g} s", {})
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - may be anything; the cause is stored, never a 0
            what = "" if type(error) is VimeError else f"{type(error).__name__}: "
            return Grade(None, f"{self._name}: {what}{error}"[:500], {})
        return self._read(value, sample)

    async def grade_rollout(self, samples: list[Sample], prompt: Prompt) -> list[Sample]:
        """Grade a rollout by its last sample and give all its samples the same reward.

        Where the verifier fails, their status is failed and the reward None, with the cause. A
        rollout with an aborted or failed sample is not graded; rewards the generate function
        already set stay.
        """
        broken = [s for s in samples if s.status in (Status.ABORTED, Status.FAILED)]
        if broken:
            cause = broken[0].reward_cause or broken[0].status.value
            return [s.with_reward(None, cause) for s in samples]
        if all(s.reward is not None for s in samples):
            return samples
        grade = await self.grade(samples[-1], prompt)
        graded = [s.with_reward(grade.reward, grade.cause, **dict(grade.details)) for s in samples]
        if grade.reward is None:
            return [replace(s, status=Status.FAILED) for s in graded]
        return graded

    def close(self) -> None:
        """End the worker threads and processes; a stuck one is not waited for."""
        if self._threads is not None:
            self._threads.close()
        if self._processes is not None:
            self._processes.close()

    async def _call(self, sample: Sample, prompt: Prompt) -> Any:
        """What the verifier returns; the limit runs while it works, not while it waits for a worker."""
        arguments = (sample, prompt, self._table)
        if self._is_async:
            async with asyncio.timeout(self._timeout_s):
                return await self._function(*arguments)
        if self._processes is not None:
            return await self._processes.call(*arguments, timeout_s=self._timeout_s)
        async with self._free:
            if self._threads is None:
                self._threads = _DaemonThreads(self._num_threads)
            future = self._threads.submit(lambda: self._function(*arguments))
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await asyncio.wrap_future(future)
            finally:
                if not future.done():
                    self._threads.add_one()  # the stuck one cannot be ended; it is replaced

    def _read(self, value: Any, sample: Sample) -> Grade:
        details: dict[str, Any] = {}
        if isinstance(value, Mapping):
            if not self._key:
                raise ConfigError(
                    f"{self._name} returned the keys {sorted(map(str, value))}; rollout.reward_key must say "
                    f"which of them is the reward"
                )
            if self._key not in value:
                raise ConfigError(
                    f"sample {sample.sample_id}: rollout.reward_key = {self._key!r} is not in what {self._name} "
                    f"returned; its keys are {sorted(map(str, value))}"
                )
            details = {"verdict": {str(k): v for k, v in value.items()}}
            value = value[self._key]
        try:
            reward = float(value)
        except (TypeError, ValueError):
            return Grade(None, f"{self._name} returned {value!r:.80}, not a number", details)
        if not math.isfinite(reward):
            return Grade(None, f"{self._name} returned {reward}", details)
        return Grade(reward, "", details)


class _DaemonThreads:
    """A few threads that run calls. Daemons: one that never returns does not keep the process
    alive.
    """

    def __init__(self, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._num_threads = 0
        for _ in range(num_threads):
            self.add_one()

    def add_one(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name=f"reward-{self._num_threads}", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - belongs to the waiter
                future.set_exception(error)


def _resolve(name: str) -> Callable[..., Any]:
    if is_dotted(name):
        return load_plugin(name, option="rollout.reward")
    if name not in verifiers.BUILT_IN:
        raise ConfigError(
            f'rollout.reward = "{name}" is unknown; built in are {", ".join(verifiers.BUILT_IN)}, and a dotted '
            f'path "pkg.module:name" names your own'
        )
    return verifiers.BUILT_IN[name]


def _import_library(name: str) -> None:
    """Load what a built-in verifier needs.

    Raises:
        ConfigError: it is not installed.
    """
    module = verifiers.LIBRARIES.get(name)
    if module is None:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.replace("_", "-")
        raise ConfigError(
            f'rollout.reward = "{name}" needs {package}, which is not installed: pip install {package}'
        ) from error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _loaded(name: str) -> Callable[..., Any]:
    """In a worker process: the verifier, with its library imported."""
    _import_library(name)
    return _resolve(name)
