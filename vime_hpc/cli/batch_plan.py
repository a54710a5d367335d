"""`vime-hpc batch-plan`: how the trainer packs a stored step into microbatches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch-plan",
        help="show how the trainer packs a stored step into microbatches",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show which samples of a committed step every data parallel rank computes, packed into which\n"
        "microbatches, by the trainer's own planner. Needs no GPU and no engine, and trains nothing.",
        epilog="Other settings of the run: --section.option=value, as in --algorithm.updates_per_step=2,\n"
        "--algorithm.mask_zero_spread=false (samples without weight are not computed).",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, required=True, help="committed step to plan")
    for name, what in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{what} parallel size (the run's)"
        )
    parser.add_argument(
        "--tokens-per-microbatch",
        type=int,
        metavar="N",
        help="trainer.max_tokens_per_microbatch (the run's)",
    )
    parser.add_argument("--samples", action="store_true", help="list every microbatch's samples")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(handler="vime_hpc.cli.batch_plan_command:run", takes_overrides=True)
