"""One live job per run directory, one configuration per run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vime_hpc.config.load import load_config
from vime_hpc.config.paths import RunPaths
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import ConfigError, DamagedDataError, NothingToDoError, RunLockedError
from vime_hpc.launch.attempts import (
    Attempt,
    Frontier,
    close_killed,
    frontier,
    read_attempts,
    write_attempt,
)
from vime_hpc.launch.run_directory import (
    claim_for_job,
    claimed,
    next_restart_count,
    read_owner,
    refuse_finished,
    refuse_foreign,
)

CLAIM = """
import sys
from pathlib import Path
from vime_hpc.config.load import load_config
from vime_hpc.launch.run_directory import claimed
with claimed(load_config([], sys.argv[1:]), "first", 0):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def options(run: Path, *more: str) -> list[str]:
    return [f"--run.dir={run}", "--model.path=m", "--data.train=t", *more]


def config(run: Path, *more: str) -> RunConfig:
    return load_config([], options(run, *more))


def test_a_second_job_is_refused_by_name_and_touches_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIM, *options(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "claimed\n"
    before = sorted(path for path in run.rglob("*"))
    with (
        pytest.raises(RunLockedError, match=rf"in use by job first.0 .*process {first.pid}"),
        claimed(config(run, "--optimizer.lr=1"), "second", 0),
    ):
        pass
    assert sorted(path for path in run.rglob("*")) == before
    first.kill()
    first.communicate()
    with claimed(config(run), "third", 0):
        assert json.loads((run / "lock.json").read_text())["job_id"] == "third"


def test_what_is_computed_may_not_change_between_attempts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(config(run), "a", 0):
        (run / "buffer" / "steps").mkdir(parents=True)
        (run / "buffer" / "steps" / "000000.json").touch()
    with (
        pytest.raises(ConfigError, match=r"optimizer.lr was 1e-06, now 0.5"),
        claimed(config(run, "--optimizer.lr=0.5"), "a", 1),
    ):
        pass
    with claimed(config(run, "--trainer.num_ranks=2", "--run.num_steps=7"), "a", 1):
        pass


def test_a_start_that_made_nothing_may_be_corrected(tmp_path: Path) -> None:
    """A word that only the ranks can find wrong must not cost the user the directory's name."""
    run = tmp_path / "run"
    with claimed(config(run), "a", 0):
        (run / "buffer" / "steps").mkdir(parents=True)
        (run / "metrics.jsonl").touch()
    with claimed(config(run, "--optimizer.lr=0.5"), "a", 1):
        assert json.loads((run / "config.json").read_text())["optimizer"]["lr"] == 0.5
        (run / "buffer" / "buffer.json").touch()
    with claimed(config(run, "--optimizer.lr=0.1"), "a", 2):
        pass
    with (
        pytest.raises(ConfigError, match=r"rollout.temperature was 1.0, now 0.5"),
        claimed(config(run, "--optimizer.lr=0.2", "--rollout.temperature=0.5"), "a", 3),
    ):
        pass


def test_options_that_came_or_went_with_a_newer_version_do_not_end_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(config(run), "one", 0) as paths:
        (run / "buffer" / "steps").mkdir(parents=True)
        (run / "buffer" / "steps" / "000000.json").touch()
        tree = json.loads(paths.config.read_text())
    del tree["buffer"]["columns"]
    tree["buffer"]["gone"] = 3
    paths.config.write_text(json.dumps(tree))
    with (
        pytest.raises(ConfigError, match=r"buffer.columns was \[\], now \['trace'\]"),
        claimed(config(run, "--buffer.columns=['trace']"), "two", 0),
    ):
        pass
    with claimed(config(run), "three", 0):
        assert "gone" not in json.loads(paths.config.read_text())["buffer"]


def test_token_and_directories_are_ours_alone(tmp_path: Path) -> None:
    with claimed(config(tmp_path / "run"), "a", 0) as paths:
        assert stat.S_IMODE(paths.token.stat().st_mode) == 0o600
        assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700
        assert len(bytes.fromhex(paths.token.read_text())) == 32


def test_a_directory_that_others_could_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with (
        pytest.raises(ConfigError, match=r"can be written by every user .*chmod o-w"),
        claimed(config(tmp_path), "a", 0),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o775)  # a group's default
    with claimed(config(tmp_path), "a", 0):
        pass


@pytest.mark.parametrize(("owner", "me"), [(1000, 1000), (0, 1000), (1000, 0)])
def test_a_directory_of_ours_or_roots_is_taken(tmp_path: Path, owner: int, me: int) -> None:
    refuse_foreign(tmp_path, os.stat_result((0o40700, 1, 1, 2, owner, 0, 0, 0, 0, 0)), me)


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Made in a shared place before us, under the name that we were going to use."""
    with pytest.raises(ConfigError, match="belongs to user id 1000, this process to 1001"):
        refuse_foreign(tmp_path, os.stat_result((0o40700, 1, 1, 2, 1000, 0, 0, 0, 0, 0)), 1001)


def test_an_unwritable_run_directory_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        claimed(config(file / "run"), "a", 0),
    ):
        pass


def test_a_cut_lock_is_damaged_data_with_the_command_that_mends_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.lock.write_text('{"job_id": "7", "restart')
    with pytest.raises(DamagedDataError, match=r"squeue --me\), empty it: : > .*lock\.json"):
        read_owner(paths)


def test_restart_counts_go_on_from_the_attempts_on_disk(tmp_path: Path) -> None:
    assert next_restart_count(tmp_path, "local") == 0
    for name in ("local.0", "local.1", "other.5"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert next_restart_count(tmp_path, "local") == 2


def test_a_finished_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    c = config(tmp_path / "run", "--run.num_steps=4")
    with claimed(c, "a", 0) as paths:
        refuse_finished(paths, c)
        commit = paths.checkpoints / "step-000004" / "commit.json"
        commit.parent.mkdir(parents=True)
        commit.write_text('{"next_step": 4}')
        refuse_finished(paths, c)  # killed before the policy was exported
        paths.export.mkdir()
        with pytest.raises(NothingToDoError, match="nothing to do"):
            refuse_finished(paths, c)


@pytest.fixture
def finished(tmp_path: Path) -> RunPaths:
    """A run that job 7 has trained to step 4 and left as it is killed, before its end was written."""
    paths = RunPaths(tmp_path / "run")
    with claimed(config(paths.root, "--run.num_steps=4"), "7", 0):
        write_attempt(paths, Attempt("7.0", 1000.0, Frontier()))
        commit = paths.checkpoints / "step-000004" / "commit.json"
        commit.parent.mkdir(parents=True)
        commit.write_text('{"next_step": 4}')
        paths.export.mkdir()
    return paths


def files_of(paths: RunPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in paths.root.rglob("*")}


def claim_for_a_while(config: RunConfig, job_id: str, restart_count: int) -> None:
    with claimed(config, job_id, restart_count):
        pass


@pytest.mark.parametrize("claim", [claim_for_a_while, claim_for_job])
def test_a_start_of_a_finished_run_leaves_nothing_behind(finished: RunPaths, claim: Any) -> None:
    close_killed(finished, frontier(finished), except_name="")
    before = files_of(finished)
    # With an option that may change: config.json stays as well.
    other = config(finished.root, "--run.num_steps=4", "--engine.num_engines=2")
    with pytest.raises(NothingToDoError, match=r"is trained to step 4 .*raise --run.num_steps"):
        claim(other, "8", 0)
    assert files_of(finished) == before


def test_a_job_of_a_finished_run_closes_the_start_that_was_killed_at_its_end(
    finished: RunPaths,
) -> None:
    with pytest.raises(NothingToDoError):
        claim_for_job(config(finished.root, "--run.num_steps=4"), "8", 0)
    assert [(a.name, a.cause) for a in read_attempts(finished)] == [("7.0", "killed from outside")]


@pytest.fixture(autouse=True)
def _restore_umask() -> object:
    old = os.umask(0)
    os.umask(old)
    yield
    os.umask(old)
