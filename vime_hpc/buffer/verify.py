"""Check everything a buffer holds against its own records, and name file, step, sample and column of what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vime_hpc.buffer.attempts import list_attempts, names_in
from vime_hpc.buffer.files import file_digest
from vime_hpc.buffer.index import (
    committed_groups,
    committed_steps,
    next_uncommitted,
    read_commit,
    read_identity,
)
from vime_hpc.buffer.journal import replay
from vime_hpc.buffer.layout import ASIDE, JOURNAL_PATTERN, Layout
from vime_hpc.buffer.schema import ROUTED, BufferSchema
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.values import nuclei_of
from vime_hpc.errors import BufferCorruptError
from vime_hpc.types import Sample

Encode = Callable[[str], list[int]]
_BLOCK = 64
"""Samples read at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing `verify` has to say. Only `damage` and `bad_value` make the buffer not good."""

    kind: Literal["damage", "bad_value", "information"]
    file: str
    message: str
    step: int | None = None
    sample_id: int | None = None
    column: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify_buffer(
    layout: Layout,
    *,
    first_step: int = 0,
    last_step: int | None = None,
    encode: Encode | None = None,
) -> Iterator[Finding]:
    """All findings, in order of steps, then journals and leftovers.

    Args:
        encode: tokenizer; when given, responses whose text encodes to other tokens are reported as information (the
            tokens are the truth; the difference is retokenization drift).
    """
    try:
        next_uncommitted(layout)
    except BufferCorruptError as error:
        yield Finding("damage", "steps", str(error))
    owners: dict[int, int] = {}
    for step in committed_steps(layout):
        if step < first_step or (last_step is not None and step > last_step):
            continue
        name = layout.relative(layout.commit(step))
        try:
            commit = read_commit(layout, step)
        except BufferCorruptError as error:
            yield Finding("damage", name, str(error), step)
            continue
        twice = sorted(
            group for group in committed_groups(commit) if owners.setdefault(group, step) != step
        )
        if twice:
            yield Finding(
                "damage",
                name,
                f"groups {twice[:8]} were committed before, in step {owners[twice[0]]}",
                step,
            )
        for worker in commit["workers"]:
            yield from verify_segment(layout, step, worker["segment"], encode)
    yield from _verify_journals(layout)


def verify_segment(
    layout: Layout, step: int, entry: Mapping[str, Any], encode: Encode | None = None
) -> Iterator[Finding]:
    """One committed segment: its bytes, then its columns, then its samples, then the values in them."""
    name = str(entry["file"])
    try:
        path = layout.checked_segment(name, step)
        size, digest = file_digest(path)
    except (BufferCorruptError, OSError) as error:
        yield Finding("damage", name, f"cannot be read: {error}", step)
        return
    if size != entry["bytes"]:
        yield Finding(
            "damage",
            name,
            f"has {size} bytes, the commit says {entry['bytes']}: cut or appended to",
            step,
        )
    elif digest != entry["xxh3_128"]:
        yield Finding(
            "damage",
            name,
            f"has XXH3-128 {digest}, the commit says {entry['xxh3_128']}: its bytes changed",
            step,
        )
    try:
        segment = SegmentFile(path, expected_header=entry["header_xxh3_64"])
    except BufferCorruptError as error:
        yield Finding("damage", name, str(error), step)
        return
    if size != entry["bytes"] or digest != entry["xxh3_128"]:
        yield from _verify_columns(segment, name, step)
    for first in range(0, len(segment), _BLOCK):
        yield from _verify_rows(
            segment, range(first, min(first + _BLOCK, len(segment))), name, step, encode
        )
    segment.close()


def _verify_rows(
    segment: SegmentFile, rows: range, name: str, step: int, encode: Encode | None
) -> Iterator[Finding]:
    """A block of samples in one read; one by one only to find the damaged one."""
    try:
        samples = segment.read(rows.start, rows.stop)
    except BufferCorruptError as error:
        if len(rows) == 1:
            yield Finding(
                "damage", name, str(error), step, int(segment.scalars["sample_id"][rows.start])
            )
        else:
            for row in rows:
                yield from _verify_rows(segment, range(row, row + 1), name, step, encode)
        return
    for sample in samples:
        yield from _verify_values(sample, segment.schema, name, step, encode)


def _verify_columns(segment: SegmentFile, name: str, step: int) -> Iterator[Finding]:
    columns = [column.name for column in segment.schema.ragged] + (
        [ROUTED] if segment.schema.routing else []
    )
    for column in columns:
        try:
            segment.column(column)
        except BufferCorruptError as error:
            yield Finding("damage", name, str(error), step, column=column)


def _verify_values(
    sample: Sample, schema: BufferSchema, name: str, step: int, encode: Encode | None
) -> Iterator[Finding]:
    broken = np.flatnonzero(~np.isfinite(sample.rollout_logprobs) & (sample.loss_mask != 0))
    if broken.size:
        trained = (
            "it is excluded from training" if sample.reward is None else "IT WOULD BE TRAINED ON"
        )
        yield Finding(
            "bad_value",
            name,
            f"rollout_logprobs is not finite at response tokens {broken[:8].tolist()}; {trained}",
            step,
            sample.sample_id,
            "rollout_logprobs",
        )
    outside = _outside_nucleus(sample)
    if outside:
        yield Finding(
            "bad_value",
            name,
            f"the sampled ids at response tokens {outside[:8]} are not in their own top-p sets; replaying the sets would give "
            "them probability 0",
            step,
            sample.sample_id,
            "top_p_token_ids",
        )
    if sample.routed_experts is not None and schema.routing is not None:
        missing = int(schema.routing.missing_rows(sample.routed_experts).sum())
        if missing:
            yield Finding(
                "information",
                name,
                f"{missing} (token, layer) routings are marked missing",
                step,
                sample.sample_id,
                ROUTED,
            )
    if encode is not None and sample.response_text:
        tokens = encode(sample.response_text)
        if tokens != sample.tokens[sample.prompt_length :].tolist():
            yield Finding(
                "information",
                name,
                f"response_text encodes to {len(tokens)} tokens that differ from the "
                f"{sample.response_length} sampled ones (retokenization drift; the stored tokens are the truth)",
                step,
                sample.sample_id,
                "tokens",
            )


def _outside_nucleus(sample: Sample) -> list[int]:
    """Trained response tokens that their own set of kept ids lacks."""
    response = sample.tokens[sample.prompt_length :]
    return [
        place
        for place, nucleus in enumerate(nuclei_of(sample) or [])
        if sample.loss_mask[place] and len(nucleus) and response[place] not in nucleus
    ]


def _verify_journals(layout: Layout) -> Iterator[Finding]:
    _, schema = read_identity(layout)
    for directory in list_attempts(layout):
        for path in names_in(directory.path):
            name = layout.relative(path)
            if match := JOURNAL_PATTERN.fullmatch(path.name):
                yield from _verify_journal(path, name, schema, int(match[1]))
            elif path.name.endswith(ASIDE):
                yield Finding(
                    "information",
                    name,
                    "left half-written by an interrupted writer; the next start sweeps it",
                )
    for path in sorted(layout.segments.glob(f"*/*{ASIDE}")):
        yield Finding(
            "information",
            layout.relative(path),
            "left half-written by an interrupted writer; the next start sweeps it",
        )


def _verify_journal(path: Path, name: str, schema: BufferSchema, step: int) -> Iterator[Finding]:
    result = replay(path, schema)
    groups = len({record.group_id for record in result.records if record.group is not None})
    yield Finding("information", name, f"{groups} whole groups of the open step usable", step)
    if result.torn_bytes:
        yield Finding(
            "information",
            name,
            f"{result.torn_bytes} bytes behind them belong to a group that was never acknowledged",
            step,
        )
    for offset, size in result.damaged:
        yield Finding(
            "damage",
            name,
            f"{size} bytes from byte {offset} on are damaged; groups there are generated again",
            step,
        )
