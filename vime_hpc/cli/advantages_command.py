"""What `vime-hpc advantages` does."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vime_hpc.algorithms import advantage
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.errors import ConfigError, PromptDataError

ID_NAMES = {
    "group_id": ("group_id", "group_ids", "group_index"),
    "rollout_id": ("rollout_id", "rollout_ids"),
    "reward": ("reward", "rewards"),
}


@dataclass(frozen=True, slots=True)
class Rows:
    """[N] each."""

    group_id: list[int]
    rollout_id: list[int]
    reward: list[float]
    usable: list[bool]


def run(arguments: argparse.Namespace) -> int:
    """Print the advantage of every row, and what they say as a whole."""
    path = Path(arguments.source)
    rows = (
        _from_json(path, arguments.reward_key)
        if path.is_file()
        else _from_run(path, arguments.step)
    )
    tensors = (
        torch.tensor(rows.reward, dtype=torch.float64),
        torch.tensor(rows.group_id, dtype=torch.int64),
        torch.tensor(rows.rollout_id, dtype=torch.int64),
        torch.tensor(rows.usable, dtype=torch.bool),
    )
    try:
        values = advantage.compute(arguments.estimator, *tensors)
    except ValueError as error:
        raise (
            error if isinstance(error, ConfigError) else PromptDataError(f"{path}: {error}")
        ) from error
    result = {
        "estimator": arguments.estimator,
        "advantages": values.tolist(),
        **_summary(tensors, values),
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'row':>6} {'group':>8} {'rollout':>12} {'reward':>10} {'advantage':>12}")
    for i, value in enumerate(values.tolist()):
        reward = f"{rows.reward[i]:.4f}" if rows.usable[i] else "unusable"
        print(f"{i:>6} {rows.group_id[i]:>8} {rows.rollout_id[i]:>12} {reward:>10} {value:>12.6f}")
    for key, number in _summary(tensors, values).items():
        print(f"{key}: {number:.6g}")
    return 0


def _summary(tensors: Sequence[torch.Tensor], values: torch.Tensor) -> dict[str, float]:
    """mean |advantage| over usable rows (its plain mean is 0 by construction), and shares over
    whole groups.
    """
    _, groups, _, usable = tensors
    flat = advantage.zero_spread(*tensors)
    ids = set(groups.tolist())
    flat_groups = set(groups[flat].tolist())
    return {
        "num_samples": len(values),
        "num_groups": len(ids),
        "num_unusable": int((~usable).sum()),
        "mean_abs_advantage": float(values[usable].abs().mean()) if usable.any() else 0.0,
        "zero_spread_share": len(flat_groups) / max(1, len(ids)),
    }


def _from_run(path: Path, step: int | None) -> Rows:
    if not path.exists():
        raise ConfigError(f"{path}: there is no such run directory or file")
    if step is None:
        raise ConfigError(
            f"{path} is a run directory; --step must say which of its steps (vime-hpc buffer ls {path})"
        )
    table = RolloutBuffer.open(path).batch(step).table
    return Rows(
        table.group_id.tolist(),
        table.rollout_id.tolist(),
        table.reward.tolist(),
        table.reward_usable.tolist(),
    )


def _from_json(path: Path, reward_key: str) -> Rows:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise PromptDataError(f"{path}: not a JSON file ({error})") from error
    columns = {name: _column(data, names, path) for name, names in ID_NAMES.items()}
    rewards, groups, rollouts = columns["reward"], columns["group_id"], columns["rollout_id"]
    if rewards is None or groups is None:
        missing = "group_id" if rewards is not None else "reward"
        raise PromptDataError(
            f"{path}: the rows have no {missing}; groups are never guessed from counts. It holds {_keys(data)}"
        )
    rollouts = list(range(len(rewards))) if rollouts is None else rollouts
    if not len(rewards) == len(groups) == len(rollouts):
        raise PromptDataError(f"{path}: {len(rewards)} rewards, {len(groups)} group ids, {len(rollouts)} rollout ids; one of each "
                              f"per row is expected")  # fmt: skip
    values = [_reward(value, reward_key, i, path) for i, value in enumerate(rewards)]
    return Rows(groups, rollouts, values, [not math.isnan(v) for v in values])


def _column(data: Any, names: Sequence[str], path: Path) -> list[Any] | None:
    """The column under one of its names; None where no row has it."""
    if isinstance(data, Mapping):
        return next((list(data[name]) for name in names if name in data), None)
    if not isinstance(data, list) or not all(isinstance(row, Mapping) for row in data):
        raise PromptDataError(f"{path}: expected an object of columns, or a list of rows")
    for name in names:
        have = [name in row for row in data]
        if any(have) and not all(have):
            raise PromptDataError(f"{path}: row {have.index(False)} has no {name}, other rows do")
        if have and all(have):
            return [row[name] for row in data]
    return None


def _reward(value: Any, key: str, row: int, path: Path) -> float:
    """The one reading of a reward: a number, null (NaN here), or an object's entry."""
    if isinstance(value, Mapping):
        if key not in value:
            raise ConfigError(f"{path}, row {row}: the reward has the keys {sorted(map(str, value))}; --reward-key "
                              f"{key!r} is not among them")  # fmt: skip
        value = value[key]
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)):
        raise PromptDataError(f"{path}, row {row}: the reward is {value!r:.40}, not a number")
    return float(value)


def _keys(data: Any) -> str:
    first = data if isinstance(data, Mapping) else (data[0] if data else {})
    return ", ".join(sorted(map(str, first))) or "nothing"
