"""submit, status and doctor against a real Slurm without accounting."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_jobs import Job, slurm

from vime_hpc.cli.main import main
from vime_hpc.launch.executor import HetSlurmExecutor, HetSlurmWatcher

CLUSTER = str(Path(__file__).parents[2] / "configs" / "clusters" / "local_test.toml")


def test_status_by_job_id_follows_a_job_from_start_to_end(
    submit: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit("--run.num_steps=200", step_s=0.2)
    job.wait_steps(3)
    assert main(["status", job.id, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["slurm"]["state"], found["run"]) == (
        "running",
        "RUNNING",
        str(job.run),
    )
    assert found["step"] >= 2
    assert 0.1 < found["seconds_per_step"] < 30
    slurm("scancel", job.id)
    job.finish()
    assert main(["status", str(job.run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] in ("killed from outside", "stopped: killed from outside")
    assert "sbatch" in found["next_action"]


CONTAINER = f"--cluster.python=env PATH=/nonexistent TZ=Pacific/Kiritimati {sys.executable}"
"""Python as in a container: none of Slurm's commands, and a clock that shows other hours (UTC+14) than the host's."""


@pytest.mark.parametrize("options", [[], [CONTAINER]], ids=["host", "container"])
def test_a_cancelled_job_stays_away(options: list[str], submit: Callable[..., Job]) -> None:
    job = submit("--run.num_steps=1000", *options)
    job.wait_steps(1)
    slurm("scancel", job.id)
    assert job.finish() == {"CANCELLED"}
    assert all(attempt.verdict != "again" for attempt in job.attempts)


def test_where_python_has_no_slurm_commands_limit_and_requeue_are_known_all_the_same(
    submit: Callable[..., Job],
) -> None:
    held = {"rank": "rollout-0", "step": 1, "do": "hold"}
    job = submit("--run.num_steps=2", CONTAINER, fault=held)
    place = job.wait_up()
    stop_at = int(place["VIME_STOP_AT"])
    assert 0 < stop_at - time.time() < 300, "cluster.time is five minutes, the warning 20 s before"
    job.wait_steps(1)
    slurm("scancel", "--signal=USR2", job.id)
    assert job.finish() == {"COMPLETED"}, job.log
    assert [attempt.cause for attempt in job.attempts] == ["asked to stop", "finished"]


def test_submitit_s_job_object_knows_the_state_of_a_heterogeneous_job(
    submit: Callable[..., Job],
) -> None:
    job = submit("--run.num_steps=1")
    watcher = HetSlurmWatcher()
    watcher.register_job(job.id)
    assert job.finish() == {"COMPLETED"}
    watcher.update()
    assert watcher.get_state(job.id, mode="force") == "COMPLETED"


def test_the_executor_is_found_as_a_submitit_plugin(cluster: Path, tmp_path: Path) -> None:
    import submitit

    executor = submitit.AutoExecutor(folder=tmp_path, cluster="hetslurm")
    assert isinstance(executor._executor, HetSlurmExecutor)
    assert submitit.AutoExecutor(folder=tmp_path).cluster == "slurm"


def test_doctor_looks_at_the_cluster_and_a_probe_job_at_its_nodes(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["doctor", "--cluster", CLUSTER, "--job", "--json", f"--run.dir={tmp_path / 'a/b/run'}"]
        )
        == 0
    )
    findings = json.loads(capsys.readouterr().out)
    found = {finding["what"].strip(): finding for finding in findings}
    assert found["Slurm"]["detail"].startswith("slurm")
    assert "3 ranks on 2 nodes" in found["probe job"]["detail"]
    assert {"trainer-0", "engine-0", "rollout-0"} <= set(found)
    assert not list(tmp_path.iterdir())


def test_doctor_says_what_the_partition_cannot_give(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        [
            "doctor",
            "--cluster",
            CLUSTER,
            "--json",
            f"--run.dir={tmp_path}",
            "--cluster.time=2-00:00:00",
            "--cluster.components.trainer.partition=man",
        ]
    )
    assert code == 1
    bad = [
        finding["detail"]
        for finding in json.loads(capsys.readouterr().out)
        if finding["level"] == "bad"
    ]
    assert any("does not exist; there are high, low, main" in detail for detail in bad)
    assert any("limit is 1-00:00:00" in detail for detail in bad)


def test_dry_run_writes_nothing_and_test_only_asks_slurm(
    cluster: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vime_hpc.cli.submit_command._check", lambda config: None)
    config = tmp_path / "run.toml"
    config.write_text('[model]\npath = "m"\n[data]\ntrain = "t"\n')
    words = [str(config), "--cluster", CLUSTER, f"--run.dir={tmp_path / 'run'}"]
    assert main(["submit", *words, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n#SBATCH")
    assert "requeue on preemption: yes" in err
    assert os.listdir(tmp_path) == ["run.toml"]
    assert main(["submit", *words, "--test-only"]) == 0
    assert "to start at" in capsys.readouterr().out
    assert (
        main(
            [
                "submit",
                *words,
                "--test-only",
                "--cluster.components.trainer.nodes=1",
                "--cluster.slurm.account=nobody",
                "--cluster.components.trainer.partition=none",
            ]
        )
        == 1
    )
    assert "Slurm would refuse this job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mpi", "level", "said"),
    [
        ("pmi2", "good", "3 ranks on 2 nodes"),
        ("none", "bad", "COMM_WORLD has 1 ranks, the step 3"),
    ],
)
def test_doctor_counts_whether_mpi_joins_all_tasks_of_both_components(
    mpi: str,
    level: str,
    said: str,
    cluster: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """MPICH's wheel speaks PMI2; without PMI each task is a world of one, and nobody says so."""
    options = [f"--cluster.mpi={mpi}", f"--run.dir={tmp_path / 'run'}"]
    main(["doctor", "--cluster", CLUSTER, "--job", "--json", *options])
    found = [
        finding
        for finding in json.loads(capsys.readouterr().out)
        if finding["what"].strip() == "probe job"
    ]
    assert [finding["level"] for finding in found] == [level], found
    assert said in found[0]["detail"]


def test_bench_submit_times_our_launcher_against_a_bare_srun_of_the_same_program(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cluster", CLUSTER, "--work", str(tmp_path / "work"), "--repeats", "1", "--json"]
    assert main(["bench", "submit", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    (bare,), (ours,) = found["bare_srun_to_first_step_s"], found["submit_to_first_step_s"]
    assert found["submit_ratio"] == pytest.approx(ours / bare)
    assert found["restart_ratio"] == pytest.approx(found["restart_to_first_step_s"][0] / bare)
    assert min(bare, ours, *found["restart_to_first_step_s"]) > 0
    (tmp_path / "figures.json").write_text(json.dumps(found))
    assert main(["bench", "compare", *[str(tmp_path / "figures.json")] * 2, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["submit_ratio"]["ratio"] == 1.0
