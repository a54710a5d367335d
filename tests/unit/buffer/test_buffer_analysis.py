"""Reading through the Python API, export, comparison, verification and repair. Doors of others: test_buffer_doors.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from vime_hpc.buffer.diff import diff_buffers
from vime_hpc.buffer.export import export
from vime_hpc.buffer.repair import apply_repair, plan_repair
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.verify import Finding, verify_buffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.errors import BufferCorruptError, ConfigError
from vime_hpc.testing.buffer_suite import TEXTS, make_group, same_sample
from vime_hpc.types import Sample

SCHEMA = BufferSchema(
    RoutingShape(num_layers=3, top_k=2, num_experts=8), optional=("ref_logprobs",)
)
NUM_STEPS, PER_STEP = 3, 4


def build(root: Path, salt: int = 0) -> RolloutBuffer:
    """3 steps of 4 groups of 2 samples, by two workers."""
    buffer = RolloutBuffer.create(root, run_id="run-1", schema=SCHEMA, durable=False)
    for worker in range(2):
        with BufferWriter(root, worker=worker, num_workers=2, durable=False) as sink:
            for step in range(NUM_STEPS):
                groups = [
                    make_group(SCHEMA, group, salt=salt)
                    for group in range(step * PER_STEP + worker, (step + 1) * PER_STEP, 2)
                ]
                sink.append(
                    step,
                    groups,
                    resume_state={"step": step},
                    stats={"num_dropped": 2, "mean_length": 4.0 + worker},
                )
    return buffer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> RolloutBuffer:
    return build(tmp_path_factory.mktemp("buffer"))


@pytest.fixture
def buffer(shared: RolloutBuffer, tmp_path: Path) -> RolloutBuffer:
    shutil.copytree(shared.layout.root, tmp_path / "buffer")
    return RolloutBuffer.open(tmp_path)


def wanted(salt: int = 0) -> list[Sample]:
    return [
        sample
        for group in range(NUM_STEPS * PER_STEP)
        for sample in make_group(SCHEMA, group, salt=salt).samples
    ]


def segment_of(buffer: RolloutBuffer, step: int, worker: int = 0) -> Path:
    return buffer.layout.root / buffer.commit(step)["workers"][worker]["segment"]["file"]


# --- doors --------------------------------------------------------------------------------------------------------------


def test_iterating_gives_every_sample_in_order(shared: RolloutBuffer) -> None:
    read = list(shared.samples())
    assert [step for step, _ in read] == [
        step for step in range(NUM_STEPS) for _ in range(2 * PER_STEP)
    ]
    assert all(map(same_sample, [sample for _, sample in read], wanted()))


def test_a_column_over_steps_is_flat_values_and_offsets(shared: RolloutBuffer) -> None:
    ids, none = shared.column("sample_id")
    tokens, offsets = shared.column("tokens", 1, 2)
    by_id = {sample.sample_id: sample for sample in wanted()}
    assert none is None
    assert offsets is not None
    for row, sample_id in enumerate(shared.column("sample_id", 1, 2)[0]):
        assert np.array_equal(tokens[offsets[row] : offsets[row + 1]], by_id[int(sample_id)].tokens)
    assert len(ids) == 24
    routed, rows = shared.column("routed_experts", 2)
    assert rows is not None
    assert routed.shape == (3, rows[-1], 2)
    with pytest.raises(ConfigError, match="no column 'nonsense'"):
        shared.column("nonsense")


def test_h5py_alone_agrees_with_the_samples(shared: RolloutBuffer) -> None:
    with h5py.File(segment_of(shared, 0), "r") as file:
        offsets = file["response_token_offsets"][:]
        assert np.array_equal(
            file["rollout_logprobs"][offsets[1] : offsets[2]],
            make_group(SCHEMA, 0).samples[1].rollout_logprobs,
        )
        text = file["prompt_text_offsets"][:]
        assert bytes(file["prompt_text"][text[2] : text[3]]) == TEXTS[2].encode()


def test_xarray_opens_a_segment_and_joins_a_step(shared: RolloutBuffer) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    with xarray.open_dataset(segment_of(shared, 0), engine="h5netcdf") as data:
        assert data.rollout_logprobs.dims == ("response_token",)
        assert data.routed_experts.sizes["moe_layer"] == 3
        assert float(data.reward.mean()) == pytest.approx(
            np.mean(
                [sample.reward for group in (0, 2) for sample in make_group(SCHEMA, group).samples]
            )
        )
    step = shared.to_xarray(1)
    assert step.sizes["sample"] == 8
    assert step.attrs["step"] == 1


def test_pandas_rows_are_the_samples(shared: RolloutBuffer) -> None:
    pytest.importorskip("pandas")
    frame = shared.to_pandas()
    assert frame.shape[0] == 24
    assert frame.sample_id.tolist() == [sample.sample_id for sample in wanted()]
    assert np.array_equal(frame.tokens[5], wanted()[5].tokens)
    assert frame.groupby("step").reward.mean()[1] == pytest.approx(
        np.mean([sample.reward for sample in wanted()[8:16]])
    )


def test_arrow_and_parquet_hold_every_column_in_sample_order(
    shared: RolloutBuffer, tmp_path: Path
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = shared.to_arrow()
    assert set(SCHEMA.column_names) | {"step"} == set(table.column_names)
    assert table["sample_id"].to_pylist() == [sample.sample_id for sample in wanted()]
    assert table["rollout_logprobs"].to_pylist()[3] == wanted()[3].rollout_logprobs.tolist()
    assert table["routed_experts"].to_pylist()[7] == wanted()[7].routed_experts.tolist()  # type: ignore[union-attr]
    export(shared, [0, 1, 2], "parquet", tmp_path / "rollouts.parquet")
    back = parquet.read_table(tmp_path / "rollouts.parquet")
    assert back["tokens"].to_pylist() == [sample.tokens.tolist() for sample in wanted()]
    export(shared, [1], "arrow", tmp_path / "rollouts.arrow")
    assert (
        pytest.importorskip("pyarrow.feather").read_table(tmp_path / "rollouts.arrow").num_rows == 8
    )


def test_json_lines_keep_every_text_exactly(shared: RolloutBuffer, tmp_path: Path) -> None:
    export(shared, [0, 1, 2], "jsonl", tmp_path / "rollouts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [row["prompt_text"] for row in rows] == [sample.prompt_text for sample in wanted()]
    assert [row["reward"] for row in rows] == [sample.reward for sample in wanted()]
    assert rows[0]["routed_experts"]["shape"] == [8, 6]


def test_slime_dictionaries_load_without_trusting_pickles(
    shared: RolloutBuffer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    paths = export(shared, [2], "slime", tmp_path / "dumps")
    data = torch.load(paths[0], weights_only=True)
    assert data["rollout_id"] == 2
    assert data["samples"][0]["tokens"] == wanted()[16].tokens.tolist()
    assert data["samples"][0]["rollout_log_probs"] == wanted()[16].rollout_logprobs.tolist()


# --- compare, verify, repair --------------------------------------------------------------------------------------------


def test_diff_of_a_copy_is_empty_and_of_another_run_names_columns(
    buffer: RolloutBuffer, shared: RolloutBuffer, tmp_path: Path
) -> None:
    assert list(diff_buffers(shared, buffer)) == []
    other = build(tmp_path / "other", salt=1)
    columns = {difference.column for difference in diff_buffers(shared, other, last_step=0)}
    assert {"tokens", "rollout_logprobs", "reward", "routed_experts", "metadata"} <= columns
    assert "prompt_id" not in columns


def damage(buffer: RolloutBuffer, encode: object = None) -> list[Finding]:
    return [
        finding
        for finding in verify_buffer(buffer.layout, encode=encode)
        if finding.kind != "information"
    ]  # type: ignore[arg-type]


def flip_value(path: Path, column: str, place: int) -> None:
    """Change one stored value the way a bad disk would: behind HDF5's back."""
    with h5py.File(path, "r") as file:
        offset = file[column].id.get_offset() + place * file[column].dtype.itemsize
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(bytes(data))


