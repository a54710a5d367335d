"""Faults that others have met, each with its right value here. What other files of this folder show already is not repeated."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from vime_hpc.buffer.export import export
from vime_hpc.buffer.hdf5_handle import BUILTIN_FILTERS
from vime_hpc.buffer.reader import BufferReader
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.verify import verify_buffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.testing.buffer_suite import make_group, make_sample, same_sample
from vime_hpc.types import PromptGroup, Sample, VersionSpan

PLAIN = BufferSchema()
MOE = BufferSchema(RoutingShape(num_layers=2, top_k=2, num_experts=8))


def build(root: Path, *steps: list[PromptGroup], schema: BufferSchema = PLAIN) -> RolloutBuffer:
    buffer = RolloutBuffer.create(root, run_id="cases", schema=schema, durable=False)
    with BufferWriter(root, durable=False) as sink:
        for step, groups in enumerate(steps):
            sink.append(step, groups, resume_state={}, stats={})
    return buffer


def of_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_one_broken_sample_of_eight_is_kept_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C25. That five of eight stop the run is shown where the rollouts are made (test_scheduler.py)."""
    group = make_group(PLAIN, 0, size=8, response=3)
    broken = replace(
        group.samples[2],
        rollout_logprobs=np.array([-0.1, np.nan, -np.inf], np.float32),
        loss_mask=np.ones(3, np.uint8),
    )
    samples = (*group.samples[:2], broken, *group.samples[3:])
    with caplog.at_level(logging.WARNING):
        buffer = build(tmp_path, [replace(group, samples=samples)])
    assert "1 of 8" in caplog.text
    batch = buffer.batch(0)
    assert batch.table.reward_usable.tolist() == [True, True, False, True, True, True, True, True]
    stored = batch.read([2])[0].rollout_logprobs
    assert stored.tobytes() == broken.rollout_logprobs.tobytes()
    code, found = of_json(capsys, "buffer", "verify", str(tmp_path))
    assert code == 3
    (finding,) = [finding for finding in found["findings"] if finding["kind"] != "information"]
    assert (finding["column"], finding["sample_id"]) == ("rollout_logprobs", broken.sample_id)
    assert "[1, 2]" in finding["message"]


def test_sampled_ids_that_the_tokenizer_would_write_otherwise_stay_and_are_a_note(
    tmp_path: Path,
) -> None:
    """Case C27: "ab" encodes to [3], the engine sampled [1, 2], in two turns with a tool's [9] between."""
    sample = replace(
        make_sample(PLAIN, 0, 0),
        tokens=np.array([7, 1, 2, 9, 1, 2], np.int32),
        response_length=5,
        loss_mask=np.array([1, 1, 0, 1, 1], np.uint8),
        rollout_logprobs=np.array([-1, -1, 0, -1, -1], np.float32),
        versions=(VersionSpan(0, 0),),
        response_text="abtab",
    )
    buffer = build(tmp_path, [PromptGroup(0, 0, (sample,))])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.h5")}
    toy = {"ab": 3, "t": 9}
    findings = list(
        verify_buffer(buffer.layout, encode=lambda text: [toy["ab"], toy["t"], toy["ab"]])
    )
    drift = [finding for finding in findings if finding.column == "tokens"]
    assert [(finding.kind, finding.sample_id) for finding in drift] == [
        ("information", sample.sample_id)
    ]
    assert {finding.kind for finding in findings} == {"information"}
    ((_, read),) = buffer.samples()
    assert read.tokens.tolist() == [7, 1, 2, 9, 1, 2]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.h5")} == before


def test_a_writer_killed_between_groups_three_and_four_leaves_three_whole_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C56: SIGKILL, then verify counts three, the next start reuses them, and only the fourth is made again."""
    build(tmp_path)
    program = f"""
import os, signal
from pathlib import Path
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.testing.buffer_suite import make_group
sink = BufferWriter(Path({str(tmp_path)!r}), attempt=1)
for group in range(3):
    sink.journal_group(0, make_group(BufferSchema(), group))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    code, result = of_json(capsys, "buffer", "verify", str(tmp_path))
    assert (code, result["good"]) == (0, True)
    assert "3 whole groups of the open step usable" in result["findings"][0]["message"]
    sink = BufferWriter(tmp_path, attempt=2, durable=False)
    kept = sink.recovered_groups(0)
    assert [group.group_id for group in kept] == [0, 1, 2]
    sink.append(0, [*kept, make_group(PLAIN, 3)], resume_state={}, stats={})
    _, listed = of_json(capsys, "buffer", "ls", str(tmp_path))
    assert [(row["groups"], row["recovered_groups"]) for row in listed["steps"]] == [(4, 3)]


