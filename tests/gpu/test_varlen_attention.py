"""Packed attention through torch's varlen kernel against one scaled_dot_product_attention per sample.

Needs 1 GiB of GPU memory and half a minute (imports of megatron-core).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

LENGTHS = [1, 7, 64, 129, 1000, 2, 513]


def attention(way: str, heads: int, groups: int, dim: int) -> torch.nn.Module:
    from megatron.core.transformer import TransformerConfig

    from vime_hpc.trainer.spec import CoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=dim,
    )
    config.vime_hpc_attention = way
    return CoreAttention(config, 1, None, "self")


def packed() -> object:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )


def inputs(heads: int, groups: int, dim: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(sum(LENGTHS), h, dim, device="cuda", dtype=torch.bfloat16)
        for h in (heads, groups, groups)
    ]


def run(module: torch.nn.Module, tensors: list[Tensor], slope: Tensor) -> list[Tensor]:
    """Output, and gradients of query, key and value for the loss (output * slope).sum()."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = module(*leaves, None, packed_seq_params=packed())
    (output.float() * slope).sum().backward()
    return [output.detach().double(), *[leaf.grad.double() for leaf in leaves]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("heads", "groups", "dim"), [(16, 8, 128), (8, 8, 64), (4, 1, 96)])
def test_varlen_is_as_close_to_the_float64_result_as_sdpa_in_the_same_type(
    heads: int, groups: int, dim: int
) -> None:
    tensors = inputs(heads, groups, dim)
    slope = torch.randn(sum(LENGTHS), heads * dim, device="cuda")
    exact = run(attention("sdpa", heads, groups, dim), [t.double() for t in tensors], slope)
    sdpa = run(attention("sdpa", heads, groups, dim), tensors, slope)
    varlen = run(attention("varlen", heads, groups, dim), tensors, slope)
    for name, right, plain, fast in zip(
        ("output", "query", "key", "value"), exact, sdpa, varlen, strict=True
    ):
        bound = 1.5 * (plain - right).abs().mean()
        error = (fast - right).abs().mean()
        print(
            f"{heads}/{groups}/{dim} {name}: mean error varlen {error:.2e}, sdpa {(plain - right).abs().mean():.2e}"
        )
        assert 0 < error <= bound, (name, float(error), float(bound))


def test_no_sample_sees_its_neighbour() -> None:
    """Other values in one sample change no bit of another's output."""
    module = attention("varlen", 16, 8, 128)
    tensors = inputs(16, 8, 128)
    before = module(*tensors, None, packed_seq_params=packed())
    start, end = sum(LENGTHS[:4]), sum(LENGTHS[:5])
    for t in tensors:
        t[start:end] = torch.randn_like(t[start:end])
    after = module(*tensors, None, packed_seq_params=packed())
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[end:], after[end:])
    assert not torch.equal(before[start:end], after[start:end])


def test_no_token_sees_a_later_one() -> None:
    module = attention("varlen", 16, 8, 128)
    tensors = inputs(16, 8, 128)
    before = module(*tensors, None, packed_seq_params=packed())
    at = sum(LENGTHS[:4]) + 400  # within the sample of 1,000
    for t in tensors:
        t[at:] = torch.randn_like(t[at:])
    after = module(*tensors, None, packed_seq_params=packed())
    assert torch.equal(before[:at], after[:at])
