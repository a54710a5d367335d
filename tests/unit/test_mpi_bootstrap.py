"""`cluster.mpi`: real MPI processes (MPICH's mpiexec) find the meeting point without a file; what is wrong is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the rendezvous store is torch's")
pytest.importorskip("mpi4py")

PROGRAM = """
import sys, time
from pathlib import Path
from functools import partial
from vime_hpc.cluster.mpi import broadcast_record
from vime_hpc.cluster.rendezvous import Rendezvous

import os
rank = int(os.environ["PMI_RANK"])
hosting = rank == int(sys.argv[2])
exchange = partial(broadcast_record, world_size=int(sys.argv[3]), timeout_s=20)
# Every rank looks into a directory of its own, so only MPI can have told it.
own = Path(sys.argv[1]) / str(rank)
own.mkdir()
if sys.argv[4:] == ["late"] and not hosting:
    import mpi4py
    mpi4py.rc.finalize = False
    from mpi4py import MPI  # takes part in nothing
    MPI.COMM_WORLD.Get_size(); time.sleep(3); os._exit(0)
if sys.argv[4:] == ["late"]:
    exchange = partial(broadcast_record, world_size=int(sys.argv[3]), timeout_s=1)
meeting = Rendezvous.open(own, b"t" * 32, hosting=hosting, address="127.0.0.1", timeout_s=20, exchange=exchange)
meeting.put(f"here/{rank}", True)
for other in range(int(sys.argv[3])):
    assert meeting.wait(f"here/{other}", timeout_s=20, who=str(other), phase="meeting")
(own / "met").touch()
end = time.monotonic() + 20
while hosting and len(list(own.parent.glob("*/met"))) < int(sys.argv[3]) and time.monotonic() < end:
    time.sleep(0.05)  # the others' answers are in this process
"""


def mpiexec(tmp_path: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = Path(sys.executable).parent / "mpiexec"
    assert launcher.exists(), "mpich is in tools/requirements-test.txt; bash tools/install.sh test"
    return subprocess.run(
        [launcher, "-n", str(ranks), sys.executable, program, tmp_path, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_every_rank_meets_the_one_that_hosts_whichever_mpi_counts_first(tmp_path: Path) -> None:
    done = mpiexec(tmp_path, 3, "1", "3")
    assert done.returncode == 0, done.stderr
    # Files, since the lines of several ranks run into each other on mpiexec's output.
    assert sorted(path.parent.name for path in tmp_path.glob("*/met")) == ["0", "1", "2"]


def test_a_world_smaller_than_the_job_is_refused_with_the_likely_cause(tmp_path: Path) -> None:
    done = mpiexec(tmp_path, 1, "0", "3")
    assert done.returncode != 0
    assert "COMM_WORLD has 1 ranks, the step 3" in done.stderr
    assert "srun --mpi=list" in done.stderr


def test_ranks_that_do_not_come_end_in_a_deadline_and_nobody_hangs(tmp_path: Path) -> None:
    done = mpiexec(tmp_path, 2, "0", "2", "late")
    assert done.returncode != 0
    assert "not all ranks came within 1 s" in done.stderr
