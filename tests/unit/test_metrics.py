"""metrics.jsonl survives kills and restarts; TensorBoard reads the events."""

from __future__ import annotations

import json
from pathlib import Path

from vime_hpc.observe.metrics import MetricsWriter, read_metrics


def test_the_later_line_of_a_step_counts_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, None, "a.0")
    writer.write(0, {"train/loss": 1.0})
    writer.write(1, {"train/loss": 2.0})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "train/lo')
    assert [r["train/loss"] for r in read_metrics(path)] == [1.0, 2.0]
    writer = MetricsWriter(path, None, "a.1")
    writer.write(1, {"train/loss": 3.0})
    writer.close()
    records = read_metrics(path)
    assert [(r["step"], r["train/loss"], r["attempt"]) for r in records] == [
        (0, 1.0, "a.0"),
        (1, 3.0, "a.1"),
    ]


def test_a_value_that_is_not_finite_is_null_so_every_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path, None, "a.0").write(0, {"x": float("nan"), "y": 1.0})
    assert (
        json.loads(
            path.read_text(), parse_constant=lambda text: (_ for _ in ()).throw(ValueError(text))
        )["x"]
        is None
    )


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path / "m.jsonl", tmp_path / "tb", "a.0")
    for step in range(3):
        writer.write(step, {"train/loss": step * 0.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
