"""The warning signal, sent to every process of a task from its first moment on: no child dies of it, and it is seen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = "import sys; sys.stdin.read()"  # until its parent closes the pipe
PROGRAM = f"""
from vime_hpc.cluster.signal_flag import SignalFlag
flag = SignalFlag()
import concurrent.futures, multiprocessing, os, subprocess, sys, time
import numpy  # its threads inherit the mask

def main():
    pipes = [subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE) for _ in range(2)]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        squares = pool.map(pow, range(8), [2] * 8)
        end = time.monotonic() + 60
        while not os.path.exists(sys.argv[1]) and time.monotonic() < end:
            time.sleep(0.01)
        assert list(squares) == [n * n for n in range(8)]
    for pipe in pipes:
        pipe.stdin.close()
    codes = [pipe.wait() for pipe in pipes]
    assert codes == [0, 0], codes
    assert flag.is_set()
    return 75

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("number", range(3))
def test_twenty_warnings_to_all_processes_kill_none_of_them(number: int, tmp_path: Path) -> None:
    """As a task of the job is started: the shell ignores the signal until Python has blocked it.

    VIME_KILL_SEED repeats the moments.
    """
    seed = int(os.environ.get("VIME_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"VIME_KILL_SEED={seed}")
    rng = random.Random(seed + number)
    program, enough = tmp_path / "program.py", tmp_path / "enough"
    program.write_text(PROGRAM)
    task = subprocess.Popen(
        [
            "bash",
            "-c",
            "trap '' USR2; echo up; exec \"$@\"",
            "task",
            sys.executable,
            program,
            enough,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert task.stdout is not None
    assert task.stdout.readline() == "up\n"
    for _ in range(20):
        os.killpg(task.pid, signal.SIGUSR2)
        time.sleep(rng.uniform(0, 0.1))
    enough.touch()
    _, error = task.communicate(timeout=120)
    assert task.returncode == 75, error
