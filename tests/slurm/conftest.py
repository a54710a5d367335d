"""A real Slurm on this host (slurm-up.sh: four nodes, network namespaces where we are root), and jobs on it.

A cluster that is up already (SLURM_DEV_HOME) is used and left up. Without the packages slurmctld, slurmd, slurm-client
and munge the tests are skipped; tools/test.sh installs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_jobs import HERE, STUB, Job, slurm, stub_spec, wait_until

from vime_hpc.cli.submit_command import submit_spec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    missing = [
        tool
        for tool in ("slurmctld", "slurmd", "sbatch", "munged")
        if not shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin")
    ]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed (packages slurmctld slurmd slurm-client munge)"
        )
    home = Path(
        os.environ.get("SLURM_DEV_HOME", f"{tempfile.gettempdir()}/slurm-dev-{os.getuid()}")
    )
    netns = os.geteuid() == 0 and shutil.which("ip") and shutil.which("nsenter")
    was_up = (home / "run" / "slurmctld.pid").exists()
    os.environ |= {"SLURM_DEV_HOME": str(home), "SLURM_DEV_NETNS": "1" if netns else "0"}
    up = subprocess.run(
        ["bash", str(HERE / "slurm-up.sh")], capture_output=True, text=True, timeout=120
    )
    assert up.returncode == 0, up.stderr
    os.environ["SLURM_CONF"] = str(home / "etc" / "slurm.conf")
    yield home
    if not was_up:
        subprocess.run(["bash", str(HERE / "slurm-down.sh")], check=True, timeout=120)


@pytest.fixture
def submit(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """Submit a stub job: one trainer on the last node, an engine and a rollout worker on another."""
    jobs: list[Job] = []

    def start(
        *overrides: str,
        run: Path | None = None,
        fault: dict[str, Any] | None = None,
        step_s: float = 0.1,
        program: Path = STUB,
    ) -> Job:
        run = run or tmp_path / "run"
        monkeypatch.setenv("STUB_STEP_S", str(step_s))
        monkeypatch.setenv("STUB_FAULT", json.dumps(fault))
        spec = stub_spec(run, *overrides, program=program)
        job = Job(submit_spec(spec), run, spec)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        slurm("scancel", job.id, check=False)
    wait_until(
        lambda: (
            not slurm(
                "squeue", "-h", "-o", "%A", "-j", ",".join(job.id for job in jobs), check=False
            ).split()
        ),
        "the test's jobs are gone",
        60,
    )
