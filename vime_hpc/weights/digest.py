"""XXH3-128 digests of tensors and of whole weight versions. Needs no torch: works on anything with a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.plan import shown

# What xxhash reads: bytes, memoryview, a numpy array (contiguous).
Readable = Any


def tensor_digest(data: Readable, dtype: str, shape: Sequence[int]) -> str:
    """32 hex digits over the dtype, the shape and the bytes, so a transposed or re-typed tensor differs.

    Args:
        data: the tensor's bytes in C order, little endian.
        dtype: torch's name of the type, "float32".
        shape: its shape.
    """
    h = xxhash.xxh3_128(header(dtype, shape))
    h.update(data)
    return h.hexdigest()


def header(dtype: str, shape: Sequence[int]) -> bytes:
    """What is digested before a tensor's bytes."""
    return f"{dtype}|{','.join(map(str, shape))}|".encode()


def root_digest(digests: Mapping[str, str]) -> str:
    """32 hex digits over `name digest` lines in sorted order of names: the identity of one set of weights."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def differing(sent: Mapping[str, str], arrived: Mapping[str, str]) -> list[str]:
    """Names whose digests differ or that only one side has, sorted."""
    return sorted(n for n in sent.keys() | arrived.keys() if sent.get(n) != arrived.get(n))


def refuse_unless_equal(
    sent: Mapping[str, str], arrived: Mapping[str, str], *, where: str, version: int
) -> None:
    """Raises WeightsMismatchError naming the tensors whose digests differ."""
    names = differing(sent, arrived)
    if names:
        raise WeightsMismatchError(
            f"{where}: weights of version {version} that arrived are not the ones sent; {len(names)} of "
            f"{len(sent)} tensors differ: {shown(names)}. The engine is not put back into service"
        )