def test_a_whole_buffer_verifies(buffer: RolloutBuffer) -> None:
    assert damage(buffer) == []


def test_verify_names_file_step_sample_and_column(buffer: RolloutBuffer) -> None:
    path = segment_of(buffer, 1)
    flip_value(
        path, "rollout_logprobs", 5
    )  # the second sample of the file: responses have 4 tokens
    findings = damage(buffer)
    victim = make_group(SCHEMA, PER_STEP).samples[1].sample_id
    assert {finding.file for finding in findings} == {buffer.layout.relative(path)}
    assert {finding.step for finding in findings} == {1}
    assert {finding.column for finding in findings if finding.column} == {"rollout_logprobs"}
    assert {finding.sample_id for finding in findings if finding.sample_id is not None} == {victim}
    batch = buffer.batch(1)
    good = [row for row in range(len(batch)) if batch.table.sample_id[row] != victim]
    assert len(batch.read(good)) == 7
    with pytest.raises(BufferCorruptError, match=f"sample {victim}"):
        batch.read(range(8))


def test_damaged_routing_names_its_layer_and_does_not_hinder_other_layers(
    buffer: RolloutBuffer,
) -> None:
    path = segment_of(buffer, 0)
    with h5py.File(path, "r") as file:
        rows = file["routed_experts"].shape[1]
    flip_value(path, "routed_experts", 1 * rows * 2 + 3)
    batch = buffer.batch(0)
    assert batch.read(range(8), layers=slice(2, 3))[0].routed_experts is not None
    with pytest.raises(BufferCorruptError, match="layer 1"):
        batch.read(range(8), layers=slice(1, 2))


