"""Weights over process groups: trainer senders broadcast buckets, engine ranks receive tensors, or the slices they hold.

One flat uint8 broadcast per bucket of the plan and part of the engine ranks. Digests are computed on both sides over what was sent and what arrived.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from vime_hpc.cluster.groups import BridgeGroup
from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.device_digest import WORD, named_digests, word_sums, words_of
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.engine_layout import Slice
from vime_hpc.weights.plan import Bucket, Placed, Round, WeightPlan

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


class _Hasher(Protocol):
    """Digests of buckets, made beside the broadcasts."""

    def add(self, flat: torch.Tensor, bucket: Bucket, prefix: str = "") -> None: ...

    def close(self) -> None: ...

    def result(self) -> Digests: ...


class _ByteHasher:
    """Digests of the bytes, on a thread of its own (xxhash lets go of the GIL)."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-digest")
        self._jobs: list[Future[Digests]] = []

    def add(self, flat: torch.Tensor, bucket: Bucket, prefix: str = "") -> None:
        self._jobs.append(self._pool.submit(_bucket_digests, flat, bucket, prefix))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def result(self) -> Digests:
        try:
            return {name: digest for job in self._jobs for name, digest in job.result().items()}
        finally:
            self.close()


class _DeviceHasher:
    """Digests of device_digest, on a stream of its own: a bucket's sums are made while the next one is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sums: list[tuple[torch.Tensor, Bucket, str]] = []

    def add(self, flat: torch.Tensor, bucket: Bucket, prefix: str = "") -> None:
        if self._stream is None:
            self._sums.append((word_sums(flat, bucket), bucket, prefix))
            return
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            self._sums.append((word_sums(flat, bucket), bucket, prefix))
        flat.record_stream(
            self._stream
        )  # its memory is not given to others before the sums are made

    def close(self) -> None:
        self._sums = []

    def result(self) -> Digests:
        if self._stream is not None:
            self._stream.synchronize()
        return {
            prefix + name: digest
            for sums, bucket, prefix in self._sums
            for name, digest in named_digests(sums, bucket).items()
        }


def digests_on_device(backend: str) -> bool:
    """Whether what goes over a bridge of this backend is digested on the GPU: 60 GB do not go to the host for it."""
    return backend == "nccl"


def _hasher(on_device: bool, device: torch.device) -> _Hasher:
    return _DeviceHasher(device) if on_device else _ByteHasher()


def _empty(bucket: Bucket, on_device: bool, device: torch.device) -> torch.Tensor:
    """Memory of a bucket. Sums over words need whole words, and zeros wherever no tensor lies."""
    if on_device:
        return torch.zeros(WORD * words_of(bucket), dtype=torch.uint8, device=device)
    return torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)


def _bucket_digests(flat: torch.Tensor, bucket: Bucket, prefix: str) -> Digests:
    data = flat.cpu().numpy()  # of a CPU tensor: no copy
    return {
        prefix + t.name: tensor_digest(data[t.offset : t.offset + t.nbytes], t.dtype, t.shape)
        for t in bucket.tensors
    }


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
        timings, tensors = Timings(), iter(tensors)
        hasher = _hasher(self._on_device, self._device)
        try:
            for i, one in enumerate(self._rounds):
                phase = _phase(version, self.source, i, len(self._rounds))
                start = time.perf_counter()
                flats = self._filled(one, tensors)
                timings.produce_s += time.perf_counter() - start
                for (part, bucket), flat in zip(one.sent, flats, strict=True):
                    hasher.add(flat, bucket, self._plan.digest_prefix(part))
                    start = time.perf_counter()
                    self._group.broadcast(flat, self.source, phase, part)
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

    def _filled(
        self, one: Round, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """The bytes of each part's bucket, from the next tensors of the iterator."""
        layout = self._plan.layout
        sent = [({t.name: t for t in bucket.tensors}, part, bucket) for part, bucket in one.sent]
        flats = [_empty(bucket, self._on_device, self._device) for _, _, bucket in sent]
        for whole in one.bucket.tensors:
            tensor = checked(whole, next(tensors, None))
            for (placed, part, _), flat in zip(sent, flats, strict=True):
                if whole.name in placed:
                    found = None if layout is None else layout.parts[part].get(whole.name)
                    piece = tensor if found is None else cut_tensor(tensor, found)
                    view(flat, placed[whole.name]).copy_(piece)
        return flats


def cut_tensor(tensor: torch.Tensor, found: Slice) -> torch.Tensor:
    """The slice of a whole tensor, without a copy."""
    ranges = zip(found.start, found.shape, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in ranges)]


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
        self,
        group: BridgeGroup,
        plan: WeightPlan,
        *,
        device: torch.device | None = None,
        on_device: bool | None = None,
    ) -> None:
        self._on_device = digests_on_device(group.backend) if on_device is None else on_device
        if plan.num_sources != group.num_sources:
            raise WeightsMismatchError(
                f"the plan has {plan.num_sources} senders, the bridge {group.num_sources}"
            )
        self._group, self._plan = group, plan
        self._device = device or torch.device("cuda" if group.backend == "nccl" else "cpu")
        self._part = 0 if plan.layout is None else group.part
        self._left = self._coming()
        self._broken = False
        self._hasher = _hasher(self._on_device, self._device)
        self.timings = Timings()

    def receive(self, version: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, bucket by bucket, cut to what this rank holds; those it holds nothing of are left out.
        A tensor is a view that stays valid as long as it is held.

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

    def _coming(self) -> Iterator[tuple[Bucket, int, int]]:
        """Buckets this rank receives, each with its number and their count among those of its sender."""
        for source in range(self._plan.num_sources):
            rounds = self._plan.rounds(source)
            for i, one in enumerate(rounds):
                for part, bucket in one.sent:
                    if part == self._part:
                        yield bucket, i, len(rounds)

    def _buckets(self, version: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for bucket, i, count in self._left:
            flat = _empty(bucket, self._on_device, self._device)
            start = time.perf_counter()
            self._broken = True
            self._group.broadcast(
                flat, bucket.source, _phase(version, bucket.source, i, count), self._part
            )
            self._broken = False
            self.timings.transfer_s += time.perf_counter() - start
            self.timings.nbytes += bucket.nbytes
            self._hasher.add(flat, bucket)
            yield bucket, flat
