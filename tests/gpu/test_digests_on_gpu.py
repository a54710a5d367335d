"""The digests a GPU computes in one pass are those that plain torch computes on the host."""

from __future__ import annotations

import pytest
import torch

from vime_hpc.weights.device_digest import WORD, flat_digests, words_of
from vime_hpc.weights.plan import TensorSpec, build_plan


@pytest.mark.parametrize("seed", [0, 1])
def test_one_pass_on_the_device_finds_what_plain_torch_finds(seed: int) -> None:
    from vime_hpc.weights.device_kernel import CHUNK_WORDS  # needs Triton

    chunk = CHUNK_WORDS * WORD // 2  # bfloat16 values
    around = [(chunk - 1,), (chunk,), (chunk + 1,), (7, chunk + 3)]
    shapes = [(1,), (3, 5), *around, (4,), (0,), (33,)]
    specs = [TensorSpec(f"t{i}", "bfloat16", shape) for i, shape in enumerate(shapes)]
    (bucket,) = build_plan(specs, 64).buckets
    host = torch.zeros(WORD * words_of(bucket), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for placed in bucket.tensors:
        host[placed.offset : placed.offset + placed.nbytes].random_(0, 256, generator=generator)
    device = host.cuda()
    expected = flat_digests(host, bucket)
    assert flat_digests(device, bucket) == expected
    for placed in bucket.tensors:
        if placed.nbytes:
            device[placed.offset + placed.nbytes - 1] ^= 1
            found = flat_digests(device, bucket)
            assert [n for n in expected if expected[n] != found[n]] == [placed.name]
            device[placed.offset + placed.nbytes - 1] ^= 1
