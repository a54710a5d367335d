"""Weights over one process group: trainer senders broadcast buckets, engine ranks receive tensors.

One flat uint8 broadcast per bucket of the plan. Digests are computed on both sides over what was sent and what arrived.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from vime_hpc.cluster.groups import BridgeGroup
from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.plan import Bucket, Placed, WeightPlan

Digests = dict[str, str]


@dataclass
class Timings:
    """Seconds of one send or receive by phase. `produce`: waiting for the iterator; `consume`: for the loader."""

    produce_s: float = 0.0
    transfer_s: float = 0.0
    digest_s: float = 0.0
    consume_s: float = 0.0
    nbytes: int = 0


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


class _Hasher:
    """Digests of a bucket on a thread of its own (xxhash lets go of the GIL), beside the broadcast."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-digest")
        self._jobs: list[Future[Digests]] = []

    def add(self, flat: torch.Tensor, bucket: Bucket) -> None:
        self._jobs.append(self._pool.submit(_bucket_digests, flat, bucket))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def result(self) -> Digests:
        try:
            return {name: digest for job in self._jobs for name, digest in job.result().items()}
        finally:
            self.close()


def _bucket_digests(flat: torch.Tensor, bucket: Bucket) -> Digests:
    data = flat.cpu().numpy()  # of a CPU tensor: no copy
    return {
        t.name: tensor_digest(data[t.offset : t.offset + t.nbytes], t.dtype, t.shape)
        for t in bucket.tensors
    }


class BridgeSender:
    """One trainer sender's end: turns the tensors it holds into the buckets of the plan."""

    early = False
    """Whether it may send before the engines stand still."""

    def __init__(
        self,
        group: BridgeGroup,
        plan: WeightPlan,
        source_index: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        if plan.num_sources != group.num_sources:
            raise WeightsMismatchError(
                f"the plan has {plan.num_sources} senders, the bridge {group.num_sources}"
            )
        self._group, self.source = group, source_index
        self._buckets = plan.of_source(source_index)
        self._device = device or torch.device("cuda" if group.backend == "nccl" else "cpu")

    def send(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int = 0
    ) -> tuple[Digests, Timings]:
        """Broadcast this sender's tensors, which must come in the plan's order.

        Returns:
            digests by name of what was sent, and seconds by phase.
        Raises:
            WeightsMismatchError: a tensor is missing, surplus, out of order, or of another shape or type.
            DeadlineError: a receiver did not take a bucket in time.
        """
        timings, hasher, tensors = Timings(), _Hasher(), iter(tensors)
        try:
            for i, bucket in enumerate(self._buckets):
                start = time.perf_counter()
                flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
                for placed in bucket.tensors:
                    fill(flat, placed, next(tensors, None))
                timings.produce_s += time.perf_counter() - start
                hasher.add(flat, bucket)
                start = time.perf_counter()
                self._group.broadcast(
                    flat, self.source, _phase(version, self.source, i, len(self._buckets))
                )
                timings.transfer_s += time.perf_counter() - start
                timings.nbytes += bucket.nbytes
            if (surplus := next(tensors, None)) is not None:
                raise WeightsMismatchError(f"sender {self.source}: {surplus[0]} is not in the plan")
        except BaseException as error:
            self._group.fail(f"{type(error).__name__}: {error}")
            hasher.close()
            raise
        start = time.perf_counter()
        digests = hasher.result()
        timings.digest_s += time.perf_counter() - start
        return digests, timings

    def confirm(self, version: int) -> None:
        """Every engine holds the version; nothing is kept from one to the next here."""


def fill(flat: torch.Tensor, placed: Placed, item: tuple[str, torch.Tensor] | None) -> None:
    """Copy a tensor to its place in a bucket. Raises WeightsMismatchError: it is not the plan's next one."""
    view(flat, placed).copy_(checked(placed, item))


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


def view(flat: torch.Tensor, placed: Placed) -> torch.Tensor:
    """The tensor at its place in a bucket, without a copy."""
    piece = flat[placed.offset : placed.offset + placed.nbytes]
    dtype: torch.dtype = getattr(torch, placed.dtype)
    return piece.view(dtype).view(placed.shape)


def _phase(version: int, source: int, i: int, count: int) -> str:
    return f"version {version}, bucket {i + 1} of {count} of sender {source}"


class BridgeReceiver:
    """One engine rank's end: an iterator of (name, tensor) for the engine's own loader."""

    def __init__(
        self, group: BridgeGroup, plan: WeightPlan, *, device: torch.device | None = None
    ) -> None:
        if plan.num_sources != group.num_sources:
            raise WeightsMismatchError(
                f"the plan has {plan.num_sources} senders, the bridge {group.num_sources}"
            )
        self._group, self._plan = group, plan
        self._device = device or torch.device("cuda" if group.backend == "nccl" else "cpu")
        self._next = 0
        self._broken = False
        self._hasher = _Hasher()
        self.timings = Timings()

    def receive(self, version: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, bucket by bucket. A tensor is a view that stays valid as long as it is held.

        Each bucket gets new memory because vLLM's layerwise reload keeps tensors until their layer is complete.

        Raises:
            DeadlineError: the sender did not send in time.
        """
        for bucket, flat in self._buckets(version):
            for placed in bucket.tensors:
                start = time.perf_counter()
                yield placed.name, view(flat, placed)
                self.timings.consume_s += time.perf_counter() - start

    def drain(self, version: int = 0) -> None:
        """Take the buckets not received yet and drop them, so that no sender waits for a receiver that failed.

        Does nothing once the bridge itself has failed: every further wait would only run into its deadline again.
        """
        if not self._broken:
            for _ in self._buckets(version):
                pass

    def digests(self) -> Digests:
        """Digests by name of what arrived."""
        start = time.perf_counter()
        found = self._hasher.result()
        self.timings.digest_s += time.perf_counter() - start
        return found

    def _buckets(self, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        buckets = self._plan.buckets
        counts = [len(self._plan.of_source(s)) for s in range(self._plan.num_sources)]
        while self._next < len(buckets):
            bucket = buckets[self._next]
            index = self._next - sum(counts[: bucket.source])
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            start = time.perf_counter()
            self._broken = True
            self._group.broadcast(
                flat, bucket.source, _phase(version, bucket.source, index, counts[bucket.source])
            )
            self._broken = False
            self.timings.transfer_s += time.perf_counter() - start
            self.timings.nbytes += bucket.nbytes
            self._hasher.add(flat, bucket)
            self._next += 1
            yield bucket, flat
