"""The rank program: what the local launcher and srun start. `python -m vime_hpc.roles RUN`.

The order of the first lines matters: the warning signal is blocked before numpy starts its threads, and the wish to
die with the launcher is told to the kernel before anything that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def _die_with_launcher() -> None:
    """A rank whose local launcher was killed gets TERM. Under srun, Slurm does that itself."""
    launcher = os.environ.get("VIME_LAUNCHER_PID")
    if launcher is None:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(launcher):
        sys.exit(1)


def main() -> int:
    _die_with_launcher()
    from vime_hpc.cluster.import_path import add_users_modules
    from vime_hpc.cluster.signal_flag import SignalFlag

    add_users_modules()

    warning = SignalFlag()
    from vime_hpc.roles.process import run_role

    return run_role(sys.argv[1], warning)


if __name__ == "__main__":
    sys.exit(main())
