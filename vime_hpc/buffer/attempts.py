"""Attempts: who writes now, and how writers of an earlier attempt are kept out without any lock.

Everything an attempt has not committed lies in journal/eNNNN/, and a commit becomes visible by a rename out of that
directory. A later attempt renames the directory to eNNNN.fenced: from then on no seal and no commit of the old attempt
can appear, because their source path is gone, and its journals no longer change what we read (a writer acknowledges a
group only after it has seen its directory still in place).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.index import (
    SEAL_FORMAT,
    Record,
    committed_groups,
    make_commit,
    read_commit,
    read_record,
    write_record,
)
from vime_hpc.buffer.journal import JournalRecord, replay
from vime_hpc.buffer.layout import (
    ASIDE,
    ATTEMPT_PATTERN,
    JOURNAL_PATTERN,
    SEAL_PATTERN,
    SEGMENT_PATTERN,
    Layout,
)
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.errors import BufferCorruptError, RunLockedError
from vime_hpc.types import PromptGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptDirectory:
    """journal/eNNNN or journal/eNNNN.fenced."""

    attempt: int
    fenced: bool
    path: Path


def list_attempts(layout: Layout) -> list[AttemptDirectory]:
    """All attempts that left a directory, oldest first."""
    if not layout.journal.is_dir():
        return []
    found = [
        AttemptDirectory(int(match[1]), match[2] is not None, path)
        for path in layout.journal.iterdir()
        if (match := ATTEMPT_PATTERN.fullmatch(path.name))
    ]
    return sorted(found, key=lambda directory: (directory.attempt, not directory.fenced))


def next_attempt(layout: Layout) -> int:
    """A number higher than every attempt that ever wrote here. One process asks and tells the others."""
    highest = max((directory.attempt for directory in list_attempts(layout)), default=-1)
    if layout.segments.is_dir():
        for step in sorted(layout.segments.iterdir())[-2:]:
            for path in step.iterdir():
                if match := SEGMENT_PATTERN.fullmatch(layout.relative(path).removesuffix(ASIDE)):
                    highest = max(highest, int(match[3]))
    return highest + 1


def enter_attempt(layout: Layout, attempt: int, disk: Disk) -> None:
    """Make this attempt's directory and fence off all earlier ones.

    Raises:
        RunLockedError: a later attempt exists, so this process is the stale one.
    """
    disk.make_directory(layout.attempt(attempt))
    disk.at("attempt.entered")
    for directory in list_attempts(layout):
        if directory.attempt > attempt or (directory.attempt == attempt and directory.fenced):
            if not names_in(layout.attempt(attempt)):
                layout.attempt(attempt).rmdir()
            raise RunLockedError(
                f"{layout.root}: attempt {attempt} wants to write, but {directory.path.name} exists: a later attempt of this run "
                f"has taken over. This process is left over from an earlier start, or the attempt number went back; the next "
                f"free one is {next_attempt(layout)}"
            )
        if directory.attempt < attempt and not directory.fenced:
            _fence(layout, directory, disk)


def _fence(layout: Layout, directory: AttemptDirectory, disk: Disk) -> None:
    """Rename an attempt's directory. A writer that started too late may have made it anew: then under a further name."""
    for suffix in ("", *range(1, 100)):
        try:
            os.rename(
                directory.path, directory.path.with_name(f"{directory.path.name}.fenced{suffix}")
            )
        except FileNotFoundError:
            return  # another worker of this attempt was faster
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue
        break
    log.info("buffer: fenced off %s", directory.path.name)
    disk.sync_directory(layout.journal)
    disk.at("attempt.fenced")


def check_not_fenced(layout: Layout, attempt: int) -> None:
    """Raises RunLockedError once a later attempt has fenced this one off."""
    if not layout.attempt(attempt).is_dir():
        raise RunLockedError(
            f"{layout.root}: attempt {attempt} was fenced off by a later attempt of the same run, so nothing it writes counts any "
            "more. This process must end; if no other job runs, start the run again"
        )


def names_in(directory: Path) -> list[Path]:
    """Sorted entries; none when another worker has just removed the directory."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def seals_of(directory: Path, step: int) -> list[Record]:
    """The seals of a step in one attempt's directory. A damaged one counts as missing and is logged."""
    seals = []
    for path in names_in(directory):
        match = SEAL_PATTERN.fullmatch(path.name)
        if match and int(match[1]) == step:
            try:
                seals.append(read_record(path, SEAL_FORMAT))
            except BufferCorruptError as error:
                log.error("buffer: %s; the worker's groups are taken from its journal", error)
    return seals


def commit_if_sealed(
    layout: Layout, step: int, source: Path, own: Path, worker: int, disk: Disk
) -> bool:
    """Commit the step when every worker has sealed it in `source`; publishes from the live directory `own`."""
    if layout.commit(step).exists():
        return True
    try:
        seals = seals_of(source, step)
    except (
        FileNotFoundError
    ):  # removed under us: another worker committed and swept, or we are fenced
        return layout.commit(step).exists()
    if not seals or len(seals) < int(seals[0]["num_workers"]):
        return False
    disk.make_directory(layout.steps)
    aside = own / f"step-{step:06d}.worker-{worker:04d}.commit{ASIDE}"
    try:
        write_record(disk, layout.commit(step), make_commit(seals), point="commit", aside=aside)
    except FileNotFoundError as error:
        raise RunLockedError(
            f"{layout.root}: step {step} was not committed: the attempt was fenced off meanwhile"
        ) from error
    return True


