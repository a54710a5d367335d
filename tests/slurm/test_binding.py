"""Which CPUs and GPUs a rank gets, on a Slurm that binds tasks (task/affinity): two nodes of as many CPUs as this host has.

The other tests' cluster pretends to 16 CPUs a node, and a Slurm that binds refuses to lay tasks out over CPUs that are not
there. So this one has a home and a port of its own, beside the other.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_jobs import HERE, Job, slurm, stub_spec

from vime_hpc.cli.submit_command import submit_spec

ALL = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def binding(
    cluster: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:  # `cluster` skips where Slurm is not installed
    home = tmp_path_factory.mktemp("binding")
    knobs = {
        "HOME": str(home),
        "PORT": "27800",
        "NODES": "2",
        "CPUS": str(os.cpu_count()),
        "GPUS": "2",
        "NETNS": "0",
        "HOSTS": "0",
        "AUTH": "none",
        "TASK": "task/affinity",
    }
    environment = os.environ | {f"SLURM_DEV_{name}": value for name, value in knobs.items()}
    with pytest.MonkeyPatch.context() as patch:
        try:
            subprocess.run(
                ["bash", str(HERE / "slurm-up.sh")], env=environment, check=True, timeout=120
            )
            patch.setenv("SLURM_CONF", str(home / "etc" / "slurm.conf"))
            yield
        finally:
            subprocess.run(
                ["bash", str(HERE / "slurm-down.sh")], env=environment, check=True, timeout=120
            )


def places(run: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """Where each rank of a finished job of two trainer ranks, an engine and a worker ran."""
    options = ["--trainer.num_ranks=2", "--run.num_steps=1"]
    options += ["--cluster.components.trainer.nodelist=n1"]
    spec = stub_spec(run, *options, *overrides)
    job = Job(submit_spec(spec), run, spec)
    try:
        assert job.finish() == {"COMPLETED"}, job.log
    finally:
        slurm("scancel", job.id, check=False)
    directory = job.paths.attempt(f"{job.id}.0") / "places"
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


@pytest.mark.usefixtures("binding")
@pytest.mark.parametrize("shape", ["het", "separate", "step"])
def test_trainer_ranks_have_cores_of_their_own_and_the_others_share_their_nodes(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STEP_S", "0.02")
    gpus = ["--cluster.components.trainer.gpus_per_node=2"]
    gpus += ["--cluster.components.rollout.gpus_per_node=2"]
    found = places(tmp_path / "run", f"--cluster.shape={shape}", *gpus)
    one, two = (set(found[f"trainer-{rank}"]["cpus"]) for rank in (0, 1))
    assert len(one) == len(two) == 1
    assert not one & two
    assert found["engine-0"]["cpus"] == found["rollout-0"]["cpus"] == ALL
    # No GPU is taken away from a rank: each chooses by its place on the node, and peers copy directly.
    assert {place["CUDA_VISIBLE_DEVICES"] for place in found.values()} == {"0,1"}


@pytest.mark.usefixtures("binding")
def test_what_the_user_says_of_binding_is_what_srun_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STEP_S", "0.02")
    found = places(
        tmp_path / "run",
        "--cluster.components.trainer.cpu_bind=map_cpu:1,0",
        "--cluster.components.rollout.nodes=1",
        "--cluster.components.rollout.cpu_bind=cores",
    )
    assert [found[f"trainer-{rank}"]["cpus"] for rank in (0, 1)] == [[1], [0]]
    assert len(found["engine-0"]["cpus"]) == len(found["rollout-0"]["cpus"]) == 1
    everything = places(tmp_path / "again", '--cluster.srun=["--cpu-bind=none"]')
    assert {tuple(place["cpus"]) for place in everything.values()} == {tuple(ALL)}
