"""Weights between processes that share a GPU: the trainer keeps one copy of the buckets, the engine reads it in place.

The copy's CUDA IPC handles go through the job's store as JSON, once; a publish is one fill of the copy and a key that says so.
Nothing here unpickles what came from the network: a handle is bytes for the CUDA driver, and a wrong one shows in the digests.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vime_hpc.cluster.groups import BridgeGroup, wait_for_keys
from vime_hpc.errors import ConfigError, WeightsMismatchError
from vime_hpc.weights.bridge import Timings, checked
from vime_hpc.weights.bucket_digests import Digests
from vime_hpc.weights.device_digest import WORD, WordSums, words_of
from vime_hpc.weights.plan import Bucket, WeightPlan
from vime_hpc.weights.staging import KeptMemory

IPC = "ipc"


class IpcGroup(BridgeGroup):
    """The members' meeting point in the store; there is no process group behind it."""

    def __init__(
        self, store: Any, epoch: int, rank: int, world: int, timeout_s: float, num_sources: int = 1
    ) -> None:
        super().__init__(store, epoch, rank, world, num_sources, IPC, timeout_s)

    def _make(self, source: int, part: int, members: Sequence[int]) -> None:
        return None

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait_for(self, key: str, source: int, phase: str) -> str:
        """The value of a key that a sender puts. Raises DeadlineError, also when a member gave up."""
        wait_for_keys(
            self._store,
            {key: self.role_of(source)},
            self.timeout_s,
            phase=phase,
            interrupt=self._raise_if_failed,
        )
        return str(self._store.get(key).decode())


def ipc_group(
    store: Any, epoch: int, rank: int, world: int, timeout_s: float, num_sources: int = 1
) -> IpcGroup:
    """Join, as groups.bridge_group does. Raises DeadlineError: a member did not come; names its rank."""
    group = IpcGroup(store, epoch, rank, world, timeout_s, num_sources)
    group.join()
    return group


def export_memory(tensor: torch.Tensor) -> dict[str, Any]:
    """What another process needs to open a contiguous uint8 CUDA tensor, as JSON values."""
    shared = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    device, handle, size, offset, counter, counter_offset, event, waits = shared
    return {
        "device": device,
        "handle": _text(handle),
        "size": size,
        "offset": offset,
        "counter": _text(counter),
        "counter_offset": counter_offset,
        "event": _text(event),
        "waits": waits,
        "nbytes": tensor.numel(),
    }


def open_memory(exported: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The tensor behind export_memory, of another process, on this process's name of the same GPU."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        _bytes(exported["handle"]),
        exported["size"],
        exported["offset"],
        _bytes(exported["counter"]),
        exported["counter_offset"],
        _bytes(exported["event"]),
        exported["waits"],
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (exported["nbytes"],), (1,)
    )


