"""tools/install.sh and an environment that another checkout made: it is named, and never changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/sh
# The environment of a checkout: its package is found there, or on PYTHONPATH.
echo "${PYTHONPATH:-OWNER}"
"""


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A checkout, and in first/.venv the environment of another one."""
    for name in ("first", "second"):
        shutil.copytree(ROOT / "tools", tmp_path / name / "tools")
        shutil.copy(ROOT / "setup.cfg", tmp_path / name)
    python = tmp_path / "first" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.replace("OWNER", str(tmp_path / "first")))
    python.chmod(0o755)
    return tmp_path / "second"


def install(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["bash", "tools/install.sh", "run"],
        cwd=checkout,
        env={**kept, "VIME_VENV": str(checkout.parent / "first" / ".venv"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def stamp(checkout: Path) -> None:
    """The environment has what the checkouts need."""
    done = subprocess.run(
        "cat tools/requirements-cpu.txt tools/install.sh setup.cfg | sha256sum | cut -d' ' -f1",
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    (checkout.parent / "first" / ".venv" / ".installed-run").write_text(done.stdout)


def test_nothing_is_installed_into_the_environment_of_another_checkout(second: Path) -> None:
    answer = install(second)
    assert answer.returncode == 2
    assert f"is the environment of {second.parent / 'first'}" in answer.stderr
    assert not (second.parent / "first" / ".venv" / ".installed-run").exists()


def test_whose_code_a_shared_environment_runs_is_said(second: Path) -> None:
    stamp(second)
    answer = install(second)
    assert answer.returncode == 0
    assert f"runs the code of {second.parent / 'first'}" in answer.stderr
    assert f"export PYTHONPATH={second}" in answer.stderr
    quiet = install(second, PYTHONPATH=str(second))
    assert (quiet.returncode, quiet.stderr) == (0, "")
    own = install(second.parent / "first")
    assert (own.returncode, own.stderr) == (0, "")
