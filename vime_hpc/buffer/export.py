"""The same samples for other tools: pandas rows, Arrow, Parquet, JSON lines, xarray, slime's debug dictionary."""

from __future__ import annotations

import base64
import importlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.columns import OPTIONAL_BY_NAME, Column
from vime_hpc.buffer.schema import ROUTED
from vime_hpc.buffer.values import decode_text
from vime_hpc.errors import ConfigError
from vime_hpc.types import Sample

if TYPE_CHECKING:
    from vime_hpc.buffer.reader import StepBatch
    from vime_hpc.buffer.store import RolloutBuffer

FORMATS = ("parquet", "arrow", "jsonl", "slime")
_SLIME_COLUMNS = {
    "teacher_logprobs": "teacher_log_probs",
    "top_p_token_ids": "rollout_top_p_token_ids",
    "top_p_token_offsets": "rollout_top_p_token_offsets",
}
"""Optional columns that slime's samples have as well, and their names there."""


def sample_row(step: int, sample: Sample) -> dict[str, Any]:
    """One sample as a flat row: scalars, texts, numpy arrays of the token columns; reward None where unusable."""
    row: dict[str, Any] = {
        "step": step,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "rollout_id": sample.rollout_id,
        "prompt_id": sample.prompt_id,
        "index_in_group": sample.index_in_group,
        "attempt": sample.attempt,
        "seed": sample.seed,
        "status": sample.status.value,
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "reward_cause": sample.reward_cause,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "mask_sum": int(np.sum(sample.loss_mask, dtype=np.int64)),
        "weight_version": min((span.version for span in sample.versions), default=-1),
        "prompt_text": sample.prompt_text,
        "response_text": sample.response_text,
        "metadata": json.dumps(sample.metadata, sort_keys=True),
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "rollout_logprobs": sample.rollout_logprobs,
        "span_version": np.array([span.version for span in sample.versions], "<i8"),
        "span_start": np.array([span.start for span in sample.versions], "<i8"),
        **{name: _shown(name, values) for name, values in sample.columns.items()},
    }
    if sample.routed_experts is not None:
        row[ROUTED] = sample.routed_experts
    return row


def _shown(name: str, values: npt.NDArray[Any]) -> Any:
    """Numbers as they are, bytes as the text they are."""
    return decode_text(values) if OPTIONAL_BY_NAME[name].text else values


def export(buffer: RolloutBuffer, steps: Sequence[int], kind: str, target: Path) -> list[Path]:
    """Write the steps as one file (parquet, arrow, jsonl) or one file per step (slime: target is a directory).

    Texts that are not valid Unicode (lone surrogates) are written in backslash form by arrow and parquet, which accept
    nothing else; JSON lines keep them exactly, as \\ud800 escapes.
    """
    if kind not in FORMATS:
        raise ConfigError(f"unknown export format {kind!r}; known: {', '.join(FORMATS)}")
    if not steps:
        raise ConfigError(
            f"{buffer.layout.root}: nothing to export; committed steps: {buffer.steps()[:3]}..."
        )
    if kind == "jsonl":
        with open(target, "w", encoding="ascii") as file:
            for line in json_lines(buffer, steps):
                file.write(line + "\n")
        return [target]
    if kind == "slime":
        return _export_slime(buffer, steps, target)
    table = buffer.to_arrow(steps[0], steps[-1])
    if kind == "parquet":
        need_module("pyarrow.parquet").write_table(table, target, compression="zstd")
    else:
        need_module("pyarrow.feather").write_feather(table, str(target), compression="uncompressed")
    return [target]


def json_lines(buffer: RolloutBuffer, steps: Sequence[int]) -> Iterator[str]:
    """One JSON object per sample; routed_experts as base64 of the raw array with its type and shape; NaN as null."""
    for step, sample in buffer.samples(steps[0], steps[-1]):
        row = sample_row(step, sample)
        row["metadata"] = sample.metadata
        for name in sample.columns:
            if OPTIONAL_BY_NAME[name].text == "json":
                row[name] = json.loads(row[name])
        if sample.routed_experts is not None:
            experts = np.ascontiguousarray(sample.routed_experts)
            row[ROUTED] = {
                "dtype": experts.dtype.name,
                "shape": list(experts.shape),
                "base64": base64.b64encode(experts.tobytes()).decode("ascii"),
            }
        yield json.dumps({name: _json_value(value) for name, value in row.items()}, allow_nan=False)


def arrow_table(pyarrow: Any, buffer: RolloutBuffer, steps: Sequence[int]) -> Any:
    """A pyarrow Table over the steps; the value buffers of large lists are the columns as read, not copied.

    Null: an unusable reward, and an optional column of a sample that has none.
    """
    tables = []
    for step in steps:
        batch = buffer.batch(step)
        arrays: dict[str, Any] = {"step": pyarrow.array(np.full(len(batch), step, dtype=np.int64))}
        ids = batch.segment_ids()
        order = {int(sample_id): row for row, sample_id in enumerate(batch.scalars["sample_id"])}
        scalars = batch.scalars[[order[int(sample_id)] for sample_id in ids]]
        for column in buffer.schema.scalars:
            usable = "reward_usable" if column.name == "reward" else column.present
            arrays[column.name] = pyarrow.array(
                np.ascontiguousarray(scalars[column.name]), mask=_missing(scalars, usable)
            )
        for column in buffer.schema.ragged:
            arrays[column.name] = _arrow_ragged(
                pyarrow, column, *batch.column(column.name), _missing(scalars, column.present)
            )
        if buffer.schema.routing is not None:
            arrays[ROUTED] = _arrow_routed(pyarrow, batch, _missing(scalars, f"{ROUTED}_present"))
        tables.append(pyarrow.table(arrays).take(pyarrow.array(np.argsort(ids, kind="stable"))))
        batch.close()
    return pyarrow.concat_tables(tables)


