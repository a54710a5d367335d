"""The two loops against stub roles that share one integer and one list: order, lag bound, resume, hang, stop."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vime_hpc.errors import DeadlineError, NothingToDoError, RequeueRequested, VimeError
from vime_hpc.loop import RolloutSide, TrainerSide, rollout_loop, trainer_loop

WAIT_S = 1.0


@dataclass
class World:
    """What survives a restart (`committed`, `saved`) and what one attempt shares."""

    committed: list[int] = field(default_factory=list)
    """committed[k] = weight version that generated step k."""
    saved: int = 0
    trained: list[int] = field(default_factory=list)
    logged: list[int] = field(default_factory=list)
    stop_at: int = -1

    def __post_init__(self) -> None:
        self.new_attempt()

    def new_attempt(self) -> None:
        self.changed = threading.Condition()
        self.published = self.held = -1
        self.stopped = False
        self.lag_seen: list[int] = []

    def wait(self, what: Any, phase: str) -> None:
        with self.changed:
            if not self.changed.wait_for(what, timeout=WAIT_S):
                raise DeadlineError(f"{phase}: nobody came within {WAIT_S} s")

    def tell(self, **values: Any) -> None:
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()


class StubTrainer:
    """Buffer reader, trainer, publisher, checkpoint keeper, stop flag and log of the trainer side."""

    only_to_end = False

    def __init__(self, world: World, save_every: int = 1, die_at: int = -1) -> None:
        self.world, self.save_every, self.die_at = world, save_every, die_at

    def wait_for(self, step: int) -> Any:
        self.world.wait(lambda: len(self.world.committed) > step, f"batch of step {step}")
        return SimpleNamespace(step=step, table=None, stats={})

    def step(self, batch: Any) -> dict[str, float]:
        if batch.step == self.die_at:
            raise VimeError("trainer dies here")
        self.world.trained.append(batch.step)
        self.world.lag_seen.append(batch.step - self.world.committed[batch.step])
        return {"train/loss": 0.0}

    def publish(self, version: int) -> dict[str, float]:
        self.world.tell(published=version)
        self.world.wait(lambda: self.world.held >= version, f"confirmation of version {version}")
        return {}

    def restore(self) -> int:
        return self.world.saved

    def save_if_due(self, next_step: int, *, force: bool = False) -> dict[str, float]:
        if force or next_step % self.save_every == 0:
            self.world.saved = next_step
        return {}

    def agreed(self) -> bool:
        stop = len(self.world.trained) == self.world.stop_at
        if stop:
            self.world.tell(stopped=True)
        return stop

    def log(self, step: int, metrics: Mapping[str, float], batch: Any) -> None:
        assert {"perf/step_time", "train/loss"} <= set(metrics)
        assert self.world.saved <= step, "a kill between checkpoint and line would lose the line"
        self.world.logged.append(step)

    def side(self, num_steps: int) -> TrainerSide:
        return TrainerSide(num_steps, self, self, self, self, self, self, self.only_to_end)


class StubRollout:
    """Buffer writer, generator, receiver, evaluator and stop flag of the rollout side."""

    def __init__(self, world: World, hang_at: int = -1) -> None:
        self.world, self.hang_at = world, hang_at
        self.version = -1
        self.left = False

    @property
    def next_step(self) -> int:
        return len(self.world.committed)

    def receive(self, at_least: int) -> int:
        while self.version < at_least or self.world.published > self.version:
            before = self.version
            self.world.wait(
                lambda before=before: self.world.published > before or self.world.stopped,
                f"weight version {before + 1}",
            )
            if self.world.published == before:
                raise RequeueRequested("the trainer stopped")
            self.version = self.world.published
            self.world.tell(held=self.version)
        return self.version

    def generate(self, step: int, version: int) -> tuple[list[Any], dict[str, float]]:
        if step == self.hang_at:
            threading.Event().wait(2 * WAIT_S)
        return [version], {}

    def state(self) -> Mapping[str, Any]:
        return {}

    def append(self, step: int, groups: Sequence[Any], *, resume_state: Any, stats: Any) -> None:
        assert step == len(self.world.committed)
        self.world.tell(committed=[*self.world.committed, groups[0]])

    def evaluate_if_due(self, version: int, *, last: bool = False) -> None:
        del version, last

    def leave(self) -> None:
        self.left = True

    def side(self, num_steps: int, lag: int) -> RolloutSide:
        return RolloutSide(num_steps, lag, self, self, self, self)


def run_both(
    world: World, trainer: StubTrainer, rollout: StubRollout, steps: int, lag: int
) -> list[Any]:
    """Both loops in threads; returns their exceptions (None = ended well)."""
    ends: list[Any] = [None, None]

    def guard(index: int, function: Any, side: Any) -> None:
        try:
            function(side)
        except VimeError as error:
            ends[index] = error

    threads = [
        threading.Thread(target=guard, args=(0, trainer_loop, trainer.side(steps))),
        threading.Thread(target=guard, args=(1, rollout_loop, rollout.side(steps, lag))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * WAIT_S)
        assert not thread.is_alive(), "a loop hangs instead of failing"
    return ends


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_step_is_trained_once_within_the_lag_bound(lag: int) -> None:
    world = World()
    assert run_both(world, StubTrainer(world), StubRollout(world), 6, lag) == [None, None]
    assert world.trained == list(range(6))
    assert max(world.lag_seen) <= lag
    assert min(world.lag_seen) >= 0
    assert world.held == 6, "the last version reaches the engines"


def test_lag_zero_is_strictly_on_policy() -> None:
    world = World()
    run_both(world, StubTrainer(world), StubRollout(world), 5, 0)
    assert world.committed == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("save_every", [1, 2])
def test_a_killed_run_goes_on_without_training_or_generating_anything_twice(
    lag: int, save_every: int
) -> None:
    world = World()
    ends = run_both(world, StubTrainer(world, save_every, die_at=3), StubRollout(world), 6, lag)
    assert isinstance(ends[0], VimeError)
    before = list(world.committed)
    world.trained = world.trained[
        : world.saved
    ]  # what was trained after the checkpoint is lost with the process
    world.new_attempt()
    assert run_both(world, StubTrainer(world, save_every), StubRollout(world), 6, lag) == [
        None,
        None,
    ]
    assert world.trained == list(range(6))
    assert world.committed[: len(before)] == before, "a committed step is not generated again"


def test_a_hanging_rollout_becomes_an_error_that_names_the_phase() -> None:
    world = World()
    ends = run_both(world, StubTrainer(world), StubRollout(world, hang_at=2), 4, 0)
    assert isinstance(ends[0], DeadlineError)
    assert "batch of step 2" in str(ends[0])


def test_a_dead_trainer_becomes_an_error_on_the_rollout_side() -> None:
    world = World()
    ends = run_both(world, StubTrainer(world, die_at=1), StubRollout(world), 4, 0)
    assert isinstance(ends[1], DeadlineError)
    assert "weight version 2" in str(ends[1])


@pytest.mark.parametrize("lag", [0, 2])
def test_a_stop_request_saves_and_ends_both_loops_with_the_wish_to_be_requeued(lag: int) -> None:
    world = World(stop_at=2)
    rollout = StubRollout(world)
    ends = run_both(world, StubTrainer(world, save_every=100), rollout, 6, lag)
    assert [type(end) for end in ends] == [RequeueRequested, RequeueRequested]
    assert world.saved == 2
    assert rollout.left
    world.stop_at = -1
    world.new_attempt()
    assert run_both(world, StubTrainer(world), StubRollout(world), 6, lag) == [None, None]
    assert world.trained == list(range(6))
    assert world.logged == list(range(6)), "the step before the stop has its line, too"


def test_a_stop_while_waiting_for_a_batch_saves_where_the_trainer_stands() -> None:
    world = World(committed=[0])

    class Impatient(StubTrainer):
        def wait_for(self, step: int) -> Any:
            return None if step == 1 else super().wait_for(step)

    world.held = 10
    with pytest.raises(RequeueRequested, match="stopped before step 1"):
        trainer_loop(Impatient(world, save_every=100).side(3))
    assert world.saved == 1


def test_a_run_killed_behind_its_last_checkpoint_only_publishes_and_ends() -> None:
    world = World(committed=[0, 1], saved=2)
    trainer = StubTrainer(world)
    trainer.only_to_end = True
    rollout = StubRollout(world)
    assert run_both(world, trainer, rollout, 2, 0) == [None, None]
    assert (world.trained, rollout.version) == ([], 2)


def test_a_finished_run_has_nothing_to_do() -> None:
    world = World(committed=[0, 1], saved=2)
    with pytest.raises(NothingToDoError, match="step 2 of 2"):
        trainer_loop(StubTrainer(world).side(2))
