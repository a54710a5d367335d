"""Kill a buffer's writer on purpose, start it again, and check that nothing acknowledged was lost or changed.

The writer is forked, reports every acknowledgement through a pipe only after the buffer has given it, and is killed with
SIGKILL. Groups are pure functions of their id, so whatever is read can be compared bit for bit.
"""

from __future__ import annotations

import logging
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vime_hpc.buffer.files import Disk, file_digest
from vime_hpc.buffer.index import read_commit
from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.errors import BufferCorruptError
from vime_hpc.testing.buffer_suite import make_group, same_groups, same_sample

SCHEMA = BufferSchema(
    RoutingShape(num_layers=2, top_k=2, num_experts=8),
    optional=("old_logprobs", "image_xxh3_64", "top_p_token_ids", "image_digests", "trace"),
)
"""Routed experts, and an optional column of every kind of axis."""
GROUPS_PER_STEP = 3


@dataclass
class Ledger:
    """What the buffer has promised so far: acknowledged groups and committed steps."""

    groups: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)
    """Committed steps already compared in full: their files never change, so later checks skip them."""

    def note(self, line: str) -> None:
        kind, number = line.split()
        (self.groups if kind == "group" else self.committed).add(int(number))


@dataclass
class CrashReport:
    """Counts over all kills."""

    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    wrong: int = 0
    unreadable: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.acknowledged} groups acknowledged, {self.lost} lost, {self.wrong} wrong, "
            f"{self.unreadable} sealed files unreadable"
        )


def groups_of(step: int) -> range:
    """Group ids a step consists of in these tests."""
    return range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)


def write_steps(
    root: Path, attempt: int, num_steps: int, disk: Disk, acknowledge: Callable[[str], None]
) -> None:
    """A rollout worker in small: reuse what was recovered, acknowledge the rest, commit; from the first open step on."""
    with BufferWriter(root, attempt=attempt, disk=disk) as sink:
        for step in range(sink.next_step, num_steps):
            have = {group.group_id: group for group in sink.recovered_groups(step)}
            for group_id in groups_of(step):
                if group_id not in have:
                    have[group_id] = make_group(SCHEMA, group_id)
                    sink.journal_group(step, have[group_id])
                    acknowledge(f"group {group_id}")
            sink.append(
                step,
                [have[group_id] for group_id in groups_of(step)],
                resume_state={"step": step},
                stats={},
            )
            acknowledge(f"step {step}")


