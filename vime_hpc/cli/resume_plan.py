"""`vime-hpc resume-plan`: where the next start of a run would go on, and why."""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "resume-plan",
        help="where the next start of a run would go on, and why; starts nothing",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks checkpoints and buffer of a run and says what the next start would load, reuse and pass over.",
        epilog="Overrides as for submit (--run.num_steps=200, --trainer.tp=4) show what a changed configuration would do.\n"
        "exit codes: 0 there is something to do, 3 the records contradict each other, 4 nothing to do",
    )
    parser.add_argument(
        "run", metavar="RUN|JOBID", help="run directory, or the id of a Slurm job of ours"
    )
    parser.add_argument(
        "--sizes-only",
        action="store_true",
        help="do not read the checkpoint files to compare digests",
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="another machine than so far: configs/clusters/NAME.toml"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(
        handler="vime_hpc.cli.resume_plan_command:resume_plan", takes_overrides=True
    )
