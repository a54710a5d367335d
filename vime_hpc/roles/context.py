"""What every role starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vime_hpc.cluster.rank import RankInfo
from vime_hpc.cluster.signal_flag import SignalFlag
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig


@dataclass(frozen=True)
class RoleContext:
    """What every role starts from."""

    config: RunConfig
    paths: RunPaths
    rank: RankInfo
    warning: SignalFlag
    token: bytes

    @property
    def attempt_directory(self) -> Path:
        return self.paths.attempt(self.rank.attempt)
