"""Where everything of a buffer lies, and the strict patterns its names follow. Names read from data must match one.

buffer/ buffer.json
        segments/step-000012/worker-0003.e0001.h5            sealed samples of one worker, never changed
        steps/000012.json                                    the commit of a step
        journal/e0001/                                       what attempt 1 is doing: gone from this name once fenced off
            worker-0003.json                                 who writes
            step-000012.worker-0003.log                      acknowledged prompt groups of an uncommitted step
            step-000012.worker-0003.seal.json                the worker's part of the commit
        journal/e0001.fenced/                                the same, of an attempt that was superseded
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vime_hpc.errors import BufferCorruptError, ConfigError

SEGMENT_PATTERN = re.compile(r"segments/step-(\d{6,})/worker-(\d{4,})\.e(\d{4,})\.h5")
STEP_PATTERN = re.compile(r"(\d{6,})\.json")
ATTEMPT_PATTERN = re.compile(r"e(\d{4,})(\.fenced\d*)?")
JOURNAL_PATTERN = re.compile(r"step-(\d{6,})\.worker-(\d{4,})\.log")
SEAL_PATTERN = re.compile(r"step-(\d{6,})\.worker-(\d{4,})\.seal\.json")
WORKER_PATTERN = re.compile(r"worker-(\d{4,})\.json")
ASIDE = ".aside"
"""Suffix of a file that does not have its final name yet."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one buffer directory."""

    root: Path

    @property
    def identity(self) -> Path:
        return self.root / "buffer.json"

    @property
    def steps(self) -> Path:
        return self.root / "steps"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    def commit(self, step: int) -> Path:
        return self.steps / f"{step:06d}.json"

    def segment_directory(self, step: int) -> Path:
        return self.segments / f"step-{step:06d}"

    def segment(self, step: int, worker: int, attempt: int) -> Path:
        return self.segment_directory(step) / f"worker-{worker:04d}.e{attempt:04d}.h5"

    def attempt(self, attempt: int) -> Path:
        return self.journal / f"e{attempt:04d}"

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def checked_segment(self, name: str, step: int) -> Path:
        """The path of a segment named in a commit.

        Raises:
            BufferCorruptError: the name is not a segment of this step; it may not lead out of the buffer.
        """
        match = SEGMENT_PATTERN.fullmatch(name)
        if match is None or int(match[1]) != step:
            raise BufferCorruptError(
                f"{self.commit(step)}: names the segment {name!r}, expected "
                f"segments/step-{step:06d}/worker-NNNN.eNNNN.h5; the commit was not written by vime-hpc"
            )
        return self.root / name


def journal_name(step: int, worker: int) -> str:
    return f"step-{step:06d}.worker-{worker:04d}.log"


def seal_name(step: int, worker: int) -> str:
    return f"step-{step:06d}.worker-{worker:04d}.seal.json"


def find_buffer(path: Path) -> Layout:
    """The buffer at `path`, which may be the buffer directory or the run directory above it.

    Raises:
        ConfigError: there is none.
    """
    for root in (path, path / "buffer"):
        if (root / "buffer.json").is_file():
            return Layout(root)
    raise ConfigError(
        f"{path}: no rollout buffer here (no buffer.json in it or in {path / 'buffer'}); "
        "give the run directory or its buffer directory"
    )
