"""What a step's groups say about themselves, under the names vime uses. numpy only.

Every mean names its base: rewards are over usable rollouts (one vote a rollout), lengths over
    samples, zero-spread shares over
whole groups.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vime_hpc.protocols import Metrics
from vime_hpc.rollout.filters import rollout_rewards
from vime_hpc.types import PromptGroup, Sample, Status

REPETITION_WINDOW = 10_000
REPETITION_RATIO = 10.0
"""A response whose last 10,000 characters compress more than tenfold repeats itself."""


def rollout_metrics(groups: Sequence[PromptGroup], *, step: int) -> Metrics:
    """rollout/* and staleness/* of the groups of one step's batch.

    Returns:
        raw_reward and its deviation over usable rollouts (absent where none is),
        response_lengths_{mean,median,max,min}, truncated_ratio, aborted, failed and unusable_share
        over rollouts, repetition_frac, zero_std/share, solve_all and solve_none shares over groups,
        zero_std/count_{value}, num_samples, response_tokens, staleness/{mean,max}.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    rewards = {group.group_id: rollout_rewards(group) for group in groups}
    usable = [r for votes in rewards.values() for r in votes.values() if r is not None]
    num_rollouts = sum(len(votes) for votes in rewards.values())
    lengths = np.array([s.response_length for s in samples], dtype=np.float64)
    metrics: Metrics = {
        "rollout/response_lengths_mean": float(lengths.mean()),
        "rollout/response_lengths_median": float(np.median(lengths)),
        "rollout/response_lengths_max": float(lengths.max()),
        "rollout/response_lengths_min": float(lengths.min()),
        "rollout/response_tokens": float(lengths.sum()),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_groups": float(len(groups)),
        "rollout/truncated_ratio": _share(samples, Status.TRUNCATED),
        "rollout/unusable_share": (num_rollouts - len(usable)) / num_rollouts,
        "rollout/failed": float(sum(s.status is Status.FAILED for s in samples)),
        "rollout/aborted": float(sum(s.status is Status.ABORTED for s in samples)),
        "rollout/repetition_frac": float(
            np.mean([repeats_itself(s.response_text) for s in samples])
        ),
    }
    if usable:
        metrics["rollout/raw_reward"] = float(np.mean(usable))
        metrics["rollout/raw_reward_std"] = float(np.std(usable))
    metrics |= _spread_metrics(rewards)
    versions = [span.version for s in samples for span in s.versions[:1]]
    if versions:
        metrics["staleness/mean"] = float(np.mean([step - v for v in versions]))
        metrics["staleness/max"] = float(max(step - v for v in versions))
    return metrics


def repeats_itself(text: str) -> bool:
    """Whether the end of a response compresses more than REPETITION_RATIO times."""
    tail = text[-REPETITION_WINDOW:].encode()
    return bool(tail) and len(tail) / len(zlib.compress(tail)) > REPETITION_RATIO


def drop_metrics(reasons: Iterable[str]) -> Metrics:
    """rollout/dynamic_filter/drop_{reason}: groups a filter dropped, by reason."""
    return {f"rollout/dynamic_filter/drop_{r}": float(n) for r, n in Counter(reasons).items()}


def _spread_metrics(rewards: Mapping[int, Mapping[int, float | None]]) -> Metrics:
    """Over groups with at least one usable rollout: shares that give no signal, and their reward
    values.
    """
    flat: Counter[str] = Counter()
    graded = solved = unsolved = 0
    best = max((r for v in rewards.values() for r in v.values() if r is not None), default=0.0)
    for votes in rewards.values():
        usable = {r for r in votes.values() if r is not None}
        if not usable:
            continue
        graded += 1
        if len(usable) == 1:
            value = next(iter(usable))
            flat[f"{value:.1f}"] += 1
            solved += value == best and value > 0
            unsolved += value <= 0
    if not graded:
        return {}
    shares: Metrics = {
        "rollout/zero_std/share": sum(flat.values()) / graded,
        "rollout/solve_all_share": solved / graded,
        "rollout/solve_none_share": unsolved / graded,
    }
    return shares | {
        f"rollout/zero_std/count_{value}": float(n) for value, n in sorted(flat.items())
    }


def _share(samples: Sequence[Sample], status: Status) -> float:
    return sum(s.status is status for s in samples) / len(samples)
