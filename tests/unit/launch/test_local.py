"""Whom the local launcher names when a job ends badly and no rank could write down why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vime_hpc.cluster.rank import RankInfo, Role
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import RoleDiedError
from vime_hpc.launch import local
from vime_hpc.launch.local import StoppedError, _raise_for, _Rank, run_local


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


@pytest.mark.parametrize("stopped", [False, True])
def test_what_the_ranks_put_into_their_temporary_directory_is_gone_after_the_start(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves vllm_dist_* there; also after TERM to the launcher, which the first rank sends here."""
    base = tmp_path / "tmp"
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    package = (
        tmp_path / "vime_hpc"
    )  # the ranks' program, which writes down where its temporary files went
    (package / "roles").mkdir(parents=True)
    for path in (package, package / "roles"):
        (path / "__init__.py").touch()
    (package / "roles" / "__main__.py").write_text(
        "import json, os, signal, sys, tempfile, time\n"
        "name = tempfile.mkstemp(prefix='vllm_dist_')[1]\n"
        "open(f'{sys.argv[1]}/where-{os.getpid()}', 'w').write(name)\n"
        f"if {stopped}:\n"
        "    os.kill(int(os.environ['VIME_LAUNCHER_PID']), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "json.py").write_text("raise SystemExit('of the current directory')\n")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(local, "write_submitted", lambda *_, **__: None)
    monkeypatch.setattr(local, "write_machine", lambda *_: None)
    config = load_config(
        [],
        [f"--run.dir={tmp_path}/run", "--model.path=m", "--data.train=t", "--observe.progress=off"],
    )
    umask = os.umask(0)
    try:
        if stopped:
            with pytest.raises(StoppedError, match="stopped by SIGTERM"):
                run_local(config)
        else:
            run_local(config)
    finally:
        os.umask(umask)
    made = [Path(path.read_text()) for path in (tmp_path / "run").glob("where-*")]
    assert made
    assert all(path.is_relative_to(base) for path in made)
    assert list(base.iterdir()) == []
