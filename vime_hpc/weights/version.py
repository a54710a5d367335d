"""The state of one engine's weights: which version it holds, and whether an update is under way."""

from __future__ import annotations

from enum import StrEnum

from vime_hpc.errors import WeightsMismatchError

NO_VERSION = -1
"""Before the first publish: the engine holds what its model directory had, which no version stands for."""


class WeightState(StrEnum):
    """CLEAN: serves `version`. UPDATING: holds a mixture, must not serve."""

    CLEAN = "clean"
    UPDATING = "updating"


class VersionKeeper:
    """CLEAN(v) → UPDATING → CLEAN(v'), v' >= v. A failed update leaves UPDATING: only a full version heals it."""

    def __init__(self, version: int = NO_VERSION) -> None:
        self.version = version
        self.state = WeightState.CLEAN
        self.asleep: set[str] = set()
        """What the engine gave its GPU memory back for: "weights", "kv_cache"."""

    @property
    def may_serve(self) -> bool:
        """Whether it holds one whole version, and has memory for all it needs."""
        return self.state is WeightState.CLEAN and not self.asleep

    def begin(self, version: int) -> None:
        """Raises WeightsMismatchError when the version would go back."""
        self.refuse_going_back(version)
        self.state = WeightState.UPDATING

    def refuse_going_back(self, version: int) -> None:
        """Raises WeightsMismatchError when the version is older than the one held."""
        if version < self.version:
            raise WeightsMismatchError(
                f"weights of version {version} were offered to an engine that holds version {self.version}; versions "
                f"never go back. The trainer was probably restarted from an older checkpoint than the engines know of: "
                f"restart the engines too"
            )

    def commit(self, version: int) -> None:
        if self.state is not WeightState.UPDATING:
            raise WeightsMismatchError(
                f"version {version} was committed without an update being under way"
            )
        self.version = version
        self.state = WeightState.CLEAN
