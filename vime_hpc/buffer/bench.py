"""`vime-hpc bench buffer`: what the buffer costs beside the bare device and beside other formats, as ratios of one run.

Every write ends in fsync. Competitors that are not installed are left out. Ratios are of best-of-n times taken in turn,
so that a noisy machine hits all of them alike.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import numpy as np

from vime_hpc.buffer.bench_formats import bench_other_formats
from vime_hpc.buffer.codec import pack_sample
from vime_hpc.buffer.files import Disk, file_digest
from vime_hpc.buffer.index import make_commit, make_seal, write_record
from vime_hpc.buffer.layout import Layout
from vime_hpc.buffer.measuring import (
    bytes_read,
    make_groups,
    peak_memory_above,
    remove_tree,
    timed,
    timed_raw_write,
)
from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.segment_writer import write_segment
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter

MOE = BufferSchema(RoutingShape(num_layers=48, top_k=8, num_experts=128))
PLAIN = BufferSchema()


def bench_buffer(work: Path, *, megabytes: int = 128, repeats: int = 3) -> dict[str, float]:
    """All figures; writes about 20 times `megabytes` into a new directory below `work` and removes it again."""
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=work) as name:
        inner = Path(name)
        figures = bench_write(inner, megabytes=megabytes, repeats=repeats)
        figures |= bench_other_formats(inner, repeats=repeats)
        figures |= bench_read(inner)
        figures |= bench_reopen(inner)
        return figures | bench_memory(inner, megabytes=16 * megabytes)


def bench_write(work: Path, *, megabytes: int, repeats: int) -> dict[str, float]:
    """Durable append of a step with routing columns against raw write + fsync of as many bytes."""
    groups = make_groups(MOE, num_groups=max(megabytes // 6, 1), prompt=1000, response=3000)
    times: dict[str, list[float]] = {"append": [], "raw": []}
    size = 0
    for number in range(repeats):
        root = work / f"write-{number}"
        RolloutBuffer.create(root, run_id="bench", schema=MOE)
        with BufferWriter(root) as sink:
            append = functools.partial(sink.append, 0, groups, resume_state={}, stats={})
            times["append"].append(timed(append))
        entry = BufferReader(root).commit(0)["workers"][0]["segment"]
        size = entry["bytes"]
        data = (root / entry["file"]).read_bytes()
        times["raw"].append(timed_raw_write(work / "raw", data))
        del data
        remove_tree(root)
    best = {name: min(values) for name, values in times.items()}
    return {
        "write/segment_mib": size / 2**20,
        "write/append_mib_per_s": size / 2**20 / best["append"],
        "write/raw_mib_per_s": size / 2**20 / best["raw"],
        "write/append_over_raw": best["raw"] / best["append"],
    }


def bench_memory(work: Path, *, megabytes: int) -> dict[str, float]:
    """What appending a step of this size needs above the samples, which are in memory already."""
    groups = make_groups(MOE, num_groups=max(megabytes // 6, 1), prompt=1000, response=3000)
    root = work / "memory"
    RolloutBuffer.create(root, run_id="bench", schema=MOE)
    with BufferWriter(root) as sink:
        append = functools.partial(sink.append, 0, groups, resume_state={}, stats={})
        above = peak_memory_above(append)
    size = BufferReader(root).commit(0)["workers"][0]["segment"]["bytes"]
    remove_tree(root)
    return {"memory/segment_mib": size / 2**20, "memory/peak_above_samples_mib": above / 2**20}


def bench_read(work: Path) -> dict[str, float]:
    """A whole column against np.fromfile, and the bytes read for one pipeline rank's layers of its own samples."""
    path = work / "read.h5"
    samples = [
        pack_sample(MOE, sample)
        for group in make_groups(MOE, num_groups=16, prompt=1000, response=3000)
        for sample in group.samples
    ]
    write_segment(path, MOE, samples, {"run_id": "bench", "step": 0})
    segment = SegmentFile(path)
    values, _ = segment.column("routed_experts")
    flat = work / "flat.bin"
    values.tofile(flat)
    column = min(timed(lambda: segment.column("routed_experts")) for _ in range(3))
    raw = min(timed(lambda: np.fromfile(flat, dtype=np.uint8)) for _ in range(3))
    before = bytes_read()
    segment.read(0, len(segment) // 4, layers=slice(0, 12))
    touched = bytes_read() - before
    segment.close()
    size = path.stat().st_size
    path.unlink()
    flat.unlink()
    return {
        "read/column_over_fromfile": raw / column,
        "read/quarter_of_samples_and_layers_share_of_bytes": touched / size,
    }


def bench_reopen(work: Path, *, num_steps: int = 10_000) -> dict[str, float]:
    """Time until a writer and a reader of a buffer of 10,000 committed segments know where they stand."""
    root = work / "reopen"
    RolloutBuffer.create(root, run_id="bench", schema=PLAIN, durable=False)
    layout, disk = Layout(root), Disk(durable=False)
    samples = [
        pack_sample(PLAIN, sample)
        for sample in make_groups(PLAIN, num_groups=1, prompt=4, response=4)[0].samples
    ]
    template = work / "template.h5"
    header = write_segment(template, PLAIN, samples, {"run_id": "bench", "step": 0})
    size, digest = file_digest(template)
    for step in range(num_steps):
        path = layout.segment(step, 0, 0)
        path.parent.mkdir()
        os.link(template, path)
        entry = {
            "file": layout.relative(path),
            "bytes": size,
            "xxh3_128": digest,
            "header_xxh3_64": header,
            "num_samples": 8,
            "num_groups": 1,
            "group_ids": [[step, step]],
        }
        seal = make_seal(
            run_id="bench",
            step=step,
            worker=0,
            num_workers=1,
            attempt=0,
            segment=entry,
            resume_state={},
            stats={},
        )
        write_record(disk, layout.commit(step), make_commit([seal]), point="commit")
    writer = timed(lambda: BufferWriter(root, attempt=1, durable=False).close())
    reader = timed(lambda: BufferReader(root).last_resume_state())
    remove_tree(root)
    template.unlink()
    return {"reopen/num_segments": num_steps, "reopen/writer_s": writer, "reopen/reader_s": reader}
