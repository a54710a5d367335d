"""What the stub ranks work on: prompt groups that follow from their number, and one digest of all that was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.testing.buffer_suite import make_group
from vime_hpc.types import PromptGroup, VersionSpan

GROUPS_PER_STEP = 4


def group_ids(step: int, worker: int = 0, num_workers: int = 1) -> Iterator[int]:
    """The groups of a step that a worker generates."""
    for group_id in range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP):
        if group_id % num_workers == worker:
            yield group_id


def generated(schema: BufferSchema, group_id: int, version: int) -> PromptGroup:
    """What generation gives for a prompt under a weight version: no chance in it."""
    group = make_group(schema, group_id)
    spans = (VersionSpan(version, 0),)
    return replace(group, samples=tuple(replace(s, versions=spans) for s in group.samples))


def state_after(trained: Iterable[tuple[int, str, int]]) -> str:
    """Digest over (step, content digest, lag) of every batch trained, in order."""
    state = ""
    for step, content, lag in trained:
        state = hashlib.sha256(f"{state} {step} {content} {lag}".encode()).hexdigest()
    return state
