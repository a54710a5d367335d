"""Memory that buckets pass through on their way: one travels while another is filled or emptied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vime_hpc.weights.device_digest import WORD, WordSums, words_of
from vime_hpc.weights.plan import Bucket, Placed

SLOTS = 3  # one is filled, one travels, one waits behind it: a pause of the filling thread leaves no gap on the wire


def view(flat: torch.Tensor, placed: Placed) -> torch.Tensor:
    """The tensor at its place in a bucket, without a copy."""
    piece = flat[placed.offset : placed.offset + placed.nbytes]
    dtype: torch.dtype = getattr(torch, placed.dtype)
    return piece.view(dtype).view(placed.shape)


class Memory(Protocol):
    """Where the k-th bucket of a sequence lies while it is on its way."""

    slots: int
    """Buckets that have memory at one time: the k-th may be taken once the (k - slots)-th is not needed any more."""

    buckets: Sequence[Bucket]
    device: torch.device

    def flat(self, k: int) -> torch.Tensor:
        """[8 * words_of(bucket)] uint8."""
        ...

    def views(self, k: int) -> list[torch.Tensor]:
        """The bucket's tensors at their places in `flat(k)`."""
        ...

    def sums(self, k: int) -> WordSums:
        """For the bucket's digests on the device."""
        ...


class KeptMemory:
    """Memory of its own for every bucket, version after version.

    Views and tables are made once: of 18,867 tensors (a 30B-A3B model) they take 0.1 s of Python, the wire 0.16 s.

    Args:
        flats: of every bucket.
    """

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, flats: Sequence[torch.Tensor] = ()
    ) -> None:
        self.buckets, self.device, self.slots = buckets, device, len(buckets)
        self._flats = dict(enumerate(flats))
        self._views: dict[int, list[torch.Tensor]] = {}
        self._gaps: dict[int, list[torch.Tensor]] = {}
        self._sums: dict[int, WordSums] = {}

    def flat(self, k: int) -> torch.Tensor:
        return self._flats[k]

    def views(self, k: int) -> list[torch.Tensor]:
        if k not in self._views:
            flat = self.flat(k)
            self._views[k] = [view(flat, placed) for placed in self.buckets[k].tensors]
        return self._views[k]

    def sums(self, k: int) -> WordSums:
        if k not in self._sums:
            self._sums[k] = WordSums(self.buckets[k], self.device)
        return self._sums[k]

    @torch.no_grad()
    def fill(self, k: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a bucket's tensors to their places, in one call, and zeros to where none lies."""
        torch._foreach_copy_(self.views(k), list(tensors))
        if k not in self._gaps:
            self._gaps[k] = _gaps(self.flat(k), self.buckets[k])
        if self._gaps[k]:
            torch._foreach_zero_(self._gaps[k])


class Staging(KeptMemory):
    """A few buffers that the buckets take in turns, version after version. Made when first needed."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, slots: int = SLOTS) -> None:
        super().__init__(buckets, device)
        self.slots = slots
        self._buffers: list[torch.Tensor] = []

    def flat(self, k: int) -> torch.Tensor:
        if not self._buffers:
            size = WORD * max(words_of(bucket) for bucket in self.buckets)
            self._buffers = [
                torch.zeros(size, dtype=torch.uint8, device=self.device)
                for _ in range(min(self.slots, len(self.buckets)))
            ]
        if k not in self._flats:
            whole = self._buffers[k % self.slots]
            self._flats[k] = whole[: WORD * words_of(self.buckets[k])]
        return self._flats[k]


class NewMemory:
    """New memory for every bucket, for a receiver that keeps views: vLLM's layerwise reload holds a layer's tensors until the
    last of them is there."""

    slots = SLOTS

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self.buckets, self.device = buckets, device
        self._flats: dict[int, torch.Tensor] = {}

    def flat(self, k: int) -> torch.Tensor:
        self._flats.pop(k - self.slots, None)
        if k not in self._flats:
            nbytes = WORD * words_of(self.buckets[k])
            self._flats[k] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._flats[k]

    def views(self, k: int) -> list[torch.Tensor]:
        return [view(self.flat(k), placed) for placed in self.buckets[k].tensors]

    def sums(self, k: int) -> WordSums:
        return WordSums(self.buckets[k], self.device)


def _gaps(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """What lies between a bucket's tensors, and behind the last."""
    starts = [0, *(placed.offset + placed.nbytes for placed in bucket.tensors)]
    ends = [*(placed.offset for placed in bucket.tensors), len(flat)]
    return [flat[a:b] for a, b in zip(starts, ends, strict=True) if b > a]
