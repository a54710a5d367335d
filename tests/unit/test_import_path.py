"""Ranks find the user's modules, and take none of them for Python's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import vime_hpc
from vime_hpc.cluster.import_path import IMPORT_FROM

CODE = """
from vime_hpc.cluster.import_path import add_users_modules
add_users_modules()
import json, my_rewards
print(json.dumps(my_rewards.VALUE))
"""


def test_the_users_directory_is_looked_in_last(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "my_rewards.py").write_text("VALUE = 1\n")
    answer = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env=os.environ
        | {IMPORT_FROM: str(tmp_path), "PYTHONPATH": str(Path(vime_hpc.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.stdout, answer.stderr) == ("1\n", "")
