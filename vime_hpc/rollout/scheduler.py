"""Generates one step's prompt groups: bounded requests in flight, grading beside generation, order
by id.

The batch is the first `prompts_per_step` groups, by group id, that pass the filters: not the first
to finish, which would favour short responses and make a run depend on timing. Groups started beyond
that (over_sampling) and finished are kept for the next step where max_weight_lag lets them;
unfinished ones are stopped and started again then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vime_hpc.config.plugin import load_plugin
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.errors import ConfigError, EngineError, VimeError
from vime_hpc.protocols import EngineClient, GenerateFunction, GroupFilter, Metrics
from vime_hpc.rollout.event_loop import CoroutineRunner
from vime_hpc.rollout.filters import reason_to_drop, resolve_filters, rollout_rewards
from vime_hpc.rollout.generate import (
    AskAgain,
    BoundClient,
    Sampling,
    check_samples,
    failed_sample,
)
from vime_hpc.rollout.metrics import drop_metrics, rollout_metrics
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.seeds import request_seed
from vime_hpc.rollout.source import PromptSource
from vime_hpc.types import GroupRequest, PromptGroup, Sample, Status

log = logging.getLogger(__name__)

DROP_LIMIT = 10
"""Groups dropped per group wanted before a step is filled with dropped ones: a model that solves
everything would otherwise generate for ever under zero_spread."""
ABORT_LIMIT = 20
"""Times one rollout may be stopped by the engine (a weight change each) before it counts as
failed.
"""
CANCEL_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 0.2
"""Before a rollout's second try; doubled before each further one."""

GroupDone = Callable[[int, PromptGroup], None]


