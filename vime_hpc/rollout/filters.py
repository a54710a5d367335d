"""Which prompt groups enter a batch. A filter gives a reason to drop a group, or None to keep
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime_hpc.config.plugin import is_dotted, load_plugin
from vime_hpc.errors import ConfigError
from vime_hpc.protocols import GroupFilter
from vime_hpc.types import PromptGroup, Status


def rollout_rewards(group: PromptGroup) -> dict[int, float | None]:
    """rollout_id -> reward; None where any sample of the rollout is unusable (aborted, failed, not
    graded).
    """
    rewards: dict[int, float | None] = {}
    for sample in group.samples:
        spoiled = sample.status in (Status.ABORTED, Status.FAILED) or sample.reward is None
        if spoiled or rewards.get(sample.rollout_id, 0.0) is None:
            rewards[sample.rollout_id] = None
        else:
            rewards[sample.rollout_id] = sample.reward
    return rewards


def zero_spread(group: PromptGroup, table: Mapping[str, Any]) -> str | None:
    """Drop a group whose usable rewards are all equal (equality decides, not a deviation) or fewer
    than two.
    """
    usable = [reward for reward in rollout_rewards(group).values() if reward is not None]
    if not usable:
        return "zero_std_none"
    return f"zero_std_{usable[0]:g}" if len(set(usable)) < 2 else None


def unusable(group: PromptGroup, table: Mapping[str, Any]) -> str | None:
    """Drop a group with any unusable rollout."""
    return "unusable" if None in rollout_rewards(group).values() else None


BUILT_IN: Mapping[str, GroupFilter] = {"zero_spread": zero_spread, "unusable": unusable}


def resolve_filters(names: Sequence[str]) -> list[GroupFilter]:
    """The filters of rollout.filters, in order.

    Raises:
        ConfigError: an unknown name or a dotted path that leads nowhere.
    """
    found: list[GroupFilter] = []
    for name in names:
        if is_dotted(name):
            found.append(load_plugin(name, option="rollout.filters"))
        elif name in BUILT_IN:
            found.append(BUILT_IN[name])
        else:
            raise ConfigError(
                f'rollout.filters has "{name}"; built in are {", ".join(BUILT_IN)}, and a dotted path '
                f'"pkg.module:name" names your own'
            )
    return found


def reason_to_drop(group: PromptGroup, filters: Sequence[GroupFilter]) -> str | None:
    """The first filter's reason, or None."""
    for group_filter in filters:
        reason = group_filter(group, {})
        if reason is not None:
            return reason
    return None
