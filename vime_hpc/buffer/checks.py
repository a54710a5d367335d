"""A sample's values against the schema, before anything is stored. What would not survive storage is refused here.

Every function raises DamagedDataError, whose message names sample, column, what was found and what was expected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.columns import Column
from vime_hpc.buffer.schema import (
    ROUTED,
    STATUS_NAMES,
    BufferSchema,
    RoutingShape,
    canonical_json,
)
from vime_hpc.buffer.values import IMAGE_DIGEST, decode_json, encode_text
from vime_hpc.errors import DamagedDataError
from vime_hpc.types import Sample

AnyArray = npt.NDArray[Any]


def scalar_record(where: str, schema: BufferSchema, sample: Sample) -> npt.NDArray[np.void]:
    """[] record of schema.scalar_dtype."""
    reward = math.nan if sample.reward is None else float(sample.reward)
    values: list[Any] = [  # in the order of SCALARS
        sample.sample_id,
        sample.group_id,
        sample.rollout_id,
        sample.prompt_id,
        sample.index_in_group,
        sample.attempt,
        sample.seed,
        STATUS_NAMES.index(sample.status.value),
        reward,
        sample.reward is not None,
        sample.prompt_length,
        sample.response_length,
        int(np.add.reduce(sample.loss_mask, dtype=np.int64)),
        min((span.version for span in sample.versions), default=-1),
    ]
    values += [
        int(sample.columns.get(column.name, column.fill))  # type: ignore[arg-type]
        for column in schema.optional_columns
        if column.axis == "sample"
    ]
    values += [column.name in sample.columns for column in schema.optional_columns]
    if schema.routing is not None:
        values.append(sample.routed_experts is not None)
    try:
        return np.array(tuple(values), dtype=schema.scalar_dtype)
    except OverflowError as error:
        raise _overflow(where, schema, values) from error


def _overflow(where: str, schema: BufferSchema, values: Sequence[Any]) -> DamagedDataError:
    """Which of the values did not fit."""
    for column, value in zip(schema.scalars, values, strict=True):
        kind = np.dtype(column.dtype)
        if kind.kind in "iu" and not np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return DamagedDataError(f"{where}: {column.name} is {value}, which does not fit {kind}")
    raise AssertionError(f"{where}: {values} fit {schema.scalar_dtype}")


def ragged_values(where: str, column: Column, sample: Sample, lengths: dict[str, int]) -> AnyArray:
    """One flat column of a sample in its stored type.

    Args:
        lengths: values the sample must bring per axis; axes that are not in it have any length.
    """
    if column.fill is not None:
        if column.name not in sample.columns:
            return np.full(lengths.get(column.axis, 0), column.fill, dtype=column.dtype)
        values = np.asarray(sample.columns[column.name])
    elif column.axis == "byte":
        if column.text == "json":
            return np.frombuffer(_metadata_bytes(where, sample), dtype=np.uint8)
        return encode_text(getattr(sample, column.name))
    elif column.axis == "span":
        name = column.name.removeprefix("span_")
        return np.array([getattr(span, name) for span in sample.versions], dtype=column.dtype)
    else:
        values = np.asarray(getattr(sample, column.name))
    _check_shape(where, column, values, lengths)
    stored = _narrow(where, column.name, values, np.dtype(column.dtype))
    _check_range(where, column, stored)
    return stored


def _check_shape(where: str, column: Column, values: AnyArray, lengths: dict[str, int]) -> None:
    expected = lengths.get(column.axis)
    if expected is None and values.ndim != 1:
        raise DamagedDataError(
            f"{where}: {column.name} has shape {values.shape}, expected one dimension"
        )
    if expected is not None and values.shape != (expected,):
        raise DamagedDataError(
            f"{where}: {column.name} has shape {values.shape}, expected ({expected},) because the sample has "
            f"{lengths['token']} tokens and response_length {lengths['response_token']}; an append or truncation forgot this column"
        )


def _check_range(where: str, column: Column, stored: AnyArray) -> None:
    if column.unit == "token id" and stored.size and np.minimum.reduce(stored) < 0:
        raise DamagedDataError(
            f"{where}: {column.name} contain the negative id {int(stored.min())}"
        )
    if column.name == "loss_mask" and stored.size and np.maximum.reduce(stored) > 1:
        raise DamagedDataError(f"{where}: loss_mask contains {int(stored.max())}, expected 0 or 1")
    if column.text == "json":
        _check_json(where, column, stored)


def _check_json(where: str, column: Column, stored: AnyArray) -> None:
    try:
        value = decode_json(stored)
    except ValueError as error:
        raise DamagedDataError(
            f"{where}: {column.name} is not UTF-8 JSON ({error}); make it with vime_hpc.buffer.values.encode_json"
        ) from error
    if column.name == "image_digests":
        entries = value if isinstance(value, list) else [value]
        wrong = [entry for entry in entries if not IMAGE_DIGEST.fullmatch(str(entry))]
        if wrong or not isinstance(value, list):
            raise DamagedDataError(
                f"{where}: image_digests holds {(wrong or [value])[0]!r:.80}; expected a list of xxh3_128:HEX or sha256:HEX, one "
                "per image of the prompt"
            )


def check_edges(where: str, schema: BufferSchema, sample: Sample) -> None:
    """Edges that deal a column out to the response tokens start at 0, never fall, and end at its length."""
    for column in schema.ragged:
        present = {column.name, column.edges} & set(sample.columns) if column.edges else None
        if not present:
            continue
        if len(present) == 1:
            raise DamagedDataError(
                f"{where}: has {present.pop()} but not its partner; {column.name} and {column.edges} are of no use apart"
            )
        edges = np.asarray(sample.columns[column.edges])
        total = len(sample.columns[column.name])
        if edges[0] != 0 or bool((np.diff(edges) < 0).any()) or edges[-1] != total:
            raise DamagedDataError(
                f"{where}: {column.edges} run from {int(edges[0])} to {int(edges[-1])}; expected to rise from 0 to {total}, the number "
                f"of {column.name}"
            )


def _narrow(where: str, name: str, values: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """The same values in the stored type. HDF5 would saturate silently (300 -> 255), so this refuses instead."""
    if values.dtype == dtype:
        return np.ascontiguousarray(values)
    if values.dtype.kind not in "biuf" or (dtype.kind in "iu" and values.dtype.kind == "f"):
        raise DamagedDataError(
            f"{where}: {name} has type {values.dtype}, stored as {dtype}; convert it explicitly"
        )
    if dtype.kind in "iu" and values.size and values.dtype.kind != "b":
        limit, low, high = np.iinfo(dtype), int(values.min()), int(values.max())
        if low < limit.min or high > limit.max:
            raise DamagedDataError(
                f"{where}: {name} spans {low}..{high}, its stored type {dtype} holds {limit.min}..{limit.max}"
            )
    with np.errstate(over="ignore"):
        stored = values.astype(dtype)
    if dtype.kind == "f" and bool((np.isfinite(values) & ~np.isfinite(stored)).any()):
        raise DamagedDataError(
            f"{where}: {name} has finite values beyond the range of its stored type {dtype}"
        )
    return stored


def routed_values(where: str, routing: RoutingShape, sample: Sample) -> AnyArray:
    """[T - 1, layers, top_k] in the stored type, all of it marked missing when the sample has none.

    `check_expert_ids` looks at the ids: it reads all of them, so who turns them anyway does it then.
    """
    rows, width = len(sample.tokens) - 1, routing.num_layers * routing.top_k
    if sample.routed_experts is None:
        mark = np.array(routing.missing, dtype=routing.dtype)
        return np.broadcast_to(mark, (rows, routing.num_layers, routing.top_k))
    experts = np.asarray(sample.routed_experts)
    if experts.shape != (rows, width):
        raise DamagedDataError(
            f"{where}: routed_experts has shape {experts.shape}, expected ({rows}, {width}) = (tokens - 1, "
            f"{routing.num_layers} layers * top_k {routing.top_k})"
        )
    return _narrow(where, ROUTED, experts, routing.dtype).reshape(
        rows, routing.num_layers, routing.top_k
    )


def check_expert_ids(where: str, routing: RoutingShape, experts: AnyArray) -> None:
    """[T - 1, layers, top_k]: every id is one of the model's experts, or the row is marked missing."""
    if not experts.size or experts.max() < routing.num_experts:
        return
    wrong = experts >= routing.num_experts
    wrong &= ~routing.missing_rows(experts).reshape(len(experts), routing.num_layers, 1)
    if wrong.any():
        row, layer, _ = (int(index) for index in np.argwhere(wrong)[0])
        raise DamagedDataError(
            f"{where}: routed_experts holds id {int(experts[wrong][0])} at row {row}, layer {layer}; the buffer was "
            f"created for {routing.num_experts} experts (ids 0..{routing.num_experts - 1}; {routing.missing} in all "
            f"top_k places marks a missing row)"
        )


def check_spans(where: str, sample: Sample) -> None:
    """Version spans cover the response from its first token on, in order."""
    starts: Sequence[int] = [span.start for span in sample.versions]
    ordered = all(left < right for left, right in itertools.pairwise(starts))
    if starts and (
        starts[0] != 0 or not ordered or starts[-1] > max(sample.response_length - 1, 0)
    ):
        raise DamagedDataError(
            f"{where}: version spans start at {list(starts)}; expected 0 first, then rising, all below "
            f"response_length {sample.response_length}"
        )


def _metadata_bytes(where: str, sample: Sample) -> bytes:
    try:
        return canonical_json(sample.metadata)
    except (TypeError, ValueError) as error:
        raise DamagedDataError(
            f"{where}: metadata is not plain JSON ({error}); store numbers, strings, lists and objects, "
            "and null in place of NaN"
        ) from error
