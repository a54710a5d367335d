"""Digests of buckets, made beside their transfer: of the bytes on the host, or of device_digest on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from vime_hpc.weights.device_digest import WordSums
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.plan import Bucket
from vime_hpc.weights.staging import Memory

Digests = dict[str, str]


class Hasher(Protocol):
    """Digests of the buckets of a sequence, one after another."""

    def add(self, k: int) -> None:
        """The k-th bucket lies in its memory, as far as the present GPU stream is concerned."""
        ...

    def let_go(self, k: int) -> None:
        """Return once the k-th bucket's memory is not read here any more. Does nothing for one that was not added."""
        ...

    def result(self) -> Digests:
        """Digests by name of everything added."""
        ...

    def close(self) -> None:
        """Give up what is not done yet."""
        ...


def hasher(memory: Memory, prefixes: Sequence[str] = (), *, on_device: bool) -> Hasher:
    """
    Args:
        prefixes: what is put before the names of each bucket's tensors; none = nothing.
        on_device: digests of device_digest instead of the bytes'.
    """
    prefixes = prefixes or ("",) * len(memory.buckets)
    return _DeviceHasher(memory, prefixes) if on_device else _ByteHasher(memory, prefixes)


class _ByteHasher:
    """On a thread of its own (xxhash lets go of the GIL)."""

    def __init__(self, memory: Memory, prefixes: Sequence[str]) -> None:
        self._memory, self._prefixes = memory, prefixes
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vime-digest")
        self._jobs: dict[int, Future[Digests]] = {}

    def add(self, k: int) -> None:
        of_bucket = (self._memory.flat(k), self._memory.buckets[k], self._prefixes[k])
        self._jobs[k] = self._pool.submit(_byte_digests, *of_bucket)

    def let_go(self, k: int) -> None:
        if k in self._jobs:
            self._jobs[k].result()

    def result(self) -> Digests:
        try:
            done = (self._jobs[k].result() for k in sorted(self._jobs))
            return {name: digest for found in done for name, digest in found.items()}
        finally:
            self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _byte_digests(flat: torch.Tensor, bucket: Bucket, prefix: str) -> Digests:
    data = flat.cpu().numpy()  # of a CPU tensor: no copy
    return {
        prefix + t.name: tensor_digest(data[t.offset : t.offset + t.nbytes], t.dtype, t.shape)
        for t in bucket.tensors
    }


class _DeviceHasher:
    """On a stream of its own. A bucket's names are joined to its sums while later buckets are on their way."""

    def __init__(self, memory: Memory, prefixes: Sequence[str]) -> None:
        self._memory, self._prefixes = memory, prefixes
        on_cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._begun: dict[int, WordSums] = {}
        self._found: Digests = {}

    def add(self, k: int) -> None:
        flat, sums = self._memory.flat(k), self._memory.sums(k)
        if self._stream is None:
            sums.begin(flat)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(flat.device))
            with torch.cuda.stream(self._stream):
                sums.begin(flat)
            # its memory is not given to others before the sums are made
            flat.record_stream(self._stream)
        self._begun[k] = sums

    def let_go(self, k: int) -> None:
        if (sums := self._begun.pop(k, None)) is not None:
            prefix = self._prefixes[k]
            self._found.update((prefix + name, digest) for name, digest in sums.named().items())

    def result(self) -> Digests:
        for k in sorted(self._begun):
            self.let_go(k)
        return self._found

    def close(self) -> None:
        self._begun.clear()
