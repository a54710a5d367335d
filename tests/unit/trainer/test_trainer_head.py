"""Chunked logprobs against the plain formula, values and gradients."""

from __future__ import annotations

import pytest
import torch

from vime_hpc.trainer.head import vocab_parallel_logprobs


def naive(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize(
    ("temperature", "logprob"), [(1.0, -0.407606), (0.5, -0.142932), (2.0, -0.680270)]
)
def test_logits_are_divided_by_the_temperature(temperature: float, logprob: float) -> None:
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    result, _ = vocab_parallel_logprobs(
        torch.ones(1, 1), weight, torch.tensor([0]), temperature=temperature, chunk_tokens=4
    )
    assert result.item() == pytest.approx(logprob, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_plain_formula_for_any_chunk(
    chunk: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(10, 8, generator=generator),
        torch.randn(30, 8, generator=generator),
    )
    targets = torch.randint(0, 30, (10,), generator=generator)
    pull = torch.randn(2, 10, generator=generator)
    results = []
    for function in (
        naive,
        lambda h, w, t, temp: vocab_parallel_logprobs(
            h, w, t, temperature=temp, chunk_tokens=chunk
        ),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = function(h, w, targets, temperature)
        (pull[0] * logprobs + pull[1] * entropy).sum().backward()
        results.append((logprobs, entropy, h.grad, w.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


def test_without_tokens_gradients_are_zero_not_missing() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    logprobs, _ = vocab_parallel_logprobs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), temperature=1.0, chunk_tokens=3
    )
    logprobs.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(7, 4))


def test_full_logits_never_exist_at_once() -> None:
    """The largest tensor made for 64 tokens of a vocabulary of 1000 holds one chunk of 8 tokens."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight = (
        torch.randn(64, 4, requires_grad=True),
        torch.randn(1000, 4, requires_grad=True),
    )
    with Watch():
        logprobs, _ = vocab_parallel_logprobs(
            hidden, weight, torch.arange(64), temperature=1.0, chunk_tokens=8
        )
        logprobs.sum().backward()
    assert largest == 8 * 1000
