"""A hypothesis state machine: the buffer against a dictionary that does what the buffer promises."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.testing.buffer_suite import make_group, same_groups, same_sample
from vime_hpc.types import PromptGroup

SCHEMA = BufferSchema()


class BufferMachine(RuleBasedStateMachine):
    """Two workers, groups dealt by number, killed and restarted at will."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="buffer-model-"))
        RolloutBuffer.create(self.root, run_id="model", schema=SCHEMA, durable=False)
        self.attempt = -1
        self.next_group = 0
        self.compared = 0  # steps read back and compared so far
        self.committed: dict[int, set[int]] = {}
        self.open: set[int] = set()  # acknowledged, in no sealed part
        self.sealed: list[dict[int, set[int]]] = [{}, {}]  # per worker: step -> groups
        self.restart()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def group(self, group_id: int) -> PromptGroup:
        return make_group(SCHEMA, group_id, size=1)

    def step_of(self, worker: int) -> int:
        return len(self.committed) + len(self.sealed[worker])

    @rule()
    def restart(self) -> None:
        """SIGKILL of both workers: nothing is closed, a new attempt starts."""
        self.attempt += 1
        self.sinks = [
            BufferWriter(
                self.root, worker=worker, num_workers=2, attempt=self.attempt, durable=False
            )
            for worker in (0, 1)
        ]
        for parts in self.sealed:
            for groups in parts.values():
                self.open |= groups
            parts.clear()
        recovered = {
            group.group_id
            for sink in self.sinks
            for step in range(len(self.committed), len(self.committed) + 4)
            for group in sink.recovered_groups(step)
        }
        assert recovered == self.open
        for sink in self.sinks:
            assert sink.next_step == len(self.committed)

    @rule(worker=st.sampled_from([0, 1]))
    def acknowledge(self, worker: int) -> None:
        group_id = self.next_group * 2 + worker
        self.next_group += 1
        self.sinks[worker].journal_group(self.step_of(worker), self.group(group_id))
        self.open.add(group_id)

    @precondition(lambda self: any(len(parts) < 2 for parts in self.sealed))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        worker = data.draw(
            st.sampled_from([worker for worker in (0, 1) if len(self.sealed[worker]) < 2])
        )
        mine = sorted(group for group in self.open if group % 2 == worker)
        chosen = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        step = self.step_of(worker)
        self.sinks[worker].append(
            step,
            [self.group(group) for group in sorted(chosen)],
            resume_state={"worker": worker},
            stats={},
        )
        self.sealed[worker][step] = chosen
        self.open -= chosen
        step = len(self.committed)
        while all(step in parts for parts in self.sealed):
            self.committed[step] = set().union(*(parts.pop(step) for parts in self.sealed))
            step += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.open)))
        self.sinks[group_id % 2].discard_group(self.step_of(group_id % 2), group_id)
        self.open.discard(group_id)

    @invariant()
    def committed_steps_are_what_the_model_says(self) -> None:
        reader = BufferReader(self.root)
        assert reader.committed_steps() == sorted(self.committed)
        for step in range(self.compared, len(self.committed)):
            self.compared = step + 1
            batch = reader.batch(step)
            wanted = [
                sample
                for group in sorted(self.committed[step])
                for sample in self.group(group).samples
            ]
            assert all(map(same_sample, batch.read(range(len(batch))), wanted))
            assert len(batch) == len(wanted)
            batch.close()

    @invariant()
    def left_over_groups_are_ready_for_the_next_step(self) -> None:
        for worker, sink in enumerate(self.sinks):
            ready = sink.recovered_groups(self.step_of(worker))
            assert {group.group_id for group in ready} <= self.open
            assert same_groups(ready, [self.group(group.group_id) for group in ready])


BufferMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestBufferAgainstADictionary = BufferMachine.TestCase
