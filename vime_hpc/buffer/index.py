"""The small JSON records of a buffer: its identity, a worker's seal, a step's commit. Each carries its own digest.

A commit is a pure function of the seals, so every worker that sees all of them writes the same bytes and no lock or
leader is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vime_hpc.buffer.files import Disk
from vime_hpc.buffer.layout import ASIDE, STEP_PATTERN, Layout
from vime_hpc.buffer.schema import FORMAT_VERSION, BufferSchema, canonical_json
from vime_hpc.errors import BufferCorruptError, ConfigError
from vime_hpc.types import Sample, Status

IDENTITY_FORMAT = "vime-hpc rollout buffer"
SEAL_FORMAT = "vime-hpc worker seal"
COMMIT_FORMAT = "vime-hpc step commit"

Record = dict[str, Any]


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Canonical JSON with the XXH3-128 of everything else under "digest", and a newline."""
    body = {key: value for key, value in record.items() if key != "digest"}
    return (
        canonical_json({**body, "digest": xxhash.xxh3_128_hexdigest(canonical_json(body))}) + b"\n"
    )


def check_record(record: Any, kind: str, where: str) -> Record:
    """A parsed record, compared with its own digest, kind and version.

    Raises:
        BufferCorruptError: any of them is not as expected.
    """
    if not isinstance(record, dict) or record.get("format") != kind:
        raise BufferCorruptError(f"{where}: not a record of kind {kind!r}")
    if record.get("format_version") not in range(1, FORMAT_VERSION + 1):
        raise BufferCorruptError(
            f"{where}: format version {record.get('format_version')!r}, this vime-hpc reads 1 to {FORMAT_VERSION}"
        )
    body = {key: value for key, value in record.items() if key != "digest"}
    try:
        found = xxhash.xxh3_128_hexdigest(canonical_json(body))
    except ValueError as error:
        raise BufferCorruptError(f"{where}: holds values no record has: {error}") from error
    if found != record.get("digest"):
        raise BufferCorruptError(
            f"{where}: its content has digest {found}, it states {record.get('digest')}; the file was "
            "changed after it was written, or the disk damaged it"
        )
    return record


def read_record(path: Path, kind: str) -> Record:
    """A record from disk. FileNotFoundError passes through: absence is for the caller to judge."""
    data = path.read_bytes()
    try:
        record = json.loads(data)
    except ValueError as error:
        raise BufferCorruptError(
            f"{path}: not JSON ({error}); {len(data)} bytes. To see the rest of the buffer: "
            f"vime-hpc buffer verify {path.parent.parent}"
        ) from error
    return check_record(record, kind, str(path))


def read_commit(layout: Layout, step: int) -> Record:
    record = read_record(layout.commit(step), COMMIT_FORMAT)
    if record["step"] != step:
        raise BufferCorruptError(
            f"{layout.commit(step)}: is the commit of step {record['step']}, expected {step}"
        )
    return record


def read_identity(layout: Layout) -> tuple[str, BufferSchema]:
    """Run id and schema of the buffer."""
    record = read_record(layout.identity, IDENTITY_FORMAT)
    return str(record["run_id"]), BufferSchema.from_json(record["schema"], str(layout.identity))


