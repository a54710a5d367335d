"""Changed elements over a base: what is encoded applies back bit for bit, and is never longer than the tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vime_hpc.errors import CheckpointCorruptError
from vime_hpc.weights.delta import SAME, SPARSE, WHOLE, Bytes, apply, encode


def payload_of(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 70_000),
    st.sampled_from([0.0, 1e-4, 0.01, 0.3, 1.0]),
    st.integers(0, 2**32),
)
def test_what_is_encoded_applies_back_and_twice_does_no_harm(
    itemsize: int, length: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, length * itemsize).astype(np.uint8)
    new = base.copy()
    new.view(f"u{itemsize}")[rng.random(length) < share] ^= 1
    change = encode(base, new, itemsize)
    assert len(change.payload) <= len(new)
    target = base.copy()
    for _ in range(2):
        apply(target, change.encoding, change.count, payload_of(change.payload), itemsize)
        assert (target == new).all()


@pytest.mark.parametrize(
    ("places", "encoding", "nbytes"),
    [
        ([], SAME, 0),
        ([0, 255], "sparse1", 2 * 3),  # gaps 0 and 254, two bytes of value each
        ([255], "sparse1", 3),
        (
            [*range(10), 300],
            "sparse1",
            12 * 3,
        ),  # one element on the way is written with the value it has
        ([90_000], "sparse2", 2 * 4),
    ],
)
def test_the_size_of_an_encoding_is_its_gaps_and_values(
    places: list[int], encoding: str, nbytes: int
) -> None:
    base = np.zeros(200_000, np.uint8)
    new = base.copy()
    new.view("u2")[places] = 7
    change = encode(base, new, 2)
    assert (change.encoding, len(change.payload)) == (encoding, nbytes)


def test_a_tensor_that_changes_everywhere_is_stored_whole() -> None:
    base = np.zeros(100, np.uint8)
    change = encode(base, base + 1, 2)
    assert (change.encoding, change.payload) == (WHOLE, bytes([1]) * 100)


@pytest.mark.parametrize(
    ("encoding", "count", "payload"),
    [
        ("sparse1", 2, b"\0\1\1"),  # shorter than two elements
        ("sparse1", 1, b"\xff\1\1"),  # beyond the end
        (WHOLE, 10, b"\0"),
        ("zip", 1, b"\0\1\1"),
    ],
)
def test_a_damaged_change_is_refused(encoding: str, count: int, payload: bytes) -> None:
    assert set(SPARSE) == {"sparse1", "sparse2"}
    with pytest.raises(CheckpointCorruptError):
        apply(np.zeros(20, np.uint8), encoding, count, payload_of(payload), 2)
