"""What each start of the job came to: RUN/attempts/<job>.<restart>/attempt.json, written at its begin and its end.

A start that was killed from outside (node failure, preemption, scancel, SIGKILL of the batch script) leaves no end; it
is never taken for a good one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vime_hpc.config.paths import RunPaths

Cause = Literal[
    "finished",
    "nothing to do",
    "time limit",
    "asked to stop",
    "crash",
    "cannot go on",
    "killed from outside",
]
RECORD = "attempt.json"
# Deaths that leave no failure record, as a shell reports them: SIGKILL, SIGSEGV, SIGABRT, SIGBUS.
DIED_OF_A_SIGNAL = (137, 139, 134, 135)
CLOCKS_DIFFER_S = 1.0


@dataclass(frozen=True, slots=True)
class Frontier:
    """How far a run has come: what a restart cannot lose."""

    committed_steps: int = 0
    checkpoint_step: int = 0

    def is_past(self, other: Frontier) -> bool:
        return (
            self.committed_steps > other.committed_steps
            or self.checkpoint_step > other.checkpoint_step
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the job. Times are seconds since 1970."""

    name: str
    began: float
    at_begin: Frontier
    host: str = ""
    end_time: float | None = None
    """When Slurm would end it."""
    warning_s: float = 0.0
    """How long before that the warning comes."""
    ended: float | None = None
    at_end: Frontier | None = None
    cause: Cause | None = None
    reason: str = ""
    verdict: Literal["done", "again", "stop", ""] = ""

    @property
    def made_progress(self) -> bool:
        return self.at_end is not None and self.at_end.is_past(self.at_begin)


def frontier(paths: RunPaths) -> Frontier:
    """The state of the run directory now: committed buffer steps, next step of the newest committed checkpoint."""
    steps = paths.buffer / "steps"
    committed = sum(1 for path in steps.glob("*.json")) if steps.is_dir() else 0
    saved = [
        _next_step(path)
        for path in paths.checkpoints.glob("step-*/commit.json")
        if path.parent.suffix != ".tmp"
    ]
    return Frontier(committed, max(saved, default=0))


def _next_step(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["next_step"])
    except (OSError, ValueError, KeyError):
        return 0  # being replaced, or damaged: `vime-hpc resume-plan` names it


def write_attempt(paths: RunPaths, attempt: Attempt) -> None:
    path = paths.attempt(attempt.name) / RECORD
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(attempt), indent=1))
    os.replace(part, path)


def read_attempts(paths: RunPaths) -> list[Attempt]:
    """All recorded starts, in the order they began."""
    found = [
        _from(json.loads(path.read_text()))
        for path in (paths.root / "attempts").glob(f"*/{RECORD}")
    ]
    return sorted(found, key=lambda attempt: attempt.began)


def _from(tree: dict[str, Any]) -> Attempt:
    tree["at_begin"] = Frontier(**tree["at_begin"])
    tree["at_end"] = Frontier(**tree["at_end"]) if tree["at_end"] else None
    return Attempt(**tree)


def close_killed(paths: RunPaths, now: Frontier, except_name: str) -> None:
    """Write the missing end of earlier starts: they were killed from outside, and came this far."""
    for attempt in read_attempts(paths):
        if attempt.ended is None and attempt.name != except_name:
            last = max(
                (path.stat().st_mtime for path in paths.attempt(attempt.name).rglob("*")),
                default=attempt.began,
            )
            write_attempt(
                paths,
                replace(
                    attempt,
                    ended=last,
                    at_end=now,
                    cause="killed from outside",
                    verdict="again",
                    reason="left no end: preempted, cancelled, its node failed, or its batch script was "
                    "killed",
                ),
            )


def exit_codes(paths: RunPaths, name: str) -> dict[str, int]:
    """Exit code of every task that ended in this start, by rank name."""
    codes = {}
    for path in (paths.attempt(name) / "exits").glob("*"):
        text = path.read_text().strip()
        if text:
            codes[path.name] = int(text)
    return codes


def killed_first(paths: RunPaths, name: str, failure: Mapping[str, Any] | None) -> str | None:
    """The rank that died of a signal before the first failure record was written, if any: then it is the cause.

    The others' records ("connection closed by peer") are its consequence. Slurm's own SIGKILL of ranks that do not end
    comes later, by KillWait.
    """
    before = failure["time"] + CLOCKS_DIFFER_S if failure else float("inf")
    recorded = {path.stem for path in (paths.attempt(name) / "failures").glob("*.json")}
    dead = [
        ((paths.attempt(name) / "exits" / rank).stat().st_mtime, rank)
        for rank, code in exit_codes(paths, name).items()
        if code in DIED_OF_A_SIGNAL and rank not in recorded
    ]
    died, rank = min(dead, default=(float("inf"), None))
    return rank if died < before else None
