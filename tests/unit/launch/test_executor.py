"""submitit hands sbatch one file, the script that --dry-run prints. The commands here are scripts that write down what came."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vime_hpc.config.load import load_config
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.launch.job import JobSpec, job_spec
from vime_hpc.launch.sbatch import render

pytest.importorskip("submitit")


def spec_of(run: Path) -> JobSpec:
    options = ["--model.path=m", "--data.train=t", f"--run.dir={run}", "--trainer.num_ranks=16"]
    options += ["--engine.num_engines=4", "--engine.tp=2", "--cluster.components.trainer.nodes=2"]
    options += ["--cluster.components.trainer.gpus_per_node=8"]
    options += ["--cluster.components.rollout.gpus_per_node=8"]
    return job_spec(load_config([], options))


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of what the false sbatch was given: `calls` has a line a call, `script` the last one's file."""
    seen, bin_ = tmp_path / "seen", tmp_path / "bin"
    seen.mkdir()
    bin_.mkdir()
    for name, body in {
        "srun": "exit 1",
        "squeue": "exit 1",
        "sacct": "exit 1",
        "sbatch": f'[ "$1" = --version ] && exit\n'
        f'echo "$#" >>"{seen}/calls"; cp "$1" "{seen}/script"\n[ -e "{seen}/refuse" ] && '
        f'{{ cat "{seen}/refuse" >&2; exit 1; }}\necho "Submitted batch job 4711"',
    }.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return seen


def test_one_job_of_two_components_is_one_file_and_one_call(sbatch: Path, tmp_path: Path) -> None:
    from vime_hpc.cli.submit_command import submit_spec

    spec = spec_of(tmp_path / "run 'of' [mine]")
    assert submit_spec(spec) == "4711"
    assert (sbatch / "calls").read_text().split() == ["1"]
    text = (sbatch / "script").read_text()
    assert text == render(spec)
    assert text.count("#SBATCH hetjob\n") == 1
    kept = spec.run / "submitted" / "4711_submission.sh"
    assert kept.read_text() == text
    assert not stat.S_IMODE(spec.run.stat().st_mode) & 0o077


def test_an_example_s_account_is_not_submitted(sbatch: Path, tmp_path: Path) -> None:
    from vime_hpc.cli.submit_command import submit_spec

    config = load_config(
        [Path("configs/clusters/generic.toml")],
        ["--model.path=m", "--data.train=t", f"--run.dir={tmp_path / 'run'}"],
    )
    with pytest.raises(ConfigError, match=r"cluster\.slurm\.account: still CHANGE"):
        submit_spec(job_spec(config))
    assert not (tmp_path / "run").exists()
    assert not (sbatch / "calls").exists()


def test_what_sbatch_says_is_in_the_error(sbatch: Path, tmp_path: Path) -> None:
    from vime_hpc.cli.submit_command import submit_spec

    (sbatch / "refuse").write_text("sbatch: error: Batch job submission failed: Invalid qos\n")
    with pytest.raises(VimeError, match=r"Invalid qos.*vime-hpc doctor --cluster"):
        submit_spec(spec_of(tmp_path / "run"))
