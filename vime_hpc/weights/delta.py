"""Changed elements of a tensor over its base: encode, and apply to a copy. Pure numpy.

An update by Adam at a small learning rate leaves most bfloat16 weights as they were. What is stored is, for every changed
element, how many unchanged ones lie before it, and its new value: an overwrite, so applying it twice does no harm. A gap that
does not fit its width is bridged by elements that are written with the value they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime_hpc.errors import CheckpointCorruptError

Bytes = NDArray[np.uint8]
SAME, WHOLE = "same", "whole"
SPARSE = {"sparse1": 1, "sparse2": 2}
"""Bytes a gap takes by name of the encoding."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """How a tensor differs from its base. `count`: elements written; `payload`: their gaps, then their values."""

    encoding: str
    count: int
    payload: bytes


def encode(base: Bytes, new: Bytes, itemsize: int) -> Encoded:
    """The shorter of: nothing, gaps of one byte, gaps of two bytes, the whole tensor.

    Args:
        base, new: [nbytes] uint8, of the same length.
        itemsize: bytes per element.
    """
    old, values = _elements(base, itemsize), _elements(new, itemsize)
    changed = np.flatnonzero(old != values)
    if not len(changed):
        return Encoded(SAME, 0, b"")
    skipped = np.diff(changed, prepend=-1) - 1
    sizes = {
        name: (len(changed) + int((skipped >> (8 * width)).sum())) * (width + itemsize)
        for name, width in SPARSE.items()
    }
    encoding = min(sizes, key=sizes.__getitem__)
    if sizes[encoding] >= len(new):
        return Encoded(WHOLE, len(values), new.tobytes())
    positions = _with_bridges(changed, skipped, 1 << (8 * SPARSE[encoding]))
    gaps = (np.diff(positions, prepend=-1) - 1).astype(f"<u{SPARSE[encoding]}")
    return Encoded(encoding, len(positions), gaps.tobytes() + values[positions].tobytes())


def apply(target: Bytes, encoding: str, count: int, payload: Bytes, itemsize: int) -> None:
    """Write the changed elements into `target`, a private copy of the base.

    Raises:
        CheckpointCorruptError: the payload does not have the length or the places its record says.
    """
    if encoding == SAME:
        return
    if encoding == WHOLE:
        if len(payload) != len(target):
            raise CheckpointCorruptError(f"{len(payload)} bytes for a tensor of {len(target)}")
        target[:] = payload
        return
    if encoding not in SPARSE:
        raise CheckpointCorruptError(f"unknown encoding {encoding!r}")
    width = SPARSE[encoding]
    if len(payload) != count * (width + itemsize):
        raise CheckpointCorruptError(
            f"{len(payload)} bytes for {count} changed elements of {itemsize} bytes ({encoding})"
        )
    gaps = np.frombuffer(payload, f"<u{width}", count)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    elements = _elements(target, itemsize)
    if count and positions[-1] >= len(elements):
        raise CheckpointCorruptError(
            f"a changed element at {positions[-1]} of a tensor of {len(elements)} elements"
        )
    elements[positions] = np.frombuffer(payload, f"<u{itemsize}", count, offset=count * width)


def _elements(data: Bytes, itemsize: int) -> NDArray[Any]:
    return data.view(f"<u{itemsize}")


def _with_bridges(changed: NDArray[Any], skipped: NDArray[Any], reach: int) -> NDArray[Any]:
    """The changed places and, between two further apart than a gap can say, every reach-th one."""
    bridges = skipped // reach
    wide = np.flatnonzero(bridges)
    if not len(wide):
        return changed
    times = bridges[wide]
    before = np.where(wide > 0, changed[wide - 1], -1)
    steps = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times) + 1
    return np.sort(np.concatenate([changed, np.repeat(before, times) + steps * reach]))