def xarray_dataset(xarray: Any, buffer: RolloutBuffer, step: int) -> Any:
    """One step as an xarray Dataset with the names and dimensions of the files, workers' segments joined."""
    batch = buffer.batch(step)
    variables: dict[str, tuple[tuple[str, ...], Any, dict[str, str]]] = {}
    rows = {int(sample_id): row for row, sample_id in enumerate(batch.scalars["sample_id"])}
    scalars = batch.scalars[[rows[int(sample_id)] for sample_id in batch.segment_ids()]]
    for column in buffer.schema.scalars:
        variables[column.name] = (
            ("sample",),
            np.ascontiguousarray(scalars[column.name]),
            _described(column),
        )
    for column in buffer.schema.ragged:
        values, offsets = batch.column(column.name)
        variables[column.name] = ((column.dimension,), values, _described(column))
        variables[column.offsets] = (("sample_edge",), offsets, {})
    if buffer.schema.routing is not None:
        values, offsets = batch.column(ROUTED)
        variables[ROUTED] = (
            ("moe_layer", "routed_row", "top_k_place"),
            values,
            {"units": "expert id"},
        )
        variables["routed_row_offsets"] = (("sample_edge",), offsets, {})
    batch.close()
    return xarray.Dataset(variables, attrs={"run_id": buffer.run_id, "step": step})


def _described(column: Column) -> dict[str, str]:
    return {"units": column.unit, "long_name": column.meaning}


def _missing(scalars: npt.NDArray[Any], flag: str) -> npt.NDArray[np.bool_] | None:
    """[N] True where the flag is 0; None without such a flag or such a sample."""
    if flag not in (scalars.dtype.names or ()):
        return None
    missing = scalars[flag] == 0
    return missing if missing.any() else None


def _arrow_ragged(
    pyarrow: Any,
    column: Column,
    values: npt.NDArray[Any],
    offsets: Any,
    missing: npt.NDArray[np.bool_] | None,
) -> Any:
    if column.axis != "byte":
        return _arrow_lists(pyarrow, offsets, pyarrow.array(values), missing)
    texts = (decode_text(values[start:stop]) for start, stop in itertools.pairwise(offsets))
    return pyarrow.array(
        [text.encode("utf-8", "backslashreplace").decode() for text in texts],
        type=pyarrow.large_string(),
        mask=missing,
    )


def _arrow_lists(
    pyarrow: Any, offsets: Any, values: Any, missing: npt.NDArray[np.bool_] | None
) -> Any:
    mask = None if missing is None else pyarrow.array(missing)
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), values, mask=mask)


def _arrow_routed(pyarrow: Any, batch: StepBatch, missing: npt.NDArray[np.bool_] | None) -> Any:
    """[rows] lists of fixed size layers * top_k, layer-major, one list of rows per sample."""
    values, offsets = batch.column(ROUTED)
    rows = np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(
        values.shape[1], values.shape[0] * values.shape[2]
    )
    flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), rows.shape[1])
    return _arrow_lists(pyarrow, offsets, flat, missing)


def _export_slime(buffer: RolloutBuffer, steps: Sequence[int], target: Path) -> list[Path]:
    """`{"rollout_id": step, "samples": [...]}` per step, of plain values, as slime's --load-debug-rollout-data reads."""
    torch = need_module("torch")
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for step in steps:
        samples = [_slime_sample(buffer, sample) for _, sample in buffer.samples(step, step)]
        paths.append(target / f"{step}.pt")
        torch.save({"rollout_id": step, "samples": samples}, paths[-1])
    return paths


def _slime_sample(buffer: RolloutBuffer, sample: Sample) -> dict[str, Any]:
    data: dict[str, Any] = {
        "group_index": sample.group_id,
        "index": sample.rollout_id,
        "prompt": sample.prompt_text,
        "tokens": sample.tokens.tolist(),
        "response": sample.response_text,
        "response_length": sample.response_length,
        "label": None,
        "reward": sample.reward,
        "loss_mask": sample.loss_mask.tolist(),
        "weight_versions": [str(span.version) for span in sample.versions],
        "rollout_log_probs": sample.rollout_logprobs.tolist(),
        "status": sample.status.value,
        "metadata": sample.metadata,
        "remove_sample": sample.reward is None,
    }
    for name, theirs in _SLIME_COLUMNS.items():
        if name in sample.columns:
            data[theirs] = sample.columns[name].tolist()
    if sample.routed_experts is not None and buffer.schema.routing is not None:
        routing = buffer.schema.routing
        data["rollout_routed_experts"] = (
            sample.routed_experts.astype(np.int32)
            .reshape(-1, routing.num_layers, routing.top_k)
            .tolist()
        )
    return data


def _json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        values = value.tolist()
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return [entry if np.isfinite(entry) else None for entry in values]
        return values
    return value


def need_module(name: str) -> ModuleType:
    """An optional package, or a ConfigError that says what to install and what works without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs {name}, which is not installed; pip install {name}. "
            "Without it: RolloutBuffer.column and RolloutBuffer.samples need numpy, h5py and xxhash only"
        ) from error
