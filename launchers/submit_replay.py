#!/usr/bin/env python
"""Train again on a run's buffer, in a job: python launchers/submit_replay.py RUN NEW_RUN --cluster NAME [--steps A:B] [overrides]

The same as `vime-hpc replay`, on a cluster: RUN is only read. The metrics lie in NEW_RUN/metrics.jsonl afterwards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vime_hpc.cli.overrides import parse_with_overrides
from vime_hpc.cli.submit_command import config_files, submit_or_print
from vime_hpc.config.load import build_config, load_config
from vime_hpc.errors import VimeError
from vime_hpc.launch.finished_buffer import refuse_unfinished
from vime_hpc.launch.replay import plan_replay, prepare

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
)
parser.add_argument("run", type=Path)
parser.add_argument("new_run", type=Path)
parser.add_argument("--cluster", required=True)
parser.add_argument("--steps", metavar="A:B")
parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
arguments, overrides = parse_with_overrides(parser)
of_cluster = [text for text in overrides if text.startswith("--cluster.")]

try:
    replay = plan_replay(
        arguments.run,
        arguments.steps,
        [text for text in overrides if text not in of_cluster],
        arguments.new_run,
    )
    # The machine is that of this command, not the one RUN was made on; load_config wants the required options, too.
    needed = [f"--{name}.{key}=x" for name, key in (("model", "path"), ("data", "train"))]
    cluster = load_config(config_files([], arguments.cluster), [*needed, *of_cluster]).cluster
    config = build_config(
        replay.config.model_dump(mode="json") | {"cluster": cluster.model_dump(mode="json")}
    )
    refuse_unfinished(config, replay.out, replay.first)
    submit_or_print(config, dry_run=arguments.dry_run, prepare=lambda: prepare(replay))
except VimeError as error:
    parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
