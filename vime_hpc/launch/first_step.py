"""What `vime-hpc bench submit` runs as every rank: the imports of a program, then its "first step", then the end.

    python -m vime_hpc.launch.first_step MODULES RUN

MODULES is a comma-separated list to import, or "-". The first start in a batch script of ours asks for a restart.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

from vime_hpc.cluster.signal_flag import SignalFlag
from vime_hpc.errors import RequeueRequested


def main(modules: str, run: str) -> int:
    SignalFlag()
    for name in modules.split(","):
        if name != "-":
            importlib.import_module(name)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    rank = int(os.environ["SLURM_PROCID"]) + int(os.environ.get("VIME_FIRST_RANK", "0"))
    path = stamp(Path(run), restart, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(repr(time.time()))
    part.rename(path)
    asks_for_restart = "VIME_ATTEMPT" in os.environ and restart == 0
    return RequeueRequested.exit_code if asks_for_restart else 0


def stamp(run: Path, restart: int, rank: int) -> Path:
    """Where a rank writes the time of its first step, seconds since 1970."""
    return run / "first-step" / f"{restart}-{rank}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
