"""MPI as a bootstrap (`cluster.mpi`): the job's meeting point reaches every rank by one broadcast instead of by a file.

For sites whose shared file system shows new files late. MPI does this one exchange and is finalized at once: a rank that is
killed later takes nobody else along in MPI's own way, and forked processes inherit no MPI state. Buffers only, no pickles.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from vime_hpc.errors import ConfigError, DeadlineError

_POLL_S = 0.01


def mpi_problem(step_tasks: int) -> str:
    """Why MPI does not join the tasks of this step; empty where it does. Without PMI each task is a world of 1."""
    try:
        size = _load().COMM_WORLD.Get_size()
    except (ImportError, RuntimeError) as error:
        return f"mpi4py does not load: {error}"
    if size != step_tasks:
        return (
            f"COMM_WORLD has {size} ranks, the step {step_tasks}: this MPI and srun's --mpi do not meet "
            f"(srun --mpi=list; MPICH's wheel wants pmi2, Open MPI's pmix)"
        )
    return ""


def broadcast_record(record: bytes | None, *, world_size: int, timeout_s: float) -> bytes:
    """One rank gives the record, all others None; every rank gets it. Once a process: MPI is finalized afterwards.

    Args:
        record: what the others are to know, one byte or more.
        world_size: ranks of the job, all of which call this.
    Raises:
        ConfigError: MPI does not load, or joins fewer ranks than the job has.
        DeadlineError: not all ranks came within timeout_s.
    """
    if problem := mpi_problem(world_size):
        raise ConfigError(
            f"cluster.mpi: {problem}; leave cluster.mpi empty to meet through a file, and ask "
            f"`vime-hpc doctor --job` what works here"
        )
    mpi = _load()
    world = mpi.COMM_WORLD
    # Which rank gives it is asked, not assumed: MPI may count the components of a heterogeneous job in another order.
    sizes = np.zeros(world_size, np.int64)
    own = np.array([len(record or b"")], np.int64)
    _finish(world.Iallgather(own, sizes), timeout_s, "saying who hosts the meeting point")
    if np.count_nonzero(sizes) != 1:
        raise ConfigError(
            f"cluster.mpi: {np.count_nonzero(sizes)} ranks host the meeting point, expected one: the ranks are of "
            f"different jobs; see the lines VIME_ of the job script"
        )
    root = int(sizes.argmax())
    box = np.frombuffer(record, np.uint8).copy() if record else np.zeros(sizes[root], np.uint8)
    _finish(world.Ibcast(box, root=root), timeout_s, "handing out the meeting point")
    mpi.Finalize()
    return box.tobytes()


def _load() -> Any:
    """MPI, initialized. It is never finalized at exit: after a failure that would wait for ranks that are gone."""
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def _finish(request: Any, timeout_s: float, phase: str) -> None:
    end = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > end:
            raise DeadlineError(
                f"start: MPI, {phase}: not all ranks came within {timeout_s:g} s; the logs in attempts/ say which "
                f"rank is not up"
            )
        time.sleep(_POLL_S)
