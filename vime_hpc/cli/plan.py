"""`vime-hpc plan`: which weights travel from which trainer rank to which engine rank, before a run or of one."""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="which weights travel from which trainer rank to which engine rank; starts nothing",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show the plan by which weights travel: buckets, senders, and the bytes every engine rank receives over\n"
        "the bytes of its parameters. Of configuration files it is what is expected, told from the model directory's\n"
        "headers (no GPU, no torch); of a run directory what the run recorded and goes by.",
        epilog="Overrides as for run: --section.option=value, as in --engine.tp=4, --trainer.pp=2.",
    )
    parser.add_argument(
        "source", nargs="+", metavar="CONFIG", help="TOML configuration files, or one run directory"
    )
    parser.add_argument("--buckets", action="store_true", help="list every bucket")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(handler="vime_hpc.cli.plan_command:run", takes_overrides=True)
