"""Weights through version directories: trainer senders write them, engine ranks read them (transports disk and delta).

A version is written while the engines still generate, and checked by every engine rank before any engine is paused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime_hpc.errors import CheckpointCorruptError, VimeError, WeightsMismatchError
from vime_hpc.weights.bridge import Timings, checked
from vime_hpc.weights.bucket_digests import Digests
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.delta import Bytes, Encoded, apply, encode
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.ipc import IpcGroup
from vime_hpc.weights.plan import DTYPE_BYTES, Placed, WeightPlan, refuse_unless_complete
from vime_hpc.weights.version_directory import FULL, VersionReader, folder_of, prune
from vime_hpc.weights.version_writer import (
    Files,
    Shard,
    commit,
    naming_the_disk,
    write_delta,
    write_full,
)

DISK, DELTA = "disk", "delta"
DIRECTORIES = (DISK, DELTA)
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class VersionStore:
    """Where versions go and which are kept.

    Args:
        root: RUN/weights, the same directory on all nodes.
        tag: of this attempt of the job; part of every file's name.
        keep: newest versions kept. max_deltas: deltas in a row before a full version; 0 = full versions only.
    """

    root: Path
    tag: str
    keep: int = 2
    max_deltas: int = 0
    fsync: bool = True


class DirectoryGroup(IpcGroup):
    """The members' meeting point in the store; the weights themselves travel through files."""


def directory_group(
    store: Any, epoch: int, rank: int, world: int, timeout_s: float, num_sources: int = 1
) -> DirectoryGroup:
    """Join, as groups.bridge_group does. Raises DeadlineError: a member did not come; names its rank."""
    group = DirectoryGroup(store, epoch, rank, world, num_sources, DISK, timeout_s)
    group.join()
    return group


@dataclass
class _Base:
    """What the newest confirmed version holds of this sender's tensors, on the CPU."""

    version: int
    root: str
    tensors: dict[str, Bytes]
    digests: Digests
    num_deltas: int = 0


class DirectorySender:
    """One trainer sender's end, as BridgeSender: writes its files of a version; sender 0 then commits it.

    With max_deltas > 0 it keeps a copy of its tensors. The first version after a start, one after max_deltas deltas, and
    one after a version that was not confirmed are full.
    """

    early = True

    def __init__(
        self,
        group: DirectoryGroup,
        channel: PublishChannel,
        plan: WeightPlan,
        source_index: int,
        versions: VersionStore,
        files: Files | None = None,
    ) -> None:
        self._group, self._channel, self.source = group, channel, source_index
        self._num_sources, self._versions = plan.num_sources, versions
        self._placed = [t for bucket in plan.of_source(source_index) for t in bucket.tensors]
        self._files = files or Files(fsync=versions.fsync)
        self._base: _Base | None = None
        self._next: _Base | None = None
        self._changes: dict[str, Encoded] = {}

    def send(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int = 0
    ) -> tuple[Digests, Timings]:
        """Write this sender's tensors as part of `version`; on sender 0 the version exists when this returns.

        Raises:
            WeightsMismatchError: a tensor is missing, surplus, out of order, or of another shape or type.
            VimeError: the files could not be written.
        """
        timings, start = Timings(), time.perf_counter()
        folder = folder_of(self._versions.root, version)
        try:
            with naming_the_disk(folder, version):
                folder.mkdir(parents=True, exist_ok=True)
                shard = self._write(folder, version, self._in_plan(iter(tensors), timings))
            timings.transfer_s = time.perf_counter() - start - timings.produce_s
            timings.nbytes = sum(shard.files.values())
            if self.source == 0:
                self._commit(folder, version, shard)
            else:
                self._channel.put_shard(version, self.source, shard.to_json())
        except BaseException as error:
            self._base = self._next = None
            self._group.fail(f"{type(error).__name__}: {error}")
            raise
        return {name: piece.digest for name, piece in shard.pieces.items()}, timings

    def confirm(self, version: int) -> None:
        """Every engine holds the version: it becomes the base of the next, and old versions may go."""
        if self._next is not None and self._next.version == version:
            for t in self._placed:
                change = self._changes.get(t.name)
                if change is not None and change.payload:
                    payload = np.frombuffer(change.payload, np.uint8)
                    target = self._next.tensors[t.name]
                    apply(target, change.encoding, change.count, payload, DTYPE_BYTES[t.dtype])
            self._base, self._next, self._changes = self._next, None, {}
        if self.source == 0:
            with naming_the_disk(self._versions.root, version):
                prune(self._versions.root, version, self._versions.keep)

    def _write(self, folder: Path, version: int, stream: Iterator[tuple[Placed, Bytes]]) -> Shard:
        stem = f"{self._versions.tag}-s{self.source:03d}"
        base, self._base = self._base, None  # until this version is confirmed
        unconfirmed, self._next = self._next is not None, None
        if base is None or unconfirmed or base.num_deltas >= self._versions.max_deltas:
            kept: dict[str, Bytes] = {}
            shard = write_full(self._files, folder, stem, self._placed, self._kept(stream, kept))
            digests = {name: piece.digest for name, piece in shard.pieces.items()}
            self._changes = {}
            if self._versions.max_deltas:
                self._next = _Base(version, "", kept, digests)
            return shard
        shard = write_delta(self._files, folder, stem, base.version, self._encoded(stream, base))
        digests = {name: piece.digest for name, piece in shard.pieces.items()}
        self._next = _Base(version, base.root, base.tensors, digests, base.num_deltas + 1)
        return shard

    def _kept(
        self, stream: Iterator[tuple[Placed, Bytes]], kept: dict[str, Bytes]
    ) -> Iterator[Bytes]:
        for t, data in stream:
            if self._versions.max_deltas:
                kept[t.name] = data = data.copy()
            yield data

    def _encoded(
        self, stream: Iterator[tuple[Placed, Bytes]], base: _Base
    ) -> Iterator[tuple[Placed, str, str, Encoded]]:
        self._changes = {}
        for t, data in stream:
            change = encode(base.tensors[t.name], data, DTYPE_BYTES[t.dtype])
            self._changes[t.name] = change
            yield t, base.digests[t.name], tensor_digest(data, t.dtype, t.shape), change

    def _commit(self, folder: Path, version: int, own: Shard) -> None:
        others = [
            Shard.from_json(self._channel.get_shard(version, source))
            for source in range(1, self._num_sources)
        ]
        base_root = self._next.root if self._next is not None and own.kind != FULL else ""
        with naming_the_disk(folder, version):
            manifest = commit(self._files, folder, version, [own, *others], base_root)
        if self._next is not None:
            self._next.root = manifest.root
        self._group.put(f"{version}/ready", manifest.root)

    def _in_plan(
        self, tensors: Iterator[tuple[str, torch.Tensor]], timings: Timings
    ) -> Iterator[tuple[Placed, Bytes]]:
        for placed in self._placed:
            start = time.perf_counter()
            tensor = checked(placed, next(tensors, None)).detach().cpu().contiguous()
            data = tensor.flatten().view(torch.uint8).numpy()
            timings.produce_s += time.perf_counter() - start
            yield placed, data
        if (surplus := next(tensors, None)) is not None:
            raise WeightsMismatchError(f"sender {self.source}: {surplus[0]} is not in the plan")