def committed_steps(layout: Layout) -> list[int]:
    """Rising numbers of the committed steps, from file names alone."""
    if not layout.steps.is_dir():
        return []
    matches = (STEP_PATTERN.fullmatch(path.name) for path in layout.steps.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def next_uncommitted(layout: Layout) -> int:
    """First step without a commit.

    Raises:
        BufferCorruptError: a commit is missing in the middle.
    """
    steps = committed_steps(layout)
    if steps and steps != list(range(steps[0], steps[0] + len(steps))):
        missing = sorted(set(range(steps[0], steps[-1])) - set(steps))
        raise BufferCorruptError(
            f"{layout.steps}: steps up to {steps[-1]} are committed but {missing[:8]} are missing; a file was deleted. To go "
            f"on from there: vime-hpc buffer drop {layout.root} --from-step {missing[0]}"
        )
    return steps[-1] + 1 if steps else 0


def make_seal(
    *,
    run_id: str,
    step: int,
    worker: int,
    num_workers: int,
    attempt: int,
    segment: Mapping[str, Any],
    resume_state: Mapping[str, Any],
    stats: Mapping[str, float],
) -> Record:
    """A worker's part of a step's commit. Raises ConfigError when the resume state is not plain JSON."""
    try:
        canonical_json(dict(resume_state))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"step {step}: the prompt source's resume state is not plain JSON: {error}"
        ) from error
    return {
        "format": SEAL_FORMAT,
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "step": step,
        "worker": worker,
        "num_workers": num_workers,
        "attempt": attempt,
        "segment": dict(segment),
        "resume_state": dict(resume_state),
        "stats": {name: _stored_float(value) for name, value in stats.items()},
    }


def make_commit(seals: Sequence[Record]) -> Record:
    """The commit all seals of a step add up to."""
    first = seals[0]
    workers = [
        {key: seal[key] for key in ("worker", "segment", "resume_state", "stats")}
        for seal in sorted(seals, key=lambda seal: int(seal["worker"]))
    ]
    return {
        "format": COMMIT_FORMAT,
        "format_version": FORMAT_VERSION,
        "run_id": first["run_id"],
        "step": first["step"],
        "attempt": first["attempt"],
        "num_workers": first["num_workers"],
        "workers": workers,
    }


def describe_segment(
    samples: Sequence[Sample],
    file: str,
    size: int,
    digest: str,
    header: str,
    recovered: Collection[int],
) -> dict[str, Any]:
    """The segment's entry in seal and commit."""
    groups = {sample.group_id for sample in samples}
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        "file": file,
        "bytes": size,
        "xxh3_128": digest,
        "header_xxh3_64": header,
        "num_samples": len(samples),
        "num_groups": len(groups),
        "group_ids": id_ranges(list(groups)),
        "num_recovered_groups": len(groups & set(recovered)),
        "num_usable": len(rewards),
        "reward_sum": math.fsum(rewards),
        "num_truncated": sum(sample.status is Status.TRUNCATED for sample in samples),
        "num_tokens": sum(len(sample.tokens) for sample in samples),
        "num_response_tokens": sum(sample.response_length for sample in samples),
    }


def id_ranges(ids: Sequence[int]) -> list[list[int]]:
    """Sorted ids as [first, last] pairs, both inclusive."""
    ranges: list[list[int]] = []
    for value in sorted(set(ids)):
        if ranges and ranges[-1][1] == value - 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ranges


def committed_groups(commit: Mapping[str, Any]) -> set[int]:
    """Group ids of a committed step."""
    return {
        group
        for worker in commit["workers"]
        for first, last in worker["segment"]["group_ids"]
        for group in range(first, last + 1)
    }


def write_record(
    disk: Disk, path: Path, record: Mapping[str, Any], *, point: str, aside: Path | None = None
) -> None:
    """Atomically and durably; `aside` is the temporary path, beside `path` by default."""
    aside = aside or path.with_name(path.name + ASIDE)
    disk.write_aside(aside, encode_record(record))
    disk.at(f"{point}.written")
    disk.publish(aside, path)
    disk.at(f"{point}.durable")


def content_digest(sample_ids: npt.NDArray[np.int64], digests: npt.NDArray[np.uint64]) -> str:
    """XXH3-128 over (sample_id, sample digest) in sample_id order: equal whatever files the samples lie in."""
    order = np.argsort(sample_ids, kind="stable")
    pairs = np.stack(
        [sample_ids[order].astype("<i8").view("<u8"), digests[order].astype("<u8")], axis=1
    )
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(pairs).tobytes())


def _stored_float(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)
