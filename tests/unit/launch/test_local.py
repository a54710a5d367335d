"""Whom the local launcher names when a job ends badly and no rank could write down why."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vime_hpc.cluster.rank import RankInfo, Role
from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import RoleDiedError
from vime_hpc.launch.local import _raise_for, _Rank


def ended(paths: RunPaths, role: Role, number: int, code: str) -> _Rank:
    info = RankInfo(number, 2, role, 0, 1, number, "local", 0)
    log = paths.attempt(info.attempt) / "logs" / f"{info.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"last words of {info.name}\n")
    process = subprocess.Popen([sys.executable, "-c", code])
    process.wait()
    return _Rank(info, process, log)


def test_the_rank_that_ended_by_itself_is_named_and_not_those_ended_for_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    killed = f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})"
    ranks = [
        ended(paths, Role.TRAINER, 0, killed),
        ended(paths, Role.ROLLOUT, 1, "raise SystemExit(3)"),
    ]
    with pytest.raises(
        RoleDiedError, match=r"rollout-0 ended with exit code 3 (.|\n)*last words of rollout-0"
    ):
        _raise_for(ranks, paths)
    with pytest.raises(RoleDiedError, match="trainer-0 was killed by SIGTERM"):
        _raise_for(ranks[:1], paths)
