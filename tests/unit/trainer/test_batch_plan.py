"""`vime-hpc batch-plan` says what the trainer's packing makes of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.config.load import load_config
from vime_hpc.testing.buffer_suite import make_group
from vime_hpc.testing.ranks import preload


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    options = ["--model.path=m", "--data.train=t", "--trainer.num_ranks=2"]
    config = load_config([], [*options, "--trainer.max_tokens_per_microbatch=64"])
    (root / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    buffer = RolloutBuffer.create(root / "buffer", run_id="r", durable=False)
    with BufferWriter(root, durable=False) as writer:
        groups = [make_group(buffer.schema, group_id) for group_id in range(12)]
        writer.append(0, groups, resume_state={}, stats={})
    return root


def plan(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["batch-plan", str(run), "--step", "0", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_sample_with_weight_is_in_one_microbatch_under_the_limit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(run, capsys)
    table = RolloutBuffer.open(run).batch(0).table
    lengths = dict(
        zip(table.sample_id.tolist(), table.prompt_length + table.response_length, strict=True)
    )
    parts = [part for rank in found["ranks"] for part in rank["microbatches"]]
    planned = [sample for part in parts for sample in part["samples"]]
    assert len(planned) == len(set(planned)) == found["num_samples"] - found["num_left_out"]
    assert planned
    for part in parts:
        assert part["tokens"] == sum(lengths[sample] for sample in part["samples"])
        assert part["tokens"] <= 64 or len(part["samples"]) == 1
    assert found["dp"] == 2
    assert len({len(rank["microbatches"]) for rank in found["ranks"]}) == 1
    tokens = [rank["tokens"] for rank in found["ranks"]]
    assert found["imbalance"] == pytest.approx(max(tokens) * 2 / sum(tokens))


def test_the_tokens_are_those_the_trainer_packs_with_padding_and_fillers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preload()  # megatron, with the twins of torch.cuda in place while it is imported and not after
    from vime_hpc.trainer.microbatch import pack

    options = ["--tp", "4", "--dp", "32", "--trainer.sequence_parallel=true"]
    found = plan(run, capsys, *options, "--algorithm.mask_zero_spread=false")
    batch = RolloutBuffer.open(run).batch(0)
    rows = {sample: row for row, sample in enumerate(batch.table.sample_id.tolist())}
    parts = [part for rank in found["ranks"] for part in rank["microbatches"]]
    assert any(not part["samples"] for part in parts), "a filler"
    assert any(part["samples"] and part["padding"] for part in parts)
    for part in parts:
        mine = [rows[sample] for sample in part["samples"]]
        packed = pack(mine, batch.read(mine), torch.device("cpu"), multiple=4)
        assert packed.num_tokens == part["tokens"] + part["padding"]


def test_a_layout_limit_and_other_settings_may_be_tried(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = plan(run, capsys, "--dp", "1", "--tokens-per-microbatch", "100000")
    assert (one["dp"], one["num_microbatches"], one["imbalance"]) == (1, 1, 1.0)
    two = plan(run, capsys, "--dp", "1", "--pp", "2", "--algorithm.updates_per_step=3")
    assert (two["num_updates"], {rank["update"] for rank in two["ranks"]}) == (3, {0, 1, 2})
    assert two["bubble_share"] > 0
    assert main(["batch-plan", str(run), "--step", "0", "--samples"]) == 0
    text = capsys.readouterr().out
    assert f"step 0: {one['num_samples']} samples, {one['num_left_out']} left out" in text
    assert "microbatch 0: samples " in text


def test_a_step_that_is_not_there_is_a_usage_error(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch-plan", str(run), "--step", "3"]) == 2
    assert "has no committed step 3; it has 0" in capsys.readouterr().err
