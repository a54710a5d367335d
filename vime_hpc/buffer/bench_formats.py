"""The buffer's durable write against what others dump rollouts as: torch.save of dictionaries, and JSON lines."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vime_hpc.buffer.export import need_module, sample_row
from vime_hpc.buffer.measuring import (
    in_turn,
    make_groups,
    ratio,
    raw_write,
    remove_tree,
    timed,
    timed_write,
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
    rows = [
        {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in sample_row(0, sample).items()
        }
        for group in groups
        for sample in group.samples
    ]
    bare = bytes(sum(array.nbytes for group in groups for array in _arrays(group)))
    root = work / name
    RolloutBuffer.create(root, run_id="bench", schema=schema)
    with BufferWriter(root) as sink:
        candidates = {
            "append": _append_steps(sink, groups),
            "raw": lambda: timed_write(raw_write, work / "raw", bare),
            "jsonl": lambda: timed(lambda: _json_lines(work / "rows.jsonl", rows)),
        }
        if importlib.util.find_spec("torch"):
            candidates |= _torch_saves(work / "rows.pt", rows)
        times = in_turn(candidates, repeats)
    remove_tree(root)
    figures = {
        f"{name}/append_s": statistics.median(times["append"]),
        f"{name}/raw_s": statistics.median(times["raw"]),
    }
    for competitor in [key for key in times if key not in ("append", "raw")]:
        figures |= ratio(f"{name}/{competitor}_over_append", times[competitor], times["append"])
    # What no durable format can surpass.
    return figures | ratio(f"{name}/jsonl_over_raw", times["jsonl"], times["raw"])


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


def _append_steps(sink: BufferWriter, groups: Sequence[PromptGroup]) -> Callable[[], float]:
    """Each call appends the groups as the next step, with metadata of its own, and returns the seconds."""

    def append() -> float:
        step = sink.next_step
        turn = [
            replace(
                group,
                samples=tuple(replace(sample, metadata={"turn": step}) for sample in group.samples),
            )
            for group in groups
        ]
        return timed(lambda: sink.append(step, turn, resume_state={}, stats={}))

    return append


def _json_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    raw_write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    path.unlink()


def _torch_saves(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Callable[[], float]]:
    """torch.save of dictionaries of lists, as slime dumps them, and of the same with tensors in place of the lists."""
    torch = need_module("torch")
    tensors = [
        {
            key: torch.tensor(value) if isinstance(value, list) else value
            for key, value in row.items()
        }
        for row in rows
    ]

    def save(values: Sequence[dict[str, Any]]) -> None:
        with open(path, "wb") as file:
            torch.save(values, file)
            os.fsync(file.fileno())
        path.unlink()

    return {
        "torch_save_lists": lambda: timed(lambda: save(rows)),
        "torch_save_tensors": lambda: timed(lambda: save(tensors)),
    }
