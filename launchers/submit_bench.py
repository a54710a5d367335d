#!/usr/bin/env python
"""Submit a benchmark run: python launchers/submit_bench.py CONFIG... --cluster NAME --run.dir=RUN [overrides]

The configuration as it is, and no restarts, which would be in the figures. Two such runs (or two directories of repeats)
are held against each other by `vime-hpc bench compare A B`; RUN/record has what is needed to run the same again.
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
        config_files(arguments.configs, arguments.cluster), ["--cluster.requeue=never", *overrides]
    )
    submit_or_print(config, dry_run=arguments.dry_run)
except VimeError as error:
    parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
