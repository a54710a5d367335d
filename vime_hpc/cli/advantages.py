"""`vime-hpc advantages`: the advantages a stored step, or rewards in a JSON file, get from an
estimator.
"""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "advantages",
        help="compute advantages of a stored step, or of rewards in a JSON file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compute advantages again, offline, with any estimator.",
        epilog='A JSON file holds columns {"reward": [...], "group_id": [...], "rollout_id": [...]} or a list of such rows. Groups '
        "are\nnever guessed: rows without group_id are refused. Without rollout_id every row is a rollout of its own. A reward of\n"
        "null is unusable; a reward that is an object is read through --reward-key.",
    )
    parser.add_argument(
        "source", metavar="RUN|FILE", help="run directory (or its buffer), or a JSON file"
    )
    parser.add_argument("--step", type=int, help="step of the run; needed for a run directory")
    parser.add_argument(
        "--estimator",
        default="grpo",
        help="algorithm.advantage: a built-in name or a dotted path (grpo)",
    )
    parser.add_argument(
        "--reward-key", default="", metavar="KEY", help="entry of rewards that are objects"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler="vime_hpc.cli.advantages_command:run")
