"""Log-probabilities and entropies of packed tokens from hidden states, over a vocabulary cut by
tensor parallelism.

The vocabulary-sized logits are made for `chunk_tokens` tokens at a time, in forward and again in
backward, so they never exist at once: 16,384 tokens of a 151,936 vocabulary would be 9.3 GiB in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight^T / temperature) at `targets`, and the entropy of that
    distribution.

    Args:
        hidden: [tokens, H], the same on every rank of `group`; its gradient is this rank's PART of
            the sum (put megatron's copy_to_tensor_model_parallel_region before it).
        weight: [columns of this rank, H], without vocabulary padding.
        targets: [tokens] int64, ids in the whole vocabulary.
        temperature: the logits are divided by it, in float32.
        chunk_tokens: tokens whose logits are in memory at once.
        vocab_start: id of this rank's first column.
        group: the tensor parallel group; None = the vocabulary is whole.
    Returns:
        logprobs [tokens] float32 and entropy [tokens] float32 (nats), both differentiable.
    """
    result = _VocabLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_tokens, vocab_start, group
    )
    return result[0], result[1]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    # the product in the model's type, as the engine computes it; everything after it in float32
    return (hidden @ weight.t()).float().div_(temperature)


def _local_targets(targets: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    inside = (targets >= start) & (targets < start + columns)
    return (targets - start).clamp(0, columns - 1), inside


def _fuses(hidden: Tensor) -> bool:
    """On CUDA in half precision one kernel makes what follows the product (kernels.py): the float32 copies
    of a chunk are then never written; 16,384 tokens of a 151,936 vocabulary save 70 ms of a step."""
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)


def _fused_sums(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    start: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, entropy and log Z of a chunk."""
    from vime_hpc.trainer.kernels import vocab_sums

    own, exp_sum, weighted, chosen = vocab_sums(
        hidden @ weight.t(), targets, start, 1 / temperature
    )
    if group is not None:
        highest = own.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack(
            [exp_sum * (own - highest).exp(), weighted * (own - highest).exp(), chosen]
        )
        dist.all_reduce(sums, group=group)
        own, (exp_sum, weighted, chosen) = highest, sums.unbind()
    log_z = own + exp_sum.log()
    return chosen - log_z, log_z - weighted / exp_sum, log_z


def _fused_gradient(
    ctx: Any, a: int, b: int, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The gradient of a chunk's logits before the temperature."""
    from vime_hpc.trainer.kernels import vocab_gradient_

    hidden, weight, targets, log_z, entropy = ctx.saved_tensors
    outer = [None if g is None else g[a:b].contiguous() for g in (grad_logprobs, grad_entropy)]
    logits = hidden[a:b] @ weight.t()
    return vocab_gradient_(
        logits,
        targets[a:b],
        log_z[a:b],
        entropy[a:b],
        outer[0],
        outer[1],
        ctx.start,
        1 / ctx.temperature,
    )


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        start: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in backward
        tokens = hidden.shape[0]
        fused = _fuses(hidden)
        logprobs, entropy, log_z = (
            torch.empty(tokens, dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for a in range(0, tokens, chunk):
            b = min(a + chunk, tokens)
            if fused:
                logprobs[a:b], entropy[a:b], log_z[a:b] = _fused_sums(
                    hidden[a:b], weight, targets[a:b], temperature, start, group
                )
                continue
            logits = _logits(hidden[a:b], weight, temperature)
            highest = logits.max(1).values
            if group is not None:
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            logits.sub_(highest[:, None])
            index, inside = _local_targets(targets[a:b], start, weight.shape[0])
            chosen = logits.gather(1, index[:, None])[:, 0].masked_fill(~inside, 0.0)
            exp = logits.exp()
            # sum exp, sum exp * logit, logit of the target: one collective for the three
            sums = torch.stack([exp.sum(1), exp.mul_(logits).sum(1), chosen])
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            logprobs[a:b] = sums[2] - log_sum
            entropy[a:b] = log_sum - sums[1] / sums[0]
            log_z[a:b] = highest + log_sum
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.chunk, ctx.start = temperature, chunk, start
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        fused = _fuses(hidden)
        grad_hidden = torch.empty_like(hidden)
        # summed over chunks in float32: sums of bfloat16 chunks would lose what a single product
        # keeps
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for a in range(0, hidden.shape[0], ctx.chunk):
            b = min(a + ctx.chunk, hidden.shape[0])
            if fused:
                grad = _fused_gradient(ctx, a, b, grad_logprobs, grad_entropy)
                torch.mm(grad, weight, out=grad_hidden[a:b])
                grad_weight += grad.t() @ hidden[a:b]
                continue
            logp = _logits(hidden[a:b], weight, ctx.temperature).sub_(log_z[a:b, None])
            p = logp.exp()
            grad = torch.zeros_like(p)
            if grad_logprobs is not None:
                grad -= p * grad_logprobs[a:b, None]
                index, inside = _local_targets(targets[a:b], ctx.start, weight.shape[0])
                grad.scatter_add_(1, index[:, None], (grad_logprobs[a:b] * inside)[:, None])
            if grad_entropy is not None:
                grad -= p * (logp + entropy[a:b, None]) * grad_entropy[a:b, None]
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[a:b] = grad @ weight
            grad_weight += grad.t() @ hidden[a:b]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
