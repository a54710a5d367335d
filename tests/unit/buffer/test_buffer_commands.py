"""The `vime-hpc buffer` commands: exit codes, words a person needs, JSON a program needs."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli import buffer as command
from vime_hpc.cli.printable import printable
from vime_hpc.errors import VimeError
from vime_hpc.testing.buffer_suite import make_group, make_sample

SCHEMA = BufferSchema(optional=("ref_logprobs",))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five committed steps of two groups, one more group acknowledged."""
    RolloutBuffer.create(tmp_path / "buffer", run_id="run-1", schema=SCHEMA, durable=False)
    with BufferWriter(tmp_path, durable=False) as sink:
        for step in range(5):
            sink.append(
                step,
                [make_group(SCHEMA, group) for group in (2 * step, 2 * step + 1)],
                resume_state={},
                stats={"num_dropped": 1},
            )
        sink.journal_group(5, make_group(SCHEMA, 10))
    return tmp_path


def call(*arguments: str) -> int:
    """The exit code `vime-hpc buffer ...` ends with."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    parsed = parser.parse_args(["buffer", *arguments])
    module, _, name = parsed.handler.partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(parsed))
    except VimeError as error:
        print(error)
        return error.exit_code


def cut(run: Path, step: int) -> Path:
    path = next((run / f"buffer/segments/step-{step:06d}").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    return path


def test_ls_lists_steps_and_the_open_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ls", str(run)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[-1].split() == ["5", "open:", "1", "groups", "acknowledged"]
    assert call("ls", str(run), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["samples"] for row in data["steps"]] == [4] * 5
    assert data["open"] == {"5": 1}


def test_ls_of_one_cut_file_among_five_names_exactly_that_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut(run, 3)
    assert call("ls", str(run), "--json") == 3
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["step"] for row in rows if row["damage"]] == [3]
    assert path.name in rows[3]["damage"][0]
    assert len(list(RolloutBuffer.open(run).samples(0, 2))) == 12


def test_show_prints_the_schema_a_step_and_a_sample_token_by_token(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("show", str(run)) == 0
    assert "filters: none" in capsys.readouterr().out
    assert call("show", str(run), "--step", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert printable(make_sample(SCHEMA, 4, 0).response_text)[:20] in lines[1]
    assert "\x1b" not in "".join(lines)
    sample = make_sample(SCHEMA, 6, 0)
    assert call("show", str(run), "--sample", str(sample.sample_id)) == 0
    out = capsys.readouterr().out
    assert f"{sample.tokens[-1]}" in out.splitlines()[-1]
    assert f"{sample.rollout_logprobs[-1]:.5f}" in out.splitlines()[-1]
    assert "\\x1b[31m" in out  # a model's escape codes must not reach the terminal
    assert "\x1b" not in out
    assert call("show", str(run), "--sample", str(sample.sample_id), "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == sample.tokens.tolist()
    assert call("show", str(run), "--sample", "123456789") == 2
    assert call("show", str(run), "--step", "77") == 2


def test_verify_counts_usable_groups_of_a_killed_writer_and_is_good(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "buffer/journal/e0000/step-000005.worker-0000.log"
    path.write_bytes(path.read_bytes() + b"VHJ1half a group")
    assert call("verify", str(run)) == 0
    out = capsys.readouterr().out
    assert "1 whole groups of the open step usable" in out
    assert "5 committed steps, 0 damaged" in out


def test_verify_of_damage_ends_with_code_3_and_names_it_in_json(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cut(run, 1)
    assert call("verify", str(run), "--json") == 3
    data = json.loads(capsys.readouterr().out)
    assert not data["good"]
    assert data["findings"][0]["file"].endswith(path.name)
    assert data["findings"][0]["step"] == 1


def test_export_writes_the_chosen_steps(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    assert (
        call(
            "export",
            str(run),
            "--format",
            "jsonl",
            "--output",
            str(target),
            "--first-step",
            "1",
            "--last-step",
            "2",
        )
        == 0
    )
    assert len(target.read_text().splitlines()) == 8
    assert (
        call("export", str(run), "--format", "jsonl", "--output", str(target), "--first-step", "9")
        == 2
    )
    assert "committed: 0..4" in capsys.readouterr().out
    nowhere = tmp_path / "no such" / "out.jsonl"
    assert call("export", str(run), "--format", "jsonl", "--output", str(nowhere)) == 2
    assert f"mkdir -p '{nowhere.parent}'" in capsys.readouterr().out
    assert call("export", str(run), "--format", "parquet", "--output", str(tmp_path)) == 2
    assert "is a directory; name a file" in capsys.readouterr().out


def test_diff_ends_with_0_for_equal_and_1_for_different(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("diff", str(run), str(run)) == 0
    other = tmp_path / "other"
    RolloutBuffer.create(other, run_id="run-2", schema=SCHEMA, durable=False)
    BufferWriter(other, durable=False).append(
        0, [make_group(SCHEMA, 0, salt=4)], resume_state={}, stats={}
    )
    capsys.readouterr()
    assert call("diff", str(run), str(other), "--json", "--last-step", "0") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["counts"]["tokens"] == 2
    assert data["counts"]["sample"] == 2


def test_drop_asks_first_and_has_nothing_to_do_beyond_the_end(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("drop", str(run), "--from-step", "3") == 0
    assert RolloutBuffer.open(run).steps() == [0, 1, 2, 3, 4]
    assert call("drop", str(run), "--from-step", "3", "--yes") == 0
    assert RolloutBuffer.open(run).steps() == [0, 1, 2]
    assert call("drop", str(run), "--from-step", "3", "--yes") == 4


def test_repair_says_what_it_would_do_then_does_it_then_has_nothing_to_do(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("repair", str(run)) == 4
    (run / "buffer/steps/000002.json").unlink()
    assert call("repair", str(run)) == 3
    assert "rebuild commit" in capsys.readouterr().out
    assert call("repair", str(run), "--yes") == 0
    assert call("verify", str(run)) == 0
    assert call("repair", str(run)) == 4


def test_a_path_without_a_buffer_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("ls", str(tmp_path / "nowhere")) == 2
    assert "no rollout buffer here" in capsys.readouterr().out
