"""What `vime-hpc doctor` says of a request that a partition cannot give. sinfo is a script that prints what a real one did."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vime_hpc.cli.doctor_slurm import cluster
from vime_hpc.config.load import load_config
from vime_hpc.launch.job import job_spec

ROWS = {
    "gpu": "gpu|1-00:00:00|4|64|512000|gpu:a100:4(S:0-1)",
    "cpu": "cpu|infinite|100|128|256000|(null)",
    "mixed": "mixed|12:00:00|2|64+|128000+|gpu:4\nmixed|12:00:00|2|32|64000|(null)",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sinfo of three partitions, of which gpu is the default one; the other commands answer nothing of use."""
    for name, rows in ROWS.items():
        (tmp_path / name).write_text(rows + "\n")
    every = " ".join(str(tmp_path / name) for name in ROWS)
    names = "\\n".join(ROWS)
    scripts = {
        "sinfo": f'case "$*" in *--partition=*) cat "{tmp_path}/${{4#--partition=}}" 2>/dev/null;; '
        f'*%P) printf "gpu*\\ncpu\\nmixed\\n";; *"%R") printf "{names}\\n";; *) cat {every};; esac',
        "scontrol": 'echo "SchedulerType = sched/backfill"',
        "sbatch": "true",
    }
    (tmp_path / "bin").mkdir()
    for name, body in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")


def bad(*options: str) -> list[str]:
    given = ["--model.path=m", "--data.train=t", *(f"--cluster.{option}" for option in options)]
    found = cluster(job_spec(load_config([], given)))
    return [finding.detail for finding in found if finding.level == "bad"]


T, R = "components.trainer.", "components.rollout."


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([f"{T}gpus_per_node=4", f"{R}gpus_per_node=4"], []),
        ([f"{T}partition=cpu", f"{R}partition=gpu"], []),
        ([f"{T}partition=cpu", f"{R}nodes=1", "time=30-0"], ["cluster.time = 30-0 is longer"]),
        ([f"{T}partition=cpu", f"{T}gpus_per_node=1", f"{R}nodes=1"], ["has no GPUs a node"]),
        ([f"{T}gpus_per_node=8", f"{R}nodes=1"], ["has 4 GPUs a node in its GRES"]),
        (
            [f"{T}cpus_per_task=65", f"{R}nodes=1"],
            ["at most 64 CPUs a node, cluster.components.trainer asks for 65"],
        ),
        ([f"{T}mem=600G", f"{R}nodes=1"], ["at most 512000 MiB a node"]),
        ([f"{T}partition=typo", f"{R}nodes=1"], ["does not exist; there are cpu, gpu, mixed"]),
        (
            [f"{T}nodes=1", f"{R}nodes=1", "slurm.account=project_CHANGE"],
            ["cluster.slurm.account still says CHANGE"],
        ),
        # of nodes of which some are greater ("64+") nothing is claimed
        ([f"{T}partition=mixed", f"{T}cpus_per_task=99", f"{R}nodes=1"], []),
    ],
)
def test_what_the_partition_cannot_give_is_said_with_the_option(
    options: list[str], said: list[str]
) -> None:
    found = bad(*options)
    assert len(found) == len(said), found
    assert all(words in text for words, text in zip(said, found, strict=True)), found


def test_commands_without_a_cluster_behind_them_are_told_on_one_line(
    slurm: None, tmp_path: Path
) -> None:
    """sbatch --version fails as well where no slurm.conf can be found."""
    silent = "#!/bin/sh\necho 'scontrol: error: no server' >&2\necho 'scontrol: fatal: end' >&2\nexit 1\n"
    for name in ("scontrol", "sbatch"):
        (tmp_path / "bin" / name).write_text(silent)
    assert bad() == [
        "its commands are here, but the controller does not answer: scontrol: error: no server scontrol: fatal: end"
    ]
