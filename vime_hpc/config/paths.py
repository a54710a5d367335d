"""Where things lie in a run directory. Everything is relative to its root, so it may be moved between attempts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WEIGHT_PLAN = "weight_plan.json"
"""In an attempt's directory."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The layout of RUN/ (see docs/architecture.md)."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock.json"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def identity(self) -> Path:
        return self.root / "run_id"

    @property
    def record(self) -> Path:
        return self.root / "record"

    @property
    def submitted(self) -> Path:
        """The scripts as they were submitted, `<job id>_submission.sh`."""
        return self.root / "submitted"

    @property
    def buffer(self) -> Path:
        return self.root / "buffer"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def attempt(self, name: str) -> Path:
        """Logs, failure records and rendezvous of one start of the job (`<job id>.<restart count>`)."""
        return self.root / "attempts" / name

    def weight_plans(self) -> list[Path]:
        """Of every attempt that built its bridge, the plan by which weights travelled."""
        return sorted(self.root.glob(f"attempts/*/{WEIGHT_PLAN}"))
