"""`vime-hpc logs`: lines of all ranks in order of time, whoever wrote them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vime_hpc.cli.logs_command import merge
from vime_hpc.cli.main import main


def test_lines_of_vllm_are_merged_with_ours(tmp_path: Path) -> None:
    """Its stamps have no year: the file's last change knows it, also where a run went over New Year."""
    server, rollout = tmp_path / "engine-0.vllm.log", tmp_path / "rollout-0.log"
    server.write_text(
        "INFO 12-31 23:59:58 [importing.py:98] first\n"
        "  warnings.warn(\n"
        "(EngineCore pid=11993) WARNING 01-01 00:00:02 [vllm.py:709] third\n"
    )
    rollout.write_text(
        "2026-12-31 23:59:59,500 INFO rollout-0 second\n2027-01-01 00:00:03,000 INFO rollout-0 last\n"
    )
    new_year = time.mktime((2027, 1, 1, 0, 0, 3, 0, 0, -1))
    os.utime(server, (new_year, new_year))
    merged = [line.split()[-1] for _, line in merge([server, rollout])]
    assert merged == ["first", "warnings.warn(", "second", "third", "last"]


def test_the_newest_start_that_wrote_logs_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call of a finished run begins a start, finds nothing to do, and leaves no logs."""
    (tmp_path / "config.json").write_text("{}")
    for number, name in enumerate(("local.0", "local.1", "local.2")):
        (tmp_path / "attempts" / name / "logs").mkdir(parents=True)
        if number < 2:
            (tmp_path / "attempts" / name / "logs" / "trainer-0.log").write_text(
                f"of {name} \x1b[31m\n"
            )
        os.utime(tmp_path / "attempts" / name, (number, number))
    assert main(["logs", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().out == "trainer-0  of local.1 \\x1b[31m\n"
    )  # what a model wrote drives no terminal
