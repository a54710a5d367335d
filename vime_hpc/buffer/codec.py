"""Sample <-> the byte stream of its columns: what digests cover, what the journal stores, what a segment splits up.

Stream of a sample, all little-endian: the packed scalar record; then for each ragged column in the schema's order the
int64 count of its values and the values; then routed_experts. In a digest routed_experts stand as their XXH3-64 per
layer, so a reader of some layers can check exactly what it read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vime_hpc.buffer.checks import (
    check_edges,
    check_expert_ids,
    check_spans,
    ragged_values,
    routed_values,
    scalar_record,
)
from vime_hpc.buffer.schema import ROUTED, STATUS_NAMES, BufferSchema
from vime_hpc.buffer.values import decode_text
from vime_hpc.errors import BufferCorruptError, DamagedDataError
from vime_hpc.types import Sample, Status, VersionSpan

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A checked sample as arrays of exactly the stored types."""

    sample_id: int
    scalars: npt.NDArray[np.void]
    """[] record of schema.scalar_dtype."""
    ragged: tuple[AnyArray, ...]
    """One flat array per column of schema.ragged."""
    routed: AnyArray | None
    """[T - 1, layers, top_k]; None when the schema has no routing."""

    @property
    def where(self) -> str:
        """What messages call the sample."""
        return _where(
            *(int(self.scalars[name]) for name in ("sample_id", "group_id", "index_in_group"))
        )


def _where(sample_id: int, group_id: int, index_in_group: int) -> str:
    return f"sample {sample_id} (group {group_id}, index {index_in_group})"


def pack_sample(
    schema: BufferSchema, sample: Sample, *, check_experts: bool = True
) -> PackedSample:
    """Check a sample against the schema and convert it to stored types without copying what already fits.

    Args:
        check_experts: False leaves `check_expert_ids` to whoever reads the routed experts next.
    Raises:
        DamagedDataError: columns disagree about a length, or a value would not survive its stored type; the message
            names sample, column, what was found and what was expected.
    """
    where = _where(sample.sample_id, sample.group_id, sample.index_in_group)
    num_tokens, response_length = len(sample.tokens), sample.response_length
    if not 0 <= response_length < num_tokens:
        raise DamagedDataError(
            f"{where}: response_length is {response_length} of {num_tokens} tokens; expected a prompt of one token or more"
        )
    lengths = {
        "token": num_tokens,
        "response_token": response_length,
        "response_edge": response_length + 1,
    }
    undeclared = [name for name in sorted(sample.columns) if name not in schema.optional]
    if undeclared or (sample.routed_experts is not None and schema.routing is None):
        raise DamagedDataError(
            f"{where}: has columns {undeclared or [ROUTED]} which this buffer does not declare; "
            f"it was created with optional columns {list(schema.optional)}. They are fixed for a whole run: start one with "
            f"--buffer.columns={[*schema.optional, *undeclared]} --run.dir=PATH"
        )
    ragged = tuple(ragged_values(where, column, sample, lengths) for column in schema.ragged)
    check_spans(where, sample)
    check_edges(where, schema, sample)
    routed = None if schema.routing is None else routed_values(where, schema.routing, sample)
    if schema.routing is not None and routed is not None and check_experts:
        check_expert_ids(where, schema.routing, routed)
    return PackedSample(sample.sample_id, scalar_record(where, schema, sample), ragged, routed)


def unpack_sample(schema: BufferSchema, packed: PackedSample) -> Sample:
    """The inverse of pack_sample; packed.routed may hold fewer layers than the schema says."""
    row = packed.scalars
    values = {
        column.name: array for column, array in zip(schema.ragged, packed.ragged, strict=True)
    }
    code = int(row["status"])
    if code >= len(STATUS_NAMES):
        raise BufferCorruptError(
            f"sample {packed.sample_id}: status code {code} is unknown; known 0..{len(STATUS_NAMES) - 1}"
        )
    columns: dict[str, AnyArray] = {}
    for column in schema.optional_columns:
        if row[column.present]:
            columns[column.name] = (
                np.asarray(row[column.name]) if column.axis == "sample" else values[column.name]
            )
    routed = packed.routed
    if routed is not None:
        routed = (
            routed.reshape(len(routed), routed.shape[1] * routed.shape[2])
            if row[f"{ROUTED}_present"]
            else None
        )
    return Sample(
        sample_id=int(row["sample_id"]),
        group_id=int(row["group_id"]),
        rollout_id=int(row["rollout_id"]),
        prompt_id=int(row["prompt_id"]),
        index_in_group=int(row["index_in_group"]),
        tokens=values["tokens"],
        response_length=int(row["response_length"]),
        loss_mask=values["loss_mask"],
        rollout_logprobs=values["rollout_logprobs"],
        status=Status(STATUS_NAMES[code]),
        finish_reason=decode_text(values["finish_reason"]),
        attempt=int(row["attempt"]),
        seed=int(row["seed"]),
        reward=float(row["reward"]) if row["reward_usable"] else None,
        reward_cause=decode_text(values["reward_cause"]),
        versions=tuple(
            VersionSpan(int(version), int(start))
            for version, start in zip(values["span_version"], values["span_start"], strict=True)
        ),
        routed_experts=routed,
        prompt_text=decode_text(values["prompt_text"]),
        response_text=decode_text(values["response_text"]),
        metadata=json.loads(bytes(values["metadata"])),
        columns=columns,
    )


def sample_digest(
    schema: BufferSchema, packed: PackedSample, layer_digests: npt.NDArray[np.uint64] | None
) -> int:
    """XXH3-64 of the sample's stream, routed experts represented by their digests per layer ([L] uint64)."""
    state = xxhash.xxh3_64(packed.scalars.tobytes())
    for array in packed.ragged:
        count = len(array)
        state.update(count.to_bytes(8, "little"))
        if count:
            state.update(array.data)
    if layer_digests is not None:
        state.update(layer_digests.astype("<u8", copy=False).tobytes())
    return int(state.intdigest())


def encode_stream(packed: PackedSample) -> Iterator[bytes | memoryview]:
    """The sample's stream for the journal, routed experts in full."""
    yield packed.scalars.tobytes()
    for array in packed.ragged:
        yield len(array).to_bytes(8, "little")
        yield array.data.cast("B") if array.size else b""
    if packed.routed is not None:
        yield np.ascontiguousarray(packed.routed).data.cast("B") if packed.routed.size else b""


def decode_stream(schema: BufferSchema, data: memoryview, offset: int) -> tuple[Sample, int]:
    """One sample from the stream at `offset`, and the offset behind it. The caller has checked the record's digest."""
    record = schema.scalar_dtype
    scalars = np.frombuffer(data, dtype=record, count=1, offset=offset)[0]
    offset += record.itemsize
    ragged: list[AnyArray] = []
    for column in schema.ragged:
        count = int.from_bytes(data[offset : offset + 8], "little")
        ragged.append(np.frombuffer(data, dtype=column.dtype, count=count, offset=offset + 8))
        offset += 8 + ragged[-1].nbytes
    routed = None
    if schema.routing is not None:
        shape = (
            int(scalars["prompt_length"] + scalars["response_length"]) - 1,
            schema.routing.num_layers,
            schema.routing.top_k,
        )
        routed = np.frombuffer(
            data, dtype=schema.routing.dtype, count=math.prod(shape), offset=offset
        ).reshape(shape)
        offset += routed.nbytes
    packed = PackedSample(int(scalars["sample_id"]), scalars, tuple(ragged), routed)
    return unpack_sample(schema, packed), offset
