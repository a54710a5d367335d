"""`vime-hpc bench buffer`: what the buffer costs beside the bare device and beside other formats, as ratios of one run.

Every write ends in fsync. Competitors that are not installed are left out. Every ratio of times is the median over rounds
in which all its candidates ran one after the other, beside the smallest and the largest (`…_min`, `…_max`).
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from vime_hpc.buffer.bench_formats import bench_other_formats
from vime_hpc.buffer.codec import pack_sample
from vime_hpc.buffer.files import Disk, file_digest
from vime_hpc.buffer.hdf5_handle import Handle
from vime_hpc.buffer.index import describe_segment, make_commit, make_seal, write_record
from vime_hpc.buffer.layout import Layout
from vime_hpc.buffer.measuring import (
    bytes_read,
    in_turn,
    make_groups,
    peak_memory_above,
    ratio,
    raw_publish,
    raw_write,
    remove_tree,
    timed,
    timed_write,
)
from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.schema import ROUTED, BufferSchema, RoutingShape
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.segment_writer import write_segment
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.types import PromptGroup

MOE = BufferSchema(RoutingShape(num_layers=48, top_k=8, num_experts=128))
PLAIN = BufferSchema()


def bench_buffer(work: Path, *, megabytes: int = 128, repeats: int = 5) -> dict[str, float]:
    """All figures; writes about 20 times `megabytes` into a new directory below `work` and removes it again."""
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=work) as name:
        inner = Path(name)
        figures = bench_write(inner, megabytes=megabytes, repeats=repeats)
        figures |= bench_other_formats(inner, repeats=repeats)
        figures |= bench_read(inner, repeats=repeats)
        figures |= bench_reopen(inner)
        return figures | bench_memory(inner, megabytes=16 * megabytes)


def bench_write(work: Path, *, megabytes: int, repeats: int) -> dict[str, float]:
    """Durable append of a step with routing columns against the bytes of its segment, written bare.

    `append_over_raw` is against write + fsync of one file; `append_over_raw_published` against write + fsync + rename +
    fsync of the directory, which is what a file that is whole or absent after a crash costs at least.
    """
    groups = make_groups(MOE, num_groups=max(megabytes // 6, 1), prompt=1000, response=3000)
    numbers = itertools.count()

    def append() -> float:
        root = work / f"write-{next(numbers)}"
        seconds = _timed_append(root, groups)
        remove_tree(root)
        return seconds

    first = work / f"write-{next(numbers)}"
    _timed_append(first, groups)  # gives the reference its bytes, and takes the first run's costs
    entry = BufferReader(first).commit(0)["workers"][0]["segment"]
    data = (first / entry["file"]).read_bytes()
    remove_tree(first)
    times = in_turn(
        {
            "append": append,
            "raw": lambda: timed_write(raw_write, work / "raw", data),
            "published": lambda: timed_write(raw_publish, work / "raw", data),
        },
        repeats,
    )
    mib = len(data) / 2**20
    return {
        "write/segment_mib": mib,
        "write/append_mib_per_s": mib / statistics.median(times["append"]),
        "write/raw_mib_per_s": mib / statistics.median(times["raw"]),
        "write/raw_published_mib_per_s": mib / statistics.median(times["published"]),
        **ratio("write/append_over_raw", times["raw"], times["append"]),
        **ratio("write/append_over_raw_published", times["published"], times["append"]),
    }


def _timed_append(root: Path, groups: Sequence[PromptGroup]) -> float:
    """Seconds in which a new buffer's first step is sealed and committed."""
    RolloutBuffer.create(root, run_id="bench", schema=MOE)
    with BufferWriter(root) as sink:
        return timed(functools.partial(sink.append, 0, groups, resume_state={}, stats={}))


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


def bench_read(work: Path, *, repeats: int) -> dict[str, float]:
    """A whole column against np.fromfile, and the bytes read for one pipeline rank's layers of its own samples.

    Everything is read from the page cache. Ours compares digests and has no option not to; so one reference hashes what
    it reads, and the file is also read as ours reads it with the digests left out.
    """
    path = work / "read.h5"
    samples = [
        pack_sample(MOE, sample)
        for group in make_groups(MOE, num_groups=16, prompt=1000, response=3000)
        for sample in group.samples
    ]
    write_segment(path, MOE, samples, {"run_id": "bench", "step": 0})
    segment, handle = SegmentFile(path), Handle(path)
    flat = work / "flat.bin"
    segment.column(ROUTED)[0].tofile(flat)

    def hashed() -> None:
        xxhash.xxh3_64_intdigest(np.fromfile(flat, dtype=np.uint8).data)

    times = in_turn(
        {
            "column": lambda: timed(lambda: segment.column(ROUTED)),
            "unchecked": lambda: timed(lambda: handle.read(ROUTED, np.uint8)),
            "fromfile": lambda: timed(lambda: np.fromfile(flat, dtype=np.uint8)),
            "hashed": lambda: timed(hashed),
        },
        repeats,
    )
    handle.file.close()
    before = bytes_read()
    segment.read(0, len(segment) // 4, layers=slice(0, 12))
    touched = bytes_read() - before
    segment.close()
    size = path.stat().st_size
    path.unlink()
    flat.unlink()
    return {
        **ratio("read/column_over_fromfile", times["fromfile"], times["column"]),
        **ratio("read/column_over_fromfile_with_xxh3", times["hashed"], times["column"]),
        **ratio("read/unchecked_column_over_fromfile", times["fromfile"], times["unchecked"]),
        "read/quarter_of_samples_and_layers_share_of_bytes": touched / size,
    }


def bench_reopen(work: Path, *, num_steps: int = 10_000) -> dict[str, float]:
    """Time until a writer and a reader of a buffer of 10,000 committed segments know where they stand."""
    root = work / "reopen"
    make_committed(root, num_steps)
    writer = timed(lambda: BufferWriter(root, attempt=1, durable=False).close())
    reader = timed(lambda: BufferReader(root).last_resume_state())
    remove_tree(root)
    return {"reopen/num_segments": num_steps, "reopen/writer_s": writer, "reopen/reader_s": reader}


def make_committed(root: Path, num_steps: int) -> None:
    """A buffer whose committed steps are all links to one segment; quick to make, and every commit is true of it."""
    RolloutBuffer.create(root, run_id="bench", schema=PLAIN, durable=False)
    layout, disk = Layout(root), Disk(durable=False)
    (group,) = make_groups(PLAIN, num_groups=1, prompt=4, response=4)
    template = root / "template.h5"
    header = write_segment(
        template,
        PLAIN,
        [pack_sample(PLAIN, sample) for sample in group.samples],
        {"run_id": "bench", "step": 0},
    )
    size, digest = file_digest(template)
    for step in range(num_steps):
        path = layout.segment(step, 0, 0)
        path.parent.mkdir()
        os.link(template, path)
        entry = describe_segment(group.samples, layout.relative(path), size, digest, header, ())
        entry["group_ids"] = [[step, step]]  # but for this: no two steps may have a group in common
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
    template.unlink()
