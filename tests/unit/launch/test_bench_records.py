"""The record of a run, and `vime-hpc bench compare` on two of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.cli.bench_compare_command import words
from vime_hpc.cli.main import main
from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.launch.attempts import Attempt, Frontier, write_attempt
from vime_hpc.launch.record import (
    git_state,
    machine,
    settings,
    write_machine,
    write_node,
    write_submitted,
)

STEPS = [9.0, 2.0, 2.0, 3.0, 4.0, 4.0]
"""Seconds of each step; the first one warms up. Median of the others 3, quartiles 2 and 4."""


def record(root: Path, *, steps: list[float] | None = None, **options: Any) -> Path:
    """A run directory of one start that was submitted at 900, began at 1000 and trained a step at 1010, 1020, ..."""
    config = load_config(
        [],
        [
            "--model.path=m",
            "--data.train=t",
            f"--run.dir={root}",
            *(f"--{name.replace('__', '.')}={value}" for name, value in options.items()),
        ],
    )
    paths = RunPaths(root)
    directory = paths.attempt("7.0")
    directory.mkdir(parents=True)
    write_submitted(paths, config, layout={"world_size": 3}, command=["vime-hpc", "submit"])
    write_machine(directory)
    write_node(directory, "trainer-0")
    write_node(directory, "engine-0")
    write_attempt(paths, Attempt("7.0", 1000.0, Frontier()))
    submitted = json.loads((paths.record / "submitted.json").read_text())
    (paths.record / "submitted.json").write_text(json.dumps(submitted | {"time": 900.0}))
    lines = [
        json.dumps({"step": n, "time": 1010.0 + 10 * n, "attempt": "7.0", "perf/step_time": s})
        for n, s in enumerate(steps or STEPS)
    ]
    paths.metrics.write_text("\n".join(lines) + "\n")
    return root


def compared(capsys: pytest.CaptureFixture[str], one: Path, two: Path) -> dict[str, Any]:
    assert main(["bench", "compare", str(one), str(two), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_same_run_twice_differs_in_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(capsys, record(tmp_path / "a"), record(tmp_path / "b"))
    assert found["differences"] == {}
    assert found["notes"] == []
    assert found["metrics"]["perf/step_time"] == {
        "a": 3.0,
        "b": 3.0,
        "ratio": 1.0,
        "a_spread": [2.0, 4.0],
        "b_spread": [2.0, 4.0],
        "values": [5, 5],
        "apart": False,
    }
    assert found["metrics"]["launch/submit_to_first_step_s"]["a"] == 110.0


def test_what_differs_is_named_with_both_values_and_each_metric_has_its_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = record(tmp_path / "a", run__seed=1)
    two = record(tmp_path / "b", run__seed=2, optimizer__lr=0.5, steps=[s * 4 for s in STEPS])
    change(two / "record" / "submitted.json", packages={"torch": "9.9"}, layout={"world_size": 6})
    change(two / "attempts" / "7.0" / "machine.json", cpu="Another CPU", gpus=["One GPU"])
    change(two / "attempts" / "7.0" / "nodes" / "engine-0.json", host="other", gpus=["One GPU"])
    change(one / "record" / "submitted.json", packages={"torch": "1.0"})
    found = compared(capsys, one, two)
    different = found["differences"]
    assert different["seeds.run.seed"] == different["config.run.seed"] == [1, 2]
    assert different["config.optimizer.lr"][1] == 0.5
    assert different["packages.torch"] == ["1.0", "9.9"]
    assert different["layout.world_size"] == [3, 6]
    assert different["machine.cpu"] == [machine()["cpu"], "Another CPU"]
    assert different["machine.gpus"][1] == ["One GPU"]
    assert different["nodes.engine-0.gpus"][1] == ["One GPU"]
    assert "nodes.engine-0.host" not in different
    metric = found["metrics"]["perf/step_time"]
    assert (metric["ratio"], metric["apart"]) == (4.0, True)
    assert main(["bench", "compare", str(one), str(two)]) == 0
    said = capsys.readouterr().out
    assert "packages.torch: 1.0 -> 9.9" in said
    assert words(
        {**found, "differences": {"x": ["same " * 40 + "one", "same " * 40 + "two"]}}
    ).count("same one -> ..."), "of long values the part that differs is shown"
    assert "4.000  2..4, 8..16  apart" in said


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_environment_is_recorded_without_secrets_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "key_secret")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    one = record(tmp_path / "a")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("SOMEBODY_ELSES", "x")
    two = record(tmp_path / "b")
    found = compared(capsys, one, two)
    assert found["differences"] == {"machine.environment.NCCL_ALGO": ["Ring", "Tree"]}
    written = (two / "attempts" / "7.0" / "machine.json").read_text()
    assert "TOKENIZERS_PARALLELISM" in settings({"TOKENIZERS_PARALLELISM": "false"})
    assert "secret" not in written
    assert "SOMEBODY_ELSES" not in written


def test_a_directory_of_repeats_has_the_spread_of_the_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, factor in enumerate((1, 2, 3)):
        record(tmp_path / "a" / f"run-{number}", steps=[s * factor for s in STEPS])
    record(tmp_path / "b" / "run-0", steps=[s * 2 for s in STEPS])
    record(tmp_path / "b" / "run-1", run__seed=5)
    found = compared(capsys, tmp_path / "a", tmp_path / "b")
    metric = found["metrics"]["perf/step_time"]
    assert (metric["a"], metric["a_spread"], metric["values"]) == (6.0, [3.0, 9.0], [3, 2])
    (note,) = found["notes"]
    assert "run-1 is no plain repeat: config.run.seed, seeds.run.seed differ" in note


def test_figures_of_other_bench_commands_are_compared_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text('{"s": [1.0, 2.0, 3.0], "ratio": 0.0, "slurm": "slurm 1"}')
    (tmp_path / "b.json").write_text('{"s": [4.0, 4.0, 7.0], "ratio": 2.0, "slurm": "slurm 2"}')
    found = compared(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert found["differences"] == {"slurm": ["slurm 1", "slurm 2"]}
    assert (found["metrics"]["s"]["ratio"], found["metrics"]["s"]["apart"]) == (2.0, True)
    assert found["metrics"]["ratio"]["ratio"] is None


def test_what_holds_no_record_says_what_one_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = record(tmp_path / "a")
    assert main(["bench", "compare", str(there), str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["bench", "compare", str(there), str(tmp_path / "empty")]) == 2
    assert "neither metrics.jsonl" in capsys.readouterr().err
    (there / "record" / "submitted.json").write_text('{"cut')
    assert main(["bench", "compare", str(there), str(there)]) == 3


def test_a_run_that_sbatch_started_by_hand_is_compared_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = record(tmp_path / "a"), record(tmp_path / "b")
    (two / "record" / "submitted.json").unlink()
    found = compared(capsys, one, two)
    assert any("git state and packages are not known" in note for note in found["notes"])
    assert found["metrics"]["perf/step_time"]["ratio"] == 1.0


def test_git_state_has_commit_changes_and_unknown_files(tmp_path: Path) -> None:
    for command in (
        ["init", "-q"],
        ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-q", "--allow-empty", "-m", "1"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = git_state(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"], clean["changes"]) == (40, False, "")
    (tmp_path / "known").write_text("one\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "known"], check=True)
    (tmp_path / "unknown").touch()
    dirty = git_state(tmp_path)
    assert dirty is not None
    assert (dirty["dirty"], dirty["unknown_files"]) == (True, ["unknown"])
    assert "+one" in dirty["changes"]


@pytest.mark.usefixtures("no_commands")
def test_a_record_is_written_where_there_is_no_git_no_slurm_and_no_gpu(tmp_path: Path) -> None:
    root = record(tmp_path / "a")
    written = json.loads((root / "record" / "submitted.json").read_text())
    assert (written["git"], written["slurm"]) == (None, None)
    assert written["packages"]["pydantic"]
    here = json.loads((root / "attempts" / "7.0" / "machine.json").read_text())
    assert here["gpus"] == []
    assert here["cpus"] >= 1
    assert here["kernel"].startswith("Linux")


@pytest.fixture
def no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.mark.usefixtures("no_commands")
def test_bench_submit_without_slurm_says_where_to_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cluster=configs/clusters/local_test.toml", f"--work={tmp_path / 'work'}"]
    assert main(["bench", "submit", *options]) == 2
    assert "no srun here" in capsys.readouterr().err
