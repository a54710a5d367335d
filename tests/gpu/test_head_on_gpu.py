"""The chunked head against plain log_softmax over the whole vocabulary.

Needs 30 GiB of GPU memory and a quarter of a minute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_hpc.trainer.head import vocab_parallel_logprobs

VOCAB, HIDDEN, TEMPERATURE = 151_936, 1024, 0.8


def case(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and weights in bfloat16 with logits of standard deviation 3, targets, a slope per token."""
    torch.manual_seed(5)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") * (3 / HIDDEN**0.5)).bfloat16()
    return (
        hidden,
        weight,
        torch.randint(VOCAB, (tokens,), device="cuda"),
        torch.randn(tokens, device="cuda"),
    )


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, in the inputs' type, everything after them in float32 (float64 stays)."""
    logits = (hidden @ weight.t()).to(
        torch.promote_types(hidden.dtype, torch.float32)
    ) / TEMPERATURE
    table = logits.log_softmax(1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return vocab_parallel_logprobs(
        hidden, weight, targets, temperature=TEMPERATURE, chunk_tokens=256
    )


def with_gradients(
    way, hidden: Tensor, weight: Tensor, targets: Tensor, slope: Tensor
) -> list[Tensor]:  # type: ignore[no-untyped-def]
    h, w = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logprobs, entropy = way(h, w, targets)
    ((logprobs + 0.1 * entropy) * slope).sum().backward()
    return [t.detach().float() for t in (logprobs, entropy, h.grad, w.grad)]


def test_logprobs_entropies_and_gradients_are_as_good_as_those_of_all_logits_at_once() -> None:
    hidden, weight, targets, slope = case(1024)
    exact = with_gradients(naive, hidden.double(), weight.double(), targets, slope)
    plain = with_gradients(naive, hidden, weight, targets, slope)
    ours = with_gradients(chunked, hidden, weight, targets, slope)
    for name, right, whole, part in zip(
        ("logprobs", "entropy", "hidden", "weight"), exact, plain, ours, strict=True
    ):
        error, bound = (part - right).abs().mean(), (whole - right).abs().mean()
        print(
            f"{name}: mean error chunked {error:.3e}, whole {bound:.3e}, size {right.abs().mean():.3e}"
        )
        assert error <= 1.2 * bound, (name, float(error), float(bound))


def test_float32_head_equals_plain_log_softmax() -> None:
    hidden, weight, targets, slope = case(512)
    plain = with_gradients(naive, hidden.float(), weight.float(), targets, slope)
    ours = with_gradients(chunked, hidden.float(), weight.float(), targets, slope)
    for name, whole, part in zip(
        ("logprobs", "entropy", "hidden", "weight"), plain, ours, strict=True
    ):
        torch.testing.assert_close(part, whole, rtol=2e-5, atol=2e-5, msg=name)


def test_the_whole_float32_logits_are_never_in_memory() -> None:
    """16,384 tokens: 9.3 GiB of float32 logits, and their gradient as much again."""
    tokens = 16_384
    hidden, weight, targets, slope = case(tokens)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = vocab_parallel_logprobs(
        hidden, weight, targets, temperature=TEMPERATURE, chunk_tokens=1024
    )
    (logprobs * slope).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    print(f"peak {used / 2**30:.2f} GiB; all logits would be {tokens * VOCAB * 4 / 2**30:.2f} GiB")
    assert used < tokens * VOCAB * 4 / 2
