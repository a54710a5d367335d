"""Digests of tensors that lie in GPU memory, computed there: reading 1.2 GB back to the host for xxhash takes longer than
everything else of a publish.

Two sums modulo 2^64 over the 8-byte words of a tensor, each word times an odd factor of its place in the bucket. Both ends
place tensors alike, so equal bytes give equal sums; any single changed word changes both, others go unseen once in 2^64.
They find damage, not forgery: what they are compared with travels signed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import xxhash

from vime_hpc.weights.digest import header
from vime_hpc.weights.plan import Bucket

WORD = 8
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: odd, its bits look random


def words_of(bucket: Bucket) -> int:
    """8-byte words a bucket takes, its last one filled up."""
    return -(-bucket.nbytes // WORD)


class WordSums:
    """The sums of one bucket. Where its tensors lie is worked out once, and lies on the device from then on."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        first = np.array([t.offset // WORD for t in bucket.tensors], np.int64)
        after = np.array([-(-(t.offset + t.nbytes) // WORD) for t in bucket.tensors], np.int64)
        self._names = [t.name for t in bucket.tensors]
        self._headers = [header(t.dtype, t.shape) for t in bucket.tensors]
        self._of_words: Callable[[torch.Tensor], torch.Tensor]
        self._host: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Plain torch passes over the bytes about ten times: 93 ms for the 8.8 GB of a 4B model.
            from vime_hpc.weights.device_kernel import ChunkSums

            self._of_words = ChunkSums(first, after, _MIX, device)
            self._host = torch.empty((len(first), 2), dtype=torch.int64, pin_memory=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._of_words = partial(plain_word_sums, first=first, after=after)

    def sums(self, flat: torch.Tensor) -> torch.Tensor:
        """[tensors, 2] int64, on flat's device, without waiting for it.

        Args:
            flat: [8 * words_of(bucket)] uint8; zero wherever no tensor lies.
        """
        return self._of_words(flat.view(torch.int64))

    def begin(self, flat: torch.Tensor) -> None:
        """Put the sums, and their way to the host, on the present stream. One at a time."""
        sums = self.sums(flat)
        if self._host is None or self._done is None:
            self._host = sums
            return
        self._host.copy_(sums, non_blocking=True)
        self._done.record()

    def named(self) -> dict[str, str]:
        """32 hex digits by tensor name of what was begun last; waits for it."""
        if self._done is not None:
            self._done.synchronize()
        if self._host is None:
            raise RuntimeError("no sums were begun")
        rows = self._host.numpy()
        return {
            name: xxhash.xxh3_128_hexdigest(head + row.tobytes())
            for name, head, row in zip(self._names, self._headers, rows, strict=True)
        }


def flat_digests(flat: torch.Tensor, bucket: Bucket) -> dict[str, str]:
    """32 hex digits by tensor name of one bucket; waits for the device. `flat`: as of WordSums.sums."""
    sums = WordSums(bucket, flat.device)
    sums.begin(flat)
    return sums.named()


def plain_word_sums(words: torch.Tensor, first: np.ndarray, after: np.ndarray) -> torch.Tensor:
    """What the kernel computes, in plain torch. words: int64; first, after: [tensors] int64, the words of every tensor."""
    factors = torch.arange(1, 2 * len(words), 2, device=words.device)
    plain = torch.zeros(len(words) + 1, dtype=torch.int64, device=words.device)
    mixed = torch.zeros_like(plain)
    torch.cumsum(factors * words, 0, out=plain[1:])
    torch.cumsum(factors.mul_(_MIX).mul_(words ^ (words >> 31)), 0, out=mixed[1:])
    bounds = [torch.from_numpy(bound).to(words.device) for bound in (first, after)]
    return torch.stack([one[bounds[1]] - one[bounds[0]] for one in (plain, mixed)], 1)
