"""Digests of tensors that lie in GPU memory, computed there: reading 1.2 GB back to the host for xxhash takes longer than
everything else of a publish.

Two sums modulo 2^64 over the 8-byte words of a tensor, each word times an odd factor of its place in the bucket. Both ends
place tensors alike, so equal bytes give equal sums; any single changed word changes both, others go unseen once in 2^64.
They find damage, not forgery: what they are compared with travels signed.
"""

from __future__ import annotations

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
    first = torch.tensor([t.offset // WORD for t in bucket.tensors], device=flat.device)
    after = torch.tensor(
        [-(-(t.offset + t.nbytes) // WORD) for t in bucket.tensors], device=flat.device
    )
    factors = torch.arange(1, 2 * len(words), 2, device=flat.device)
    plain = torch.zeros(len(words) + 1, dtype=torch.int64, device=flat.device)
    mixed = torch.zeros_like(plain)
    torch.cumsum(factors * words, 0, out=plain[1:])
    torch.cumsum(factors.mul_(_MIX).mul_(words ^ (words >> 31)), 0, out=mixed[1:])
    return torch.stack([plain[after] - plain[first], mixed[after] - mixed[first]], 1)


def named_digests(sums: torch.Tensor, bucket: Bucket) -> dict[str, str]:
    """32 hex digits by tensor name; waits for the device."""
    rows = sums.cpu().numpy()
    return {
        t.name: tensor_digest(row.tobytes(), t.dtype, t.shape)
        for t, row in zip(bucket.tensors, rows, strict=True)
    }
