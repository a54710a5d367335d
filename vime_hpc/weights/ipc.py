"""Weights between processes on the GPUs of one node: the trainer keeps one copy of the buckets, each cut to what the engine ranks of
a part hold, and an engine rank reads its own: in place on the same GPU, else copied over from the trainer's GPU.

The copy's CUDA IPC handles go through the job's store as JSON, once; a publish is one fill of the copy and a key that says so.
Nothing here unpickles what came from the network: a handle is bytes for the CUDA driver, and a wrong one shows in the digests.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vime_hpc.cluster.groups import BridgeGroup, device_identity, wait_for_keys
from vime_hpc.errors import ConfigError, EngineError, WeightsMismatchError
from vime_hpc.weights.bridge import Timings, checked, cut_round
from vime_hpc.weights.bucket_digests import Digests
from vime_hpc.weights.device_digest import WORD, WordSums, words_of
from vime_hpc.weights.plan import Bucket, WeightPlan
from vime_hpc.weights.staging import KeptMemory, Staging

IPC = "ipc"


class IpcGroup(BridgeGroup):
    """The members' meeting point in the store; there is no process group behind it."""

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
    store: Any,
    epoch: int,
    rank: int,
    world: int,
    timeout_s: float,
    num_sources: int = 1,
    part_of: Sequence[int] = (),
) -> IpcGroup:
    """Join, as groups.bridge_group does. Raises DeadlineError: a member did not come; names its rank."""
    group = IpcGroup(store, epoch, rank, world, num_sources, IPC, timeout_s, part_of)
    group.join()
    return group


def export_memory(tensor: torch.Tensor) -> dict[str, Any]:
    """What another process needs to open a contiguous uint8 CUDA tensor, as JSON values.

    torch's event, for which a receiver would wait, is left out: the sender waits for its device before it says that the
    memory is filled.
    """
    shared = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    _, handle, size, offset, counter, counter_offset, _, _ = shared
    return {
        "gpu": device_identity(tensor.device),
        "handle": _text(handle),
        "size": size,
        "offset": offset,
        "counter": _text(counter),
        "counter_offset": counter_offset,
        "nbytes": tensor.numel(),
    }


def open_memory(exported: dict[str, Any]) -> torch.Tensor:
    """The tensor behind export_memory, of another process, on this process's name of the same GPU.

    Raises:
        EngineError: this process does not see that GPU, or the driver does not open the memory.
    """
    gpu = exported["gpu"]
    device = next((d for d in visible_devices() if device_identity(d) == gpu), None)
    if device is None:
        raise EngineError(
            f"the sender's memory lies on {gpu}, which this engine rank does not see; it sees "
            f"{', '.join(map(device_identity, visible_devices())) or 'no GPU'}"
        )
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,
            _bytes(exported["handle"]),
            exported["size"],
            exported["offset"],
            _bytes(exported["counter"]),
            exported["counter_offset"],
            b"",
            False,
        )
    except RuntimeError as error:
        raise EngineError(
            f"{exported['nbytes']} bytes of the sender's memory on {gpu} (at {exported['offset']} of an allocation of "
            f"{exported['size']}) cannot be opened, probably because the sender has ended: {error}"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (exported["nbytes"],), (1,)
    )


