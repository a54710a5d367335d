"""`vime-hpc submit`: configuration to job description to Slurm."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from vime_hpc.config.cluster import unchanged
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.launch.job import JobSpec, describe, job_spec
from vime_hpc.launch.record import command_line, write_submitted
from vime_hpc.launch.run_directory import (
    make_root,
    refuse_finished,
    refuse_live_owner,
    refuse_waiting_job,
)
from vime_hpc.launch.sbatch import render


def submit(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc submit`; returns the exit code."""
    config = load_config(config_files(arguments.configs, arguments.cluster), arguments.overrides)
    _check(config)
    spec = job_spec(config)
    if arguments.dry_run:
        print(
            json.dumps({**summary(spec), "script": render(spec)})
            if arguments.json
            else render(spec),
            end="",
        )
        _tell("dry run, nothing submitted", spec)
        return 0
    if arguments.test_only:
        return _test_only(spec)
    job_id = submit_spec(spec)
    if arguments.json:
        print(json.dumps({"job_id": job_id, **summary(spec)}))
    else:
        print(f"job {job_id} submitted; run directory {spec.run}")
        print("\n".join(f"  {line}" for line in describe(spec)))
        print(
            f"  what it does: vime-hpc status {job_id}\n  its log:      {spec.run}/slurm-{job_id}.log"
        )
    return 0


def submit_or_print(
    config: RunConfig, *, dry_run: bool, prepare: Callable[[], object] = lambda: None
) -> None:
    """What every launcher ends with: check, describe on standard error, then print the script or submit it.

    Args:
        prepare: called right before the submission, not in a dry run.
    """
    _check(config)
    spec = job_spec(config)
    print("\n".join(describe(spec)), file=sys.stderr)
    if dry_run:
        print(render(spec), end="")
        return
    prepare()
    print(f"job {submit_spec(spec)}, run directory {spec.run}")


def config_files(configs: list[str], cluster: str | None) -> list[Path]:
    """The files in merging order; a bare cluster name means configs/clusters/NAME.toml."""
    files = [Path(path) for path in configs]
    if cluster is None:
        return files
    path = Path(cluster)
    named = Path("configs/clusters") / f"{cluster}.toml"
    if not path.exists() and not named.exists():
        known = sorted(file.stem for file in Path("configs/clusters").glob("*.toml"))
        raise ConfigError(
            f"--cluster {cluster}: there is neither {path} nor {named} in {Path.cwd()}; "
            + (f"known here: {', '.join(known)}" if known else "give the path of a cluster file")
        )
    return [*files, path if path.exists() else named]


def submit_spec(spec: JobSpec) -> str:
    """Submit through submitit; returns the (leading) job's id.

    Raises:
        ConfigError: submitit or Slurm's commands are not here, or the run directory belongs to a live job.
        NothingToDoError: the run is complete.
        VimeError: sbatch refused the job.
    """
    try:
        from vime_hpc.launch.executor import HetSlurmExecutor
    except ImportError as error:
        raise ConfigError(
            f"submit needs submitit ({error}): pip install 'vime_hpc[slurm]'. Or use sbatch on what --dry-run "
            f"prints"
        ) from error
    if placeholders := unchanged(spec.cluster):
        raise ConfigError(
            f"{', '.join(placeholders)}: still CHANGE, as in the example; put in what your site gave you"
        )
    missing = [command for command in ("sbatch", "srun") if not shutil.which(command)]
    if missing:
        raise ConfigError(
            f"there is no {' and no '.join(missing)} on {socket.gethostname()}: submit from a login node, or run on this "
            f"machine with `vime-hpc run`"
        )
    paths = RunPaths(spec.run)
    refuse_live_owner(paths)
    refuse_waiting_job(paths, spec.cluster)
    refuse_finished(paths, spec.config)
    make_root(spec.run, spec.config.run.share_with_group)
    write_submitted(paths, spec.config, layout=summary(spec), command=command_line())
    return str(HetSlurmExecutor(paths.submitted).submit_spec(spec).job_id)


def summary(spec: JobSpec) -> dict[str, object]:
    """The layout for machines."""
    return {
        "run": str(spec.run),
        "shape": spec.cluster.shape,
        "world_size": spec.world_size,
        "components": [
            {
                "name": c.name,
                "nodes": c.nodes,
                "tasks": c.tasks,
                "first_rank": c.first_rank,
                "distribution": c.distribution,
                "roles": {str(role): size for role, size in c.roles},
                "ranks_of_nodes": [] if c.is_service else c.ranks_of_nodes(),
            }
            for c in spec.components
        ],
    }


def _check(config: RunConfig) -> None:
    """What `vime-hpc run` checks before it starts, too: a job that waits a day in the queue should not fail on a typo."""
    from vime_hpc.cli.preflight import check, keep_foreign_modules_out

    keep_foreign_modules_out()  # sbatch hands the environment on to the job
    check(config, import_plugins=False)


def _tell(what: str, spec: JobSpec) -> None:
    """On standard error, so that the script on standard output can be piped into a file."""
    print(f"{what}; run directory {spec.run}", *describe(spec), sep="\n  ", file=sys.stderr)


def _test_only(spec: JobSpec) -> int:
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=render(spec), text=True, capture_output=True, timeout=60
    )
    if answer.returncode:
        raise VimeError(f"Slurm would refuse this job: {answer.stderr.strip()}")
    print(answer.stderr.strip() or answer.stdout.strip())
    return 0
