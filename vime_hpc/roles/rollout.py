"""The rollout role: builds what rollout_loop works with on one rollout worker, and runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cluster.rendezvous import Rendezvous, host_address
from vime_hpc.config.paths import WEIGHT_PLAN
from vime_hpc.config.rollout import RolloutConfig
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.absence import EngineAbsence
from vime_hpc.engine.client import EngineControl, EngineHTTPClient
from vime_hpc.engine.router import RouterServer
from vime_hpc.errors import ConfigError, RequeueRequested, RoleDiedError
from vime_hpc.loop import RolloutSide, rollout_loop
from vime_hpc.protocols import Evaluator, Generator, WeightReceiver
from vime_hpc.roles.context import RoleContext
from vime_hpc.roles.engine import max_model_len, needs_router
from vime_hpc.roles.fixed_weights import FixedReceiver, RecordedSink
from vime_hpc.roles.interruptible import InterruptibleLoop
from vime_hpc.roles.lives import UP, EngineLives
from vime_hpc.roles.meeting import meeting
from vime_hpc.roles.probe import ask_engines, is_due
from vime_hpc.roles.receiving import FollowingReceiver, LeadingReceiver, NoReceiver
from vime_hpc.roles.recovery import open_groups, restore_source
from vime_hpc.roles.rejoin import Fleet, LeadingBridge
from vime_hpc.roles.schema import buffer_schema
from vime_hpc.roles.sleeping import SleepAfterGenerating
from vime_hpc.rollout.evaluate import EngineEvaluator, EvalOptions
from vime_hpc.rollout.rewards.runner import RewardRunner
from vime_hpc.rollout.scheduler import RolloutScheduler
from vime_hpc.rollout.sft import SftGenerator
from vime_hpc.rollout.source import PromptSource, load_prompts
from vime_hpc.rollout.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Parts:
    """What differs between a run with engines and one without."""

    generator: Generator
    weights: WeightReceiver
    evaluator: Evaluator


def run_rollout(context: RoleContext) -> None:
    """One rollout worker, from the meeting to the last committed step."""
    with meeting(context) as rendezvous, ExitStack() as stack:
        writer = stack.enter_context(_open_writer(context, rendezvous))
        source = _source(context)
        restore_source(source, writer)
        build = _without_engines if context.config.algorithm.loss == "sft" else _with_engines
        parts = build(context, rendezvous, writer, source, stack)
        records = (
            RecordedSink(writer, context.paths, context.config, context.rank.attempt)
            if context.config.run.mode == "rollout_only" and context.rank.role_rank == 0
            else None
        )
        rollout_loop(
            RolloutSide(
                num_steps=context.config.run.end_step,
                max_weight_lag=context.config.rollout.max_weight_lag,
                buffer=records or writer,
                generator=parts.generator,
                weights=parts.weights,
                evaluator=parts.evaluator,
            )
        )
        if records:
            records.finish(rendezvous, _interruption(context, rendezvous))


def _open_writer(context: RoleContext, rendezvous: Rendezvous) -> BufferWriter:
    config, rank, root = context.config, context.rank, context.paths.buffer
    run_id = context.paths.identity.read_text().strip()
    buffer = RolloutBuffer.create(
        root, run_id=run_id, schema=buffer_schema(config), durable=config.buffer.fsync
    )
    if rank.role_rank == 0:
        rendezvous.put("buffer_attempt", buffer.next_attempt())
    attempt = rendezvous.wait(
        "buffer_attempt",
        timeout_s=config.run.startup_timeout_s,
        who="rollout-0",
        phase="opening the buffer",
    )
    return BufferWriter(
        root,
        worker=rank.role_rank,
        num_workers=rank.role_size,
        attempt=attempt,
        durable=config.buffer.fsync,
        store_text=config.buffer.store_text,
    )


def _source(context: RoleContext) -> PromptSource:
    config, rank = context.config, context.rank
    prompts = load_prompts(config.data.train, config.data, load_tokenizer(config.model.path))
    return PromptSource(
        prompts,
        seed=config.run.seed,
        group_size=config.rollout.group_size,
        shuffle=config.data.shuffle,
        worker=rank.role_rank,
        num_workers=rank.role_size,
    )


def _without_engines(
    context: RoleContext,
    rendezvous: Rendezvous,
    writer: BufferWriter,
    source: PromptSource,
    stack: ExitStack,
) -> _Parts:
    generator = SftGenerator(
        source=source,
        tokenizer=load_tokenizer(context.config.model.path),
        data=context.config.data,
        config=context.config.rollout,
        num_groups=_share(context),
    )
    return _Parts(generator, NoReceiver(), NoEvaluator())


def _with_engines(
    context: RoleContext,
    rendezvous: Rendezvous,
    writer: BufferWriter,
    source: PromptSource,
    stack: ExitStack,
) -> _Parts:
    config = context.config
    tokenizer = load_tokenizer(config.model.path)
    runner = InterruptibleLoop(_interruption(context, rendezvous))
    stack.callback(runner.close)
    urls = _engine_urls(context, rendezvous)
    token = context.paths.token.read_text().strip()
    receiver = _receiver(context, rendezvous, urls, token, runner)
    targets = [stack.enter_context(_router(context, urls)).url] if needs_router(config) else urls
    client = EngineHTTPClient(
        targets,
        token,
        concurrency=config.rollout.concurrency,
        request_timeout_s=config.rollout.request_timeout_s,
    )
    runner.run(client.__aenter__())
    stack.callback(lambda: runner.run_to_end(client.__aexit__()))
    rewards = RewardRunner(config.rollout)
    stack.callback(rewards.close)
    absence = EngineAbsence(urls, token, config.run.startup_timeout_s)
    generator: Generator = RolloutScheduler(
        source=source,
        client=client,
        rewards=rewards,
        config=_generation(config),
        run_seed=config.run.seed,
        decode=tokenizer.decode,
        runner=runner,
        num_groups=_share(context),
        version_now=lambda: receiver.version,
        recovered=open_groups(writer, config.run.end_step),
        on_group_done=writer.journal_group,
        on_group_dropped=writer.discard_group,
        ask_again=absence.is_over,
    )
    if config.engine.sleep_level and isinstance(receiver, LeadingReceiver):
        generator = SleepAfterGenerating(generator, receiver, config.engine.sleep_level)
    evaluator: Evaluator = NoEvaluator()
    if config.data.eval and context.rank.role_rank == 0:
        evaluator = EngineEvaluator(
            EvalOptions(config.eval, config.rollout, config.run.seed, context.paths.root),
            prompts=load_prompts(config.data.eval, config.data, tokenizer),
            client=client,
            rewards=rewards,
            decode=tokenizer.decode,
            runner=runner,
            ask_again=absence.is_over,
        )
    return _Parts(generator, receiver, evaluator)


def _generation(config: RunConfig) -> RolloutConfig:
    """[rollout] for the scheduler. Weights that never change never get too old for a surplus group."""
    if config.run.mode != "rollout_only":
        return config.rollout
    return config.rollout.model_copy(update={"max_weight_lag": config.run.num_steps})


def _receiver(
    context: RoleContext,
    rendezvous: Rendezvous,
    urls: list[str],
    token: str,
    runner: InterruptibleLoop,
) -> LeadingReceiver | FollowingReceiver | FixedReceiver:
    config = context.config
    wait_s = config.run.wait_timeout_s
    if config.run.mode == "rollout_only":
        for index, url in enumerate(urls):
            runner.run(
                EngineControl(url, token, name=f"engine {index}").collective_rpc("vime_guard")
            )
        return FixedReceiver(_interruption(context, rendezvous))
    if context.rank.role_rank != 0:
        return FollowingReceiver(rendezvous, wait_s)
    controls = [EngineControl(url, token, name=f"engine {i}") for i, url in enumerate(urls)]
    lives = EngineLives(rendezvous, config.engine.num_engines)
    fleet = Fleet(
        controls,
        lives,
        str(context.paths.weights.resolve()),
        context.attempt_directory / WEIGHT_PLAN,
    )
    bridge = LeadingBridge(fleet, config, rendezvous, runner.run_to_end)
    receiver = LeadingReceiver(
        bridge,
        rendezvous,
        runner.run_to_end,
        pause_mode=config.rollout.pause_mode,
        timeout_s=wait_s,
        probe=lambda: ask_engines(
            urls,
            token,
            temperature=config.rollout.temperature,
            max_model_len=max_model_len(config),
        ),
        probe_is_due=lambda version, first: is_due(config, version, first=first),
        root=context.paths.root,
    )
    runner.beside = receiver.mend
    return receiver


def _engine_urls(context: RoleContext, rendezvous: Rendezvous) -> list[str]:
    timeout_s = context.config.run.startup_timeout_s
    return [
        rendezvous.wait(
            UP.format(index=i),
            timeout_s=timeout_s,
            who=f"engine-{i}",
            phase="waiting for the engines",
        )["url"]
        for i in range(context.config.engine.num_engines)
    ]


@contextmanager
def _router(context: RoleContext, urls: list[str]) -> Iterator[RouterServer]:
    config = context.config
    router = RouterServer(
        urls,
        router=config.router,
        host=host_address(config.cluster.socket_ifname),
        token_file=context.paths.token,
        log_path=context.attempt_directory / "logs" / f"router-{context.rank.role_rank}.log",
        request_timeout_s=config.rollout.request_timeout_s,
    )
    router.start()
    try:
        router.wait_ready(config.run.startup_timeout_s)
        yield router
    finally:
        router.stop()


def _share(context: RoleContext) -> int:
    """Prompt groups of a step that this worker makes."""
    total, size = context.config.rollout.prompts_per_step, context.rank.role_size
    if total < size:
        raise ConfigError(
            f"rollout.num_workers = {size}, but a step has only rollout.prompts_per_step = {total} prompt groups; "
            f"a worker would have none. Set rollout.num_workers to {total} or less"
        )
    return total // size + (context.rank.role_rank < total % size)


def _interruption(context: RoleContext, rendezvous: Rendezvous) -> Callable[[], None]:
    def check() -> None:
        if context.warning.is_set():
            rendezvous.put("stop", True)
        if rendezvous.has("failed"):
            raise RoleDiedError(f"generating: {rendezvous.get('failed')} failed")
        if rendezvous.has("stop"):
            raise RequeueRequested(
                "told to stop while generating; finished groups are in the journal"
            )

    return check


class NoEvaluator:
    """protocols.Evaluator of runs and workers that do not evaluate."""

    def evaluate_if_due(self, version: int, *, last: bool = False) -> None:
        return
