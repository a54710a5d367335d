"""Files of every released format version stay readable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vime_hpc.buffer.columns import OPTIONAL
from vime_hpc.buffer.export import json_lines
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.values import decode_json, nuclei_of
from vime_hpc.buffer.verify import verify_buffer
from vime_hpc.buffer.writer import BufferWriter

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("name", ["buffer-v1", "buffer-v1-all"])
def test_a_buffer_of_this_format_version_reads_as_it_did_when_it_was_written(
    name: str, tmp_path: Path
) -> None:
    root = tmp_path / "buffer"
    shutil.copytree(GOLDEN / name, root)
    buffer = RolloutBuffer.open(root)
    assert [*json_lines(buffer, buffer.steps())] == (
        GOLDEN / f"{name}.jsonl"
    ).read_text().splitlines()
    assert [
        finding for finding in verify_buffer(buffer.layout) if finding.kind != "information"
    ] == []


def test_one_golden_buffer_has_every_optional_column_of_its_version() -> None:
    """A column added to the table needs golden files of its own before it is released."""
    schema = RolloutBuffer.open(GOLDEN / "buffer-v1-all").schema
    assert schema.optional == tuple(column.name for column in OPTIONAL)
    assert schema.routing is not None


def test_the_journal_of_every_optional_column_replays(tmp_path: Path) -> None:
    root = tmp_path / "buffer"
    shutil.copytree(GOLDEN / "buffer-v1-all", root)
    (group,) = BufferWriter(root, attempt=1, durable=False).recovered_groups(3)
    assert group.group_id == 8
    for sample in group.samples:
        assert set(sample.columns) == {column.name for column in OPTIONAL}
        assert len(nuclei_of(sample) or []) == sample.response_length
        assert decode_json(sample.columns["trace"])["spans"][0]["name"] == "ünï"


def test_a_run_of_format_version_1_goes_on_where_it_stopped(tmp_path: Path) -> None:
    root = tmp_path / "buffer"
    shutil.copytree(GOLDEN / "buffer-v1", root)
    sink = BufferWriter(root, attempt=1, durable=False)
    assert sink.next_step == 2
    assert [group.group_id for group in sink.recovered_groups(2)] == [8]
    assert sink.last_resume_state() == {"cursor": 8}
