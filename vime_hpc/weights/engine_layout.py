"""Which part of every Hugging Face tensor an engine rank holds, as its own loader read it. Needs no torch.

A tensor that is not listed is held whole; a slice without elements is of a tensor the rank holds nothing of (an expert of
another rank).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from vime_hpc.errors import WeightsMismatchError


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements start[d] … start[d] + shape[d] of every dimension d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def union(self, other: Slice) -> Slice:
        """The smallest slice that holds both."""
        if other == self:
            return self
        start = tuple(map(min, self.start, other.start))
        ends = (
            max(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        return Slice(start, tuple(e - s for e, s in zip(ends, start, strict=True)))

    def contains(self, other: Slice) -> bool:
        return self.union(other) == self


Slices = Mapping[str, Slice]


@dataclass(frozen=True)
class RankLayout:
    """What one engine rank's loader read of the tensors it was given.

    slices: of the tensors it did not read whole. held: bytes of its parameters, in the form the loader fills.
    unknown: tensors that count as whole because what was read of them is no slice.
    """

    slices: Slices
    held: int
    unknown: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "slices": _pack(self.slices),
            "held": self.held,
            "unknown": list(self.unknown),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RankLayout:
        return cls(_unpack(raw["slices"]), int(raw["held"]), tuple(raw["unknown"]))


@dataclass(frozen=True)
class EngineLayout:
    """The layouts of all engine ranks; ranks that hold the same form a part, and receive the same.

    part_of: part of each engine rank, in the order of their bridge ranks. parts: the slices of each part.
    held: bytes of the parameters of a rank of each part. unknown: as RankLayout's, of any rank.
    """

    part_of: tuple[int, ...]
    parts: tuple[Slices, ...]
    held: tuple[int, ...]
    unknown: tuple[str, ...] = field(default=())

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankLayout]) -> EngineLayout:
        """Ranks with equal slices become one part, in order of their first rank."""
        distinct: list[RankLayout] = []
        part_of = []
        for rank in ranks:
            same = (i for i, known in enumerate(distinct) if known.slices == rank.slices)
            index = next(same, len(distinct))
            if index == len(distinct):
                distinct.append(rank)
            part_of.append(index)
        unknown = tuple(sorted({name for rank in ranks for name in rank.unknown}))
        held = tuple(rank.held for rank in distinct)
        return cls(tuple(part_of), tuple(rank.slices for rank in distinct), held, unknown)

    def to_json(self) -> dict[str, Any]:
        return {
            "part_of": list(self.part_of),
            "parts": [_pack(slices) for slices in self.parts],
            "held": list(self.held),
            "unknown": list(self.unknown),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EngineLayout:
        """Raises KeyError or TypeError: not an engine layout."""
        return cls(
            tuple(int(part) for part in raw["part_of"]),
            tuple(_unpack(slices) for slices in raw["parts"]),
            tuple(int(held) for held in raw["held"]),
            tuple(raw["unknown"]),
        )

    def refuse_unless_of(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises WeightsMismatchError: a slice is of a tensor that is not there, or reaches over its edge, or there is a tensor
        of which no rank reads anything.
        """
        for slices in self.parts:
            for name, found in slices.items():
                shape = shapes.get(name)
                if shape is None or not _whole(shape).contains(found):
                    raise WeightsMismatchError(
                        f"an engine rank reads {name} from {list(found.start)} in a shape of {list(found.shape)}, the "
                        f"trainer sends {'no such tensor' if shape is None else list(shape)}. Trainer and engine were "
                        f"probably given different models"
                    )
        unread = [
            name
            for name in shapes
            if all(name in slices and not slices[name].numel for slices in self.parts)
        ]
        if unread:
            raise WeightsMismatchError(
                f"no engine rank reads anything of {', '.join(unread[:8])}{' and more' if unread[8:] else ''}: the engine's "
                f"loader passes over what the trainer trains, so it would not serve it. Is the tensor's name one the "
                f"engine's model knows?"
            )


def _whole(shape: tuple[int, ...]) -> Slice:
    return Slice((0,) * len(shape), shape)


def _pack(slices: Slices) -> dict[str, list[list[int]]]:
    return {name: [list(s.start), list(s.shape)] for name, s in slices.items()}


def _unpack(raw: Mapping[str, Any]) -> dict[str, Slice]:
    return {name: Slice(tuple(start), tuple(shape)) for name, (start, shape) in raw.items()}


def json_text(value: Any) -> str:
    """One spelling of a JSON value, so that equal layouts have equal digests."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
