"""Samples to measure with, and what takes the measure: wall time, bytes read, peak memory of this process.

Ratios are medians over rounds: in a round every candidate runs once, and only times of one round are divided by each
other, so that a machine that slows down for a while slows both sides of a ratio.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.types import PromptGroup, Sample, Status, VersionSpan, rollout_id_of, sample_id_of


def make_groups(
    schema: BufferSchema, *, num_groups: int, prompt: int, response: int, group_size: int = 4
) -> list[PromptGroup]:
    """Groups of random samples of one length; quick to make."""
    rng, total, groups = np.random.default_rng(0), prompt + response, []
    routed = None
    if schema.routing is not None:
        routed = rng.integers(
            0,
            schema.routing.num_experts,
            (total - 1, schema.routing.num_layers * schema.routing.top_k),
            dtype=np.uint8,
        )
    base = Sample(
        sample_id=0,
        group_id=0,
        rollout_id=0,
        prompt_id=0,
        index_in_group=0,
        tokens=rng.integers(0, 150_000, total, dtype=np.int32),
        response_length=response,
        loss_mask=np.ones(response, np.uint8),
        rollout_logprobs=-rng.random(response, dtype=np.float32),
        status=Status.COMPLETED,
        reward=1.0,
        versions=(VersionSpan(0, 0),),
    )
    for group_id in range(num_groups):
        samples = []
        for index in range(group_size):
            rollout_id = rollout_id_of(group_id, index)
            experts = (
                None if routed is None else np.roll(routed, group_id * group_size + index, axis=0)
            )
            samples.append(
                replace(
                    base,
                    sample_id=sample_id_of(rollout_id),
                    group_id=group_id,
                    rollout_id=rollout_id,
                    index_in_group=index,
                    routed_experts=experts,
                )
            )
        groups.append(PromptGroup(group_id, 0, tuple(samples)))
    return groups


def raw_write(path: Path, data: bytes) -> None:
    """What the device can do: the bytes of a new file in one write, and fsync."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def raw_publish(path: Path, data: bytes) -> None:
    """`raw_write` beside, rename, fsync of the directory: the least that survives a crash as the whole file or none."""
    aside = path.with_name(path.name + ".aside")
    raw_write(aside, data)
    os.rename(aside, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def timed_write(write: Callable[[Path, bytes], None], path: Path, data: bytes) -> float:
    """Seconds of a write; the file is gone afterwards (over an old one, freeing that would be part of the time)."""
    seconds = timed(lambda: write(path, data))
    path.unlink()
    return seconds


def in_turn(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every candidate once a round, in reverse in every other round: none always comes after the same one.

    Args:
        candidates: by name, a call that returns its seconds.
    Returns:
        [rounds] seconds by name.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        names = list(candidates)
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(candidates[name]())
    return times


def ratio(
    name: str, numerators: Sequence[float], denominators: Sequence[float]
) -> dict[str, float]:
    """Median, smallest and largest of the rounds' ratios, as `name`, `name_min` and `name_max`."""
    found = [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
    return {
        name: statistics.median(found),
        f"{name}_min": min(found),
        f"{name}_max": max(found),
    }


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that starts with nothing left to collect or to write back."""
    gc.collect()
    os.sync()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bytes_read() -> int:
    """Bytes this process has read so far, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def remove_tree(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    root.rmdir()


def peak_memory_above(call: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory rose at most, over what it was before the call (Linux, glibc)."""
    gc.collect()
    # What the allocator keeps of earlier work would be used again and not be seen to rise.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel starts a new high-water mark
    before = _status_kib("VmRSS")
    call()
    return (_status_kib("VmHWM") - before) * 1024


def _status_kib(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])
