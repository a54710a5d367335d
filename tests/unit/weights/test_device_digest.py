"""The digests that a GPU computes, here on a CPU: the arithmetic is the same."""

from __future__ import annotations

import torch

from vime_hpc.weights.device_digest import WORD, flat_digests, words_of
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.staging import view

SPECS = [
    TensorSpec("a", "bfloat16", (3, 5)),
    TensorSpec("b", "float32", (7,)),
    TensorSpec("c", "bfloat16", (1,)),
    TensorSpec("d", "int64", (64,)),
]


def filled(plan: WeightPlan) -> torch.Tensor:
    torch.manual_seed(0)
    bucket = plan.buckets[0]
    flat = torch.zeros(WORD * words_of(bucket), dtype=torch.uint8)
    for placed in bucket.tensors:
        dtype = getattr(torch, placed.dtype)
        value = (
            torch.randint(-9, 9, placed.shape).to(dtype)
            if placed.dtype == "int64"
            else torch.randn(placed.shape).to(dtype)
        )
        view(flat, placed).copy_(value)
    return flat


def test_every_changed_byte_changes_the_digest_of_its_tensor_and_of_no_other() -> None:
    plan = build_plan(SPECS, 1)
    bucket, flat = plan.buckets[0], filled(plan)
    before = flat_digests(flat, bucket)
    for placed in bucket.tensors:
        for byte in (
            placed.offset,
            placed.offset + placed.nbytes // 2,
            placed.offset + placed.nbytes - 1,
        ):
            flat[byte] ^= 1
            after = flat_digests(flat, bucket)
            assert [name for name in before if before[name] != after[name]] == [placed.name]
            flat[byte] ^= 1


def test_exchanged_values_change_the_digest() -> None:
    plan = build_plan(SPECS, 1)
    bucket, flat = plan.buckets[0], filled(plan)
    before = flat_digests(flat, bucket)
    values = view(flat, bucket.tensors[3])
    values.copy_(values.roll(1))
    assert flat_digests(flat, bucket)["d"] != before["d"]
