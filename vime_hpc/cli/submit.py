"""`vime-hpc submit`: the whole job to Slurm."""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "submit",
        help="submit a whole job to Slurm",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Submit the job of the configuration files (merged left to right) to Slurm.",
        epilog="The machine is described by a file of configs/clusters/, which is merged last.\n"
        "Any option may be overridden: --section.option=value, as in --cluster.slurm.account=abc.\n"
        "`sbatch` on what --dry-run prints does the same job. docs/slurm.md tells the rest.",
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML configuration files")
    parser.add_argument(
        "--cluster", metavar="FILE", help="the machine: configs/clusters/NAME.toml (or NAME)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print layout and script, submit nothing, write nothing",
    )
    parser.add_argument(
        "--test-only",
        action="store_true",
        help="let Slurm check the request and say when it might start",
    )
    parser.add_argument(
        "--json", action="store_true", help="print job id, run directory and layout as JSON"
    )
    parser.set_defaults(handler="vime_hpc.cli.submit_command:submit", takes_overrides=True)
