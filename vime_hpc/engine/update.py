"""The rollout side of one publish: pause, receive, compare, reset the prefix cache, resume, on every engine at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Literal

from vime_hpc.engine.client import EngineControl
from vime_hpc.errors import DeadlineError, EngineError, EngineLostError, VimeError
from vime_hpc.weights.channel import PublishChannel, Sent
from vime_hpc.weights.digest import refuse_unless_equal
from vime_hpc.weights.disk import DISK
from vime_hpc.weights.engine_layout import EngineLayout, RankLayout
from vime_hpc.weights.plan import WeightPlan, why_whole
from vime_hpc.weights.version import VersionKeeper, WeightState

Metrics = dict[str, float]
LAYOUT_S = 600.0  # the engines read their model's files once more
Lost = type[VimeError] | tuple[type[VimeError], ...]


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
        send: "parts": each engine rank receives what it holds, where that can be learnt; the trainer must then send by the
            channel's agreed plan. "whole": every tensor (as the trainer's own plan says).
        keepers: what each engine holds; none = engines that start with the run. One that was started again is UPDATING:
            it must not serve before a full version.
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
        send: Literal["parts", "whole"] = "whole",
        keepers: Sequence[VersionKeeper] | None = None,
    ) -> None:
        self._controls, self._channel = list(controls), channel
        self._store, self._epoch = (store_host, store_port), epoch
        self._num_sources, self._tp, self._backend, self._timeout_s = (
            num_sources,
            tp,
            backend,
            timeout_s,
        )
        self._directory, self._send = directory, send
        self._plan: WeightPlan | None = None
        self.keepers = [VersionKeeper() for _ in controls] if keepers is None else list(keepers)
        self.unreachable: dict[int, str] = {}
        """Engines that did not answer a call, with the reason; their processes cannot be worked with any more."""

    @property
    def controls(self) -> list[EngineControl]:
        """Of every engine, in the order of their bridge ranks."""
        return self._controls

    @property
    def version(self) -> int:
        """Oldest version any engine holds; -1 before the first publish."""
        return min(k.version for k in self.keepers)

    @property
    def states(self) -> list[WeightState]:
        return [k.state for k in self.keepers]

    @property
    def plan(self) -> WeightPlan | None:
        """By which weights travel; None before the engines joined."""
        return self._plan

    async def join(self) -> None:
        """Have every worker of every engine join the bridge (the trainer's senders join at the same time).

        Raises EngineError or DeadlineError; the latter's text, from the worker, names the missing bridge ranks.
        """
        world = self._num_sources + self._tp * len(self._controls)
        await self._all_or_tell(c.collective_rpc("vime_guard") for c in self._controls)
        plan = await asyncio.to_thread(self._channel.get_plan)
        self._plan = plan = await self._agree(plan)
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
                list(plan.part_of),
                timeout_s=self._timeout_s + 10,
            )
            for i, c in enumerate(self._controls)
        )
        text = plan.to_json()  # megabytes for a large model: it travels once
        await self._all_or_tell(c.collective_rpc("vime_plan", text) for c in self._controls)

    async def _agree(self, plan: WeightPlan) -> WeightPlan:
        """The plan with what each engine rank holds, or with the reason why tensors are sent whole; the trainer is told."""
        if why := why_whole(self._send, self._tp, self._backend):
            plan = plan.sent_whole(why)
        else:
            replies = await self._all_or_tell(
                c.collective_rpc("vime_layout", timeout_s=LAYOUT_S) for c in self._controls
            )
            try:
                plan = _cut_for([rank for engine in replies for rank in engine], plan)
            except VimeError as error:
                self._channel.fail(f"engines: {error}")
                raise
        await asyncio.to_thread(self._channel.put_agreed, plan)
        return plan

    async def sleep(self, level: int) -> None:
        """Have every engine give its GPU memory back until the next version (EngineControl.sleep)."""
        await self._each(c.sleep(level) for c in self._controls)
        for keeper in self.keepers:
            keeper.asleep = {"weights", "kv_cache"}

    async def _wake(self, part: str) -> None:
        pairs = list(zip(self._controls, self.keepers, strict=True))
        await self._each(c.wake_up(part) if part in k.asleep else _nothing() for c, k in pairs)
        for keeper in self.keepers:
            keeper.asleep.discard(part)

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
                for keeper in self.keepers:
                    keeper.refuse_going_back(version)
                await self._prepare(version)
            mark("start")
            # In mode "wait" a pause lasts as long as the longest request: an engine that is late with it is not lost.
            await self._each((c.pause(mode) for c in self._controls), lost=EngineLostError)
            mark("pause")
            for keeper in self.keepers:
                keeper.begin(version)
            await self._wake("weights")
            await asyncio.to_thread(self._channel.want, version)
            # Over the bridge the worker's own deadline per bucket comes first; a file has none.
            limit = self._timeout_s if self._backend == DISK else 2 * self._timeout_s
            replies = await self._each(
                c.collective_rpc("vime_receive", "", version, timeout_s=limit)
                for c in self._controls
            )
            mark("load")
            sent = await asyncio.to_thread(self._channel.wait_sent, version)
            expected = self._sent_to_ranks(sent)
            for i, (control, ranks) in enumerate(zip(self._controls, replies, strict=True)):
                await self._compare(control, ranks, expected[i * self._tp : (i + 1) * self._tp])
            mark("verify")
            await self._wake("kv_cache")
            # keep: frozen requests hold blocks; they are preempted, and recomputed with the new weights.
            await self._each(c.reset_prefix_cache(running=mode == "keep") for c in self._controls)
            mark("reset")
            for keeper in self.keepers:
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
        await self._each(calls)

    async def _resume_clean(self, failure: BaseException | None) -> None:
        """Resume the engines that hold one whole version; one in UPDATING, or asleep, never goes back into service."""
        pairs = zip(self._controls, self.keepers, strict=True)
        clean = [c.resume() if k.may_serve else _nothing() for c, k in pairs]
        try:
            await self._each(clean)
        except VimeError as error:
            if failure is None:
                raise
            failure.add_note(f"and then, resuming the engines that were not touched: {error}")

    async def _all_or_tell(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        try:
            return await self._each(calls)
        except VimeError as error:
            self._channel.fail(f"engines: {error}")
            raise

    async def _compare(
        self, control: EngineControl, ranks: Sequence[dict[str, Any]], sent: Sequence[Sent]
    ) -> None:
        if len(ranks) != self._tp:
            raise EngineError(f"{control.name} has {len(ranks)} ranks, engine.tp says {self._tp}")
        if all(r["root"] == s.root for r, s in zip(ranks, sent, strict=True)):
            return
        for i, reply in enumerate(await control.collective_rpc("vime_digests")):
            refuse_unless_equal(
                sent[i].digests,
                reply["digests"],
                where=f"{control.name}, rank {i}",
                version=sent[i].version,
            )
        raise EngineError(f"{control.name}: root digests differ, but no tensor's digest does")

    def _sent_to_ranks(self, sent: Sent) -> list[Sent]:
        """What was sent to each engine rank."""
        if self._plan is None or self._plan.layout is None:
            return [sent] * self._tp * len(self._controls)
        of_part = [sent.of_part(part) for part in range(self._plan.num_parts)]
        return [of_part[part] for part in self._plan.part_of]

    async def _each(
        self, calls: Iterable[Awaitable[Any]], lost: Lost = (EngineLostError, DeadlineError)
    ) -> list[Any]:
        """One call an engine, in their order: run all to their end, then raise the first error, a lost engine's first.

        None is left running behind our back. Who waits in the bridge for an engine that is gone is told at once.

        Args:
            lost: errors after which an engine cannot be worked with any more.
        """
        done = await asyncio.gather(
            *(self._one(i, call, lost) for i, call in enumerate(calls)), return_exceptions=True
        )
        errors = [result for result in done if isinstance(result, BaseException)]
        if errors:
            raise min(errors, key=lambda error: not isinstance(error, EngineLostError))
        return done

    async def _one(self, index: int, call: Awaitable[Any], lost: Lost) -> Any:
        try:
            return await call
        except lost as error:
            self.unreachable[index] = str(error)
            await asyncio.to_thread(self._channel.end_bridge, str(error))
            raise

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
        ratios = [r["received"] / r["held"] for ranks in replies for r in ranks if r.get("held")]
        if ratios:
            metrics["weights/received_over_held"] = max(ratios)
        return metrics


async def _nothing() -> None:
    """Stands for an engine that is not called."""


def _cut_for(ranks: Sequence[dict[str, Any]], plan: WeightPlan) -> WeightPlan:
    """The plan by what the engine ranks said of themselves (vime_layout)."""
    whole = next((rank["whole"] for rank in ranks if "whole" in rank), "")
    if whole:
        return plan.sent_whole(whole)
    layouts = [RankLayout.from_json(rank["layout"]) for rank in ranks]
    return plan.with_layout(EngineLayout.of_ranks(layouts))
