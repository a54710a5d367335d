"""`vime-hpc replay`: train on a run's stored rollouts again, with other settings if wanted, and compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="train on a run's stored rollouts again and compare the metrics",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train on a step range of RUN's buffer again, from the checkpoint (or the initial model) at its first\n"
        "step, and compare the trainer's metrics with those RUN recorded. RUN is only read.",
        epilog="Other settings: --section.option=value, as in --algorithm.advantage=rloo, --algorithm.eps_clip=0.1,\n"
        "--rollout.filters='[\"zero_spread\"]' (leaves out groups before training).\n"
        "With nothing changed, and as many trainer ranks, every metric is equal bit for bit on a CPU.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory to replay")
    parser.add_argument(
        "--steps", metavar="A:B", help="steps A to B - 1 (all committed ones); A needs a checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new run directory (RUN-replay-1, -2, ...)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(handler="vime_hpc.cli.replay_command:replay", takes_overrides=True)