class DirectoryReceiver:
    """One engine rank's end, as BridgeReceiver: an iterator of (name, tensor) out of a version directory."""

    def __init__(self, group: DirectoryGroup, plan: WeightPlan, root: Path) -> None:
        self._group, self._plan, self._root = group, plan, root
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-digest")
        self._digests: dict[str, Future[str]] = {}
        self.timings = Timings()

    def prepare(self, version: int) -> str:
        """Wait for the version and check every tensor of it; the engine is not touched. Returns the root digest.

        Raises:
            DeadlineError: it was not committed in time.
            CheckpointCorruptError: names the file and tensor that are damaged.
            WeightsMismatchError: a wrong base, or tensors that are not the engine's.
        """
        reader = self._open(version)
        reader.check_all()
        return reader.manifest.root

    def receive(self, version: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, mapped from its file, or with its changes applied to a copy of the base's."""
        reader = self._open(version)
        self.timings.nbytes = reader.manifest.nbytes
        for name, (dtype, shape) in self._plan.specs().items():
            start = time.perf_counter()
            data = reader.tensor(name)
            piece = reader.manifest.tensors[name]
            self._digests[name] = self._pool.submit(tensor_digest, data, piece.dtype, piece.shape)
            tensor = torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)
            read = time.perf_counter()
            yield name, tensor
            self.timings.transfer_s += read - start
            self.timings.consume_s += time.perf_counter() - read

    def drain(self, version: int = 0) -> None:
        """Nobody waits for us to take anything."""

    def digests(self) -> Digests:
        """Digests by name of what was read."""
        start = time.perf_counter()
        try:
            return {name: job.result() for name, job in self._digests.items()}
        finally:
            self._pool.shutdown()
            self.timings.digest_s += time.perf_counter() - start

    def _open(self, version: int) -> VersionReader:
        phase = f"version {version} in {self._root}"
        root = self._group.wait_for(f"{version}/ready", 0, phase)
        folder, end = folder_of(self._root, version), time.monotonic() + self._group.timeout_s
        while True:  # a file system of many nodes may show a name late
            try:
                reader = VersionReader(folder)
                if reader.manifest.root == root:
                    break
                problem: VimeError = CheckpointCorruptError(
                    f"{folder}: root digest {reader.manifest.root}, the trainer wrote {root}"
                )
            except CheckpointCorruptError as error:
                problem = error
            if time.monotonic() > end:
                raise problem
            time.sleep(POLL_S)
        refuse_unless_complete(
            reader.manifest.specs(), self._plan.specs(), where=f"{folder} against the weight plan"
        )
        return reader