def test_broken_logprobs_are_listed_with_sample_and_position(tmp_path: Path) -> None:
    buffer = RolloutBuffer.create(tmp_path, run_id="r", schema=SCHEMA, durable=False)
    group = make_group(SCHEMA, 0)
    broken = replace(
        group.samples[0],
        loss_mask=np.ones(4, np.uint8),
        rollout_logprobs=np.array([-0.1, np.nan, -np.inf, 0], np.float32),
    )
    BufferWriter(tmp_path, durable=False).append(
        0, [replace(group, samples=(broken, group.samples[1]))], resume_state={}, stats={}
    )
    (finding,) = damage(buffer)
    assert (finding.kind, finding.sample_id) == ("bad_value", broken.sample_id)
    assert "[1, 2]" in finding.message


def test_drifting_text_is_information_not_damage(buffer: RolloutBuffer) -> None:
    notes = list(verify_buffer(buffer.layout, encode=lambda text: [3]))
    assert {finding.kind for finding in notes} == {"information"}
    assert any("retokenization drift" in finding.message for finding in notes)


def test_a_group_committed_twice_is_damage(tmp_path: Path) -> None:
    buffer = RolloutBuffer.create(tmp_path, run_id="r", schema=SCHEMA, durable=False)
    sink = BufferWriter(tmp_path, durable=False)
    for step in range(2):
        sink.append(step, [make_group(SCHEMA, 7)], resume_state={}, stats={})
    assert "groups [7] were committed before, in step 0" in damage(buffer)[0].message


def test_drop_removes_a_step_and_all_later_ones_and_the_run_goes_on_there(
    buffer: RolloutBuffer,
) -> None:
    buffer.drop(1)
    assert buffer.steps() == [0]
    assert damage(buffer) == []
    sinks = [
        BufferWriter(buffer.layout.root, worker=worker, num_workers=2, attempt=5, durable=False)
        for worker in range(2)
    ]
    assert [sink.next_step for sink in sinks] == [1, 1]
    assert sinks[0].recovered_groups(1) == []
    assert sinks[0].last_resume_state() == {"step": 0}


def test_repair_rebuilds_a_lost_commit_in_the_middle_from_its_segments(
    buffer: RolloutBuffer,
) -> None:
    before = list(buffer.samples())
    buffer.layout.commit(1).unlink()
    plans = plan_repair(buffer.layout)
    assert [(plan.kind, plan.step) for plan in plans] == [("rebuild_commit", 1)]
    apply_repair(buffer.layout, plans)
    assert plan_repair(buffer.layout) == []
    after = list(buffer.samples())
    assert all(map(same_sample, [sample for _, sample in after], [sample for _, sample in before]))
    assert damage(buffer) == []


def test_repair_moves_a_damaged_newest_commit_aside_and_deletes_nothing(
    buffer: RolloutBuffer,
) -> None:
    path = buffer.layout.commit(2)
    path.write_bytes(path.read_bytes()[:-20])
    plans = plan_repair(buffer.layout)
    assert [(plan.kind, plan.step) for plan in plans] == [("set_aside_commit", 2)]
    apply_repair(buffer.layout, plans)
    assert buffer.steps() == [0, 1]
    assert len(list((buffer.layout.root / "damaged").rglob("*.h5"))) == 2
    assert BufferWriter(buffer.layout.root, attempt=7, durable=False).next_step == 2


def test_a_damaged_segment_is_reported_and_left_alone(buffer: RolloutBuffer) -> None:
    path = segment_of(buffer, 1, worker=1)
    path.write_bytes(path.read_bytes()[:-1])
    (plan,) = plan_repair(buffer.layout)
    assert (plan.kind, plan.step) == ("needs_drop", 1)
    apply_repair(buffer.layout, [plan])
    assert path.exists()
    assert len(list(buffer.samples(0, 0))) == 8
