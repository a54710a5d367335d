"""The batch script's two calls where the disk gives out: said in the job's comment, and no good end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch import batch
from vime_hpc.launch.attempts import Attempt, Frontier, write_attempt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of job 7, begun; `scontrol` writes its words into scontrol.words."""
    root = tmp_path / "run"
    config = load_config([], ["--model.path=m", "--data.train=t", f"--run.dir={root}"])
    RunPaths(root).attempt("7.0").mkdir(parents=True)
    (root / "config.json").write_text(config.model_dump_json())
    write_attempt(RunPaths(root), Attempt("7.0", 1000.0, Frontier()))
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>"{tmp_path}/scontrol.words"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return root


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_end_that_cannot_be_written_says_so_where_there_is_room(
    number: int, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(batch, "write_attempt", fail)
    assert batch.main(["end", str(run), "0"]) == 1
    said = capsys.readouterr().out
    assert os.strerror(number) in said
    assert f"submit again with --run.dir={run}" in said
    assert os.strerror(number) in (run.parent / "scontrol.words").read_text()


def test_another_error_of_the_system_is_not_taken_for_a_full_disk(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(batch, "write_attempt", fail)
    with pytest.raises(ConnectionRefusedError):
        batch.main(["end", str(run), "0"])
