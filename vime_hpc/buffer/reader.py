"""The trainer's side of the buffer: wait for a step, read its small table whole and its samples in part."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.attempts import list_attempts, names_in, seals_of
from vime_hpc.buffer.index import (
    COMMIT_FORMAT,
    Record,
    check_record,
    committed_steps,
    content_digest,
    next_uncommitted,
    read_commit,
    read_identity,
)
from vime_hpc.buffer.layout import WORKER_PATTERN, Layout, find_buffer
from vime_hpc.buffer.schema import STATUS_NAMES
from vime_hpc.buffer.segment_reader import SegmentFile, coalesce
from vime_hpc.buffer.stats import merged_stats
from vime_hpc.errors import BufferCorruptError, DeadlineError
from vime_hpc.types import Sample, SampleTable, Status

_FIRST_POLL_S, _LONGEST_POLL_S = 0.005, 0.5
_TABLE_COLUMNS = (
    "sample_id",
    "group_id",
    "rollout_id",
    "prompt_length",
    "response_length",
    "mask_sum",
    "weight_version",
)


class StepBatch:
    """One committed step (`protocols.StepBatch`): its table in sample_id order, and reading of chosen samples."""

    def __init__(
        self,
        step: int,
        table: SampleTable,
        stats: Mapping[str, float],
        segments: Sequence[SegmentFile],
        places: npt.NDArray[np.int64],
        scalars: npt.NDArray[Any],
    ) -> None:
        self.step, self.table, self.stats = step, table, stats
        self.scalars = scalars
        """[N] record array of every scalar column, in the table's order."""
        self._segments, self._places = segments, places

    @classmethod
    def from_commit(cls, root: Path, commit: Mapping[str, Any]) -> Self:
        """The batch a commit describes; one rank may read the commit and broadcast it as JSON.

        Args:
            root: buffer or run directory.
            commit: content of steps/NNNNNN.json, as `BufferReader.commit` returns it.
        Raises:
            BufferCorruptError: a segment is missing, has another size or header than committed, or is damaged.
        """
        layout = find_buffer(Path(root))
        record = check_record(dict(commit), COMMIT_FORMAT, f"commit of step {commit.get('step')}")
        step = int(record["step"])
        segments = [_open_segment(layout, step, worker["segment"]) for worker in record["workers"]]
        dtypes = {segment.schema.scalar_dtype for segment in segments}
        if len(dtypes) > 1:
            raise BufferCorruptError(
                f"{layout.commit(step)}: the segments of step {step} have different columns"
            )
        scalars = np.concatenate([segment.scalars for segment in segments])
        places = np.array(
            [
                (number, row)
                for number, segment in enumerate(segments)
                for row in range(len(segment))
            ],
            dtype=np.int64,
        ).reshape(-1, 2)
        order = np.argsort(scalars["sample_id"], kind="stable")
        scalars, places = scalars[order], places[order]
        twice = scalars["sample_id"][1:][np.diff(scalars["sample_id"]) == 0]
        if twice.size:
            raise BufferCorruptError(
                f"{layout.commit(step)}: samples {twice[:8].tolist()} were sealed by two workers; "
                "they must share out the prompt groups"
            )
        return cls(step, _table(scalars), merged_stats(record), segments, places, scalars)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, indices: Sequence[int], *, layers: slice | None = None) -> list[Sample]:
        """The samples at these rows of `table`, in the order asked for, digests checked.

        Reads only their slices of each column, neighbours in one piece, and of routed_experts only `layers`.

        Raises:
            BufferCorruptError: a digest does not match; names file, sample and the next command.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(
                f"step {self.step} has {len(self)} samples; asked for rows {wanted.min()} to {wanted.max()}"
            )
        found: dict[tuple[int, int], Sample] = {}
        places = self._places[wanted]
        for number, segment in enumerate(self._segments):
            rows = np.unique(places[places[:, 0] == number, 1]).tolist()
            for first, last in coalesce(rows):
                for row, sample in enumerate(segment.read(first, last, layers=layers), start=first):
                    found[number, row] = sample
        return [found[int(number), int(row)] for number, row in places]

    def content_digest(self) -> str:
        """XXH3-128 over ids and digests of the samples: the same however many workers wrote them."""
        digests = np.concatenate([segment.digests() for segment in self._segments])
        ids = np.concatenate([segment.scalars["sample_id"] for segment in self._segments])
        return content_digest(ids, digests)

    def column(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64] | None]:
        """A whole column in segment order (see RolloutBuffer.column)."""
        parts = [segment.column(name) for segment in self._segments]
        axis = 1 if parts and parts[0][0].ndim == 3 else 0
        values = np.concatenate([part for part, _ in parts], axis=axis)
        if parts[0][1] is None:
            return values, None
        offsets, base = [np.zeros(1, dtype=np.int64)], 0
        for part, edges in parts:
            assert edges is not None
            offsets.append(edges[1:] + base)
            base += part.shape[axis]
        return values, np.concatenate(offsets)

    def segment_ids(self) -> npt.NDArray[np.int64]:
        """sample_id in segment order: what `column` is aligned with."""
        return np.concatenate([segment.scalars["sample_id"] for segment in self._segments])

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


class BufferReader:
    """Committed steps of a buffer (a `BatchSource`). Never writes, takes no locks, may run on any node."""

    def __init__(self, root: Path, *, timeout_s: float | None = None) -> None:
        """
        Args:
            root: buffer or run directory.
            timeout_s: longest wait of `wait_for` when it is given none; None = for ever.
        """
        self.layout = find_buffer(Path(root))
        self.run_id, self.schema = read_identity(self.layout)
        self._timeout_s = timeout_s

    def committed_steps(self) -> list[int]:
        """Rising; from file names alone."""
        return committed_steps(self.layout)

    @property
    def next_step(self) -> int:
        """First step without a commit."""
        return next_uncommitted(self.layout)

    def commit(self, step: int) -> Record:
        """The commit of a step, checked: plain JSON, to be broadcast and given to `StepBatch.from_commit`.

        Raises:
            FileNotFoundError: not committed yet.
            BufferCorruptError: damaged.
        """
        return read_commit(self.layout, step)

    def batch(self, step: int) -> StepBatch:
        """A committed step."""
        return StepBatch.from_commit(self.layout.root, self.commit(step))

    def wait_for_commit(self, step: int, timeout_s: float | None = None) -> Record:
        """Poll until the step is committed.

        Raises:
            DeadlineError: names the workers that have not sealed it.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        start, pause = time.monotonic(), _FIRST_POLL_S
        while True:
            try:
                return read_commit(self.layout, step)
            except FileNotFoundError:
                waited = time.monotonic() - start
                if limit is not None and waited >= limit:
                    raise DeadlineError(self._who_is_missing(step, waited)) from None
                time.sleep(pause if limit is None else max(min(pause, limit - waited), 0.0))
                pause = min(pause * 1.5, _LONGEST_POLL_S)

    def wait_for(self, step: int, timeout_s: float | None = None) -> StepBatch:
        """Block until the step is committed; see wait_for_commit."""
        return StepBatch.from_commit(self.layout.root, self.wait_for_commit(step, timeout_s))

    def last_resume_states(self) -> list[Mapping[str, Any]]:
        """Resume state of the prompt source of every worker in the newest commit; empty before the first."""
        steps = self.committed_steps()
        return (
            []
            if not steps
            else [worker["resume_state"] for worker in self.commit(steps[-1])["workers"]]
        )

    def last_resume_state(self, worker: int = 0) -> Mapping[str, Any] | None:
        """One worker's resume state in the newest commit; None before the first."""
        states = self.last_resume_states()
        return states[worker] if states else None

    def _who_is_missing(self, step: int, waited_s: float) -> str:
        head = f"{self.layout.root}: step {step} was not committed within {waited_s:.1f} s"
        attempts = [directory for directory in list_attempts(self.layout) if not directory.fenced]
        if not attempts:
            return f"{head}; no rollout worker has started writing here (next uncommitted step is {self.next_step})"
        path = attempts[-1].path
        workers = {
            int(match[1])
            for entry in names_in(path)
            if (match := WORKER_PATTERN.fullmatch(entry.name))
        }
        sealed = {int(seal["worker"]) for seal in seals_of(path, step)}
        missing = sorted(workers - sealed)
        return (
            f"{head}; sealed by workers {sorted(sealed)}, missing workers {missing} of attempt {attempts[-1].attempt} "
            f"(next uncommitted step is {self.next_step}); look at their logs, the generation may be slow or dead"
        )