def visible_devices() -> list[torch.device]:
    """Every GPU this process may use."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def devices_in_reach(device: torch.device) -> list[str]:
    """Identities of the GPUs whose memory a process that computes on `device` can open and copy from; its own among them."""
    if device.type == "cpu":
        return []
    own = device.index or 0
    return [
        device_identity(other)
        for other in visible_devices()
        if other.index == own or torch.cuda.can_device_access_peer(own, other.index)
    ]


class SharedMemory:
    """Memory that another process on this machine opens: a GPU's. Tests hand in a stand-in made of files."""

    device_type = "cuda"

    def zeros(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def export(self, tensor: torch.Tensor) -> dict[str, Any]:
        return export_memory(tensor)

    def open(self, exported: dict[str, Any]) -> torch.Tensor:
        return open_memory(exported)

    def is_on(self, flat: torch.Tensor, device: torch.device) -> bool:
        """Whether opened memory lies where a rank computes; else it is copied over."""
        return flat.device == device

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


class IpcSender:
    """One trainer sender's end, as BridgeSender: keeps the buckets of its tensors in GPU memory and fills them anew.

    Args:
        kept: the memory of an earlier sender of the same plan. Memory that an engine which has ended had opened is never
            given back to other tensors by torch, so a new bridge goes on with it.
    """

    early = True

    def __init__(
        self,
        group: IpcGroup,
        plan: WeightPlan,
        source_index: int,
        device: torch.device,
        shared: SharedMemory | None = None,
        kept: KeptMemory | None = None,
    ) -> None:
        self._shared = shared or SharedMemory()
        if device.type != self._shared.device_type:
            raise ConfigError(
                f'weights.transport = "ipc" shares GPU memory, but sender {source_index} computes on {device}'
            )
        self._group, self._plan, self.source = group, plan, source_index
        self._rounds = plan.rounds(source_index)
        sent = [pair for one in self._rounds for pair in one.sent]
        self._prefixes = [plan.digest_prefix(part) for part, _ in sent]
        buckets = [bucket for _, bucket in sent]
        if kept is None or kept.buckets != buckets:
            flats = [self._shared.zeros(WORD * words_of(b), device) for b in buckets]
            kept = KeptMemory(buckets, device, flats)
        self.memory = kept
        self._shared.synchronize(device)
        for part in range(plan.num_parts):
            of_part = [kept.flat(k) for k, (to, _) in enumerate(sent) if to == part]
            exported = [self._shared.export(flat) for flat in of_part]
            group.put(_memory_key(source_index, part), json.dumps(exported))

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
            self._fill(tensors)
            timings.nbytes = sum(bucket.nbytes for bucket in self.memory.buckets)
            self._shared.synchronize(self.memory.device)
            timings.produce_s = time.perf_counter() - start
            self._group.put(f"{version}/ready/{self.source}", "1")
            start = time.perf_counter()
            digests = digests_of(self.memory, self._prefixes)
            timings.digest_s = time.perf_counter() - start
        except BaseException as error:
            self._group.fail(f"{type(error).__name__}: {error}")
            raise
        return digests, timings

    def _fill(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        k = 0
        for one in self._rounds:
            whole = [checked(placed, next(tensors, None)) for placed in one.bucket.tensors]
            for part, bucket in one.sent:
                self.memory.fill(k, cut_round(self._plan, one, whole, part, bucket))
                k += 1
        if (surplus := next(tensors, None)) is not None:
            raise WeightsMismatchError(f"sender {self.source}: {surplus[0]} is not in the plan")

    def confirm(self, version: int) -> None:
        """Every engine holds the version; each fills the whole copy anew."""


@dataclass(frozen=True)
class Opened:
    """A sender's copy as one engine rank sees it. `memory`: the copy itself, or what it is copied to on the rank's own GPU."""

    flats: list[torch.Tensor]
    memory: KeptMemory

    def bring(self, k: int) -> None:
        """Have the k-th bucket in `memory`."""
        own = self.memory.flat(k)
        if own is not self.flats[k]:
            own.copy_(self.flats[k])


class IpcReceiver:
    """One engine rank's end, as BridgeReceiver: an iterator of (name, tensor), or of whole buckets.

    Args:
        device: what the rank computes on.
        opened: the senders' memory, kept by the caller from version to version; filled at the first.
    """

    def __init__(
        self,
        group: IpcGroup,
        plan: WeightPlan,
        *,
        device: torch.device,
        opened: dict[int, Opened],
        shared: SharedMemory | None = None,
    ) -> None:
        self._shared = shared or SharedMemory()
        self._group, self._plan, self._device, self._opened = group, plan, device, opened
        self._part = 0 if plan.layout is None else group.part
        self._read: list[WordSums] = []
        self.timings = Timings()

    def receive(self, version: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, cut to what this rank holds. A tensor stays valid until the version is confirmed.

        Raises:
            DeadlineError: a sender did not fill its copy in time.
        """
        for bucket, tensors in self._buckets(version, stay=True):
            for placed, tensor in zip(bucket.tensors, tensors, strict=True):
                start = time.perf_counter()
                yield placed.name, tensor
                self.timings.consume_s += time.perf_counter() - start

    def receive_buckets(self, version: int = 0) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
        """Yield every bucket and its tensors, in the order of `bucket.tensors`, valid until the next one. Raises as `receive`."""
        return self._buckets(version, stay=False)

    def _buckets(self, version: int, *, stay: bool) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
        for source in range(self._plan.num_sources):
            start = time.perf_counter()
            self._group.wait_for(
                f"{version}/ready/{source}", source, f"version {version} in shared memory"
            )
            opened = self._memory_of(source)
            self.timings.transfer_s += time.perf_counter() - start
            memory = opened.memory
            for k, bucket in enumerate(memory.buckets):
                opened.bring(k)
                memory.sums(k).begin(memory.flat(k))
                self._read.append(memory.sums(k))
                self.timings.nbytes += bucket.nbytes
                views = memory.views(k)
                in_turns = memory.slots < len(memory.buckets)
                yield bucket, [view.clone() for view in views] if stay and in_turns else views

    def drain(self, version: int = 0) -> None:
        """Nobody waits for us to take anything."""

    def digests(self) -> Digests:
        """Digests by name of what was read; waits until the device has read it."""
        start = time.perf_counter()
        self._shared.synchronize(self._device)
        found = {name: d for sums in self._read for name, d in sums.named().items()}
        self.timings.digest_s += time.perf_counter() - start
        return found

    def _memory_of(self, source: int) -> Opened:
        if source not in self._opened:
            key = _memory_key(source, self._part)
            exported = json.loads(self._group.wait_for(key, source, "opening the sender's memory"))
            flats = [self._shared.open(one) for one in exported]
            buckets = [b for b in self._plan.buckets_of(self._part) if b.source == source]
            here = all(self._shared.is_on(flat, self._device) for flat in flats)
            memory = (
                KeptMemory(buckets, self._device, flats) if here else Staging(buckets, self._device)
            )
            self._opened[source] = Opened(flats, memory)
        return self._opened[source]


def _memory_key(source: int, part: int) -> str:
    return f"memory/{source}/{part}"


def digests_of(memory: KeptMemory, prefixes: Sequence[str]) -> Digests:
    """Digests by name of filled buckets. `prefixes`: what is put before the names of each bucket's tensors."""
    sums = [memory.sums(k) for k in range(len(memory.buckets))]
    for k, one in enumerate(sums):
        one.begin(memory.flat(k))
    return {
        prefix + name: digest
        for prefix, one in zip(prefixes, sums, strict=True)
        for name, digest in one.named().items()
    }
