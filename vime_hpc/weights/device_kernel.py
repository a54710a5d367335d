"""The Triton kernel behind device_digest.word_sums: every byte of a bucket is read once. Import where CUDA is."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (the arguments of a Triton kernel are pointers and scalars that Python has no types for)

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

CHUNK_WORDS = 16_384  # 128 KiB a program: 4,096 programs for a bucket of 512 MiB
_BLOCK = 1_024


@triton.jit
def _sum_words(
    words, starts, ends, out, MIX: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    chunk = tl.program_id(0)
    start = tl.load(starts + chunk)
    end = tl.load(ends + chunk)
    lane = tl.arange(0, BLOCK)
    plain = tl.zeros((BLOCK,), dtype=tl.int64)
    mixed = tl.zeros((BLOCK,), dtype=tl.int64)
    for offset in range(0, CHUNK, BLOCK):
        index = start + offset + lane
        # what lies past the end reads as 0 and adds 0 to both sums
        word = tl.load(words + index, mask=index < end, other=0)
        factor = 2 * index + 1
        plain += factor * word
        mixed += factor * MIX * (word ^ (word >> 31))
    tl.store(out + 2 * chunk, tl.sum(plain))
    tl.store(out + 2 * chunk + 1, tl.sum(mixed))


def chunk_sums(words: torch.Tensor, first: np.ndarray, after: np.ndarray, mix: int) -> torch.Tensor:
    """[tensors, 2] int64: both sums of device_digest over words[first[t]:after[t]] of every tensor t.

    Args:
        words: int64, on a CUDA device.
        first, after: [tensors] int64.
        mix: the factor of the second sum.
    """
    chunks = -(-(after - first) // CHUNK_WORDS)
    tensor = np.repeat(np.arange(len(first)), chunks)
    number = np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    starts = first[tensor] + number * CHUNK_WORDS
    table = np.stack([starts, np.minimum(starts + CHUNK_WORDS, after[tensor]), tensor])
    on_device = torch.from_numpy(table).to(words.device)
    sums = torch.zeros((len(first), 2), dtype=torch.int64, device=words.device)
    if len(tensor) == 0:
        return sums
    parts = torch.empty((len(tensor), 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device):
        _sum_words[(len(tensor),)](
            words, on_device[0], on_device[1], parts, MIX=mix, CHUNK=CHUNK_WORDS, BLOCK=_BLOCK
        )
    return sums.index_add_(0, on_device[2], parts)
