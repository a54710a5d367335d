"""`vime-hpc status JOBID` of a finished job: Slurm's commands are scripts that print what real ones did (22.05.8)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.cli.main import main
from vime_hpc.config.cluster import ClusterConfig
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.errors import RunLockedError
from vime_hpc.launch.attempts import Attempt, Frontier, write_attempt
from vime_hpc.launch.run_directory import refuse_waiting_job

SQUEUE_FORGOT = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
SCONTROL_FORGOT = 'echo "job script retrieval failed: Invalid job id specified" >&2; exit 1'
NO_ACCOUNTING = 'echo "Slurm accounting storage is disabled" >&2; exit 1'
# sacct -X -n -P of a heterogeneous job that ran on n1 and n0, and of one that was cancelled.
COMPLETED = (
    "7+0|COMPLETED|n1|BeginTime|2026-11-29T22:46:34|00:05:00|\n"
    "7+1|COMPLETED|n0|BeginTime|2026-11-29T22:46:34|00:05:00\n"
)
CANCELLED = "7|CANCELLED by 0|n1|None|2026-11-29T22:46:59|\n"
NODE_FAIL = (
    "7+0|COMPLETED|n1|None|2026-11-29T22:46:59|00:05:00\n"
    "7+1|NODE_FAIL|n0|None|2026-11-29T22:46:59|00:05:00\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose job 7 began, and whose script lies where submitit keeps it."""
    root = tmp_path / "a run"
    (root / "submitted").mkdir(parents=True)
    (root / "submitted" / "7_submission.sh").write_text(f"#!/bin/bash\nrun='{root}'\n")
    config = load_config([], ["--model.path=m", "--data.train=t", f"--run.dir={root}"])
    (root / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    RunPaths(root).attempt("7.0").mkdir(parents=True)
    began(root)
    return root


def began(root: Path, **end: Any) -> None:
    write_attempt(RunPaths(root), Attempt("7.0", 1000.0, Frontier(), "n1", **end))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put scripts of these names on an otherwise bare PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.setattr("shutil.which", only_in(folder))

    def write(**scripts: str) -> None:
        for name, body in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)

    return write


def only_in(folder: Path) -> Callable[[str], str | None]:
    """shutil.which for a machine on which nothing of Slurm but these scripts is installed."""
    return lambda name: str(folder / name) if (folder / name).exists() else None


def sacct(run: Path, states: str) -> str:
    """One that answers the two questions asked of it."""
    (run.parent / "states").write_text(states)
    line = f"sbatch {run}/submitted/.submission_file_c230aaf9be29436a.sh"
    (run.parent / "line").write_text(f"{line}\n{line}\n")
    return (
        f'case "$*" in *SubmitLine*) cat "{run.parent}/line";; '
        f'*JobID,State*--jobs=7) cat "{run.parent}/states";; *) exit 2;; esac'
    )


