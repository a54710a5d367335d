"""What goes in comes out bit for bit, and what cannot be stored is refused with its name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vime_hpc.buffer.codec import pack_sample
from vime_hpc.buffer.edit import append_tokens, join_prefill, mask_response, requeue, truncate
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.segment_reader import SegmentFile
from vime_hpc.buffer.segment_writer import write_segment
from vime_hpc.errors import ConfigError, DamagedDataError
from vime_hpc.testing.buffer_suite import TEXTS, make_sample, same_sample
from vime_hpc.types import Sample, Status, VersionSpan

PLAIN = BufferSchema()
MOE = BufferSchema(
    RoutingShape(num_layers=3, top_k=2, num_experts=8), optional=("ref_logprobs", "old_logprobs")
)


def through_file(tmp_path: Path, schema: BufferSchema, samples: list[Sample]) -> list[Sample]:
    path = tmp_path / "segment.h5"
    write_segment(
        path,
        schema,
        [pack_sample(schema, sample) for sample in samples],
        {"run_id": "r", "step": 0},
    )
    segment = SegmentFile(path)
    read = segment.read(0, len(samples))
    segment.close()
    return read


@pytest.mark.parametrize("schema", [PLAIN, MOE], ids=["plain", "moe"])
def test_every_column_comes_back_bit_for_bit(tmp_path: Path, schema: BufferSchema) -> None:
    samples = [
        make_sample(schema, group, index, prompt=1 + group, response=index)
        for group in range(len(TEXTS))
        for index in range(4)
    ]
    assert all(map(same_sample, through_file(tmp_path, schema, samples), samples))


def test_a_file_of_no_samples_and_samples_of_no_response_are_readable(tmp_path: Path) -> None:
    """Case C64."""
    assert through_file(tmp_path, MOE, []) == []
    empty = [
        make_sample(MOE, 1, 0, prompt=1, response=0),
        make_sample(MOE, 2, 0, prompt=9, response=0),
    ]
    read = through_file(tmp_path, MOE, empty)
    assert [sample.routed_experts.shape for sample in read] == [(0, 6), (8, 6)]  # type: ignore[union-attr]
    assert all(map(same_sample, read, empty))


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
def test_text_of_any_length_comes_back(tmp_path: Path, size: int) -> None:
    """Case C59: no variable-length type holds it."""
    sample = replace(make_sample(PLAIN, 0, 0), response_text="é" * (size // 2) + "x" * (size % 2))
    assert through_file(tmp_path, PLAIN, [sample])[0].response_text == sample.response_text


def test_an_unusable_reward_stays_unusable_with_its_cause_and_never_reads_as_zero(
    tmp_path: Path,
) -> None:
    sample = make_sample(PLAIN, 0, 0).with_reward(None, "verifier timed out")
    read = through_file(tmp_path, PLAIN, [sample])[0]
    assert read.reward is None
    assert read.reward_cause == "verifier timed out"


@pytest.mark.parametrize("column", ["loss_mask", "rollout_logprobs"])
def test_a_column_of_the_wrong_length_is_refused_with_both_numbers(column: str) -> None:
    """Case C30: the write refuses, naming both numbers."""
    sample = make_sample(PLAIN, 3, 1, response=5)
    short = replace(sample, **{column: getattr(sample, column)[:2]})
    with pytest.raises(
        DamagedDataError,
        match=rf"sample {sample.sample_id}.*{column} has shape \(2,\).*response_length 5",
    ):
        pack_sample(PLAIN, short)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tokens": np.array([2**31], dtype=np.int64), "response_length": 0},
            "tokens spans 2147483648",
        ),
        ({"tokens": np.array([1, -5], dtype=np.int32), "response_length": 0}, "negative id -5"),
        ({"tokens": np.array([1.5]), "response_length": 0}, "type float64"),
        ({"loss_mask": np.array([0, 1, 2, 1], dtype=np.uint8)}, "loss_mask contains 2"),
        ({"loss_mask": np.array([0, 1, 256, 1], dtype=np.int64)}, "loss_mask spans 0..256"),
        ({"rollout_logprobs": np.array([0, 0, 0, -1e300])}, "beyond the range"),
        ({"response_length": 9}, "response_length is 9 of 9 tokens"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"metadata": {"x": float("nan")}}, "not plain JSON"),
        ({"metadata": {"x": object()}}, "not plain JSON"),
        ({"versions": (VersionSpan(1, 2),)}, "expected 0 first"),
        ({"columns": {"values": np.zeros(4, dtype=np.float32)}}, "does not declare"),
        ({"routed_experts": np.zeros((8, 6), dtype=np.uint8)}, "does not declare"),
    ],
)
def test_a_value_that_would_not_survive_storage_is_refused(
    change: dict[str, object], words: str
) -> None:
    """Case C60: HDF5 would clip in silence."""
    sample = replace(make_sample(PLAIN, 0, 0), **change)  # type: ignore[arg-type]
    if "tokens" in change:
        sample = replace(
            sample,
            loss_mask=np.zeros(0, np.uint8),
            rollout_logprobs=np.zeros(0, np.float32),
            versions=(),
        )
    with pytest.raises(DamagedDataError, match=words):
        pack_sample(PLAIN, sample)


def test_logprobs_keep_single_precision(tmp_path: Path) -> None:
    """Case C60."""
    sample = replace(
        make_sample(PLAIN, 0, 0, response=1),
        rollout_logprobs=np.array([-12.3456789]),
        loss_mask=np.ones(1, np.uint8),
    )
    assert (
        abs(float(through_file(tmp_path, PLAIN, [sample])[0].rollout_logprobs[0]) + 12.3456789)
        < 1e-6
    )


@pytest.mark.parametrize(
    ("experts", "top_k", "dtype"),
    [
        (128, 2, "uint8"),
        (256, 2, "uint8"),
        (256, 1, "uint16"),
        (257, 2, "uint16"),
        (512, 2, "uint16"),
    ],
)
def test_expert_ids_up_to_the_last_come_back_and_the_next_is_refused(
    tmp_path: Path, experts: int, top_k: int, dtype: str
) -> None:
    """Cases C60 and C71."""
    schema = BufferSchema(RoutingShape(2, top_k, experts))
    sample = make_sample(schema, 0, 0)
    routed = sample.routed_experts.astype(np.int64)  # type: ignore[union-attr]
    routed[0, 0] = experts - 1
    read = through_file(tmp_path, schema, [replace(sample, routed_experts=routed)])[
        0
    ].routed_experts
    assert read is not None
    assert read.dtype == dtype
    assert np.array_equal(read, routed)
    routed[0, 0] = experts
    with pytest.raises(DamagedDataError, match=f"{experts}"):
        pack_sample(schema, replace(sample, routed_experts=routed))


def test_missing_routing_is_marked_and_told_apart_from_expert_255(tmp_path: Path) -> None:
    shape = RoutingShape(num_layers=2, top_k=2, num_experts=256)
    schema = BufferSchema(shape)
    sample = make_sample(schema, 0, 0, prompt=2, response=2)
    routed = np.array([[255, 0, 1, 255], [255, 255, 3, 4], [255, 255, 255, 255]], dtype=np.uint8)
    read = through_file(
        tmp_path,
        schema,
        [replace(sample, routed_experts=routed), replace(sample, routed_experts=None)],
    )
    assert shape.missing_rows(read[0].routed_experts).tolist() == [
        [False, False],
        [True, False],
        [True, True],
    ]  # type: ignore[arg-type]
    assert read[1].routed_experts is None


def test_optional_columns_are_what_the_schema_declares_not_what_the_first_sample_has(
    tmp_path: Path,
) -> None:
    first, second = make_sample(MOE, 0, 0), make_sample(MOE, 0, 1)
    read = through_file(tmp_path, MOE, [replace(first, columns={}), second])
    assert read[0].columns == {}
    assert set(read[1].columns) == {"old_logprobs", "ref_logprobs"}
    assert np.array_equal(read[1].columns["ref_logprobs"], second.columns["ref_logprobs"])
    with pytest.raises(ConfigError, match="unknown optional buffer columns"):
        BufferSchema(optional=("no_such_column",))


def test_pad_and_eos_ids_do_not_decide_the_mask(tmp_path: Path) -> None:
    sample = replace(
        make_sample(PLAIN, 0, 0, prompt=2, response=3),
        tokens=np.array([5, 6, 7, 8, 2], np.int32),
        loss_mask=np.ones(3, np.uint8),
    )
    assert through_file(tmp_path, PLAIN, [sample])[0].loss_mask.tolist() == [1, 1, 1]


# --- changes of length --------------------------------------------------------------------------------------------------


def test_truncation_cuts_every_per_token_column() -> None:
    """Case C31."""
    schema = BufferSchema(RoutingShape(2, 2, 8), optional=("values",))
    cut = truncate(make_sample(schema, 0, 0, prompt=4, response=6), 7)
    assert (
        len(cut.tokens),
        cut.response_length,
        len(cut.loss_mask),
        len(cut.rollout_logprobs),
    ) == (7, 3, 3, 3)
    assert (cut.routed_experts.shape, cut.columns["values"].shape) == ((6, 4), (3,))  # type: ignore[union-attr]
    assert cut.status is Status.TRUNCATED
    pack_sample(schema, cut)
    with pytest.raises(ValueError, match="cannot truncate"):
        truncate(cut, 3)


def test_appending_to_a_masked_response_extends_mask_logprobs_and_versions_together() -> None:
    """Case C30."""
    old = mask_response(
        replace(make_sample(PLAIN, 0, 0, response=2), versions=(VersionSpan(2, 0),))
    )
    new = append_tokens(
        old, np.array([7, 8, 9]), logprobs=np.array([-1.0, -2.0, -3.0], np.float32), version=4
    )
    assert new.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert [(span.version, span.start) for span in new.versions] == [(2, 0), (4, 2)]
    tool = append_tokens(new, np.array([1, 2]))
    assert (tool.loss_mask[-2:].tolist(), tool.rollout_logprobs[-2:].tolist()) == (
        [0, 0],
        [0.0, 0.0],
    )
    pack_sample(PLAIN, tool)


def test_requeue_without_partial_rollouts_leaves_nothing_of_the_old_weights() -> None:
    """Case C34."""
    aborted = replace(make_sample(PLAIN, 0, 0, prompt=8, response=4), versions=(VersionSpan(2, 0),))
    cleared = requeue(aborted, keep_partial=False)
    assert (len(cleared.tokens), cleared.response_length, cleared.versions) == (8, 0, ())
    assert (len(cleared.rollout_logprobs), len(cleared.loss_mask)) == (0, 0)
    routed = make_sample(BufferSchema(RoutingShape(2, 2, 8)), 0, 0, prompt=8, response=4)
    assert routed.routed_experts is not None
    assert requeue(routed, keep_partial=False).routed_experts is None
    kept = append_tokens(
        requeue(aborted, keep_partial=True),
        np.arange(5),
        logprobs=-np.ones(5, np.float32),
        version=4,
    )
    assert [(span.version, span.start) for span in kept.versions] == [(2, 0), (4, 4)]
    pack_sample(PLAIN, cleared)


def test_joined_turns_take_the_seam_row_from_the_next_turn_and_widen_ids() -> None:
    """Cases C71 and C72: turn 1 in uint8, turn 2 in int16."""
    shape = RoutingShape(num_layers=1, top_k=2, num_experts=512)
    first = replace(
        make_sample(BufferSchema(shape), 0, 0, prompt=3, response=3),
        routed_experts=np.arange(10, dtype=np.uint8).reshape(5, 2),
    )
    tail = np.arange(300, 310, dtype=np.int16).reshape(5, 2)
    joined = append_tokens(
        first, np.arange(5), logprobs=np.zeros(5, np.float32), version=9, routed_tail=tail
    )
    assert joined.routed_experts is not None
    assert joined.routed_experts.shape == (10, 2)
    assert joined.routed_experts[5].tolist() == [300, 301]
    assert joined.routed_experts[:5].tolist() == first.routed_experts.tolist()  # type: ignore[union-attr]
    pack_sample(BufferSchema(shape), joined)


def test_prompt_rows_come_from_the_prefill_engine_or_are_marked_missing() -> None:
    """Case C70."""
    shape = RoutingShape(num_layers=1, top_k=2, num_experts=100)
    prefill, decode = np.full((5, 2), 1, np.uint8), np.full((9, 2), 2, np.uint8)
    decode[:5] = 77
    joined = join_prefill(prefill, decode, 5, shape)
    assert joined[:, 0].tolist() == [1] * 5 + [2] * 4
    assert (
        shape.missing_rows(join_prefill(None, decode, 5, shape))[:, 0].tolist()
        == [True] * 5 + [False] * 4
    )


def test_the_buffer_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, vime_hpc.buffer.store, vime_hpc.buffer.writer, vime_hpc.buffer.verify, vime_hpc.cli.buffer_commands; "
        "print([name for name in ('torch', 'pandas', 'pyarrow', 'xarray', 'pydantic') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("top_k", "experts"), [(1, 8), (2, 8), (3, 8), (4, 300), (8, 128), (8, 300), (16, 128)]
)
def test_routing_of_any_width_comes_back_layer_by_layer(
    tmp_path: Path, top_k: int, experts: int
) -> None:
    schema = BufferSchema(RoutingShape(3, top_k, experts))
    samples = [make_sample(schema, 0, index, prompt=3, response=index) for index in range(3)]
    assert all(map(same_sample, through_file(tmp_path, schema, samples), samples))