def check_segment_file(layout: Layout, step: int, entry: Mapping[str, Any]) -> Path:
    """Where a committed segment lies.

    Args:
        entry: its entry in the step's commit.
    Raises:
        BufferCorruptError: it is missing, or has another size than committed.
    """
    path = layout.checked_segment(str(entry["file"]), step)
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise BufferCorruptError(
            f"{path}: missing, but step {step} is committed with it; if the directory was copied, copy "
            f"it again, else: vime-hpc buffer drop {layout.root} --from-step {step}"
        ) from error
    if size != entry["bytes"]:
        raise BufferCorruptError(
            f"{path}: has {size} bytes, step {step} was committed with {entry['bytes']}; the file was cut or "
            f"changed. To drop it and all later steps: vime-hpc buffer drop {layout.root} --from-step {step}"
        )
    return path


def _open_segment(layout: Layout, step: int, entry: Mapping[str, Any]) -> SegmentFile:
    path = check_segment_file(layout, step, entry)
    segment = SegmentFile(path, expected_header=entry["header_xxh3_64"])
    if len(segment) != entry["num_samples"]:
        raise BufferCorruptError(
            f"{path}: has {len(segment)} samples, step {step} was committed with {entry['num_samples']}"
        )
    return segment


def _table(scalars: npt.NDArray[Any]) -> SampleTable:
    columns = {name: np.ascontiguousarray(scalars[name], dtype=np.int64) for name in _TABLE_COLUMNS}
    return SampleTable(
        **columns,
        reward=np.ascontiguousarray(scalars["reward"]),
        reward_usable=scalars["reward_usable"] != 0,
        truncated=scalars["status"] == STATUS_NAMES.index(Status.TRUNCATED.value),
    )
