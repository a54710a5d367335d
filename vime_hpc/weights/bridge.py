"""Weights over process groups: trainer senders broadcast buckets, engine ranks receive tensors, or the slices they hold.

One flat uint8 broadcast per bucket of the plan and part of the engine ranks; some are on their way while the next is filled, and the
one before is placed. Digests are computed on both sides over what was sent and what arrived.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch

from vime_hpc.cluster.groups import BridgeGroup, InFlight
from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.bucket_digests import Digests, Hasher, hasher
from vime_hpc.weights.engine_layout import Slice
from vime_hpc.weights.plan import Bucket, Placed, Round, WeightPlan
from vime_hpc.weights.staging import Memory, NewMemory, Staging

T = TypeVar("T")


@dataclass
class Timings:
    """Seconds of one send or receive by phase. `produce`: waiting for the iterator; `consume`: for the loader."""

    produce_s: float = 0.0
    transfer_s: float = 0.0
    digest_s: float = 0.0
    consume_s: float = 0.0
    nbytes: int = 0


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def digests_on_device(backend: str) -> bool:
    """Whether what goes over a bridge of this backend is digested on the GPU: 60 GB do not go to the host for it."""
    return backend == "nccl"


class BridgeSender:
    """One trainer sender's end: turns the tensors it holds into the buckets of the plan.

    Args:
        on_device: digests of device_digest instead of the bytes'; none = as the backend has it. Both ends have to agree.
    """

    early = False
    """Whether it may send before the engines stand still."""

    def __init__(
        self,
        group: BridgeGroup,
        plan: WeightPlan,
        source_index: int,
        *,
        device: torch.device | None = None,
        on_device: bool | None = None,
    ) -> None:
        if plan.num_sources != group.num_sources:
            raise WeightsMismatchError(
                f"the plan has {plan.num_sources} senders, the bridge {group.num_sources}"
            )
        self._on_device = digests_on_device(group.backend) if on_device is None else on_device
        self._group, self.source, self._plan = group, source_index, plan
        self._rounds = plan.rounds(source_index)
        sent = [pair for one in self._rounds for pair in one.sent]
        self._prefixes = [plan.digest_prefix(part) for part, _ in sent]
        self._memory = Staging([bucket for _, bucket in sent], device or _device(group))

    def send(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int = 0
    ) -> tuple[Digests, Timings]:
        """Broadcast this sender's tensors, which must come in the plan's order. Those of one bucket are held until it is filled.

        Returns:
            digests by name of what was sent, and seconds by phase.
        Raises:
            WeightsMismatchError: a tensor is missing, surplus, out of order, or of another shape or type.
            DeadlineError: a receiver did not take a bucket in time.
        """
        timings, tensors = Timings(), iter(tensors)
        digests = hasher(self._memory, self._prefixes, on_device=self._on_device)
        in_flight: deque[InFlight] = deque()
        try:
            self._send_all(tensors, version, digests, in_flight, timings)
        except BaseException as error:
            in_flight.clear()  # they would keep the group's sockets
            self._group.fail(f"{type(error).__name__}: {error}")
            digests.close()
            raise
        start = time.perf_counter()
        found = digests.result()
        timings.digest_s += time.perf_counter() - start
        return found, timings

    def _send_all(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        version: int,
        digests: Hasher,
        in_flight: deque[InFlight],
        timings: Timings,
    ) -> None:
        """Fill a bucket while those before it are on their way."""
        memory, k = self._memory, 0
        for i, one in enumerate(self._rounds):
            phase = _phase(version, self.source, i, len(self._rounds))
            with _added(timings, "produce_s"):
                whole = [checked(placed, next(tensors, None)) for placed in one.bucket.tensors]
            for part, bucket in one.sent:
                if len(in_flight) == memory.slots:
                    with _added(timings, "transfer_s"):
                        self._group.finish(in_flight.popleft())
                with _added(timings, "produce_s"):
                    digests.let_go(k - memory.slots)
                    memory.fill(k, cut_round(self._plan, one, whole, part, bucket))
                    digests.add(k)
                in_flight.append(self._group.begin(memory.flat(k), self.source, phase, part))
                timings.nbytes += bucket.nbytes
                k += 1
        if (surplus := next(tensors, None)) is not None:
            raise WeightsMismatchError(f"sender {self.source}: {surplus[0]} is not in the plan")
        while in_flight:
            with _added(timings, "transfer_s"):
                self._group.finish(in_flight.popleft())

    def confirm(self, version: int) -> None:
        """Every engine holds the version; nothing is kept from one to the next here."""


def cut_round(
    plan: WeightPlan, one: Round, whole: Sequence[torch.Tensor], part: int, bucket: Bucket
) -> list[torch.Tensor]:
    """What goes into a part's bucket of a round's whole tensors, without a copy."""
    if plan.layout is None:
        return list(whole)
    slices, held = plan.layout.parts[part], {t.name for t in bucket.tensors}
    pairs = zip(one.bucket.tensors, whole, strict=True)
    return [cut_tensor(x, slices.get(placed.name)) for placed, x in pairs if placed.name in held]


def cut_tensor(tensor: torch.Tensor, found: Slice | None) -> torch.Tensor:
    """The slice of a whole tensor, without a copy; None = all of it."""
    if found is None:
        return tensor
    ranges = zip(found.start, found.shape, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in ranges)]


def checked(placed: Placed, item: tuple[str, torch.Tensor] | None) -> torch.Tensor:
    """The tensor the trainer produced. Raises WeightsMismatchError: it is not the plan's next one."""
    if item is None:
        raise WeightsMismatchError(
            f"{placed.name} is in the plan, but the trainer did not produce it"
        )
    name, tensor = item
    found = (name, dtype_name(tensor.dtype), tuple(tensor.shape))
    if found != (placed.name, placed.dtype, placed.shape):
        raise WeightsMismatchError(
            f"the plan's next tensor is {placed.name} {placed.dtype} {list(placed.shape)}, the trainer "
            f"produced {name} {found[1]} {list(found[2])}"
        )
    return tensor


