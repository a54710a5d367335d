"""submit --dry-run, status, logs, resume-plan and doctor on run directories made by hand: no Slurm is needed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from vime_hpc.buffer.index import COMMIT_FORMAT, FORMAT_VERSION, encode_record
from vime_hpc.cli.doctor_slurm import read_settings
from vime_hpc.cli.logs_command import merge
from vime_hpc.cli.main import build_parser, main
from vime_hpc.cli.overrides import parse_with_overrides, split_overrides
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch.attempts import Attempt, Frontier, write_attempt

CONFIG = ["--model.path=m", "--data.train=t"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of 10 steps: checkpoint 7, steps 0..8 committed."""
    root = tmp_path / "run"
    root.mkdir()
    config = load_config([], [*CONFIG, f"--run.dir={root}", "--run.num_steps=10"])
    (root / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    for step in range(9):
        commit(root, step)
    checkpoint(root, 7)
    return root


def commit(root: Path, step: int) -> None:
    path = root / "buffer" / "steps" / f"{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    worker = {
        "worker": 0,
        "segment": {},
        "resume_state": {"next_group_id": 4 * (step + 1)},
        "stats": {},
    }
    path.write_bytes(
        encode_record(
            {
                "format": COMMIT_FORMAT,
                "format_version": FORMAT_VERSION,
                "run_id": "r",
                "step": step,
                "attempt": 1,
                "num_workers": 1,
                "workers": [worker],
            }
        )
    )


