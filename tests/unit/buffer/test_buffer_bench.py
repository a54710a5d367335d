"""`vime-hpc bench buffer` measures what it says, on little data; its figures themselves are no test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vime_hpc.buffer.bench import bench_memory, bench_read, bench_reopen, bench_write
from vime_hpc.buffer.bench_formats import bench_other_formats
from vime_hpc.buffer.measuring import peak_memory_above


def test_every_part_gives_its_figures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    figures = bench_write(tmp_path, megabytes=12, repeats=1)
    figures |= bench_read(tmp_path)
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
