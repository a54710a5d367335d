"""`vime-hpc run`: the whole job on this machine."""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a whole job on this machine",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run the job of the configuration files (merged left to right) on this machine.",
        epilog="Any option may be overridden: --section.option=value, as in --trainer.tp=2.\n"
        "vLLM's own options: --vllm-OPTION=value. vllm-router's own: --router-OPTION=value.\n"
        "All options: docs/config.md",
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="TOML configuration files")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and start nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result (or the configuration) as JSON"
    )
    parser.set_defaults(handler="vime_hpc.cli.run_command:run", takes_overrides=True)
