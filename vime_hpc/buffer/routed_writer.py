"""routed_experts of a segment: by far the most bytes of a step, so turning, writing and syncing them overlap.

Samples hold [row, layer, place], the file [layer, row, place], so that a pipeline rank reads its layers alone. Three
things take about equally long on 100 MB and more: turning the batch, copying it to the page cache, and the device. While
one batch is written the next is turned in a second thread, and the caller has earlier ones synced in a third (numpy,
os.pwrite and fsync release the interpreter lock meanwhile).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from vime_hpc.buffer.checks import check_expert_ids
from vime_hpc.buffer.codec import PackedSample
from vime_hpc.buffer.hdf5_create import NewDataset
from vime_hpc.buffer.schema import RoutingShape

_SMALLEST_BATCH, _LARGEST_BATCH = 16 << 20, 32 << 20
_BATCHES = 16
"""Batches of a step, within these sizes: small ones write short runs of each layer, large ones overlap less."""
_BATCHES_A_SYNC = 2
_CACHED_BYTES = 96 << 10
"""Turned at a time: every cache line read is used for all its layers before it is gone."""

AnyArray = npt.NDArray[Any]


class RoutedWriter:
    """Writes the samples' routed experts; the first batch is being turned as soon as this exists.

    Two batches are in memory at a time, whatever the step's size.
    """

    def __init__(
        self,
        routing: RoutingShape,
        samples: Sequence[PackedSample],
        start_sync: Callable[[], None] | None,
    ) -> None:
        """
        Args:
            start_sync: has what is written so far forced to the device, and returns at once; called now and then.
        """
        self._routing, self._samples, self._start_sync = routing, samples, start_sync
        self.offsets = row_offsets(
            0 if packed.routed is None else len(packed.routed) for packed in samples
        )
        """[N + 1] first row of each sample."""
        self.digests = np.zeros((len(samples), routing.num_layers), dtype="<u8")
        """[N, L] XXH3-64 of each sample's rows in each layer; complete after `write`."""
        self._batches = _split(
            self.offsets, routing.num_layers * routing.top_k * routing.dtype.itemsize
        )
        rows = max((self._rows(number) for number in range(len(self._batches))), default=0)
        size = rows * routing.num_layers * routing.top_k
        # Two buffers for all batches: fresh pages cost as much as the copy into them.
        self._spare = [np.empty(size, routing.dtype) for _ in range(min(2, len(self._batches)))]
        self._turner = ThreadPoolExecutor(1)
        self._ahead = self._turn_ahead(0)

    def write(self, dataset: NewDataset) -> None:
        """Fill the dataset [L, rows, K], batch by batch."""
        for number, (first, _) in enumerate(self._batches):
            assert self._ahead is not None
            block = self._ahead.result()
            self._ahead = self._turn_ahead(number + 1)
            if block.size:
                for layer, rows in enumerate(block):
                    dataset.write_plane(layer, int(self.offsets[first]), rows)
            if self._start_sync is not None and number % _BATCHES_A_SYNC == _BATCHES_A_SYNC - 1:
                self._start_sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._turner.shutdown()

    def _rows(self, number: int) -> int:
        first, last = self._batches[number]
        return int(self.offsets[last] - self.offsets[first])

    def _turn_ahead(self, number: int) -> Future[AnyArray] | None:
        if number >= len(self._batches):
            return None
        return self._turner.submit(self._turned, number)

    def _turned(self, number: int) -> AnyArray:
        first, last = self._batches[number]
        shape = (self._routing.num_layers, self._rows(number), self._routing.top_k)
        block = self._spare[number % 2][: math.prod(shape)].reshape(shape)
        start = int(self.offsets[first])
        for index in range(first, last):
            experts = self._samples[index].routed
            assert experts is not None
            # Here and not before: it brings the ids into the cache from which they are turned.
            check_expert_ids(self._samples[index].where, self._routing, experts)
            part = block[:, int(self.offsets[index]) - start : int(self.offsets[index + 1]) - start]
            _turn(experts, part)
            self.digests[index] = layer_digests(part)
        return block


def row_offsets(counts: Iterable[int]) -> npt.NDArray[np.int64]:
    """[N + 1] where each of N samples begins in a flat column, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.fromiter(counts, dtype=np.int64))]).astype("<i8")


def layer_digests(experts: AnyArray) -> npt.NDArray[np.uint64]:
    """XXH3-64 of each layer of [L, rows, K], whose layers are contiguous. Returns [L] uint64."""
    return np.array(
        [xxhash.xxh3_64_intdigest(layer.data if layer.size else b"") for layer in experts],
        dtype="<u8",
    )


def _split(offsets: npt.NDArray[np.int64], row_bytes: int) -> list[tuple[int, int]]:
    """Neighbouring samples, one at least, to batches of about equal bytes: (first, last + 1)."""
    total = int(offsets[-1]) * row_bytes
    limit = min(max(total // _BATCHES, _SMALLEST_BATCH), _LARGEST_BATCH)
    batches, first, count = [], 0, len(offsets) - 1
    while first < count:
        last = first + 1
        while last < count and (offsets[last + 1] - offsets[first]) * row_bytes <= limit:
            last += 1
        batches.append((first, last))
        first = last
    return batches


def _turn(experts: AnyArray, target: AnyArray) -> None:
    """Copy [rows, layers, top_k] to [layers, rows, top_k], a token and layer's ids as one machine word where they fit one."""
    word = {2: "u2", 4: "u4", 8: "u8", 16: "V16"}.get(experts.shape[2] * experts.dtype.itemsize)
    if word is None or not experts.flags.c_contiguous or not experts.size:
        target[...] = experts.transpose(1, 0, 2)
        return
    source, turned = experts.view(word)[..., 0], target.view(word)[..., 0]
    rows = max(_CACHED_BYTES // source[0].nbytes, 1)
    for first in range(0, len(source), rows):  # 5.1 GB/s in place of 2.7 for a sample as a whole
        turned[:, first : first + rows] = source[first : first + rows].T
