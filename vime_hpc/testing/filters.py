"""Group filters for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_hpc.types import PromptGroup


def even_group(group: PromptGroup, table: Mapping[str, Any]) -> str | None:
    """Drop every second group."""
    return "even" if group.group_id % 2 == 0 else None
