"""Samples packed into one microbatch: flat tokens, where each sample begins, and which positions
predict a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime_hpc.errors import DamagedDataError
from vime_hpc.types import Sample


@dataclass(frozen=True)
class Microbatch:
    """T tokens in all, R response tokens in all; entry j of an [R] tensor belongs to the j-th
    response token.
    """

    rows: tuple[int, ...]
    """Rows of the step's table, one a sample; empty = a filler that keeps this rank in step with
    the others.
    """
    tokens: Tensor
    """[1, T] int64."""
    positions: Tensor
    """[1, T] int64, from 0 within each sample."""
    packed: PackedSeqParams
    predict: Tensor
    """[R] int64: position in the pack whose hidden state predicts response token j (the one before
    it).
    """
    targets: Tensor
    """[R] int64, the response tokens."""
    mask: Tensor
    """[R] bool, from loss_mask; token values never decide."""
    rollout_logprobs: Tensor
    """[R] float32."""
    segments: Tensor
    """[R] int64, which sample of `rows`."""
    response_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[1])


def pack(
    rows: Sequence[int], samples: Sequence[Sample], device: torch.device, *, multiple: int = 1
) -> Microbatch:
    """Lay samples end to end.

    Args:
        rows: table rows of the samples.
        samples: one per row; none gives a filler of two tokens and no response.
        multiple: T is filled up to a multiple of it with a sequence of zeros of its own (sequence
            parallelism cuts T).
    Raises:
        DamagedDataError: a sample without a prompt token (nothing would predict its first response
            token).
    """
    tokens = [sample.tokens for sample in samples] or [np.zeros(2, np.int32)]
    filling = -sum(map(len, tokens)) % multiple
    if filling:
        tokens.append(np.zeros(filling, np.int32))
    lengths = [len(t) for t in tokens]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    predict, segments = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for index, sample in enumerate(samples):
        if sample.prompt_length < 1:
            raise DamagedDataError(
                f"sample {sample.sample_id}: {len(sample.tokens)} tokens, all of them response; at "
                "least one prompt token is needed to predict the first of them"
            )
        end = int(starts[index]) + len(sample.tokens)
        predict.append(np.arange(end - sample.response_length - 1, end - 1))
        segments.append(np.full(sample.response_length, index, np.int64))
    flat = np.concatenate(tokens).astype(np.int64)
    where = np.concatenate(predict)

    def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    bounds = put(starts, torch.int32)
    positions = put(np.concatenate([np.arange(n) for n in lengths]))
    return Microbatch(
        rows=tuple(rows),
        tokens=put(flat)[None],
        positions=positions[None],
        packed=_packed(bounds, max(lengths), positions),
        predict=put(where),
        targets=put(flat[where + 1] if len(where) else where),
        mask=put(_columns([s.loss_mask for s in samples], np.uint8), torch.bool),
        rollout_logprobs=put(
            _columns([s.rollout_logprobs for s in samples], np.float32), torch.float32
        ),
        segments=put(np.concatenate(segments)),
        response_lengths=tuple(s.response_length for s in samples),
    )


def _packed(bounds: Tensor, longest: int, positions: Tensor) -> PackedSeqParams:
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    packed.vime_positions = positions  # rotary.py would compute them otherwise
    return packed


def _columns(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    joined: np.ndarray = np.concatenate([np.zeros(0, dtype), *arrays])
    return joined.astype(dtype)
