"""Metrics of a run: one JSON line a step in RUN/metrics.jsonl, and TensorBoard events. Needs no torch.

Names are vime's where the meaning is the same (train/loss, rollout/raw_reward, perf/step_time ...). After a restart a
step may stand in the file twice; the later line counts, and `read_metrics` returns that one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends metrics of one process; only one process of a run writes a given file.

    Args:
        path: the JSON-lines file.
        tensorboard: directory of the event files, or None.
        attempt: name of this start of the job, stored in every line.
    """

    def __init__(self, path: Path, tensorboard: Path | None, attempt: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._attempt = attempt
        self._events = _open_events(tensorboard) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line for the step. Values that are not finite are written as null: JSON has no NaN."""
        values = {
            name: (value if math.isfinite(value) else None)
            for name, value in sorted(metrics.items())
        }
        self._file.write(
            json.dumps({"step": step, "time": time.time(), "attempt": self._attempt, **values})
            + "\n"
        )
        self._file.flush()
        if self._events:
            self._events.add_event(_event(step, metrics))
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file in step order, the last one of each step; an unfinished last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines[:-1]:  # what follows the last newline is unfinished
        record = json.loads(line)
        by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def _cut_torn_line(path: Path) -> None:
    """A killed writer may have left half a line; the next one must not continue it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def _open_events(directory: Path) -> Any:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    directory.mkdir(parents=True, exist_ok=True)
    return EventFileWriter(str(directory))


def _event(step: int, metrics: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values: Iterable[Any] = [
        Summary.Value(tag=name, simple_value=value) for name, value in sorted(metrics.items())
    ]
    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))