class BridgeReceiver:
    """One engine rank's end of one version: buckets as they arrive, or (name, tensor) for the engine's own loader.

    Args:
        device: where buckets lie; none = as the backend has it.
        on_device: digests of device_digest instead of the bytes'; none = as the backend has it. Both ends have to agree.
        memory: through which the buckets pass, kept by the caller from version to version; a view into it is valid until the
            next bucket is asked for. None = new memory for each bucket, and views that stay valid as long as they are held.
    """

    def __init__(
        self,
        group: BridgeGroup,
        plan: WeightPlan,
        *,
        device: torch.device | None = None,
        on_device: bool | None = None,
        memory: Staging | None = None,
    ) -> None:
        on_device = digests_on_device(group.backend) if on_device is None else on_device
        if plan.num_sources != group.num_sources:
            raise WeightsMismatchError(
                f"the plan has {plan.num_sources} senders, the bridge {group.num_sources}"
            )
        self._group = group
        part = 0 if plan.layout is None else group.part
        buckets = plan.buckets_of(part)
        self._memory: Memory = memory or NewMemory(buckets, device or _device(group))
        self._hasher = hasher(self._memory, on_device=on_device)
        self._part, self._phases = part, _phases(plan, part)
        self._begun: deque[InFlight] = deque()
        self._next = 0  # bucket to begin
        self._broken = False
        self.timings = Timings()

    def receive(self, version: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, cut to what this rank holds; those it holds nothing of are left out.

        Raises:
            DeadlineError: the sender did not send in time.
        """
        for bucket, tensors in self.receive_buckets(version):
            for placed, tensor in zip(bucket.tensors, tensors, strict=True):
                with _added(self.timings, "consume_s"):
                    yield placed.name, tensor

    def receive_buckets(self, version: int = 0) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
        """Yield every bucket and its tensors, in the order of `bucket.tensors`. Raises as `receive`."""
        for k in self._arriving(version):
            yield self._memory.buckets[k], self._memory.views(k)

    def drain(self, version: int = 0) -> None:
        """Take the buckets not received yet and drop them, so that no sender waits for a receiver that failed.

        Does nothing once the bridge itself has failed: every further wait would only run into its deadline again.
        """
        if not self._broken:
            for _ in self._arriving(version):
                pass

    def digests(self) -> Digests:
        """Digests by name of what arrived."""
        with _added(self.timings, "digest_s"):
            return self._hasher.result()

    def _arriving(self, version: int) -> Iterator[int]:
        """Numbers of the buckets, each once it is there. The next ones are on their way meanwhile."""
        while self._next < len(self._phases) or self._begun:
            with _added(self.timings, "transfer_s"):
                self._begin_ahead(version)
                k = self._next - len(self._begun)
                self._at_bridge(lambda: self._group.finish(self._begun.popleft()))
            self.timings.nbytes += self._memory.buckets[k].nbytes
            self._hasher.add(k)
            yield k

    def _begin_ahead(self, version: int) -> None:
        """As many as have memory, one less while the consumer may still read the one before."""
        while self._next < len(self._phases) and len(self._begun) < self._memory.slots - 1:
            k, bucket = self._next, self._memory.buckets[self._next]
            phase = f"version {version}, {self._phases[k]}"
            self._hasher.let_go(k - self._memory.slots)
            flat = self._memory.flat(k)
            begin = partial(self._group.begin, flat, bucket.source, phase, self._part)
            self._begun.append(self._at_bridge(begin))
            self._next += 1

    def _at_bridge(self, action: Callable[[], T]) -> T:
        self._broken = True
        try:
            done = action()
        except BaseException:
            self._begun.clear()  # they would keep the group's sockets
            raise
        self._broken = False
        return done


def _device(group: BridgeGroup) -> torch.device:
    return torch.device("cuda" if group.backend == "nccl" else "cpu")


def _phases(plan: WeightPlan, part: int) -> list[str]:
    """Of every bucket that the part receives, which one it is among those of its sender."""
    counts = Counter(one.bucket.source for one in plan.all_rounds)
    passed, phases = Counter[int](), []
    for one in plan.all_rounds:
        source = one.bucket.source
        phase = _of_sender(source, passed[source], counts[source])
        phases += [phase for to, _ in one.sent if to == part]
        passed[source] += 1
    return phases


def _phase(version: int, source: int, i: int, count: int) -> str:
    return f"version {version}, {_of_sender(source, i, count)}"


def _of_sender(source: int, i: int, count: int) -> str:
    return f"bucket {i + 1} of {count} of sender {source}"


@contextmanager
def _added(timings: Timings, phase: str) -> Iterator[None]:
    """Add the seconds that pass inside to a phase."""
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(timings, phase, getattr(timings, phase) + time.perf_counter() - start)
