"""What someone needs to know to run the same again: RUN/record/submitted.json and one machine.json per start.

`submitted` is written where the job was submitted: command line, configuration, seeds, layout, git state, packages.
`machine` is written where a start runs, on the batch host: CPU, GPUs, topology, kernel, environment, the nodes Slurm gave; the
first rank of every node writes the same of its node. Nothing here may stop a run: what cannot be found out is null.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vime_hpc
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig

COMMAND_S = 30.0
SUBMITTED, MACHINE, NODES = "submitted.json", "machine.json", "nodes"
SETTINGS = (
    *("CUDA_", "GLOO_", "GOMP_", "HDF5_", "HF_", "HIP_", "KMP_", "LD_", "LOADEDMODULES", "MALLOC_"),
    *("MKL_", "MPICH_", "NCCL_", "NVTE_", "OMPI_", "OMP_", "OPENBLAS_", "FI_", "PMIX_", "PYTHON"),
    *("PYTORCH_", "ROCR_", "TOKENIZERS_", "TORCH", "TRITON_", "UCX_", "VIRTUAL_ENV", "VLLM_"),
)
"""What the names of variables begin with that are worth a record."""
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
SLURM_FACTS = (
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_TASKS_PER_NODE",
    "SLURM_HET_SIZE",
)


def write_submitted(
    paths: RunPaths, config: RunConfig, *, layout: Mapping[str, Any] | None, command: Sequence[str]
) -> None:
    """RUN/record/submitted.json; an earlier one of the same run is kept under the time it was written."""
    paths.record.mkdir(parents=True, exist_ok=True)
    path = paths.record / SUBMITTED
    if path.exists():
        path.rename(path.with_name(f"submitted-{int(path.stat().st_mtime)}.json"))
    write_json(
        path,
        {
            "time": time.time(),
            "host": socket.gethostname(),
            "command": shlex.join(command),
            "seeds": {"run.seed": config.run.seed},
            "layout": layout,
            "config": config.model_dump(mode="json"),
            "git": git_state(Path(vime_hpc.__file__).parent),
            "packages": packages(),
            "python": platform.python_version(),
            "slurm": said("sbatch", "--version"),
        },
    )


def write_machine(directory: Path) -> None:
    """machine.json of a start: the host that writes it, and what Slurm says of the nodes."""
    write_json(directory / MACHINE, machine())


def write_node(directory: Path, rank: str) -> None:
    """nodes/<rank>.json of a start: the node of a rank. By rank, since the next start may get other hosts."""
    (directory / NODES).mkdir(exist_ok=True)
    write_json(directory / NODES / f"{rank}.json", node())


def node() -> dict[str, Any]:
    """This host: CPU, memory, GPUs, how they are joined, kernel."""
    return {
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "topology": {
            "numa_nodes": _names(Path("/sys/devices/system/node"), "node[0-9]*"),
            "infiniband": _names(Path("/sys/class/infiniband"), "*"),
            "gpu_links": said("nvidia-smi", "topo", "-m"),
        },
    }


def machine() -> dict[str, Any]:
    """This host, the environment that the tasks are given, and the nodes of the job, per component."""
    return node() | {
        "environment": settings(os.environ),
        "slurm": {name: os.environ[name] for name in _slurm_names() if name in os.environ},
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run computes or communicates. None that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(SETTINGS) and not SECRET.search(name)
    }


def _slurm_names() -> list[str]:
    groups = range(int(os.environ.get("SLURM_HET_SIZE", "0")))
    return [
        *SLURM_FACTS,
        *(
            f"SLURM_{what}_HET_GROUP_{group}"
            for group in groups
            for what in ("JOB_NODELIST", "JOB_NUM_NODES", "NTASKS", "JOB_PARTITION")
        ),
    ]


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, branch and uncommitted changes of the source tree; None where it is not one, or there is no git.

    `changes` is `git diff HEAD`; files git does not know are named, not copied.
    """
    commit = said("git", "-C", str(directory), "rev-parse", "HEAD")
    if not commit:
        return None
    changes = said("git", "-C", str(directory), "diff", "HEAD", "--no-ext-diff") or ""
    status = said("git", "-C", str(directory), "status", "--porcelain", "--untracked-files=all")
    unknown = [line[3:] for line in (status or "").splitlines() if line.startswith("?? ")]
    return {
        "commit": commit,
        "branch": said("git", "-C", str(directory), "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(status),
        "changes": changes,
        "changes_sha256": hashlib.sha256(changes.encode()).hexdigest() if changes else None,
        "unknown_files": unknown,
    }


def packages() -> dict[str, str]:
    """Version of every installed distribution."""
    found = {
        dist.metadata["Name"]: dist.version
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"]
    }
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def said(*words: str) -> str | None:
    """What a command prints; None where it is not there, fails or does not answer."""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def command_line() -> list[str]:
    """As it was typed; a console script shows by its name."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def write_json(path: Path, value: object) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1))
    part.rename(path)


def _cpu_model() -> str | None:
    """x86 names the model; Arm only gives codes of maker and part."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    arm = " ".join(fields[key] for key in ("CPU implementer", "CPU part") if key in fields)
    return fields.get("model name") or arm or None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _names(directory: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in directory.glob(pattern))


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU this host shows."""
    text = said(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return (text or "").splitlines()
