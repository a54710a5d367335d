"""ShellCheck finds nothing in what is rendered (the golden files are that text) nor in the project's own shell scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(
    [
        *(ROOT / "tests" / "golden").glob("*.sbatch"),
        *(ROOT / "sbatch").rglob("*.sbatch"),
        *(ROOT / "tests" / "slurm").glob("*.sh"),
        *(ROOT / "tools").glob("*.sh"),
    ]
)


@pytest.fixture(scope="module")
def shellcheck() -> str:
    found = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if not found:
        pytest.skip("shellcheck is not installed (tools/requirements-test.txt has it)")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_finds_nothing(script: Path, shellcheck: str) -> None:
    # SC2016: a dollar in single quotes is meant as it stands
    answer = subprocess.run(
        [shellcheck, "--shell=bash", "--exclude=SC2016", str(script)],
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout) == (0, "")
