"""`vime-hpc doctor`: can this machine, this cluster, run a job?"""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine or a cluster before a run is submitted",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks what can be checked where you are: packages, file system, HDF5, permissions, Slurm's version and "
        "settings, the request against the partitions.",
        epilog="  vime-hpc doctor                                  this machine\n"
        "  vime-hpc doctor --cluster configs/clusters/X.toml    Slurm, and whether it would take the request\n"
        "  vime-hpc doctor CONFIG --cluster X.toml --job    a two-minute job of the same shape checks the nodes\n"
        "exit codes: 0 nothing found, 1 something will not work",
    )
    parser.add_argument(
        "configs", nargs="*", metavar="CONFIG", help="TOML configuration files of the run to come"
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="the machine: configs/clusters/NAME.toml (or NAME)"
    )
    parser.add_argument(
        "--job", action="store_true", help="submit a probe job and wait for its findings"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=900.0,
        metavar="S",
        help="longest wait for the probe job, seconds",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(handler="vime_hpc.cli.doctor_command:doctor", takes_overrides=True)
