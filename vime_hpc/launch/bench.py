"""`vime-hpc bench submit`: seconds from submit to the first step through our launcher ÷ a bare srun of the same program.

The bare srun asks for the same components and runs the same program, so queue, allocation and imports are in both;
what is left is ours: submitit, the batch script, claiming the run directory. The restart is timed from the moment the
requeued job is let go (Slurm holds it back for two minutes, which is not ours) to its first step.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import ConfigError, DeadlineError, VimeError
from vime_hpc.launch.allocation import allocation_words
from vime_hpc.launch.executor import HetSlurmExecutor
from vime_hpc.launch.first_step import stamp
from vime_hpc.launch.job import JobSpec, job_spec
from vime_hpc.launch.record import machine, said
from vime_hpc.launch.run_directory import make_root

# A requeued job that starts within the same second is refused by slurmd (docs/decisions/slurm-job.md).
SETTLE_S = 3.0
POLL_S = 0.02


def bench_submit(
    cluster_files: list[Path],
    overrides: list[str],
    work: Path,
    *,
    imports: str = "-",
    repeats: int = 3,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Both ways in turn.

    Args:
        work: directory that compute nodes see; a run directory per repeat is made in it.
        imports: modules that every rank imports before its first step, comma-separated; "-" = none.
        timeout_s: longest wait for one first step, queueing included.
    Returns:
        the seconds of every repeat, ratios of the medians, and what they were measured with.
    Raises:
        ConfigError: no srun here, or `work` was used before.
        DeadlineError: a first step did not come in time.
        VimeError: srun or sbatch refused.
    """
    if not shutil.which("srun"):
        raise ConfigError("there is no srun here: run this on a login node")
    bare, ours, again = [], [], []
    for repeat in range(repeats):
        spec = _spec(cluster_files, overrides, work / f"run-{repeat}", imports)
        bare.append(_bare(spec, work / f"bare-{repeat}", timeout_s))
        submitted, restarted = _ours(spec, timeout_s)
        ours.append(submitted)
        again.append(restarted)
    median = statistics.median(bare)
    return {
        "bare_srun_to_first_step_s": bare,
        "submit_to_first_step_s": ours,
        "restart_to_first_step_s": again,
        "submit_ratio": statistics.median(ours) / median,
        "restart_ratio": statistics.median(again) / median,
        "submit_more_s": statistics.median(ours) - median,
        "restart_more_s": statistics.median(again) - median,
        "shape": spec.cluster.shape,
        "components": [f"{c.name}: {c.tasks} tasks, {c.nodes} nodes" for c in spec.ranked],
        "imports": imports,
        "slurm": said("sbatch", "--version"),
        "machine": machine(),
    }


def _spec(files: list[Path], overrides: list[str], run: Path, imports: str) -> JobSpec:
    if run.exists():
        raise ConfigError(f"{run} exists; give a fresh directory with --work")
    given = ["--model.path=none", "--data.train=none", f"--run.dir={run.absolute()}"]
    config = load_config(files, [*given, *overrides])
    return job_spec(config, program=("-P", "-m", "vime_hpc.launch.first_step", imports))


def _bare(spec: JobSpec, directory: Path, timeout_s: float) -> float:
    """One srun without a batch script."""
    program = [*spec.python, *spec.program, str(directory.absolute())]
    words = ["srun"]
    for index, component in enumerate(spec.ranked):
        words += [":"] if index else []
        words += [*allocation_words(component, spec), *program]
    directory.mkdir(parents=True)
    began = time.time()
    with (directory / "srun.log").open("wb") as log:
        try:
            answer = subprocess.run(words, stdout=log, stderr=log, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"bare srun: not done within {timeout_s:.0f} s; `squeue` says why it waits"
            ) from None
    if answer.returncode:
        raise VimeError(
            f"srun ended with {answer.returncode}: {(directory / 'srun.log').read_text()[-1000:]}"
        )
    return _first_step(spec, directory, 0) - began


def _ours(spec: JobSpec, timeout_s: float) -> tuple[float, float]:
    """Seconds to the first step of the first start, and of the one after the requeue."""
    began = time.time()
    make_root(spec.run, spec.config.run.share_with_group)
    job = str(HetSlurmExecutor(RunPaths(spec.run).submitted).submit_spec(spec).job_id)
    try:
        _until(lambda: _all_there(spec, spec.run, 0), f"first step of job {job}", timeout_s)
        _until(lambda: "BeginTime" in _reasons(job), f"requeue of job {job}", timeout_s)
        time.sleep(SETTLE_S)
        let_go = time.time()
        said("scontrol", "update", f"jobid={job}", "StartTime=now")
        _until(lambda: _all_there(spec, spec.run, 1), f"restart of job {job}", timeout_s)
        _until(lambda: not said("squeue", "-h", "-j", job), f"end of job {job}", timeout_s)
    except DeadlineError:
        said("scancel", job)
        raise
    return _first_step(spec, spec.run, 0) - began, _first_step(spec, spec.run, 1) - let_go


def _reasons(job: str) -> str:
    return said("squeue", "-h", "-j", job, "-o", "%r") or ""


def _all_there(spec: JobSpec, run: Path, restart: int) -> bool:
    return all(stamp(run, restart, rank).exists() for rank in range(spec.world_size))


def _first_step(spec: JobSpec, run: Path, restart: int) -> float:
    """When the last of the ranks got there, seconds since 1970."""
    return max(float(stamp(run, restart, rank).read_text()) for rank in range(spec.world_size))


def _until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise DeadlineError(f"{what}: not within {timeout_s:.0f} s; `squeue` says why it waits")
        time.sleep(POLL_S)
