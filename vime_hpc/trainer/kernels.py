"""Triton kernels of the trainer's CUDA path: rotary embedding, and what the head does with logits. Import where CUDA is.

Each replaces a chain of elementwise passes over memory; the formulas stand beside their plain torch twins in rotary.py and
head.py, and tests/gpu compares the two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (the arguments of a Triton kernel are pointers and scalars that Python has no types for)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x,
    out,
    cos,
    sin,
    positions,
    token_stride,
    head_stride,
    heads,
    sign,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    half = tl.arange(0, HALF)
    c = tl.load(cos + position * HALF + half)[None, :]
    s = tl.load(sin + position * HALF + half)[None, :] * sign
    head = tl.arange(0, HEADS)[:, None]
    inside = head < heads
    source = x + token * token_stride + head * head_stride + half[None, :]
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + HALF, mask=inside).to(tl.float32)
    target = out + (token * heads + head) * (2 * HALF) + half[None, :]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, back: bool) -> Tensor:
    """x [tokens, heads, 2 * half] turned by the angles of its positions (turned back: the gradient).

    cos, sin: [positions, half] float32; half a power of two. Computed in float32, rounded once.
    """
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x,
        out,
        cos,
        sin,
        positions,
        x.stride(0),
        x.stride(1),
        heads,
        -1.0 if back else 1.0,
        HALF=dim // 2,
        HEADS=triton.next_power_of_2(heads),
    )
    return out


@triton.jit
def _vocab_sums(logits, targets, out, columns, start, tokens, scale, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * columns
    highest = -float("inf")
    exp_sum = 0.0
    weighted = 0.0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < columns, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(highest, tl.max(x, 0))
        e = tl.exp(x - higher)
        shrink = tl.exp(highest - higher)
        exp_sum = exp_sum * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        highest = higher
    target = tl.load(targets + token) - start
    inside = (target >= 0) & (target < columns)
    chosen = tl.load(row + target, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + token, highest)
    tl.store(out + tokens + token, exp_sum)
    tl.store(out + 2 * tokens + token, weighted)
    tl.store(out + 3 * tokens + token, tl.where(inside, chosen, 0.0))


def vocab_sums(logits: Tensor, targets: Tensor, start: int, scale: float) -> Tensor:
    """[4, tokens] float32 of x = logits * scale over this rank's columns: max x, sum exp(x - max), sum exp(x - max) * x,
    and x at the target (0 where another rank holds it).
    """
    tokens, columns = logits.shape
    out = torch.empty((4, tokens), dtype=torch.float32, device=logits.device)
    _vocab_sums[(tokens,)](
        logits, targets, out, columns, start, tokens, scale, BLOCK=8192, num_warps=16
    )
    return out


@triton.jit
def _vocab_gradient(
    logits,
    targets,
    log_z,
    entropy,
    grad_logprobs,
    grad_entropy,
    columns,
    start,
    scale,
    HAS_LOGPROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + token * columns + column
    x = tl.load(place, mask=column < columns, other=-float("inf")).to(tl.float32) * scale
    logp = x - tl.load(log_z + token)
    p = tl.exp(logp)
    grad = tl.zeros([BLOCK], tl.float32)
    if HAS_LOGPROBS:
        g = tl.load(grad_logprobs + token)
        grad += tl.where(column == tl.load(targets + token) - start, g, 0.0) - p * g
    if HAS_ENTROPY:
        inner = tl.where(p > 0, p * (logp + tl.load(entropy + token)), 0.0)
        grad -= inner * tl.load(grad_entropy + token)
    tl.store(place, (grad * scale).to(logits.dtype.element_ty), mask=column < columns)


def vocab_gradient_(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    start: int,
    scale: float,
) -> Tensor:
    """The logits' gradient, written over them: of log p at the target, and of the entropy, by their outer gradients."""
    tokens, columns = logits.shape
    block = 4096
    unused: Any = logits
    _vocab_gradient[(tokens, triton.cdiv(columns, block))](
        logits,
        targets,
        log_z,
        entropy,
        unused if grad_logprobs is None else grad_logprobs,
        unused if grad_entropy is None else grad_entropy,
        columns,
        start,
        scale,
        HAS_LOGPROBS=grad_logprobs is not None,
        HAS_ENTROPY=grad_entropy is not None,
        BLOCK=block,
        num_warps=8,
    )
    return logits
