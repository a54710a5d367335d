"""Take damage out of a buffer's way: drop steps, sweep leftovers, rebuild a lost commit. Deletes only what drop names."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vime_hpc.buffer.attempts import list_attempts, names_in, next_attempt, sweep
from vime_hpc.buffer.files import Disk, file_digest
from vime_hpc.buffer.index import (
    committed_steps,
    describe_segment,
    make_commit,
    make_seal,
    read_commit,
    read_identity,
    write_record,
)
from vime_hpc.buffer.layout import (
    ASIDE,
    JOURNAL_PATTERN,
    SEAL_PATTERN,
    SEGMENT_PATTERN,
    STEP_PATTERN,
    Layout,
)
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.errors import BufferCorruptError


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing that is wrong with a step's commit, and what `apply_repair` does about it."""

    kind: Literal["rebuild_commit", "set_aside_commit", "needs_drop"]
    step: int
    reason: str


def drop_steps(layout: Layout, from_step: int) -> list[str]:
    """See RolloutBuffer.drop."""
    disk, removed = Disk(), []
    for step in reversed([step for step in committed_steps(layout) if step >= from_step]):
        layout.commit(step).unlink()
        removed.append(layout.relative(layout.commit(step)))
        disk.sync_directory(layout.steps)
    for directory in list_attempts(layout):
        for path in names_in(directory.path):
            match = JOURNAL_PATTERN.fullmatch(path.name) or SEAL_PATTERN.fullmatch(path.name)
            if match and int(match[1]) >= from_step:
                path.unlink()
                removed.append(layout.relative(path))
    if layout.segments.is_dir():
        for path in sorted(layout.segments.iterdir()):
            if path.name >= layout.segment_directory(from_step).name:
                shutil.rmtree(path)
                removed.append(layout.relative(path))
    return removed


def plan_repair(layout: Layout) -> list[Repair]:
    """What is wrong with the commits, oldest first. Segments are judged by size and header; `verify` reads them whole."""
    on_disk = {
        int(match[1])
        for path in layout.segments.iterdir()
        if (match := STEP_PATTERN.fullmatch(path.name.removeprefix("step-") + ".json"))
    }
    steps, plans = committed_steps(layout), []
    good = [step for step in steps if _commit_error(layout, step) is None]
    last_good = good[-1] if good else -1
    for step in range(max([*steps, -1]) + 1):
        error = _commit_error(layout, step) if step in steps else "the commit is missing"
        if error is None:
            plans += [
                Repair("needs_drop", step, reason) for reason in _segment_errors(layout, step)
            ]
        elif step < last_good and step in on_disk:
            plans.append(Repair("rebuild_commit", step, error))
        elif step > last_good:
            plans.append(Repair("set_aside_commit", step, error))
        else:
            plans.append(Repair("needs_drop", step, f"{error}, and its segments are gone"))
    return plans


def apply_repair(layout: Layout, plans: list[Repair]) -> list[str]:
    """Carry out the plans that lose nothing, then sweep leftovers; returns what was done.

    A commit in the middle is rebuilt from its segments (its stats and resume state are lost; only those of the newest
    commit are ever used). A damaged newest commit is moved to damaged/ with its segments: the step is generated again.
    """
    done = []
    for plan in plans:
        if plan.kind == "rebuild_commit":
            _rebuild_commit(layout, plan.step)
            done.append(f"rebuilt {layout.relative(layout.commit(plan.step))} from its segments")
        elif plan.kind == "set_aside_commit":
            done += [f"moved {name} to damaged/" for name in _set_aside(layout, plan.step)]
    steps = committed_steps(layout)
    done += [
        f"removed {name}"
        for name in sweep(layout, steps[-1] + 1 if steps else 0, next_attempt(layout))
    ]
    return done


def _commit_error(layout: Layout, step: int) -> str | None:
    try:
        read_commit(layout, step)
    except BufferCorruptError as error:
        return str(error)
    return None


def _segment_errors(layout: Layout, step: int) -> list[str]:
    errors = []
    for worker in read_commit(layout, step)["workers"]:
        entry, path = worker["segment"], layout.root / worker["segment"]["file"]
        try:
            if path.stat().st_size != entry["bytes"]:
                raise BufferCorruptError(
                    f"{entry['file']} has {path.stat().st_size} bytes, committed with {entry['bytes']}"
                )
            SegmentFile(path, expected_header=entry["header_xxh3_64"]).close()
        except (OSError, BufferCorruptError) as error:
            errors.append(str(error))
    return errors


def _rebuild_commit(layout: Layout, step: int) -> None:
    run_id, _ = read_identity(layout)
    by_attempt: dict[int, list[Path]] = {}
    for path in names_in(layout.segment_directory(step)):
        if match := SEGMENT_PATTERN.fullmatch(layout.relative(path)):
            by_attempt.setdefault(int(match[3]), []).append(path)
    for attempt, paths in sorted(by_attempt.items(), reverse=True):
        segments = [SegmentFile(path) for path in paths]
        if len(segments) == int(segments[0].attributes["num_workers"]):
            seals = [
                make_seal(
                    run_id=run_id,
                    step=step,
                    worker=int(segment.attributes["worker"]),
                    num_workers=len(segments),
                    attempt=attempt,
                    segment=segment_entry(layout, segment),
                    resume_state={},
                    stats={},
                )
                for segment in segments
            ]
            write_record(
                Disk(),
                layout.commit(step),
                make_commit(seals),
                point="commit",
                aside=layout.steps / f"{step:06d}.json{ASIDE}",
            )
            return
    raise BufferCorruptError(
        f"{layout.segment_directory(step)}: no attempt's segments are complete, the commit of step {step} "
        f"cannot be rebuilt. To go on without it: vime-hpc buffer drop {layout.root} --from-step {step}"
    )


def segment_entry(layout: Layout, segment: SegmentFile) -> dict[str, Any]:
    """What a commit says about a segment, computed from the file alone, every digest in it checked on the way."""
    samples = segment.read(0, len(segment))
    size, digest = file_digest(segment.path)
    return describe_segment(
        samples,
        layout.relative(segment.path),
        size,
        digest,
        str(segment.attributes["header_xxh3_64"]),
        set(),
    )


def _set_aside(layout: Layout, step: int) -> list[str]:
    moved = []
    for path in (layout.commit(step), layout.segment_directory(step)):
        if path.exists():
            target = layout.root / "damaged" / f"{path.name}.{next_attempt(layout)}"
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
            moved.append(layout.relative(path))
    return moved
