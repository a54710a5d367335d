"""`vime-hpc bench buffer` measures what it says, on little data; its figures themselves are no test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vime_hpc.buffer.bench import (
    bench_memory,
    bench_read,
    bench_reopen,
    bench_write,
    make_committed,
)
from vime_hpc.buffer.bench_formats import bench_other_formats
from vime_hpc.buffer.measuring import in_turn, peak_memory_above, ratio
from vime_hpc.buffer.store import RolloutBuffer


def test_every_part_gives_its_figures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    figures = bench_write(tmp_path, megabytes=12, repeats=1)
    figures |= bench_read(tmp_path, repeats=1)
    figures |= bench_reopen(tmp_path, num_steps=20)
    figures |= bench_memory(tmp_path, megabytes=12)
    assert all(value > 0 for name, value in figures.items() if not name.startswith("memory/"))
    assert 8 < figures["write/segment_mib"] < 16
    assert figures["reopen/num_segments"] == 20
    assert 0.05 < figures["read/quarter_of_samples_and_layers_share_of_bytes"] < 0.08
    assert not list(tmp_path.iterdir())


def test_other_formats_are_written_whole_and_removed(tmp_path: Path) -> None:
    figures = bench_other_formats(tmp_path, repeats=1)
    assert {name.split("/")[0] for name in figures} == {"formats", "formats_with_routing"}
    assert all(value > 0 for value in figures.values())
    assert not list(tmp_path.iterdir())


def test_peak_memory_counts_what_is_held_for_a_moment_only() -> None:
    def hold() -> None:
        np.ones(64 << 20, np.uint8)

    assert 60 << 20 < peak_memory_above(hold) < 80 << 20


def test_a_ratio_divides_the_times_of_one_round_and_is_their_median() -> None:
    """The machine is ten times slower in the second round: medians apart would give 3 / 2, the rounds give 3, 3, 1."""
    assert ratio("a", [3.0, 30.0, 2.0], [1.0, 10.0, 2.0]) == {"a": 3.0, "a_min": 1.0, "a_max": 3.0}


def test_every_candidate_runs_once_a_round_and_the_order_turns() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = in_turn({"a": lambda: run("a"), "b": lambda: run("b")}, 3)
    assert "".join(order) == "abbaab"
    assert times == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_the_buffer_that_is_reopened_has_the_samples_its_commits_say(tmp_path: Path) -> None:
    make_committed(tmp_path / "buffer", 3)
    buffer = RolloutBuffer.open(tmp_path / "buffer")
    assert buffer.steps() == [0, 1, 2]
    for step in buffer.steps():
        (worker,) = buffer.commit(step)["workers"]
        assert worker["segment"]["num_samples"] == len([*buffer.samples(step, step)]) == 4
