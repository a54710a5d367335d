"""Digests of tensors that lie in GPU memory, computed there: reading 1.2 GB back to the host for xxhash takes longer than
everything else of a publish.

Two sums modulo 2^64 over the 8-byte words of a tensor, each word times an odd factor of its place in the bucket. Both ends
place tensors alike, so equal bytes give equal sums; any single changed word changes both, others go unseen once in 2^64.
They find damage, not forgery: what they are compared with travels signed.
"""

from __future__ import annotations

import numpy as np
import torch

from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.plan import Bucket

WORD = 8
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: odd, its bits look random


def words_of(bucket: Bucket) -> int:
    """8-byte words a bucket takes, its last one filled up."""
    return -(-bucket.nbytes // WORD)


def word_sums(flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[tensors, 2] int64, on flat's device, without waiting for it.

    Args:
        flat: [8 * words_of(bucket)] uint8; zero wherever no tensor lies.
    """
    words = flat.view(torch.int64)
    first = np.array([t.offset // WORD for t in bucket.tensors], np.int64)
    after = np.array([-(-(t.offset + t.nbytes) // WORD) for t in bucket.tensors], np.int64)
    if flat.is_cuda:
        # Plain torch passes over the bytes about ten times: 93 ms for the 8.8 GB of a 4B model.
        from vime_hpc.weights.device_kernel import chunk_sums

        return chunk_sums(words, first, after, _MIX)
    return plain_word_sums(words, first, after)


def plain_word_sums(words: torch.Tensor, first: np.ndarray, after: np.ndarray) -> torch.Tensor:
    """What the kernel computes, in plain torch. words: int64; first, after: [tensors] int64, the words of every tensor."""
    factors = torch.arange(1, 2 * len(words), 2, device=words.device)
    plain = torch.zeros(len(words) + 1, dtype=torch.int64, device=words.device)
    mixed = torch.zeros_like(plain)
    torch.cumsum(factors * words, 0, out=plain[1:])
    torch.cumsum(factors.mul_(_MIX).mul_(words ^ (words >> 31)), 0, out=mixed[1:])
    bounds = [torch.from_numpy(bound).to(words.device) for bound in (first, after)]
    return torch.stack([one[bounds[1]] - one[bounds[0]] for one in (plain, mixed)], 1)


def named_digests(sums: torch.Tensor, bucket: Bucket) -> dict[str, str]:
    """32 hex digits by tensor name; waits for the device."""
    rows = sums.cpu().numpy()
    return {
        t.name: tensor_digest(row.tobytes(), t.dtype, t.shape)
        for t, row in zip(bucket.tensors, rows, strict=True)
    }