def status(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["status", "7", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("states", "word", "nodes"),
    [
        (COMPLETED, "COMPLETED", "n1,n0"),
        (CANCELLED, "CANCELLED", "n1"),
        (NODE_FAIL, "NODE_FAIL", "n1,n0"),
    ],
)
def test_accounting_answers_for_a_job_that_slurmctld_has_forgotten(
    states: str,
    word: str,
    nodes: str,
    run: Path,
    commands: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands(squeue=SQUEUE_FORGOT, scontrol=SCONTROL_FORGOT, sacct=sacct(run, states))
    found = status(capsys)
    assert (found["run"], found["job_id"]) == (str(run), "7")
    assert (found["slurm"]["state"], found["slurm"]["nodes"]) == (word, nodes)
    assert found["state"] == "killed from outside"
    assert f"Slurm says {word}" in found["next_action"]
    assert "attempts/7.0/job.sbatch" in found["next_action"]


def test_a_finished_job_is_finished_whatever_the_source(
    run: Path, commands: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    began(run, ended=1100.0, at_end=Frontier(9, 9), cause="finished", verdict="done")
    commands(squeue=SQUEUE_FORGOT, scontrol=SCONTROL_FORGOT, sacct=sacct(run, COMPLETED))
    found = status(capsys)
    assert (found["state"], found["slurm"]["state"]) == ("finished", "COMPLETED")
    assert main(["status", "7"]) == 0
    assert "job        7 COMPLETED on n1,n0" in capsys.readouterr().out


def test_without_accounting_slurmctld_answers_while_it_remembers(
    run: Path, commands: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    commands(
        squeue='printf "7+0|TIMEOUT|n1|None|N/A|0:00\\n7+1|COMPLETED|n0|None|N/A|0:00\\n"',
        scontrol=f"cat '{run}/submitted/7_submission.sh'",
        sacct=NO_ACCOUNTING,
    )
    found = status(capsys)
    assert (found["slurm"]["state"], found["slurm"]["nodes"]) == ("TIMEOUT", "n1,n0")
    assert "Slurm says TIMEOUT" in found["next_action"]


def test_without_accounting_a_forgotten_job_asks_for_the_run_directory_which_still_answers(
    run: Path, commands: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    commands(squeue=SQUEUE_FORGOT, scontrol=SCONTROL_FORGOT, sacct=NO_ACCOUNTING)
    assert main(["status", "7"]) == 2
    assert "give the run directory instead" in capsys.readouterr().err
    assert main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["slurm"], found["state"]) == (None, "killed from outside")


def pending(run: Path, commands: Callable[..., None], line: str) -> None:
    commands(
        squeue=f'echo "{line}"',
        scontrol=f"cat '{run}/submitted/7_submission.sh'",
        sacct=NO_ACCOUNTING,
    )


@pytest.mark.parametrize(
    ("line", "state", "said"),
    [
        ("7|PENDING||Priority|2026-11-30T01:00:00|5:00|", "waiting for its restart", "Priority"),
        ("7|PENDING||PartitionConfig|N/A|5:00|", "waiting for its restart", "it will never start"),
        ("7|PENDING||JobHeldUser|N/A|5:00|", "waiting for its restart", "scontrol release 7"),
        ("7|COMPLETING|n1|None|N/A|5:00|", "ending", "ask again in a minute"),
        (
            "7|FAILED|n1|None|N/A|5:00|vime-hpc stopping: the disk | is full",
            "killed from outside",
            "Its last word: stopping: the disk | is full. ",
        ),
    ],
)
def test_what_slurm_says_becomes_what_to_do(
    line: str,
    state: str,
    said: str,
    run: Path,
    commands: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pending(run, commands, line)
    found = status(capsys)
    assert found["state"] == state
    assert said in found["next_action"]


def test_a_job_that_ended_before_it_claimed_the_directory_tells_its_last_word(
    run: Path, commands: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "attempts" / "7.0" / "attempt.json").unlink()
    pending(run, commands, "7|FAILED|n1|None|N/A|5:00|vime-hpc /x/run cannot be written on n1")
    found = status(capsys)
    assert found["state"] == "not started"
    assert "there is no slurm-7.log. Its last word: /x/run cannot be" in found["next_action"]
    assert f"submit again with --run.dir='{run}'" in found["next_action"]


def test_a_run_that_sbatch_refused_was_not_submitted(
    run: Path, commands: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "attempts")
    (run / "submitted" / "7_submission.sh").unlink()
    commands(squeue=SQUEUE_FORGOT, scontrol=SCONTROL_FORGOT, sacct=NO_ACCOUNTING)
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "not submitted"


def test_the_same_run_is_not_put_into_the_queue_twice(
    run: Path, commands: Callable[..., None]
) -> None:
    commands(squeue='echo "7+0|PENDING|"; echo "7+1|PENDING|"', sacct=NO_ACCOUNTING)
    paths, cluster = RunPaths(run), ClusterConfig()
    with pytest.raises(RunLockedError, match=r"job 7 is in the queue for it already.*scancel 7"):
        refuse_waiting_job(paths, cluster)
    refuse_waiting_job(paths, ClusterConfig(slurm={"dependency": "afterany:7"}))
    commands(squeue="true")
    refuse_waiting_job(paths, cluster)