def recover_groups(
    layout: Layout,
    schema: BufferSchema,
    first_step: int,
    attempt: int,
    worker: int,
    owns: Callable[[int], bool],
) -> dict[int, dict[int, PromptGroup]]:
    """Acknowledged groups of uncommitted steps: step -> group_id -> group, each group once, at its lowest step.

    From the journals and the sealed but uncommitted segments of every fenced attempt, and of what this very worker left
    in this attempt before it was restarted.
    """
    newest: dict[tuple[int, int], JournalRecord] = {}
    for directory in list_attempts(layout):
        for path in names_in(directory.path):
            match = JOURNAL_PATTERN.fullmatch(path.name) or SEAL_PATTERN.fullmatch(path.name)
            if match is None or int(match[1]) < first_step:
                continue
            if not directory.fenced and (directory.attempt, int(match[2])) != (attempt, worker):
                continue
            step = int(match[1])
            if path.name.endswith(".log"):
                records = _replay_logged(path, schema)
            else:
                records = [
                    JournalRecord(group.group_id, step, group)
                    for group in _sealed_groups(layout, path, step)
                ]
            newest.update(((step, record.group_id), record) for record in records)
    committed: dict[int, set[int]] = {}
    recovered: dict[int, dict[int, PromptGroup]] = {}
    seen: set[int] = set()
    for (step, group_id), record in sorted(newest.items(), key=lambda item: item[0]):
        if record.group is None or not owns(group_id) or group_id in seen:
            continue
        for earlier in range(record.open_step, first_step):
            if earlier not in committed:
                committed[earlier] = committed_groups(read_commit(layout, earlier))
        if any(group_id in committed[earlier] for earlier in range(record.open_step, first_step)):
            continue
        seen.add(group_id)
        recovered.setdefault(step, {})[group_id] = record.group
    return recovered


def sweep(layout: Layout, before_step: int, attempt: int) -> list[str]:
    """Remove what no start can need any more; returns and logs the names.

    Journals and seals of committed steps, segments beside the committed ones in the newest committed step, and
    half-written files of earlier attempts.
    """
    removed: list[Path] = []
    for directory in list_attempts(layout):
        for path in names_in(directory.path):
            match = JOURNAL_PATTERN.fullmatch(path.name) or SEAL_PATTERN.fullmatch(path.name)
            if (match and int(match[1]) < before_step) or (
                directory.attempt < attempt and path.name.endswith(ASIDE)
            ):
                removed.append(path)
    if before_step > 0 and layout.commit(before_step - 1).exists():
        commit = read_commit(layout, before_step - 1)
        kept = {worker["segment"]["file"] for worker in commit["workers"]}
        step_directory = layout.segment_directory(before_step - 1)
        if step_directory.is_dir():
            removed += [
                path for path in names_in(step_directory) if layout.relative(path) not in kept
            ]
    for path in _asides(layout, before_step):
        match = SEGMENT_PATTERN.fullmatch(layout.relative(path).removesuffix(ASIDE))
        if match and int(match[3]) < attempt:
            removed.append(path)
    names = []
    for path in removed:
        path.unlink(missing_ok=True)
        names.append(layout.relative(path))
    for directory in list_attempts(layout):
        if directory.fenced and not any(
            JOURNAL_PATTERN.fullmatch(path.name) or SEAL_PATTERN.fullmatch(path.name)
            for path in names_in(directory.path)
        ):
            for path in names_in(directory.path):
                path.unlink(missing_ok=True)
            try:
                directory.path.rmdir()
            except OSError as error:  # gone already, or another worker's file came in between: the next sweep has it
                log.debug("buffer: %s stays: %s", directory.path, error)
                continue
            names.append(layout.relative(directory.path))
    return names


def _asides(layout: Layout, first_step: int) -> list[Path]:
    if not layout.segments.is_dir():
        return []
    first = layout.segment_directory(first_step).name
    return [
        path
        for step in layout.segments.iterdir()
        if step.name >= first
        for path in step.glob(f"*{ASIDE}")
    ]


def _replay_logged(path: Path, schema: BufferSchema) -> list[JournalRecord]:
    result = replay(path, schema)
    for offset, size in result.damaged:
        log.error(
            "buffer: %s is damaged from byte %d on (%d bytes); groups acknowledged there are generated again",
            path,
            offset,
            size,
        )
    if result.torn_bytes:
        log.warning(
            "buffer: %s ends in %d bytes of a group that was never acknowledged; cut off",
            path,
            result.torn_bytes,
        )
    return result.records


def _sealed_groups(layout: Layout, seal_path: Path, step: int) -> list[PromptGroup]:
    """Groups of a segment whose step was never committed; damage there is logged, its journal still counts."""
    try:
        seal = read_record(seal_path, SEAL_FORMAT)
        segment = SegmentFile(
            layout.checked_segment(seal["segment"]["file"], step),
            expected_header=seal["segment"]["header_xxh3_64"],
        )
        samples = segment.read(0, len(segment))
        segment.close()
    except BufferCorruptError as error:
        log.error(
            "buffer: %s was sealed, never committed, and cannot be read: %s", seal_path.name, error
        )
        return []
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    return [
        PromptGroup(group_id, samples[rows[0]].prompt_id, tuple(samples[row] for row in rows))
        for group_id, rows in groups.items()
    ]
