"""The static plan of a weight transfer: which tensor travels in which bucket from which sender. Needs no torch.

The plan is computed once from the list of tensors (Hugging Face names) and what each engine rank holds of them, and is the
same on every rank: the trainer's sender `source` sends its buckets in order, and the buckets of all senders stand in one order,
that of the tensors that fill them up. Where it is known what engine ranks hold, a bucket travels once to the ranks of each part,
cut to what they hold; else whole to all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import Any

import xxhash

from vime_hpc.errors import ConfigError, WeightsMismatchError
from vime_hpc.weights.engine_layout import EngineLayout, Slices, json_text

PLAN_FORMAT = 3  # 2: buckets of a sender after all those of the one before
ALIGNMENT = (
    16  # bytes; every dtype's view of a bucket needs an offset that is a multiple of its item size
)
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model in Hugging Face form. `source` is the index of the sender that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: int = 0

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and the byte offset of its first element in its bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one collective carries: `nbytes` bytes from sender `source`."""

    source: int
    tensors: tuple[Placed, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """One bucket of a sender on its way. sent: (part, bucket cut to what that part holds) in the order they travel."""

    bucket: Bucket
    sent: tuple[tuple[int, Bucket], ...]


@dataclass(frozen=True)
class WeightPlan:
    """All buckets in the order in which they travel.

    layout: which engine rank holds what; None = every engine rank receives every tensor whole, for the reason in `whole`.
    """

    buckets: tuple[Bucket, ...]
    num_sources: int
    layout: EngineLayout | None = None
    whole: str = ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Tensor names in the order they travel."""
        return tuple(t.name for b in self.buckets for t in b.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors whole (padding between them included)."""
        return sum(b.nbytes for b in self.buckets)

    @property
    def num_parts(self) -> int:
        """Sets of engine ranks that receive the same; 1 where all receive everything."""
        return 1 if self.layout is None else len(self.layout.parts)

    @property
    def part_of(self) -> tuple[int, ...]:
        """Part of every engine rank; empty where there is but one."""
        return () if self.layout is None else self.layout.part_of

    def received(self, part: int) -> int:
        """Bytes of tensors a rank of the part receives in one publish (without padding)."""
        slices: Slices = {} if self.layout is None else self.layout.parts[part]
        return sum(cut(t, slices).nbytes for b in self.buckets for t in b.tensors)

    @property
    def received_over_held(self) -> float | None:
        """Bytes an engine rank receives over those of its parameters, of the rank that receives most; None = not known."""
        if self.layout is None:
            return None
        return max(self.received(part) / held for part, held in enumerate(self.layout.held))

    def digest_prefix(self, part: int) -> str:
        """What a sender puts before the name of a tensor whose digest it tells: parts of a tensor have their own."""
        return "" if self.layout is None else part_prefix(part)

    def rounds(self, source: int) -> tuple[Round, ...]:
        """What sender `source` sends, bucket by bucket; a part that holds nothing of a bucket is left out of it."""
        return tuple(one for one in self.all_rounds if one.bucket.source == source)

    def buckets_of(self, part: int) -> tuple[Bucket, ...]:
        """What a rank of the part receives, in the order in which it does."""
        return tuple(bucket for one in self.all_rounds for to, bucket in one.sent if to == part)

    @cached_property
    def all_rounds(self) -> tuple[Round, ...]:
        """The rounds of all senders, in the order in which engine ranks receive them."""
        return tuple(Round(bucket, self._sent(bucket)) for bucket in self.buckets)

    def _sent(self, bucket: Bucket) -> tuple[tuple[int, Bucket], ...]:
        if self.layout is None:
            return ((0, bucket),)
        parts = enumerate(_cut_bucket(bucket, slices) for slices in self.layout.parts)
        return tuple((part, one) for part, one in parts if one.nbytes)

    def with_layout(self, layout: EngineLayout) -> WeightPlan:
        """The same buckets, cut to what each engine rank holds.

        Raises:
            WeightsMismatchError: the layout is of another model.
        """
        layout.refuse_unless_of({name: shape for name, (_, shape) in self.specs().items()})
        return replace(self, layout=layout, whole="")

    def sent_whole(self, reason: str) -> WeightPlan:
        """The same buckets, every tensor whole to every engine rank, and why."""
        return replace(self, layout=None, whole=reason)

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of the plan's JSON: sender and receivers compare it before anything travels."""
        return xxhash.xxh3_128_hexdigest(self.to_json().encode())

    def of_source(self, source: int) -> tuple[Bucket, ...]:
        return tuple(b for b in self.buckets if b.source == source)

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape by name."""
        return {t.name: (t.dtype, t.shape) for b in self.buckets for t in b.tensors}

    def to_json(self) -> str:
        return json_text(
            {
                "format": PLAN_FORMAT,
                "buckets": [asdict(bucket) for bucket in self.buckets],
                "num_sources": self.num_sources,
                "layout": None if self.layout is None else self.layout.to_json(),
                "whole": self.whole,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> WeightPlan:
        """Raises WeightsMismatchError when the text is not a plan of this format."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if raw["format"] != PLAN_FORMAT:
                raise WeightsMismatchError(
                    f"weight plan has format {raw['format']}, this program reads format {PLAN_FORMAT}; "
                    f"trainer and engines run different versions of vime_hpc"
                )
            return cls(
                buckets=tuple(_bucket(b) for b in raw["buckets"]),
                num_sources=int(raw["num_sources"]),
                layout=EngineLayout.from_json(raw["layout"]) if raw["layout"] else None,
                whole=str(raw["whole"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise WeightsMismatchError(
                f"not a weight plan: {type(error).__name__} {error}"
            ) from error


def why_whole(send: str, tp: int, transport: str) -> str:
    """Why engine ranks are sent every tensor whole, whatever they hold; empty where they can be sent what they hold.

    Args:
        send: weights.send. tp: engine.tp. transport: weights.transport, or the bridge's backend.
    """
    if tp == 1:
        return "engine.tp = 1: every engine rank holds all tensors"
    if transport not in ("bridge", "gloo", "nccl", "ipc"):
        return f"{transport}: one copy of all tensors is read by every engine rank"
    return 'weights.send = "whole"' if send == "whole" else ""


def part_prefix(part: int) -> str:
    """Before the names of what one part is sent; no tensor's name begins so."""
    return f"{part}/"


def cut(tensor: Placed, slices: Slices) -> Placed:
    """The tensor as a rank with these slices receives it, at the same offset."""
    found = slices.get(tensor.name)
    return tensor if found is None else replace(tensor, shape=found.shape)


def _cut_bucket(bucket: Bucket, slices: Slices) -> Bucket:
    """The bucket with every tensor cut, those of which nothing is left taken out."""
    placed: list[Placed] = []
    end = 0
    for tensor in bucket.tensors:
        part = cut(tensor, slices)
        if part.nbytes:
            placed.append(replace(part, offset=_aligned(end)))
            end = placed[-1].offset + part.nbytes
    return Bucket(bucket.source, tuple(placed), end)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _bucket(raw: Mapping[str, Any]) -> Bucket:
    tensors = tuple(
        Placed(t["name"], t["dtype"], tuple(t["shape"]), int(t["offset"])) for t in raw["tensors"]
    )
    return Bucket(int(raw["source"]), tensors, int(raw["nbytes"]))


def build_plan(specs: Iterable[TensorSpec], bucket_mib: int) -> WeightPlan:
    """Pack the tensors into buckets of one sender each; a bucket has its place in the order by its last tensor.

    So every sender may make its tensors in the order of `specs`, helping to make others' on the way, and none waits for one
    that waits for it; and an engine has a layer complete about when its last tensor comes by, whoever sends the parts of it.
    A function of its arguments alone, so every rank that lists the same tensors gets the same plan.

    Args:
        specs: every tensor of the model once.
        bucket_mib: MiB per bucket; a larger tensor gets a bucket of its own.
    Raises:
        WeightsMismatchError: a name occurs twice.
        ConfigError: unknown dtype, a source without tensors between others, no tensor, bucket_mib < 1.
    """
    specs = list(specs)
    _check_specs(specs, bucket_mib)
    num_sources = max(s.source for s in specs) + 1
    filled: list[tuple[int, Bucket]] = []
    for source in range(num_sources):
        own = [(i, s) for i, s in enumerate(specs) if s.source == source]
        filled.extend(_pack(source, own, bucket_mib * 2**20))
    return WeightPlan(tuple(bucket for _, bucket in sorted(filled, key=itemgetter(0))), num_sources)


def _check_specs(specs: list[TensorSpec], bucket_mib: int) -> None:
    if bucket_mib < 1:
        raise ConfigError(f"weights.bucket_mib = {bucket_mib}; at least 1 MiB is needed")
    if not specs:
        raise ConfigError("a weight plan needs at least one tensor, found none")
    seen: set[str] = set()
    double = [s.name for s in specs if s.name in seen or seen.add(s.name)]  # type: ignore[func-returns-value]
    if double:
        raise WeightsMismatchError(f"tensors listed twice: {shown(double)}")
    for s in specs:
        if s.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"{s.name}: dtype {s.dtype!r} cannot be sent; known: {', '.join(DTYPE_BYTES)}"
            )
    empty = set(range(max(s.source for s in specs) + 1)) - {s.source for s in specs}
    if empty or min(s.source for s in specs) < 0:
        raise ConfigError(
            f"senders without a tensor, or a negative one: {sorted(empty)}; number them 0, 1, 2, …"
        )


def _pack(
    source: int, specs: Iterable[tuple[int, TensorSpec]], limit: int
) -> Iterator[tuple[int, Bucket]]:
    """(place of the last tensor among those of all senders, bucket) of one sender's (place, tensor)."""
    placed: list[Placed] = []
    end = last = 0
    for place, s in specs:
        offset = _aligned(end)
        if placed and offset + s.nbytes > limit:
            yield last, Bucket(source, tuple(placed), end)
            placed, offset = [], 0
        placed.append(Placed(s.name, s.dtype, s.shape, offset))
        end, last = offset + s.nbytes, place
    if placed:
        yield last, Bucket(source, tuple(placed), end)


def refuse_unless_complete(
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    where: str,
) -> None:
    """Both sides must name the same tensors with the same shapes; dtypes may differ (the receiver casts).

    Args:
        found: dtype and shape by name of what is sent.
        expected: the same of what the receiver needs.
        where: who compares, for the message.
    Raises:
        WeightsMismatchError: names the missing, surplus and misshapen tensors.
    """
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys())
    shapes = [
        f"{n} is {list(found[n][1])}, expected {list(expected[n][1])}"
        for n in sorted(expected.keys() & found.keys())
        if tuple(found[n][1]) != tuple(expected[n][1])
    ]
    if not (missing or surplus or shapes):
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {shown(missing)}")
    if surplus:
        parts.append(f"{len(surplus)} surplus: {shown(surplus)}")
    if shapes:
        parts.append(f"{len(shapes)} misshapen: {shown(shapes)}")
    raise WeightsMismatchError(
        f"{where}: the tensors sent are not the tensors expected: {'; '.join(parts)}. "
        f"Trainer and engine were probably given different models"
    )


def shown(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + rest