def checkpoint(root: Path, step: int, **changes: Any) -> Path:
    folder = root / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    data = b"weights" * 100
    (folder / "rank-0000.safetensors").write_bytes(data)
    entry = {
        "name": "rank-0000.safetensors",
        "bytes": len(data),
        "xxh3_128": xxhash.xxh3_128_hexdigest(data),
        "boxes": {},
    }
    (folder / "commit.json").write_text(
        json.dumps(
            {
                "format": 1,
                "next_step": step,
                "weight_version": step,
                "layout": {"num_ranks": 2, "tp": 2, "pp": 1},
                "files": [entry],
            }
            | changes
        )
    )
    return folder


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["resume-plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[0])


def test_resume_plan_goes_on_after_the_checkpoint_and_reuses_what_was_generated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = plan(capsys, str(run))
    assert code == 0
    assert (found["next_step"], found["weight_version"], found["next_rollout_step"]) == (7, 7, 9)
    assert (found["reusable_steps"], found["data_cursor"]) == ([7, 8], [{"next_group_id": 36}])
    assert found["because"]["data_cursor"] == "buffer/steps/000008.json"
    assert found["notes"] == ["the checkpoint is resharded: num_ranks 2 -> 1, tp 2 -> 1"]


def test_resume_plan_refuses_a_buffer_that_ends_before_the_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(5, 9):
        (run / "buffer" / "steps" / f"{step:06d}.json").unlink()
    assert main(["resume-plan", str(run)]) == 3
    assert "trained up to step 7" in capsys.readouterr().err


def test_resume_plan_refuses_a_weight_version_that_is_not_the_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    checkpoint(run, 7, weight_version=5)
    assert main(["resume-plan", str(run)]) == 3
    assert "next_step 7 but weight_version 5" in capsys.readouterr().err


def test_resume_plan_takes_the_newest_complete_checkpoint_and_names_the_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C49: one without its marker, one cut by a byte, and a `latest` that points at the cut one and must not win."""
    (checkpoint(run, 8) / "commit.json").unlink()
    cut = checkpoint(run, 9) / "rank-0000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    commit(run, 9)
    (run / "checkpoints" / "latest").symlink_to("step-000009")
    code, found = plan(capsys, str(run))
    assert (code, found["next_step"]) == (0, 7)
    assert "step-000008: incomplete" in found["passed_over"][1]
    assert "has 699 bytes, its commit says 700" in found["passed_over"][0]


def test_resume_plan_finds_a_flipped_byte_unless_told_to_look_at_sizes_only(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-000007" / "rank-0000.safetensors"
    path.write_bytes(b"W" + path.read_bytes()[1:])
    assert main(["resume-plan", str(run)]) == 3
    assert "does not have the digest" in capsys.readouterr().err
    assert plan(capsys, str(run), "--sizes-only")[0] == 0


@pytest.mark.parametrize("num_steps", [7, 5])
def test_resume_plan_says_nothing_to_do_with_a_code_of_its_own(
    run: Path, num_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume-plan", str(run), f"--run.num_steps={num_steps}"]) == 4
    said = capsys.readouterr()
    assert "nothing to do" in said.err
    assert f"all {num_steps} steps are trained" in said.out
    assert main(["resume-plan", str(run), "--run.num_steps=9"]) == 0
    assert "trains from step 7 on; the last of its 9 is step 8" in capsys.readouterr().out


def test_resume_plan_without_a_checkpoint_starts_fresh(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    code, found = plan(capsys, str(run))
    assert (code, found["next_step"], found["optimizer"], found["reusable_steps"]) == (
        0,
        0,
        "fresh",
        list(range(9)),
    )


def test_resume_plan_on_another_machine_shows_the_job_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(
        '[cluster]\nshape = "split"\n[cluster.components.all]\nroles = ["trainer", "engine", "rollout"]\n'
    )
    code, found = plan(capsys, str(run), "--cluster", str(other), "--engine.num_engines=2")
    assert (code, found["next_step"]) == (0, 7)
    assert any(
        note.startswith("the job: component 0 all: 1 node, ranks 0..3: 1 trainer + 2 engine")
        for note in found["notes"]
    ), found["notes"]
    other.write_text('[cluster]\nshape = "het"\n[cluster.components.trainer]\nnodes = 3\n')
    assert main(["resume-plan", str(run), "--cluster", str(other)]) == 2
    assert "no component runs the role engine" in capsys.readouterr().err


def attempt(run: Path, **more: Any) -> Path:
    paths = RunPaths(run)
    for directory in ("logs", "failures", "exits"):
        (paths.attempt("7.0") / directory).mkdir(parents=True)
    write_attempt(
        paths,
        Attempt(
            **({"name": "7.0", "began": 1000.0, "at_begin": Frontier(0, 0), "host": "n1"} | more)
        ),
    )
    return paths.attempt("7.0")


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["status", str(run), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def forgotten_by_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """squeue is there and knows no job."""
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho Invalid job id specified >&2; exit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")


@pytest.mark.usefixtures("no_slurm")
def test_status_does_not_guess_where_slurm_cannot_be_asked(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(run)
    assert status(run, capsys)["state"] == "running, or killed"


@pytest.mark.usefixtures("no_slurm")
def test_status_of_a_local_run_needs_no_job(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "attempts" / "local.0" / "failures").mkdir(parents=True)
    assert status(run, capsys)["state"] == "stopped"
    owner = {"job_id": "local", "restart_count": 0, "host": "elsewhere", "pid": 1, "since": 0.0}
    (run / "lock.json").write_text(json.dumps({**owner, "held_by": "process"}))
    assert main(["status", str(run)]) == 0
    assert "none of Slurm's: `vime-hpc run`" in capsys.readouterr().out
    (run / "lock.json").write_text("")
    checkpoint(run, 10)
    assert status(run, capsys)["state"] == "finished"


@pytest.mark.usefixtures("forgotten_by_slurm")
def test_the_command_that_goes_on_can_be_pasted_where_the_path_is_awkward(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = run.rename(run.with_name("it's a [run]"))
    attempt(moved)
    words = shlex.split(status(moved, capsys)["next_action"].partition("go on: ")[2])
    assert words == ["sbatch", f"{moved}/attempts/7.0/job.sbatch"]


@pytest.mark.usefixtures("forgotten_by_slurm")
def test_status_never_calls_a_killed_run_done(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(run)
    found = status(run, capsys)
    assert found["state"] == "killed from outside"
    assert f"sbatch {run}/attempts/7.0/job.sbatch" in found["next_action"]


@pytest.mark.usefixtures("no_slurm")
def test_status_tells_the_first_failure_and_not_its_consequences(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = attempt(
        run,
        ended=1100.0,
        at_end=Frontier(9, 7),
        cause="crash",
        verdict="stop",
        reason="engine-0 failed",
    )
    for rank, at, consequence in (("trainer-0", 5.0, True), ("engine-0", 6.0, False)):
        (directory / "failures" / f"{rank}.json").write_text(
            json.dumps(
                {
                    "rank": rank,
                    "host": "n2",
                    "time": at,
                    "error": "E",
                    "message": f"{rank} said so",
                    "exit_code": 1,
                    "consequence": consequence,
                    "traceback": "",
                }
            )
        )
    found = status(run, capsys)
    assert found["state"] == "stopped: crash"
    assert found["failure"]["rank"] == "engine-0"
    assert main(["status", str(run)]) == 0
    assert "engine-0 said so" in capsys.readouterr().out


@pytest.mark.usefixtures("no_slurm")
def test_status_tells_of_a_task_that_was_killed_without_a_word(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = attempt(
        run, ended=1100.0, at_end=Frontier(9, 7), cause="crash", verdict="stop", reason="killed"
    )
    (directory / "exits" / "trainer-1").write_text("137\n")
    (directory / "exits" / "engine-0").write_text("143\n")
    (directory / "logs" / "trainer-1.log").write_text("step 3\n")
    failure = status(run, capsys)["failure"]
    assert (failure["rank"], failure["message"]) == ("trainer-1", "step 3")
    assert "SIGKILL" in failure["error"]


@pytest.mark.usefixtures("no_slurm")
def test_status_gives_step_and_rate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(
        run,
        ended=1100.0,
        at_end=Frontier(9, 7),
        cause="finished",
        verdict="done",
        reason="every task ended well",
    )
    lines = [
        json.dumps({"step": step, "time": 1000.0 + 4 * step, "attempt": "7.0"}) for step in range(7)
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 7, "ti')
    found = status(run, capsys)
    assert (found["state"], found["step"], found["seconds_per_step"]) == ("finished", 6, 4.0)
    assert (found["frontier"], found["num_steps"]) == (
        {"committed_steps": 9, "checkpoint_step": 7},
        10,
    )


@pytest.mark.usefixtures("forgotten_by_slurm")
def test_a_start_that_was_killed_after_the_last_step_is_finished_only_with_its_export(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(run)
    checkpoint(run, 10)
    found = status(run, capsys)
    assert found["state"] == "every step is saved, the policy is not exported"
    assert "--run.num_steps=11" in found["next_action"]
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    assert status(run, capsys)["state"] == "finished"


def test_status_of_what_is_no_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "logs", "resume-plan"])
def test_what_is_neither_a_run_nor_a_job_gets_the_next_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "/nowhere"]) == 2
    assert "squeue --me lists yours" in capsys.readouterr().err


def test_before_its_first_start_a_run_has_no_logs_and_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "submitted").mkdir()
    for command, said in (("logs", "no logs yet"), ("resume-plan", "begins at step 0")):
        assert main([command, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert f"vime-hpc status {tmp_path}" in error


def test_logs_are_merged_by_time_and_tracebacks_stay_behind_their_line(tmp_path: Path) -> None:
    (tmp_path / "a-0.log").write_text(
        "2026-01-01 00:00:01,000 INFO a\n  more of a\n2026-01-01 00:00:03,000 INFO a3\n"
    )
    (tmp_path / "b-0.log").write_text("starting\n2026-01-01 00:00:02,000 INFO b\n")
    files = sorted(tmp_path.glob("*.log"))
    lines = [line for _, line in merge(files)]
    assert [line for _, line in merge(files, last=2)] == lines[-2:]
    assert [re.sub(r".* INFO ", "", line).strip() for line in lines] == [
        "starting",
        "a",
        "more of a",
        "b",
        "a3",
    ]


def test_a_cluster_that_is_not_there_is_told_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["submit", "configs/recipes/quickstart.toml", "--cluster", "perlmuter"]) == 2
    error = capsys.readouterr().err
    assert "neither perlmuter nor configs/clusters/perlmuter.toml" in error
    assert "perlmutter" in error.partition("known here:")[2]


def test_overrides_with_spaces_are_no_files_wherever_they_stand() -> None:
    """argparse takes a word with a space for a positional argument."""
    run, table = "--run.dir=/scratch/a run", '--vllm-compilation-config={"level": 0}'
    parser = build_parser()
    for words in (
        ["submit", run, table, "a.toml", "--json"],
        ["submit", "a.toml", run, "--json", table],
        ["submit", "--json", "a.toml", run, table],
    ):
        arguments, overrides = parse_with_overrides(parser, words)
        assert (arguments.configs, arguments.json, overrides) == (["a.toml"], True, [run, table])
    assert split_overrides(["--dry-run", "--tail=3", "a.b=c", "--out", "--x y=z"])[1] == []


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "submit", "--work", "w", "--repeats", "0"],
        ["bench", "buffer", "--work", "w", "--megabytes", "-1"],
        ["logs", "7", "--tail=-5"],
    ],
)
def test_a_number_that_cannot_be_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "is no whole number of" in capsys.readouterr().err


def test_submit_parses_and_its_help_needs_nothing_heavy() -> None:
    program = (
        "import sys; from vime_hpc.cli.main import build_parser; build_parser(); "
        "print(sorted({'torch', 'numpy', 'pydantic', 'submitit'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


@pytest.mark.usefixtures("no_slurm")
def test_doctor_finds_a_token_that_others_can_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "token").write_text("00" * 32)
    (run / "token").chmod(0o644)
    assert main(["doctor", "--json", f"--run.dir={run}"]) == 1
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["token"]["level"] == "bad"
    assert found["HDF5"]["level"] == "good"
    (run / "token").chmod(0o600)
    assert main(["doctor", "--json", f"--run.dir={run}"]) == 0


def test_doctor_reads_settings_behind_an_empty_one() -> None:
    text = "PrologFlags             = \nPreemptMode             = REQUEUE\nKillWait = 5 sec\n"
    found = {"PrologFlags": "", "PreemptMode": "REQUEUE", "KillWait": "5 sec"}
    assert read_settings(text) == found


@pytest.mark.usefixtures("no_slurm")
def test_doctor_of_a_cluster_without_slurm_says_where_to_run_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        main(
            [
                "doctor",
                "--cluster",
                "configs/clusters/local_test.toml",
                f"--run.dir={tmp_path / 'r'}",
            ]
        )
        == 1
    )
    assert "there is no sbatch here" in capsys.readouterr().out
