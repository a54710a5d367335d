"""Optional columns: declared for the whole buffer, absent or present per sample, and driven by one table everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from vime_hpc.buffer.codec import pack_sample
from vime_hpc.buffer.columns import OPTIONAL
from vime_hpc.buffer.diff import diff_buffers
from vime_hpc.buffer.edit import append_tokens, requeue, truncate
from vime_hpc.buffer.export import export, json_lines
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.values import (
    decode_json,
    encode_json,
    image_digest,
    nuclei_of,
    nucleus_columns,
)
from vime_hpc.buffer.verify import verify_buffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.errors import DamagedDataError
from vime_hpc.testing.buffer_suite import make_group, make_sample, same_sample
from vime_hpc.types import PromptGroup, Sample

NAMES = tuple(column.name for column in OPTIONAL)
ALL = BufferSchema(RoutingShape(num_layers=2, top_k=2, num_experts=8), optional=NAMES)


def build(root: Path, groups: list[PromptGroup], schema: BufferSchema = ALL) -> RolloutBuffer:
    buffer = RolloutBuffer.create(root, run_id="columns", schema=schema, durable=False)
    with BufferWriter(root, durable=False) as sink:
        sink.append(0, groups, resume_state={}, stats={})
    return buffer


def segment(buffer: RolloutBuffer) -> Path:
    return buffer.layout.root / buffer.commit(0)["workers"][0]["segment"]["file"]


def damage(buffer: RolloutBuffer) -> list[str]:
    return [
        finding.message for finding in verify_buffer(buffer.layout) if finding.kind != "information"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_declared_column_is_in_the_file_whether_any_sample_has_it_or_not(
    tmp_path: Path, name: str
) -> None:
    schema = BufferSchema(optional=(name,))
    bare = replace(make_sample(schema, 0, 0), columns={})
    having = make_sample(schema, 0, 1)
    buffer = build(tmp_path / "mixed", [PromptGroup(0, 0, (bare, having))], schema)
    none = build(tmp_path / "none", [PromptGroup(0, 0, (bare,))], schema)
    read = [sample for _, sample in buffer.samples()]
    assert read[0].columns == {}
    assert set(read[1].columns) == set(schema.optional) >= {name}
    assert same_sample(read[1], having)
    with h5py.File(segment(buffer)) as both, h5py.File(segment(none)) as empty:
        assert set(both) == set(empty) >= {name, f"{name}_present"}
        assert both[f"{name}_present"][:].tolist() == [0, 1]
    plain = build(tmp_path / "plain", [PromptGroup(0, 0, (bare,))], BufferSchema())
    with h5py.File(segment(plain)) as file:
        assert name not in file
    with pytest.raises(DamagedDataError, match=f"{name}.*does not declare"):
        pack_sample(BufferSchema(), having)


def test_every_column_survives_the_segment_and_the_journal_bit_for_bit(tmp_path: Path) -> None:
    groups = [make_group(ALL, group, response=group) for group in range(6)]
    buffer = build(tmp_path, groups)
    wanted = [sample for group in groups for sample in group.samples]
    assert all(set(sample.columns) == set(NAMES) for sample in wanted)
    assert all(map(same_sample, (sample for _, sample in buffer.samples()), wanted)), (
        "read differs from written"
    )
    BufferWriter(tmp_path, durable=False).journal_group(1, make_group(ALL, 9))
    (again,) = BufferWriter(tmp_path, attempt=1, durable=False).recovered_groups(1)
    assert all(map(same_sample, again.samples, make_group(ALL, 9).samples))
    assert damage(buffer) == []


def test_the_ids_a_nucleus_kept_lie_at_two_levels_of_offsets(tmp_path: Path) -> None:
    sample = make_sample(BufferSchema(), 0, 0, prompt=2, response=3)
    sets = [[5, 7], [], [1, 2, 3]]
    schema = BufferSchema(optional=("top_p_token_ids",))
    assert schema.optional == ("top_p_token_offsets", "top_p_token_ids")
    first = replace(sample, columns=nucleus_columns([[9], [9], [9]]))
    second = replace(sample, sample_id=1, columns=nucleus_columns(sets))
    buffer = build(tmp_path, [PromptGroup(0, 0, (first, second))], schema)
    with h5py.File(segment(buffer)) as file:
        edge, kept = file["response_edge_offsets"][:], file["kept_token_offsets"][:]
        starts = file["top_p_token_offsets"][edge[1] : edge[2]]
        ids = file["top_p_token_ids"][kept[1] : kept[2]]
    assert starts.tolist() == [0, 2, 2, 5]
    assert [ids[starts[j] : starts[j + 1]].tolist() for j in range(3)] == sets
    (_, read) = list(buffer.samples())[1]
    assert [kept.tolist() for kept in nuclei_of(read) or []] == sets
    assert nuclei_of(sample) is None
    assert nuclei_of(replace(sample, response_length=0, columns=nucleus_columns([]))) == []


def columns_of(**changes: object) -> Sample:
    sample = make_sample(ALL, 0, 0, response=4)
    return replace(
        sample,
        columns={
            name: changes.get(name, values)
            for name, values in sample.columns.items()
            if changes.get(name, values) is not None
        },  # type: ignore[misc]
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_p_token_offsets": None}, "has top_p_token_ids but not its partner"),
        ({"top_p_token_ids": None}, "has top_p_token_offsets but not its partner"),
        (
            {"top_p_token_offsets": np.arange(4)},
            r"top_p_token_offsets has shape \(4,\), expected \(5,\)",
        ),
        ({"top_p_token_offsets": np.array([0, 3, 2, 2, 3])}, "expected to rise from 0 to"),
        ({"top_p_token_offsets": np.array([0, 1, 1, 1, 1])}, "run from 0 to 1; expected"),
        ({"top_p_token_offsets": np.array([1, 1, 1, 1, 2])}, "run from 1 to 2"),
        ({"top_p_token_ids": np.array([-1])}, "top_p_token_ids contain the negative id -1"),
        ({"top_p_token_ids": np.array([2**31])}, "top_p_token_ids spans 2147483648"),
        ({"top_p_token_ids": np.zeros((2, 2), np.int32)}, "expected one dimension"),
        ({"trace": np.frombuffer(b'{"a": NaN}', np.uint8)}, "trace is not UTF-8 JSON"),
        ({"trace": np.frombuffer(b'"\xff"', np.uint8)}, "trace is not UTF-8 JSON"),
        ({"image_digests": encode_json(["cafe"])}, "'cafe'; expected a list of xxh3_128:HEX"),
        ({"image_digests": encode_json({})}, "expected a list of xxh3_128:HEX"),
        ({"values": np.zeros(3, np.float32)}, r"values has shape \(3,\), expected \(4,\)"),
    ],
)
def test_an_optional_column_that_does_not_fit_its_sample_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(DamagedDataError, match=words):
        pack_sample(ALL, columns_of(**changes))


def test_images_are_told_apart_by_one_digest_each_of_either_kind() -> None:
    digests = [image_digest(b"one"), "sha256:" + "0" * 64]
    sample = columns_of(image_digests=encode_json(digests))
    assert (
        decode_json(
            dict(zip([c.name for c in ALL.ragged], pack_sample(ALL, sample).ragged, strict=True))[
                "image_digests"
            ]
        )
        == digests
    )
    assert digests[0] != image_digest(b"two")


def test_truncation_cuts_every_optional_column_of_the_response_and_no_other() -> None:
    sample = make_sample(ALL, 0, 0, prompt=4, response=6)
    sets = nuclei_of(sample) or []
    cut = truncate(sample, 7)
    packed = pack_sample(ALL, cut)
    assert [kept.tolist() for kept in nuclei_of(cut) or []] == [k.tolist() for k in sets[:3]]
    for column in OPTIONAL:
        if column.axis == "response_token":
            assert cut.columns[column.name].tolist() == sample.columns[column.name][:3].tolist()
        elif column.text or column.axis == "sample":
            assert cut.columns[column.name] is sample.columns[column.name]
    assert packed.sample_id == sample.sample_id


def test_appended_tokens_bring_their_columns_or_count_as_missing() -> None:
    sample = make_sample(ALL, 0, 0, response=2)
    sets = [kept.tolist() for kept in nuclei_of(sample) or []]
    sampled = append_tokens(
        sample,
        np.array([7, 8]),
        logprobs=np.zeros(2, np.float32),
        routing=ALL.routing,
        columns={**nucleus_columns([[7, 1], [8]]), "values": np.array([0.5, 0.25])},
    )
    tool = append_tokens(sampled, np.array([3]), routing=ALL.routing)
    pack_sample(ALL, tool)
    assert [kept.tolist() for kept in nuclei_of(tool) or []] == [*sets, [7, 1], [8], []]
    assert tool.columns["values"][2:4].tolist() == [0.5, 0.25]
    assert np.isnan(tool.columns["values"][4])
    assert np.isnan(tool.columns["advantages"][2:]).all()
    with pytest.raises(
        DamagedDataError, match="2 values of values belong to the new tokens, got 1"
    ):
        append_tokens(
            sample, np.array([7, 8]), routing=ALL.routing, columns={"values": np.zeros(1)}
        )


def test_a_restarted_rollout_keeps_what_is_said_of_its_prompt_alone() -> None:
    cleared = requeue(make_sample(ALL, 2, 0), keep_partial=False)
    pack_sample(ALL, cleared)
    assert {"image_digests", "image_xxh3_64"} <= set(cleared.columns)
    assert "trace" not in cleared.columns
    assert nuclei_of(cleared) == []


def test_exports_carry_every_column(tmp_path: Path) -> None:
    group = make_group(ALL, 1)
    buffer = build(tmp_path, [group])
    row = json.loads(next(json_lines(buffer, [0])))
    first = group.samples[0]
    assert set(NAMES) <= set(row)
    assert row["trace"] == decode_json(first.columns["trace"])
    assert row["image_digests"] == decode_json(first.columns["image_digests"])
    assert row["top_p_token_ids"] == first.columns["top_p_token_ids"].tolist()
    table = buffer.to_arrow()
    assert set(ALL.column_names) | {"step"} == set(table.column_names)
    assert table["top_p_token_offsets"].to_pylist()[1] == (
        group.samples[1].columns["top_p_token_offsets"].tolist()
    )
    frame = buffer.to_pandas()
    assert json.loads(frame.trace[0]) == decode_json(first.columns["trace"])
    step = buffer.to_xarray(0)
    assert step.top_p_token_ids.dims == ("kept_token",)
    assert step.top_p_token_offsets.dims == ("response_edge",)


def test_slime_gets_the_sets_under_its_own_names(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    group = make_group(ALL, 1)
    (path,) = export(build(tmp_path / "b", [group]), [0], "slime", tmp_path / "pt")
    theirs = torch.load(path, weights_only=True)["samples"][0]
    mine = group.samples[0].columns
    assert theirs["rollout_top_p_token_ids"] == mine["top_p_token_ids"].tolist()
    assert theirs["rollout_top_p_token_offsets"] == mine["top_p_token_offsets"].tolist()
    assert theirs["teacher_log_probs"] == mine["teacher_logprobs"].tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "image_xxh3_64"])
def test_verify_and_diff_name_the_column_that_changed(tmp_path: Path, name: str) -> None:
    group = make_group(ALL, 1)
    buffer, copy = build(tmp_path / "a", [group]), build(tmp_path / "b", [group])
    with h5py.File(segment(copy)) as file:
        place = file[name].id.get_offset()
    data = bytearray(segment(copy).read_bytes())
    data[place] ^= 1
    segment(copy).write_bytes(bytes(data))
    columns = {finding.column for finding in verify_buffer(copy.layout)}
    assert columns - {None, "routed_experts"} == {name}
    changed = replace(group.samples[0], columns=_one_changed(group.samples[0], name))
    other = build(tmp_path / "c", [replace(group, samples=(changed, group.samples[1]))])
    assert {difference.column for difference in diff_buffers(buffer, other)} == {name}


def _one_changed(sample: Sample, name: str) -> dict[str, np.ndarray]:
    values = sample.columns[name].copy()
    if name == "trace":
        values = encode_json({"other": 1})
    elif name == "image_digests":
        values = encode_json([image_digest(b"another")])
    elif name == "top_p_token_offsets":
        values[1] = values[1] - 1
    else:
        values[0] = values[0] + 1
    return {**sample.columns, name: values}


def test_a_trained_token_outside_its_own_nucleus_is_a_bad_value(tmp_path: Path) -> None:
    schema = BufferSchema(optional=("top_p_token_ids",))
    sample = replace(
        make_sample(schema, 0, 0, prompt=1, response=3),
        tokens=np.array([1, 5, 6, 7], np.int32),
        loss_mask=np.array([1, 0, 1], np.uint8),
        columns=nucleus_columns([[5, 9], [9], [8]]),
    )
    (message,) = damage(build(tmp_path, [PromptGroup(0, 0, (sample,))], schema))
    assert "response tokens [2] are not in their own top-p sets" in message


def test_show_prints_the_sets_images_and_trace_of_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(ALL, 1)
    build(tmp_path, [group])
    sample = group.samples[0]
    assert main(["buffer", "show", str(tmp_path), "--sample", str(sample.sample_id)]) == 0
    shown = capsys.readouterr().out
    assert decode_json(sample.columns["image_digests"])[0] in shown
    assert "top-p ids" in shown
    assert "advantages" in shown
    line = next(line for line in shown.splitlines() if line.split()[:1] == ["1"])
    assert line.endswith("  " + " ".join(map(str, (nuclei_of(sample) or [])[1])))
