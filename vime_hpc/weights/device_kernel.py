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


class ChunkSums:
    """Both sums of device_digest over the words of every tensor of a bucket.

    Args:
        first, after: [tensors] int64; tensor t is words[first[t]:after[t]].
        mix: the factor of the second sum.
        device: where the words will lie; the table of chunks is put there.
    """

    def __init__(
        self, first: np.ndarray, after: np.ndarray, mix: int, device: torch.device
    ) -> None:
        chunks = -(-(after - first) // CHUNK_WORDS)
        tensor = np.repeat(np.arange(len(first)), chunks)
        number = np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        starts = first[tensor] + number * CHUNK_WORDS
        table = np.stack([starts, np.minimum(starts + CHUNK_WORDS, after[tensor]), tensor])
        self._starts, self._ends, self._tensor = torch.from_numpy(table).to(device)
        self._tensors, self._mix = len(first), mix

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        """[tensors, 2] int64 of int64 words on the same device, without waiting for it."""
        sums = torch.zeros((self._tensors, 2), dtype=torch.int64, device=words.device)
        programs = len(self._tensor)
        if programs == 0:
            return sums
        parts = torch.empty((programs, 2), dtype=torch.int64, device=words.device)
        with torch.cuda.device(words.device):
            _sum_words[(programs,)](
                words, self._starts, self._ends, parts,
                MIX=self._mix, CHUNK=CHUNK_WORDS, BLOCK=_BLOCK,
            )  # fmt: skip
        return sums.index_add_(0, self._tensor, parts)
