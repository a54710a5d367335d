"""Which trainer rank computes which samples, packed into which microbatches. Pure numpy, the same
answer on every rank.

There is one global plan and every data parallel rank takes its own line of it, so the number of
microbatches is the
same everywhere without a collective: a rank that counted for itself could come to another number
    and hang the rest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from vime_hpc.errors import ConfigError
from vime_hpc.types import IntArray

Microbatches = list[list[int]]
"""Of one data parallel rank: per microbatch the rows (of the step's table) packed into it."""


def split_updates(rollout_ids: IntArray, num_updates: int) -> list[IntArray]:
    """Rows of each optimizer update: whole rollouts, in order, the shares differing by one rollout
    at most.

    Args:
        rollout_ids: [samples] int64; samples of one rollout stay in the same update.
        num_updates: optimizer updates wanted on this step.
    Returns:
        num_updates arrays of rows, together every row exactly once (nothing is carried over or
        dropped).
    Raises:
        ConfigError: fewer rollouts than updates.
    """
    _, first = np.unique(rollout_ids, return_index=True)
    ordered = rollout_ids[np.sort(first)]
    if len(ordered) < num_updates:
        raise ConfigError(
            f"algorithm.updates_per_step = {num_updates}, but the step holds only {len(ordered)} rollouts "
            f"({len(rollout_ids)} samples); lower updates_per_step or raise rollout.prompts_per_step * group_size"
        )
    shares = np.array_split(ordered, num_updates)
    return [np.flatnonzero(np.isin(rollout_ids, share)) for share in shares]


def plan_update(
    lengths: IntArray, rollout_ids: IntArray | None, dp_size: int, max_tokens: int
) -> list[Microbatches]:
    """Pack samples into microbatches of at most `max_tokens` and hand them out to the data parallel
    ranks.

    Args:
        lengths: [samples] tokens of each sample (prompt and response).
        rollout_ids: not needed for the packing (denominators are fixed beforehand), kept for other
            planners.
        dp_size: data parallel ranks.
        max_tokens: tokens in one microbatch; a longer sample sits alone in one.
    Returns:
        Per rank its microbatches: the same number (at least one) on every rank, every row exactly
            once, none empty as
        long as there are enough samples for that; otherwise an empty one stands for a filler
        without weight.
    """
    if dp_size < 1 or max_tokens < 1:
        raise ValueError(f"dp_size {dp_size} and max_tokens {max_tokens} must be positive")
    tokens: list[int] = (
        lengths.tolist()
    )  # Python integers: ten times faster to touch one by one than numpy's
    order: list[int] = np.argsort(-lengths, kind="stable").tolist()
    bins = _best_fit(tokens, order, max_tokens)
    wanted = max(1, -(-len(bins) // dp_size)) * dp_size
    even = _spread(tokens, order, min(wanted, len(tokens)))
    if all(len(rows) == 1 or _load(rows, tokens) <= max_tokens for rows in even):
        bins = even
    else:
        _split_largest(bins, tokens, wanted)
    bins += [[] for _ in range(wanted - len(bins))]
    return _hand_out(bins, tokens, dp_size)


def _load(rows: list[int], tokens: list[int]) -> int:
    return sum([tokens[row] for row in rows])


def _best_fit(tokens: list[int], order: list[int], max_tokens: int) -> Microbatches:
    """Best fit decreasing: each sample goes where the least room is left. n log n, at most 11/9 of
    the optimum.
    """
    bins: Microbatches = []
    room: list[
        int
    ] = []  # sorted; (tokens left << 32) + microbatch, one integer so that comparing is cheap
    for row in order:
        length = tokens[row]
        at = bisect_left(room, length << 32)
        if at < len(room):
            entry = room.pop(at)
            bins[entry & 0xFFFFFFFF].append(row)
            insort(room, entry - (length << 32))
        else:
            insort(room, ((max(max_tokens, length) - length) << 32) + len(bins))
            bins.append([row])
    return bins


def _spread(tokens: list[int], order: list[int], num_bins: int) -> Microbatches:
    """Longest processing time first: each sample goes to the emptiest of a fixed number of
    microbatches.
    """
    bins: Microbatches = [[] for _ in range(num_bins)]
    heap = list(range(num_bins))  # (tokens so far << 32) + microbatch
    for row in order:
        entry = heap[0]
        bins[entry & 0xFFFFFFFF].append(row)
        heapq.heapreplace(heap, entry + (tokens[row] << 32))
    return bins


def _split_largest(bins: Microbatches, tokens: list[int], wanted: int) -> None:
    """Cut the fullest microbatches of several samples in two until there are `wanted`, or only
    single samples.
    """
    heap = [(-_load(rows, tokens), index) for index, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    while len(bins) < wanted and heap:
        _, index = heapq.heappop(heap)
        halves = _spread(tokens, sorted(bins[index], key=lambda row: (-tokens[row], row)), 2)
        bins[index] = halves[0]
        bins.append(halves[1])
        for at in (index, len(bins) - 1):
            if len(bins[at]) > 1:
                heapq.heappush(heap, (-_load(bins[at], tokens), at))


def _hand_out(bins: Microbatches, tokens: list[int], dp_size: int) -> list[Microbatches]:
    """Rounds of dp_size microbatches of like size; in each round the largest goes to the rank with
    least work so far.
    """
    sizes = np.array([_load(rows, tokens) for rows in bins], dtype=np.int64)
    ranking = np.argsort(-sizes, kind="stable")
    work = np.zeros(dp_size, dtype=np.int64)
    plan: list[Microbatches] = [[] for _ in range(dp_size)]
    for start in range(0, len(bins), dp_size):
        chosen = ranking[start : start + dp_size]
        ranks = np.argsort(work, kind="stable")
        work[ranks] += sizes[chosen]
        for rank, index in zip(ranks.tolist(), chosen.tolist(), strict=True):
            plan[rank].append(sorted(bins[index]))
    return plan