def test_one_cut_file_of_five_is_named_and_the_other_four_are_analysed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C56, second half."""
    buffer = build(tmp_path, *([make_group(PLAIN, step)] for step in range(5)))
    path = buffer.layout.segment(2, 0, 0)
    path.write_bytes(path.read_bytes()[:-7])
    code, listed = of_json(capsys, "buffer", "ls", str(tmp_path))
    assert code == 3
    assert [row["step"] for row in listed["steps"] if row["damage"]] == [2]
    assert path.name in listed["steps"][2]["damage"][0]
    whole = [step for step in range(5) if step != 2]
    read = [sample for step in whole for _, sample in buffer.samples(step, step)]
    wanted = [sample for step in whole for sample in make_group(PLAIN, step).samples]
    assert all(map(same_sample, read, wanted))
    assert len(read) == len(wanted)


def test_texts_with_nul_and_lone_surrogates_are_byte_equal_in_the_file_and_legible_in_exports(
    tmp_path: Path,
) -> None:
    """Case C63."""
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ["a\0b", "\ud800x", "", "tail\0\0"]
    samples = tuple(
        replace(make_sample(PLAIN, 0, index), response_text=text)
        for index, text in enumerate(texts)
    )
    buffer = build(tmp_path, [PromptGroup(0, 0, samples)])
    assert [sample.response_text for _, sample in buffer.samples()] == texts
    with h5py.File(buffer.layout.segment(0, 0, 0)) as file:
        data = bytes(file["response_text"][:])
    assert data == "".join(texts).encode("utf-8", "surrogatepass")
    export(buffer, [0], "jsonl", tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["response_text"] for line in lines] == texts
    export(buffer, [0], "parquet", tmp_path / "out.parquet")
    shown = parquet.read_table(tmp_path / "out.parquet")["response_text"].to_pylist()
    assert shown == ["a\0b", "\\ud800x", "", "tail\0\0"]


@pytest.mark.parametrize("name", ["nothing", "empty responses"])
def test_a_step_without_samples_or_without_responses_is_readable_and_listed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C64: no sample at all; responses of length 0, and routing of no rows beside a prompt of one token."""
    groups = [] if name == "nothing" else [make_group(MOE, 0, prompt=1, response=0)]
    buffer = build(tmp_path, groups, schema=MOE)
    wanted: list[Sample] = [sample for group in groups for sample in group.samples]
    read = [sample for _, sample in buffer.samples()]
    assert len(read) == len(wanted)
    assert all(map(same_sample, read, wanted))
    assert buffer.column("routed_experts")[0].shape == (2, 0, 2)
    code, listed = of_json(capsys, "buffer", "ls", str(tmp_path))
    assert code == 0
    assert listed["steps"][0]["tokens"] == len(wanted)
    assert buffer.to_pandas().shape[0] == buffer.to_arrow().num_rows == len(wanted)


def test_built_in_filters_are_all_a_file_may_have_and_show_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C66."""
    buffer = build(tmp_path, [make_group(MOE, 0)], schema=MOE)
    used: set[int] = set()
    with h5py.File(buffer.layout.segment(0, 0, 0)) as file:
        for dataset in file.values():
            plan = dataset.id.get_create_plist()
            used |= {plan.get_filter(index)[0] for index in range(plan.get_nfilters())}
    assert used <= set(BUILTIN_FILTERS) == {1, 2, 3}
    _, shown = of_json(capsys, "buffer", "show", str(tmp_path))
    assert shown["filters"] == sorted(used)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_processes_that_write_one_step_at_once_leave_every_sample_once_and_one_content(
    num_workers: int, tmp_path: Path
) -> None:
    """Case C68."""
    one = build(tmp_path / "one", [make_group(PLAIN, group) for group in range(8)])
    build(tmp_path)
    program = """
import sys
from pathlib import Path
from vime_hpc.buffer.schema import BufferSchema
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.testing.buffer_suite import make_group
worker, count = int(sys.argv[2]), int(sys.argv[3])
with BufferWriter(Path(sys.argv[1]), worker=worker, num_workers=count, attempt=1, durable=False) as sink:
    groups = [make_group(BufferSchema(), group) for group in range(worker, 8, count)]
    sink.append(0, groups, resume_state={}, stats={})
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(rank), str(num_workers)]
        )
        for rank in range(num_workers)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * num_workers
    batch = BufferReader(tmp_path).batch(0)
    wanted = [sample for group in range(8) for sample in make_group(PLAIN, group).samples]
    assert batch.table.sample_id.tolist() == [sample.sample_id for sample in wanted]
    assert batch.content_digest() == one.batch(0).content_digest()
    assert not h5py.get_config().mpi


def test_advantages_of_a_saved_step_are_bit_equal_whoever_wrote_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case C111. That plan and metrics of a replay are the run's, bit for bit, is shown on a real job (test_modes.py); that
    reading needs neither torch nor engine, in test_buffer_doors.py."""
    pytest.importorskip("torch")
    groups = [make_group(PLAIN, group, size=4, response=5 + group) for group in range(4)]
    outputs = []
    for num_workers in (1, 2):
        root = tmp_path / str(num_workers)
        RolloutBuffer.create(root, run_id="cases", schema=PLAIN, durable=False)
        for worker in range(num_workers):
            with BufferWriter(root, worker=worker, num_workers=num_workers, durable=False) as sink:
                sink.append(0, groups[worker::num_workers], resume_state={}, stats={})
        code, result = of_json(capsys, "advantages", str(root), "--step", "0")
        assert code == 0
        outputs.append(json.dumps(result))
    assert outputs[0] == outputs[1]