@dataclass
class _Step:
    """What is known about the step being filled."""

    step: int
    wanted: int
    passed: dict[int, PromptGroup] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    tasks: dict[asyncio.Task[PromptGroup], int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    num_rollouts: int = 0
    num_unusable: int = 0

    def complete(self) -> bool:
        """The wanted groups are known, and nothing with a lower id is still open."""
        if len(self.passed) < self.wanted:
            return False
        last = sorted(self.passed)[self.wanted - 1]
        return all(group_id > last for group_id in self.tasks.values())


class RolloutScheduler:
    """A protocols.Generator over one engine client. Not thread-safe: one caller, one step at a
    time.
    """

    def __init__(self, *, source: PromptSource, client: EngineClient, rewards: RewardRunner, config: RolloutConfig,
                 run_seed: int, decode: Callable[[Sequence[int]], str], runner: CoroutineRunner,
                 num_groups: int | None = None, version_now: Callable[[], int] | None = None,
                 recovered: Iterable[PromptGroup] = (), on_group_done: GroupDone | None = None,
                 on_group_dropped: Callable[[int, int], None] | None = None,
                 on_progress: Callable[[int, int], None] | None = None,
                 ask_again: AskAgain | None = None) -> None:  # fmt: skip
        """
        Args:
            source: prompts; its next_group_id is the frontier (everything below is committed).
            client: asynchronous engine client, used only inside the runner's loop.
            rewards: grades; closed by its owner.
            decode: token ids to text.
            num_groups: this worker's share of rollout.prompts_per_step; none = all of it.
            version_now: the weight version the engines hold at this moment; none = the one given to
                `generate`.
            recovered: groups the journal kept from before a crash; those at or above the frontier
                are reused.
            on_group_done: called with (step, group) as soon as a group is finished and graded,
                before the step is
                complete: the place to write a journal. Finished groups that the batch leaves over
                    are used by the next step.
            on_group_dropped: called with (step, group id) for a finished group that no step will
                use.
            on_progress: called with (groups ready, groups wanted).
            ask_again: waits for an engine that is away; whether to hand the request out again. None = never.
        Raises:
            ConfigError: rollout.generate or rollout.filters name nothing.
        """
        self._source, self._client, self._rewards = source, client, rewards
        self._config, self._run_seed, self._decode, self._runner = config, run_seed, decode, runner
        self._num_groups = config.prompts_per_step if num_groups is None else num_groups
        self._generate: GenerateFunction = load_plugin(config.generate, option="rollout.generate")
        self._filters: list[GroupFilter] = resolve_filters(config.filters)
        self._on_group_done = on_group_done
        self._on_group_dropped = on_group_dropped
        self._on_progress = on_progress
        self._ask_again = ask_again
        self._num_handed_out_again = 0
        self._finished = {group.group_id: group for group in recovered}
        self._version = 0
        self._version_now = version_now or (lambda: self._version)
        self._limit: asyncio.Semaphore | None = None

    def generate(self, step: int, version: int) -> tuple[list[PromptGroup], Metrics]:
        """This worker's groups of the step, graded, in group_id order, and their metrics.

        Raises:
            VimeError: more than rollout.max_failed_share of the rollouts are unusable.
        """
        self._version = version
        started = time.monotonic()
        groups, state = self._runner.run(self._fill(step))
        seconds = time.monotonic() - started
        metrics = rollout_metrics(groups, step=step) | drop_metrics(state.dropped.values())
        metrics |= {f"rollout/{name}": float(count) for name, count in state.counts.items()}
        metrics["rollout/epoch"] = self._source.epoch()
        if self._num_handed_out_again:
            metrics["rollout/requests_handed_out_again"] = float(self._num_handed_out_again)
            self._num_handed_out_again = 0
        metrics["perf/rollout_time"] = seconds
        metrics["perf/response_tokens_per_s"] = (
            metrics.get("rollout/response_tokens", 0.0) / seconds
        )
        return groups, metrics

    def state(self) -> Mapping[str, Any]:
        """Resume state once the step just generated is committed."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue behind the last committed step."""
        self._source.restore(state)

    async def _fill(self, step: int) -> tuple[list[PromptGroup], _Step]:
        if self._limit is None:
            self._limit = asyncio.Semaphore(self._config.concurrency)
        state = _Step(step, self._num_groups)
        target = math.ceil(self._num_groups * self._config.over_sampling)
        await self._forget_old(step, state)
        ids = self._source.ids()
        try:
            while not state.complete():
                while len(state.passed) + len(state.tasks) < target:
                    await self._start(next(ids), state)
                if not state.complete():
                    await self._collect_finished(state)
                self._fill_up_if_hopeless(state)
        finally:
            await _cancel(state.tasks)
        batch = [state.passed[group_id] for group_id in sorted(state.passed)[: self._num_groups]]
        await self._keep_surplus(batch, state)
        return batch, state

    async def _forget_old(self, step: int, state: _Step) -> None:
        """Finished groups below the frontier are used up; those made by weights that are too old
        are made again.
        """
        frontier = self._source.next_group_id
        kept = {}
        for group_id, group in self._finished.items():
            oldest = min((span.version for s in group.samples for span in s.versions), default=step)
            if group_id < frontier:
                await self._report_dropped(step, group_id)
            elif step - oldest > self._config.max_weight_lag:
                state.counts["surplus_too_old"] += 1
                await self._report_dropped(step, group_id)
            else:
                kept[group_id] = group
        self._finished = kept

    async def _start(self, group_id: int, state: _Step) -> None:
        """Take a finished group from before, or begin it."""
        if group_id in self._finished:
            state.counts["groups_reused"] += 1
            self._decide(self._finished[group_id], state)
            return
        request = self._source.request(group_id)
        state.tasks[asyncio.create_task(self._group(request, state))] = group_id

    async def _collect_finished(self, state: _Step) -> None:
        done, _ = await asyncio.wait(state.tasks, return_when=asyncio.FIRST_COMPLETED)
        groups = [task.result() for task in sorted(done, key=lambda t: state.tasks[t])]
        for task in done:
            del state.tasks[task]
        self._finished |= {group.group_id: group for group in groups}
        if self._on_group_done is not None:
            # In threads: an fsync on a shared file system takes milliseconds, and requests go on
            # meanwhile; together: a journal can share one fsync between them.
            calls = (asyncio.to_thread(self._on_group_done, state.step, g) for g in groups)
            await asyncio.gather(*calls)
        for group in groups:
            self._decide(group, state)

    def _decide(self, group: PromptGroup, state: _Step) -> None:
        rewards = rollout_rewards(group)
        state.num_rollouts += len(rewards)
        state.num_unusable += sum(reward is None for reward in rewards.values())
        state.causes.update({s.rollout_id: s.reward_cause for s in group.samples
                             if rewards[s.rollout_id] is None}.values())  # fmt: skip
        self._stop_if_too_many_failed(state)
        reason = reason_to_drop(group, self._filters)
        if reason is None:
            state.passed[group.group_id] = group
        else:
            state.dropped[group.group_id] = reason
        if self._on_progress is not None:
            self._on_progress(min(len(state.passed), state.wanted), state.wanted)

    def _stop_if_too_many_failed(self, state: _Step) -> None:
        base = max(state.num_rollouts, state.wanted * self._config.group_size)
        if state.num_unusable > self._config.max_failed_share * base:
            causes = "; ".join(
                f"{n} x {cause or 'no cause given'}" for cause, n in state.causes.most_common(3)
            )
            raise VimeError(
                f"step {state.step}: {state.num_unusable}/{base} rollouts are unusable, more than "
                f"rollout.max_failed_share = {self._config.max_failed_share:g}: {causes}. Mend the cause, or "
                f"raise rollout.max_failed_share; the groups finished so far are kept"
            )

    def _fill_up_if_hopeless(self, state: _Step) -> None:
        if len(state.dropped) < DROP_LIMIT * state.wanted or len(state.passed) >= state.wanted:
            return
        missing = state.wanted - len(state.passed)
        log.warning("step %d: filters dropped %d groups; %d of them are used after all to fill the batch",
                    state.step, len(state.dropped), missing)  # fmt: skip
        for group_id in sorted(state.dropped)[:missing]:
            del state.dropped[group_id]
            state.passed[group_id] = self._finished[group_id]
        state.counts["dynamic_filter/kept_insufficient"] += missing

    async def _keep_surplus(self, batch: list[PromptGroup], state: _Step) -> None:
        """Move the frontier behind the batch; finished groups beyond it wait for the next step."""
        last = batch[-1].group_id if batch else self._source.next_group_id - 1
        self._source.rewind(last + 1)
        self._finished = {g: group for g, group in self._finished.items() if g > last}
        state.counts["groups_surplus"] += len(self._finished)
        # Those beyond the batch are judged again by the next step, and counted there.
        state.dropped = {g: reason for g, reason in state.dropped.items() if g <= last}
        for group_id in sorted(state.dropped):
            await self._report_dropped(state.step, group_id)

    async def _report_dropped(self, step: int, group_id: int) -> None:
        if self._on_group_dropped is not None:
            await asyncio.to_thread(self._on_group_dropped, step, group_id)

    async def _group(self, request: GroupRequest, state: _Step) -> PromptGroup:
        rollouts = [
            asyncio.create_task(self._rollout(request, i, state)) for i in range(request.group_size)
        ]
        try:
            parts = await asyncio.gather(*rollouts)
        finally:
            await _cancel(dict.fromkeys(rollouts, request.group_id))
        samples = tuple(sample for part in parts for sample in part)
        return PromptGroup(request.group_id, request.prompt.prompt_id, samples)

    async def _rollout(self, request: GroupRequest, index: int, state: _Step) -> list[Sample]:
        """One rollout, tried again with another seed where something broke or the engine stopped
        it.
        """
        failures = aborts = 0
        while True:
            attempt = failures + aborts
            samples = await self._try(replace(request, attempt=attempt), index, state.step)
            if any(s.status is Status.ABORTED for s in samples) and aborts < ABORT_LIMIT:
                aborts += 1
                state.counts["aborted_retries"] += 1
                continue  # from the start: nothing of the stopped try is kept
            if any(s.status is Status.FAILED for s in samples):
                failures += 1
                if failures < self._config.max_attempts:
                    state.counts["failed_retries"] += 1
                    log.info(
                        "rollout %d.%d, try %d: %s",
                        request.group_id,
                        index,
                        failures,
                        samples[0].reward_cause,
                    )
                    await asyncio.sleep(RETRY_PAUSE_S * 2 ** (failures - 1))
                    continue
            return await self._rewards.grade_rollout(samples, request.prompt)

    async def _try(self, request: GroupRequest, index: int, step: int) -> list[Sample]:
        config = self._config
        assert self._limit is not None

        def seed_of_turn(turn: int) -> int:
            return request_seed(self._run_seed, step=step, group_id=request.group_id, index_in_group=index,
                                attempt=request.attempt, turn=turn)  # fmt: skip

        sampling = Sampling(config.max_response_tokens, config.temperature, config.top_p, config.top_k,
                            config.request_timeout_s)  # fmt: skip
        client = BoundClient(
            self._client,
            sampling,
            self._limit,
            seed_of_turn,
            self._decode,
            self._version_now,
            self._is_worth_another_try,
        )
        version = self._version_now()
        try:
            samples = await self._generate(request, index, client, config.generate_table)
            return check_samples(samples, request, index)
        except ConfigError:
            raise
        except Exception as error:  # a user's function may raise anything; stored, counted
            if isinstance(error, VimeError) and not isinstance(error, (EngineError, TimeoutError)):
                raise
            cause = f"{type(error).__name__}: {error}"[:500]
            return [
                failed_sample(request, index, cause=cause, version=version, seed=seed_of_turn(0))
            ]

    async def _is_worth_another_try(self, error: EngineError) -> bool:
        again = self._ask_again is not None and await self._ask_again(error)
        self._num_handed_out_again += again
        return again


async def _cancel(tasks: Mapping[asyncio.Task[Any], int]) -> None:
    """Stop tasks, requests and rewards alike; wait for them a little, not for their work."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=CANCEL_TIMEOUT_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # looked at: the first error is on its way up already
