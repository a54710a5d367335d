"""What the command says of errors that are the machine's or another user's, and which it leaves a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vime_hpc.cli import buffer_commands
from vime_hpc.cli.main import main


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    """The exit code of a command that meets this error."""

    def raising(arguments: object) -> int:
        raise error

    monkeypatch.setattr(buffer_commands, "ls", raising)
    return main(["buffer", "ls", "somewhere"])


def test_a_run_of_someone_else_is_told_by_its_owner_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = tmp_path / "run" / "config.json"
    error = PermissionError(errno.EACCES, "Permission denied", str(inner))
    assert fail(monkeypatch, error) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"vime-hpc buffer: {inner}: permission denied to user id {os.getuid()}")
    assert f"{tmp_path} belongs to user id {tmp_path.stat().st_uid}" in said
    assert "run.share_with_group" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_disk_is_told_by_the_files_name(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(monkeypatch, OSError(number, os.strerror(number), "/scratch/me/out")) == 1
    said = capsys.readouterr().err
    assert "/scratch/me/out" in said
    assert "write elsewhere" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(errno.ENOENT, "gone", "f")])
def test_an_error_of_ours_keeps_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(monkeypatch, error) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "please report it" in said