def run_and_kill(
    root: Path, attempt: int, num_steps: int, disk: Disk, delay_s: float | None, ledger: Ledger
) -> bool:
    """Fork a writer and kill it `delay_s` after its start (None = it ends by itself); True if it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            logging.disable()
            os.write(
                writing, b"\n"
            )  # started: the parent's clock runs from here, not from the fork
            write_steps(root, attempt, num_steps, disk, lambda line: _say(writing, line))
            os._exit(0)
        except BaseException:
            logging.disable(logging.NOTSET)
            logging.getLogger(__name__).exception("the writer failed by itself")
            os._exit(70)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if delay_s is not None:
            select.select([pipe], [], [], 30)
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
        lines = pipe.read().decode().splitlines()
    status = os.waitpid(child, 0)[1]
    for line in lines:
        if line.strip():
            ledger.note(line)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise AssertionError(f"{root}: the writer of attempt {attempt} failed by itself")
    return os.WIFSIGNALED(status)


def check_promises(root: Path, attempt: int, ledger: Ledger, report: CrashReport) -> None:
    """Start as the next attempt would, and count what is lost, wrong or unreadable."""
    with BufferWriter(root, attempt=attempt, durable=False) as sink:
        reader, found = BufferReader(root), set()
        for step in reader.committed_steps():
            found |= set(groups_of(step))
            if step not in ledger.checked:
                _check_step(reader, step, report)
                ledger.checked.add(step)
        for step in range(sink.next_step, sink.next_step + 2):
            recovered = sink.recovered_groups(step)
            report.wrong += not same_groups(
                recovered, [make_group(SCHEMA, group.group_id) for group in recovered]
            )
            found |= {group.group_id for group in recovered}
        report.lost += len(ledger.groups - found)
        report.lost += len(ledger.committed - set(reader.committed_steps()))
    report.acknowledged += len(ledger.groups)


def _check_step(reader: BufferReader, step: int, report: CrashReport) -> None:
    """One committed step: whole files by digest, every sample bit for bit."""
    for worker in reader.commit(step)["workers"]:
        entry = worker["segment"]
        report.unreadable += file_digest(reader.layout.root / entry["file"]) != (
            entry["bytes"],
            entry["xxh3_128"],
        )
    batch = reader.batch(step)
    wanted = [
        sample for group_id in groups_of(step) for sample in make_group(SCHEMA, group_id).samples
    ]
    samples = batch.read(range(len(batch)))
    report.wrong += not (len(samples) == len(wanted) and all(map(same_sample, samples, wanted)))
    batch.close()


def random_kills(
    work: Path, kills: int, *, seed: int, durable: bool, per_buffer: int = 20
) -> CrashReport:
    """Kill writers at random moments, `per_buffer` times per buffer directory, each buffer checked after every kill.

    The moments spread over the time that a start and two steps take on this machine, measured first.
    """
    report, rng, round_number = CrashReport(), random.Random(seed), 0
    probe = work / "probe"
    RolloutBuffer.create(probe, run_id="crash", schema=SCHEMA, durable=False)
    start = time.monotonic()
    run_and_kill(probe, 0, 2, Disk(durable=durable), None, Ledger())
    longest_s = time.monotonic() - start
    shutil.rmtree(probe)
    while report.kills < kills:
        root, ledger, attempt = work / f"buffer-{round_number}", Ledger(), 0
        RolloutBuffer.create(root, run_id="crash", schema=SCHEMA, durable=False)
        for _ in range(min(per_buffer, kills - report.kills)):
            before = set(ledger.groups)
            run_and_kill(
                root, attempt, 10_000, Disk(durable=durable), rng.uniform(0, longest_s), ledger
            )
            report.kills += 1
            check_promises(root, attempt + 1, ledger, report)
            report.acknowledged -= len(before)
            attempt += 2
        ledger.checked.clear()
        final = CrashReport()
        check_promises(root, attempt, ledger, final)
        report.lost, report.wrong = report.lost + final.lost, report.wrong + final.wrong
        report.unreadable += final.unreadable
        shutil.rmtree(root)
        round_number += 1
    return report


def flip_segment_bytes(root: Path, places: int | None, *, seed: int) -> tuple[int, int]:
    """Flip bytes of the committed segment of step 0 one at a time and read it through HDF5, past the size check.

    Returns (refused, unharmed); raises AssertionError when a wrong sample is returned. None = every byte.
    """
    layout = RolloutBuffer.open(root).layout
    entry = read_commit(layout, 0)["workers"][0]["segment"]
    path, rng = layout.root / entry["file"], random.Random(seed)
    data = path.read_bytes()
    wanted = [
        sample for group_id in groups_of(0) for sample in make_group(SCHEMA, group_id).samples
    ]
    chosen = range(len(data)) if places is None else rng.sample(range(len(data)), places)
    refused = unharmed = 0
    for place in chosen:
        path.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        )
        try:
            segment = SegmentFile(path, expected_header=entry["header_xxh3_64"])
            samples = segment.read(0, len(segment))
            segment.close()
        except BufferCorruptError:
            refused += 1
            continue
        if len(samples) != len(wanted) or not all(map(same_sample, samples, wanted)):
            raise AssertionError(f"{path}: a wrong sample was returned after flipping byte {place}")
        unharmed += 1
    path.write_bytes(data)
    return refused, unharmed


def _say(descriptor: int, line: str) -> None:
    os.write(descriptor, line.encode() + b"\n")
