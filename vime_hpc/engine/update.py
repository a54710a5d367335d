"""The rollout side of one publish: pause, receive, compare, reset the prefix cache, resume, on every engine at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from vime_hpc.engine.client import EngineControl
from vime_hpc.errors import EngineError, VimeError
from vime_hpc.weights.channel import PublishChannel, Sent
from vime_hpc.weights.digest import refuse_unless_equal
from vime_hpc.weights.disk import DISK
from vime_hpc.weights.version import VersionKeeper, WeightState

Metrics = dict[str, float]


class EngineWeightReceiver:
    """Brings engines from one weight version to the next, each CLEAN(v) → UPDATING → CLEAN(v').

    Args:
        controls: one per engine, in the order of their bridge ranks.
        channel: the publish channel shared with the trainer.
        store_host, store_port: the job's TCPStore, which the engines' workers open by themselves.
        epoch: number of this building of the bridge.
        num_sources: trainer senders. tp: ranks per engine. backend: "gloo", "nccl", "ipc" or "disk".
        timeout_s: deadline of every phase.
        directory: where versions lie, as the engines' nodes name it ("disk").
    """

    def __init__(
        self,
        controls: Sequence[EngineControl],
        channel: PublishChannel,
        *,
        store_host: str,
        store_port: int,
        epoch: int,
        num_sources: int,
        tp: int,
        backend: str,
        timeout_s: float,
        directory: str = "",
    ) -> None:
        self._controls, self._channel = list(controls), channel
        self._store, self._epoch = (store_host, store_port), epoch
        self._num_sources, self._tp, self._backend, self._timeout_s = (
            num_sources,
            tp,
            backend,
            timeout_s,
        )
        self._directory = directory
        self._keepers = [VersionKeeper() for _ in controls]
        self._asleep = False

    @property
    def version(self) -> int:
        """Oldest version any engine holds; -1 before the first publish."""
        return min(k.version for k in self._keepers)

    @property
    def states(self) -> list[WeightState]:
        return [k.state for k in self._keepers]

    async def join(self) -> None:
        """Have every worker of every engine join the bridge (the trainer's senders join at the same time).

        Raises EngineError or DeadlineError; the latter's text, from the worker, names the missing bridge ranks.
        """
        world = self._num_sources + self._tp * len(self._controls)
        await _all(c.collective_rpc("vime_guard") for c in self._controls)
        await self._all_or_tell(
            c.collective_rpc(
                "vime_join",
                *self._store,
                self._epoch,
                self._num_sources + i * self._tp,
                world,
                self._num_sources,
                self._backend,
                self._timeout_s,
                self._directory,
                timeout_s=self._timeout_s + 10,
            )
            for i, c in enumerate(self._controls)
        )
        plan = await asyncio.to_thread(self._channel.get_plan)
        text = plan.to_json()  # megabytes for a large model: it travels once
        await self._all_or_tell(c.collective_rpc("vime_plan", text) for c in self._controls)

    async def sleep(self, level: int) -> None:
        """Have every engine give its GPU memory back until the next version (EngineControl.sleep)."""
        await _all(c.sleep(level) for c in self._controls)
        self._asleep = True

    async def _wake(self, part: str) -> None:
        if self._asleep:
            await _all(c.wake_up(part) for c in self._controls)

    async def receive_newest(
        self, at_least: int, mode: str = "wait", wait_s: float | None = None
    ) -> tuple[int, Metrics]:
        """Wait for a version >= at_least and bring every engine to the newest. Nothing is done if it is held already."""
        newest = await asyncio.to_thread(self._channel.wait_newest, at_least, wait_s)
        if newest == self.version:
            return newest, {}
        return newest, await self.receive(newest, mode)

    async def receive(self, version: int, mode: str = "wait") -> Metrics:
        """One transaction. On an error engines with mixed weights stay paused (UPDATING), and the trainer is told.

        Args:
            version: the announced version.
            mode: wait, abort or keep: what happens to requests in flight.
        Raises:
            WeightsMismatchError: naming the tensors that arrived differently, or a version that goes back.
            EngineError, DeadlineError: an engine or the trainer failed.
        """
        marks: list[tuple[str, float]] = []

        def mark(phase: str) -> None:
            marks.append((phase, time.perf_counter()))

        asked = time.perf_counter()
        try:
            if self._backend == DISK:
                for keeper in self._keepers:
                    keeper.refuse_going_back(version)
                await self._prepare(version)
            mark("start")
            await _all(c.pause(mode) for c in self._controls)
            mark("pause")
            for keeper in self._keepers:
                keeper.begin(version)
            await self._wake("weights")
            await asyncio.to_thread(self._channel.want, version)
            # Over the bridge the worker's own deadline per bucket comes first; a file has none.
            limit = self._timeout_s if self._backend == DISK else 2 * self._timeout_s
            replies = await _all(
                c.collective_rpc("vime_receive", "", version, timeout_s=limit)
                for c in self._controls
            )
            mark("load")
            sent = await asyncio.to_thread(self._channel.wait_sent, version)
            for control, ranks in zip(self._controls, replies, strict=True):
                await self._compare(control, ranks, sent)
            mark("verify")
            await self._wake("kv_cache")
            self._asleep = False
            # keep: frozen requests hold blocks; they are preempted, and recomputed with the new weights.
            await _all(c.reset_prefix_cache(running=mode == "keep") for c in self._controls)
            mark("reset")
            for keeper in self._keepers:
                keeper.commit(version)
            await asyncio.to_thread(self._channel.confirm, version, sent.root)
        except BaseException as error:
            self._channel.fail(
                f"engines, receiving version {version}: {type(error).__name__}: {error}"
            )
            await self._resume_clean(error)
            raise
        await self._resume_clean(None)
        mark("resume")
        return {"weights/engine_prepare_s": marks[0][1] - asked, **self._metrics(marks, replies)}

    async def _prepare(self, version: int) -> None:
        """Have every engine rank check a version on disk while its engine serves on."""
        calls = (
            c.collective_rpc("vime_prepare", version, timeout_s=2 * self._timeout_s)
            for c in self._controls
        )
        await _all(calls)

    async def _resume_clean(self, failure: BaseException | None) -> None:
        """Resume the engines that hold one whole version; one in UPDATING, or asleep, never goes back into service."""
        if self._asleep:
            return
        pairs = zip(self._controls, self._keepers, strict=True)
        try:
            await _all(c.resume() for c, k in pairs if k.state is WeightState.CLEAN)
        except VimeError as error:
            if failure is None:
                raise
            failure.add_note(f"and then, resuming the engines that were not touched: {error}")

    async def _all_or_tell(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        try:
            return await _all(calls)
        except VimeError as error:
            self._channel.fail(f"engines: {error}")
            raise

    async def _compare(
        self, control: EngineControl, ranks: Sequence[dict[str, Any]], sent: Sent
    ) -> None:
        if len(ranks) != self._tp:
            raise EngineError(f"{control.name} has {len(ranks)} ranks, engine.tp says {self._tp}")
        if all(r["root"] == sent.root for r in ranks):
            return
        for i, reply in enumerate(await control.collective_rpc("vime_digests")):
            refuse_unless_equal(
                sent.digests,
                reply["digests"],
                where=f"{control.name}, rank {i}",
                version=sent.version,
            )
        raise EngineError(f"{control.name}: root digests differ, but no tensor's digest does")

    def _metrics(
        self, marks: list[tuple[str, float]], replies: list[list[dict[str, Any]]]
    ) -> Metrics:
        metrics = {
            f"weights/engine_{name}_s": t - before
            for (_, before), (name, t) in itertools.pairwise(marks)
        }
        metrics["weights/engine_stall_s"] = marks[-1][1] - marks[0][1]
        slowest = [r["seconds"] for ranks in replies for r in ranks]
        for key in slowest[0]:
            metrics[f"weights/rank_{key}"] = max(s[key] for s in slowest)
        metrics["weights/rank_nbytes"] = float(replies[0][0]["nbytes"])
        return metrics


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run all to their end, then raise the first error: none is left running behind our back."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return done
