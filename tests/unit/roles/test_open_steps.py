"""A restart with two steps open, and with another number of rollout workers: nothing is made twice, nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.errors import ConfigError
from vime_hpc.roles.recovery import open_groups, restore_source
from vime_hpc.rollout.source import PromptSet, PromptSource
from vime_hpc.testing.buffer_suite import make_group
from vime_hpc.types import Prompt

GROUPS_PER_STEP = 6
NUM_STEPS = 5
PROMPTS = PromptSet(
    tuple(Prompt(i, np.array([i], dtype=np.int32), f"p{i}") for i in range(40)), 40, 0, 0, "digest"
)


class Worker:
    """A rollout worker without engine: `generate` is counted, everything else is the real thing."""

    def __init__(self, root: Path, worker: int, num_workers: int, attempt: int) -> None:
        self.writer = BufferWriter(
            root, worker=worker, num_workers=num_workers, attempt=attempt, durable=False
        )
        self.source = PromptSource(
            PROMPTS,
            seed=1,
            group_size=2,
            worker=worker,
            num_workers=num_workers,
        )
        restore_source(self.source, self.writer)
        self.kept = {group.group_id: group for group in open_groups(self.writer, NUM_STEPS)}
        self.share = GROUPS_PER_STEP // num_workers + (worker < GROUPS_PER_STEP % num_workers)
        self.generated: list[int] = []

    def make(self, step: int, count: int | None = None) -> None:
        """Generate (or take from the journal) this worker's groups of a step; all of them are sealed, fewer are not."""
        ids = [self.source.next_request().group_id for _ in range(self.share)]
        for group_id in ids[:count]:
            if group_id not in self.kept:
                self.generated.append(group_id)
                self.kept[group_id] = make_group(BufferSchema(), group_id)
                self.writer.journal_group(step, self.kept[group_id])
        if count is None:
            groups = [self.kept[group_id] for group_id in ids]
            self.writer.append(step, groups, resume_state=self.source.state(), stats={})


def start(root: Path, num_workers: int) -> list[Worker]:
    attempt = RolloutBuffer.create(root, run_id="r", durable=False).next_attempt()
    return [Worker(root, worker, num_workers, attempt) for worker in range(num_workers)]


def finish(workers: Sequence[Worker]) -> None:
    """What is left of the run, worker by worker within a step."""
    for step in range(workers[0].writer.next_step, NUM_STEPS):
        for worker in workers:
            worker.make(step)


def committed(root: Path) -> list[int]:
    buffer = RolloutBuffer.open(root)
    return [
        group_id
        for step in buffer.steps()
        for group_id in sorted(set(buffer.batch(step).table.group_id.tolist()))
    ]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (2, 3), (3, 2), (4, 3)])
def test_two_open_steps_are_recovered_by_any_number_of_workers(
    tmp_path: Path, before: int, after: int
) -> None:
    root = tmp_path / "buffer"
    first = start(root, before)
    for step in range(2):
        for worker in first:
            worker.make(step)
    first[0].make(2)  # sealed; committed already where there is no other worker
    first[0].make(3, count=1)  # a group of the step after, acknowledged
    if before > 1:
        first[1].make(2, count=1)  # the others were still at it when all were killed
    second = start(root, after)
    finish(second)
    made = Counter(group for worker in [*first, *second] for group in worker.generated)
    assert set(made.values()) == {1}, "a group that was acknowledged was generated again"
    ids = committed(root)
    assert len(ids) == NUM_STEPS * GROUPS_PER_STEP
    assert len(set(ids)) == len(ids), "a group was committed twice"
    waiting = [
        group_id
        for worker in second
        for group_id in takewhile(lambda i: i <= max(ids), worker.source.ids())
    ]
    assert sorted(ids + waiting) == list(range(max(ids) + 1)), "a group is neither used nor to come"
    if GROUPS_PER_STEP % before == 0 == GROUPS_PER_STEP % after:
        assert waiting == []


def test_the_number_of_workers_may_change_again_and_again(tmp_path: Path) -> None:
    root = tmp_path / "buffer"
    for step, num_workers in enumerate([3, 2, 6, 1, 3]):
        for worker in start(root, num_workers):
            worker.make(step)
    assert sorted(committed(root)) == list(range(NUM_STEPS * GROUPS_PER_STEP))


def test_other_prompts_are_still_refused_after_a_change_of_workers(tmp_path: Path) -> None:
    root = tmp_path / "buffer"
    for worker in start(root, 2):
        worker.make(0)
    (other,) = start(root, 1)
    other.source._seed = 2  # as a run with another run.seed has it
    with pytest.raises(ConfigError, match=r"run\.seed was 1 and is now 2"):
        restore_source(other.source, other.writer)
