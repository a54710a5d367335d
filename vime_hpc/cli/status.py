"""`vime-hpc status` and `vime-hpc logs`: what a run is doing, and what its ranks wrote."""

from __future__ import annotations

import argparse
from typing import Any

from vime_hpc.cli.numbers import nonnegative_int


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="what a run or job is doing, its first failure, and what to do next",
        description="One answer from Slurm (squeue, sacct where there is accounting, scontrol), the run directory's attempts, "
        "failure records and metrics.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="RUN|JOBID", help="run directory, or the id of a Slurm job of ours"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(handler="vime_hpc.cli.status_command:status")

    logs = subparsers.add_parser("logs", help="the logs of all ranks of a start, merged by time")
    logs.add_argument(
        "target", metavar="RUN|JOBID", help="run directory, or the id of a Slurm job of ours"
    )
    logs.add_argument("--attempt", help="which start, as JOB.RESTART (default: the newest)")
    logs.add_argument(
        "--rank", action="append", help="only this rank, as trainer-0 (may be repeated)"
    )
    logs.add_argument(
        "--tail",
        type=nonnegative_int,
        default=0,
        metavar="N",
        help="only the last N lines of the merged log",
    )
    logs.add_argument("--json", action="store_true", help="one JSON object a line")
    logs.set_defaults(handler="vime_hpc.cli.logs_command:logs")
