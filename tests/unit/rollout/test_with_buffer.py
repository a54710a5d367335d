"""The scheduler over the real buffer: what was finished survives, what was dropped is forgotten."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from seeded_client import END, Answer, SeededClient

from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.cli.main import main
from vime_hpc.rollout.scheduler import RolloutScheduler
from vime_hpc.rollout.source import PromptSource
from vime_hpc.types import PromptGroup

HERE = __name__


def open_writer(root: Path) -> BufferWriter:
    buffer = RolloutBuffer.create(root, run_id="r", durable=False)
    return BufferWriter(root, attempt=buffer.next_attempt(), durable=False)


def hooks(writer: BufferWriter) -> dict[str, Any]:
    return {
        "recovered": writer.recovered_groups(writer.next_step),
        "on_group_done": writer.journal_group,
        "on_group_dropped": writer.discard_group,
    }


def run_steps(writer: BufferWriter, scheduler: RolloutScheduler, steps: range) -> None:
    for step in steps:
        groups, stats = scheduler.generate(step, step)
        writer.append(step, groups, resume_state=scheduler.state(), stats=stats)


async def slow_p1(prompt: Sequence[int]) -> None:
    await asyncio.sleep(0.1 if b"p1" in bytes(t for t in prompt if t < 256) else 0.0)


def drop_every_third(group: PromptGroup, table: Mapping[str, Any]) -> str | None:
    return "third" if group.group_id % 3 == 0 else None


def test_a_killed_run_goes_on_without_losing_or_repeating_a_group(
    tmp_path: Path,
    make_scheduler: Callable[..., RolloutScheduler],
    make_source: Callable[..., PromptSource],
) -> None:
    options: dict[str, Any] = {"over_sampling": 2.0, "max_weight_lag": 1}
    writer = open_writer(tmp_path)
    client = SeededClient(fault=lambda prompt, seed: slow_p1(prompt))
    run_steps(writer, make_scheduler(client, hooks=hooks(writer), **options), range(1))
    # killed here: nothing is closed
    writer = open_writer(tmp_path)
    source = make_source()
    source.restore(json.loads(json.dumps(writer.last_resume_state())))
    client = SeededClient()
    scheduler = make_scheduler(client, source=source, hooks=hooks(writer), **options)
    assert writer.next_step == 1
    run_steps(writer, scheduler, range(1, 3))
    tables = [RolloutBuffer.open(tmp_path).batch(step).table for step in range(3)]
    assert [sorted(set(t.group_id.tolist())) for t in tables] == [[0, 1], [2, 3], [4, 5]]
    assert not any(prompt in (b"p2", b"p3") for prompt, _ in client.calls)


def test_dropped_groups_do_not_come_back_after_a_restart(
    tmp_path: Path, make_scheduler: Callable[..., RolloutScheduler]
) -> None:
    writer = open_writer(tmp_path)
    options: dict[str, Any] = {"filters": [f"{HERE}:drop_every_third"]}
    run_steps(writer, make_scheduler(SeededClient(), hooks=hooks(writer), **options), range(2))
    assert open_writer(tmp_path).recovered_groups(2) == []
    table = RolloutBuffer.open(tmp_path).batch(1).table
    assert sorted(set(table.group_id.tolist())) == [4, 5]


def test_failed_rollouts_and_broken_logprobs_are_stored_and_unusable(
    tmp_path: Path,
    make_scheduler: Callable[..., RolloutScheduler],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fault(prompt: Sequence[int], seed: int) -> Answer | None:
        text = bytes(t for t in prompt if t < 256)
        if text == b"p0":
            raise ConnectionError("engine is gone")
        return Answer([48, END], [math.nan, -0.1]) if text == b"p1" else None

    writer = open_writer(tmp_path)
    scheduler = make_scheduler(
        SeededClient(fault=fault),
        prompts_per_step=3,
        max_failed_share=0.9,
        max_attempts=1,
        hooks=hooks(writer),
    )
    run_steps(writer, scheduler, range(1))
    batch = RolloutBuffer.open(tmp_path).batch(0)
    assert batch.table.reward_usable.tolist() == [False] * 4 + [True] * 2
    assert batch.table.mask_sum.tolist() == [0, 0, 0, 0, 2, 2]
    samples = batch.read(range(6))
    assert "engine is gone" in samples[0].reward_cause
    assert samples[2].metadata["bad_logprobs"] == {"0": "nan"}
    capsys.readouterr()
    assert main(["advantages", str(tmp_path), "--step", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_unusable"], result["advantages"][:4]) == (4, [0.0] * 4)
    assert main(["advantages", str(tmp_path)]) == 2
