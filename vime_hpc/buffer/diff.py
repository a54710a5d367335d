"""Compare two buffers sample by sample, column by column, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vime_hpc.buffer.export import sample_row
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.types import Sample


@dataclass(frozen=True, slots=True)
class Difference:
    """One column of one sample that differs, or (column "sample") a sample only one side has."""

    step: int
    sample_id: int
    column: str
    message: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diff_buffers(
    left: RolloutBuffer, right: RolloutBuffer, *, first_step: int = 0, last_step: int | None = None
) -> Iterator[Difference]:
    """Every difference over the steps either side has committed. Floats are compared bit for bit, NaN equal to NaN."""
    steps = [
        step
        for step in sorted(set(left.steps()) | set(right.steps()))
        if first_step <= step and (last_step is None or step <= last_step)
    ]
    for step in steps:
        sides = [
            {sample.sample_id: sample for _, sample in side.samples(step, step)}
            for side in (left, right)
        ]
        for sample_id in sorted(set(sides[0]) | set(sides[1])):
            first, second = sides[0].get(sample_id), sides[1].get(sample_id)
            if first is None or second is None:
                yield Difference(
                    step,
                    sample_id,
                    "sample",
                    f"only in the {'second' if first is None else 'first'} buffer",
                )
            else:
                yield from _diff_samples(step, first, second)


def _diff_samples(step: int, left: Sample, right: Sample) -> Iterator[Difference]:
    first, second = sample_row(step, left), sample_row(step, right)
    for column in sorted(set(first) | set(second)):
        if column not in first or column not in second:
            yield Difference(
                step,
                left.sample_id,
                column,
                f"only in the {'second' if column not in first else 'first'} buffer",
            )
            continue
        one, two = first[column], second[column]
        if not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray):
            if one != two:
                yield Difference(step, left.sample_id, column, f"{one!r:.60} != {two!r:.60}")
        elif one.shape != two.shape:
            yield Difference(step, left.sample_id, column, f"length {one.shape} != {two.shape}")
        elif one.tobytes() != two.tobytes():
            places = np.argwhere((one != two) & ~((one != one) & (two != two)))
            if len(places):
                place = tuple(places[0].tolist())
                yield Difference(
                    step,
                    left.sample_id,
                    column,
                    f"{len(places)} of {one.size} entries, first at {place}: "
                    f"{one[place]} != {two[place]}",
                )
