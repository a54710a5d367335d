"""`vime-hpc bench submit`: how long our launcher takes to the first step, against a bare srun."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vime_hpc.cli.submit_command import config_files
from vime_hpc.errors import ConfigError


def main(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc bench submit`."""
    try:
        from vime_hpc.launch.bench import bench_submit
    except ImportError as error:
        raise ConfigError(
            f"bench submit needs submitit ({error}): pip install 'vime_hpc[slurm]'"
        ) from error
    figures = bench_submit(
        config_files([], arguments.cluster),
        arguments.overrides,
        Path(arguments.work),
        imports=arguments.imports,
        repeats=arguments.repeats,
    )
    if arguments.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        if isinstance(value, list):
            value = ", ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in value)
        print(f"{name:28} {f'{value:.3g}' if isinstance(value, float) else value}")
    return 0
