"""Microbatch plans: one global plan, every sample once, the same number of non-empty microbatches
on every rank.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vime_hpc.errors import ConfigError
from vime_hpc.trainer.packing import plan_update, split_updates


def rows_of(plan: list[list[list[int]]]) -> list[int]:
    return sorted(row for rank in plan for microbatch in rank for row in microbatch)


def test_uneven_samples_give_every_rank_two_microbatches_and_none_is_empty() -> None:
    plan = plan_update(np.array([9, 5, 5, 5]), None, 2, 9)
    assert [len(rank) for rank in plan] == [2, 2]
    assert all(microbatch for rank in plan for microbatch in rank)
    assert rows_of(plan) == [0, 1, 2, 3]


def test_samples_that_fill_two_microbatches_give_one_of_eight_tokens_to_each_rank() -> None:
    lengths = np.array([6, 6, 2, 2])
    plan = plan_update(lengths, None, 2, 8)
    assert [[int(lengths[m].sum()) for m in rank] for rank in plan] == [[8], [8]]


def test_a_sample_above_the_cap_sits_alone() -> None:
    lengths = np.array([100, 3, 3])
    plan = plan_update(lengths, None, 1, 10)
    assert sorted(map(tuple, plan[0])) == [(0,), (1, 2)]


def test_fewer_samples_than_ranks_leaves_fillers_and_the_same_count_everywhere() -> None:
    plan = plan_update(np.array([7]), None, 3, 10)
    assert sorted(plan) == [[[]], [[]], [[0]]]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80),
    dp_size=st.integers(1, 9),
    cap=st.integers(1, 70),
)
def test_any_step_is_planned_completely_evenly_and_within_the_cap(
    lengths: list[int], dp_size: int, cap: int
) -> None:
    sizes = np.array(lengths)
    plan = plan_update(sizes, None, dp_size, cap)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    assert plan[0]
    assert rows_of(plan) == list(range(len(lengths)))
    microbatches = [microbatch for rank in plan for microbatch in rank]
    assert all(len(m) <= 1 or sizes[m].sum() <= cap for m in microbatches)
    empty = sum(not m for m in microbatches)
    assert not empty or all(len(m) <= 1 for m in microbatches), (
        "a filler although a microbatch could be split"
    )
    assert plan == plan_update(sizes, None, dp_size, cap), "the plan must be the same on every rank"


@given(rollouts=st.lists(st.integers(0, 12), min_size=1, max_size=40), updates=st.integers(1, 5))
def test_updates_hold_whole_rollouts_and_lose_none(rollouts: list[int], updates: int) -> None:
    ids = np.array(rollouts)
    if len(set(rollouts)) < updates:
        with pytest.raises(
            ConfigError, match=f"updates_per_step = {updates}.*{len(set(rollouts))} rollouts"
        ):
            split_updates(ids, updates)
        return
    shares = split_updates(ids, updates)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(ids)))
    owners = [set(ids[share].tolist()) for share in shares]
    assert sum(map(len, owners)) == len(set(rollouts)), "a rollout stands in two updates"
    assert max(map(len, owners)) - min(map(len, owners)) <= 1


def test_ten_rollouts_in_three_updates_are_four_three_and_three() -> None:
    """Case C107: nothing is trimmed to a multiple, and too few rollouts are refused with both numbers."""
    shares = split_updates(np.arange(10), 3)
    assert [len(share) for share in shares] == [4, 3, 3]
    assert sorted(np.concatenate(shares).tolist()) == list(range(10))
    with pytest.raises(ConfigError, match=r"updates_per_step = 256.*only 128 rollouts"):
        split_updates(np.arange(128), 256)


def test_8192_samples_for_512_ranks_are_planned_in_a_blink_and_balanced_to_one_percent() -> None:
    lengths = np.random.default_rng(0).integers(50, 16_000, 8192)
    started = time.process_time()  # of this process alone: others on the machine do not count
    plan = plan_update(lengths, None, 512, 16_384)
    elapsed = time.process_time() - started
    work = np.array([sum(int(lengths[m].sum()) for m in rank) for rank in plan])
    assert work.max() / work.mean() < 1.01
    assert elapsed < 2.0, f"{elapsed:.3f} s (25 to 60 ms on one quiet core)"
