"""The buffer's durable write against what others dump rollouts as: torch.save of dictionaries, and JSON lines."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.buffer.export import need_module, sample_row
from vime_hpc.buffer.measuring import (
    make_groups,
    raw_write,
    remove_tree,
    timed,
    timed_raw_write,
)
from vime_hpc.buffer.schema import BufferSchema, RoutingShape
from vime_hpc.buffer.store import RolloutBuffer
from vime_hpc.buffer.writer import BufferWriter
from vime_hpc.types import PromptGroup

_ROUTED = BufferSchema(RoutingShape(num_layers=48, top_k=8, num_experts=128))


def bench_other_formats(work: Path, *, repeats: int) -> dict[str, float]:
    """Two steps of equal bytes: many samples of tokens, logprobs and masks, and few samples with expert ids."""
    plain = make_groups(BufferSchema(), num_groups=256, prompt=400, response=1200)
    figures = _compare(work, "formats", BufferSchema(), plain, repeats)
    routed = make_groups(_ROUTED, num_groups=4, prompt=500, response=1500)
    return figures | _compare(work, "formats_with_routing", _ROUTED, routed, repeats)


def _compare(
    work: Path, name: str, schema: BufferSchema, groups: Sequence[PromptGroup], repeats: int
) -> dict[str, float]:
    ours = min(_append_times(work / name, schema, groups, repeats))
    rows = [
        {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in sample_row(0, sample).items()
        }
        for group in groups
        for sample in group.samples
    ]
    size = sum(array.nbytes for group in groups for array in _arrays(group))
    raw = min(timed_raw_write(work / "raw", bytes(size)) for _ in range(repeats))
    lines = timed(lambda: _json_lines(work / "rows.jsonl", rows))
    figures = {
        f"{name}/append_s": ours,
        f"{name}/raw_s": raw,
        f"{name}/jsonl_over_append": lines / ours,
        f"{name}/jsonl_over_raw": lines / raw,  # what no durable format can surpass
    }
    if importlib.util.find_spec("torch"):
        lists = timed(_torch_save(work / "rows.pt", rows))
        tensor = need_module("torch").tensor
        tensors = [
            {key: tensor(value) if isinstance(value, list) else value for key, value in row.items()}
            for row in rows
        ]
        figures[f"{name}/torch_save_lists_over_append"] = lists / ours
        figures[f"{name}/torch_save_tensors_over_append"] = (
            timed(_torch_save(work / "rows.pt", tensors)) / ours
        )
    return figures


def _arrays(group: PromptGroup) -> list[np.ndarray[Any, Any]]:
    """What must be stored of a group at least: the numbers of its token columns."""
    return [
        array
        for sample in group.samples
        for array in (
            sample.tokens,
            sample.loss_mask,
            sample.rollout_logprobs,
            sample.routed_experts,
        )
        if array is not None
    ]


def _append_times(
    root: Path, schema: BufferSchema, groups: Sequence[PromptGroup], repeats: int
) -> list[float]:
    RolloutBuffer.create(root, run_id="bench", schema=schema)
    times = []
    with BufferWriter(root) as sink:
        for step in range(repeats):
            turn = [
                replace(
                    group,
                    samples=tuple(
                        replace(sample, metadata={"turn": step}) for sample in group.samples
                    ),
                )
                for group in groups
            ]
            times.append(timed(lambda: sink.append(step, turn, resume_state={}, stats={})))  # noqa: B023
    remove_tree(root)
    return times


def _json_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    raw_write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    path.unlink()


def _torch_save(path: Path, rows: Sequence[dict[str, Any]]) -> Callable[[], None]:
    torch = need_module("torch")

    def save() -> None:
        with open(path, "wb") as file:
            torch.save(rows, file)
            os.fsync(file.fileno())
        path.unlink()

    return save