class SharedMemory:
    """Memory that another process on this machine opens: a GPU's. Tests hand in a stand-in made of files."""

    device_type = "cuda"

    def zeros(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def export(self, tensor: torch.Tensor) -> dict[str, Any]:
        return export_memory(tensor)

    def open(self, exported: dict[str, Any], device: torch.device) -> torch.Tensor:
        return open_memory(exported, device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


class IpcSender:
    """One trainer sender's end, as BridgeSender: keeps the buckets of its tensors in GPU memory and fills them anew."""

    early = True

    def __init__(
        self,
        group: IpcGroup,
        plan: WeightPlan,
        source_index: int,
        device: torch.device,
        shared: SharedMemory | None = None,
    ) -> None:
        self._shared = shared or SharedMemory()
        if device.type != self._shared.device_type:
            raise ConfigError(
                f'weights.transport = "ipc" shares GPU memory, but sender {source_index} computes on {device}'
            )
        self._group, self.source = group, source_index
        buckets = plan.of_source(source_index)
        flats = [self._shared.zeros(WORD * words_of(b), device) for b in buckets]
        self._memory = KeptMemory(buckets, device, flats)
        self._shared.synchronize(device)
        exported = [self._shared.export(flat) for flat in flats]
        group.put(f"memory/{source_index}", json.dumps(exported))

    def send(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int = 0
    ) -> tuple[Digests, Timings]:
        """Fill the buckets, which no engine reads between two publishes, and say so.

        Raises:
            WeightsMismatchError: a tensor is missing, surplus, out of order, or of another shape or type.
        """
        timings = Timings()
        try:
            start = time.perf_counter()
            for k, bucket in enumerate(self._memory.buckets):
                found = [checked(placed, next(tensors, None)) for placed in bucket.tensors]
                self._memory.fill(k, found)
                timings.nbytes += bucket.nbytes
            if (surplus := next(tensors, None)) is not None:
                raise WeightsMismatchError(f"sender {self.source}: {surplus[0]} is not in the plan")
            self._shared.synchronize(self._memory.device)
            timings.produce_s = time.perf_counter() - start
            self._group.put(f"{version}/ready/{self.source}", "1")
            start = time.perf_counter()
            digests = digests_of(self._memory)
            timings.digest_s = time.perf_counter() - start
        except BaseException as error:
            self._group.fail(f"{type(error).__name__}: {error}")
            raise
        return digests, timings

    def confirm(self, version: int) -> None:
        """Every engine holds the version; each fills the whole copy anew."""


class IpcReceiver:
    """One engine rank's end, as BridgeReceiver: an iterator of (name, tensor), each a view of the trainer's copy.

    Args:
        opened: the senders' memory, kept by the caller from version to version; filled at the first.
    """

    def __init__(
        self,
        group: IpcGroup,
        plan: WeightPlan,
        *,
        device: torch.device,
        opened: dict[int, KeptMemory],
        shared: SharedMemory | None = None,
    ) -> None:
        self._shared = shared or SharedMemory()
        self._group, self._plan, self._device, self._opened = group, plan, device, opened
        self._read: list[WordSums] = []
        self.timings = Timings()

    def receive(self, version: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once. A tensor stays valid until the version is confirmed.

        Raises:
            DeadlineError: a sender did not fill its copy in time.
        """
        for bucket, tensors in self.receive_buckets(version):
            for placed, tensor in zip(bucket.tensors, tensors, strict=True):
                start = time.perf_counter()
                yield placed.name, tensor
                self.timings.consume_s += time.perf_counter() - start

    def receive_buckets(self, version: int = 0) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
        """Yield every bucket and its tensors, in the order of `bucket.tensors`. Raises as `receive`."""
        for source in range(self._plan.num_sources):
            start = time.perf_counter()
            self._group.wait_for(
                f"{version}/ready/{source}", source, f"version {version} in shared memory"
            )
            memory = self._memory_of(source)
            self.timings.transfer_s += time.perf_counter() - start
            for k, bucket in enumerate(memory.buckets):
                memory.sums(k).begin(memory.flat(k))
                self._read.append(memory.sums(k))
                self.timings.nbytes += bucket.nbytes
                yield bucket, memory.views(k)

    def drain(self, version: int = 0) -> None:
        """Nobody waits for us to take anything."""

    def digests(self) -> Digests:
        """Digests by name of what was read; waits until the device has read it."""
        start = time.perf_counter()
        self._shared.synchronize(self._device)
        found = {name: d for sums in self._read for name, d in sums.named().items()}
        self.timings.digest_s += time.perf_counter() - start
        return found

    def _memory_of(self, source: int) -> KeptMemory:
        if source not in self._opened:
            exported = json.loads(
                self._group.wait_for(f"memory/{source}", source, "opening the sender's memory")
            )
            flats = [self._shared.open(one, self._device) for one in exported]
            self._opened[source] = KeptMemory(self._plan.of_source(source), self._device, flats)
        return self._opened[source]


def digests_of(memory: KeptMemory) -> Digests:
    """Digests by name of filled buckets."""
    sums = [memory.sums(k) for k in range(len(memory.buckets))]
    for k, one in enumerate(sums):
        one.begin(memory.flat(k))
    return {name: digest for one in sums for name, digest in one.named().items()}
