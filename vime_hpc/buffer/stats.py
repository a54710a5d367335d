"""The stats of a step's workers as one: what adds up, what is the largest or smallest, and what is averaged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

_ADDED = re.compile(
    r"(num|count|drop|groups|surplus|kept)_.*|.*_(retries|tokens|per_s)|failed|aborted"
)
_LARGEST = re.compile(r".*_(s|time|max)|max")
_SMALLEST = re.compile(r".*_min|min")
"""Of the last part of a name; the first of the three that fits counts. Everything else is a mean weighted by samples."""


def merged_stats(commit: Mapping[str, Any]) -> dict[str, float]:
    """The stats of a commit: counts and rates add up, durations and maxima take the largest, minima the smallest, the rest
    is the mean weighted by samples. A worker without a name takes no part in it."""
    names = sorted({name for worker in commit["workers"] for name in worker["stats"]})
    return {name: _merged(name, commit["workers"]) for name in names}


def _merged(name: str, workers: list[Mapping[str, Any]]) -> float:
    having = [worker for worker in workers if name in worker["stats"]]
    values = [float(worker["stats"][name]) for worker in having]
    leaf = name.rsplit("/", 1)[-1]
    rules: dict[re.Pattern[str], Callable[[list[float]], float]] = {
        _ADDED: math.fsum,
        _LARGEST: max,
        _SMALLEST: min,
    }
    for pattern, rule in rules.items():
        if pattern.fullmatch(leaf):
            return rule(values)
    weights = [max(int(worker["segment"]["num_samples"]), 0) for worker in having]
    if len(values) == 1 or not sum(weights):
        return math.fsum(values) / len(values)
    products = (weight * value for weight, value in zip(weights, values, strict=True))
    return math.fsum(products) / sum(weights)
