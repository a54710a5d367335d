#!/usr/bin/env python
"""Evaluate a policy on held-out prompts: python launchers/submit_eval.py CONFIG... --cluster NAME --model.path=EXPORT [overrides]

One step of rollouts without training; the evaluation at weight version 0 is written to RUN/eval.
"""

from __future__ import annotations

import argparse

from vime_hpc.cli.overrides import parse_with_overrides
from vime_hpc.cli.submit_command import config_files, submit_or_print
from vime_hpc.config.load import load_config
from vime_hpc.errors import VimeError

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)
parser.add_argument("configs", nargs="+")
parser.add_argument("--cluster", required=True)
parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
arguments, overrides = parse_with_overrides(parser)

try:
    config = load_config(
        config_files(arguments.configs, arguments.cluster),
        [
            "--run.mode=rollout_only",
            "--run.num_steps=1",
            "--rollout.prompts_per_step=1",
            *overrides,
        ],
    )
    submit_or_print(config, dry_run=arguments.dry_run)
except VimeError as error:
    parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
