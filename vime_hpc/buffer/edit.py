"""Change a sample's length: append, truncate, requeue, join. Driven by the schema table, so no column can be forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vime_hpc.buffer.columns import OPTIONAL_BY_NAME, RAGGED, Column
from vime_hpc.buffer.schema import RoutingShape
from vime_hpc.errors import DamagedDataError
from vime_hpc.types import Sample, Status, VersionSpan

AnyArray = npt.NDArray[Any]

_RESPONSE = tuple(column for column in RAGGED if column.axis == "response_token")


def truncate(sample: Sample, num_tokens: int, *, response_text: str = "") -> Sample:
    """The first num_tokens tokens of a sample, every per-token column cut with them; status truncated.

    Args:
        response_text: text of what is left; cannot be computed here, so it is empty by default.
    Raises:
        ValueError: num_tokens would cut into the prompt or is more than there are.
    """
    if not sample.prompt_length <= num_tokens <= len(sample.tokens):
        raise ValueError(
            f"sample {sample.sample_id}: cannot truncate {len(sample.tokens)} tokens to {num_tokens}; the prompt has "
            f"{sample.prompt_length}"
        )
    length = num_tokens - sample.prompt_length
    cut = _cut_response(sample, length)
    rows = None if sample.routed_experts is None else sample.routed_experts[: num_tokens - 1]
    return replace(
        cut,
        tokens=sample.tokens[:num_tokens],
        response_length=length,
        routed_experts=rows,
        status=Status.TRUNCATED,
        versions=tuple(span for span in sample.versions if span.start < length),
        response_text=response_text,
    )


def append_tokens(
    sample: Sample,
    tokens: AnyArray,
    *,
    logprobs: AnyArray | None = None,
    version: int | None = None,
    routed_tail: AnyArray | None = None,
    routing: RoutingShape | None = None,
    columns: Mapping[str, AnyArray] | None = None,
    text: str = "",
) -> Sample:
    """Extend the response; all columns grow together.

    Args:
        tokens: [n] new token ids.
        logprobs: [n] of sampled tokens, which get mask 1. None = tokens of an environment: mask 0, logprob 0.
        version: weights that sampled them; a span is added when it differs from the last one's.
        routed_tail: [n, layers * top_k] routing of the rows from the last old token on: the row of the old last token
            is only known once the next turn has run it. Ids of a wider type widen the result.
        routing: needed to mark the rows missing when the sample has routing and routed_tail is None.
        columns: values of optional columns for the new tokens, as a sample of these tokens alone would have them. A
            column the sample has and this lacks is filled as missing; its token sets are empty.
    """
    new = np.asarray(tokens, dtype=np.int32)
    if logprobs is not None and len(logprobs) != len(new):
        raise DamagedDataError(
            f"sample {sample.sample_id}: {len(new)} new tokens come with {len(logprobs)} logprobs"
        )
    if not len(new):
        return sample
    added = {
        "loss_mask": np.full(len(new), logprobs is not None, dtype=np.uint8),
        "rollout_logprobs": np.zeros(len(new), dtype=np.float32)
        if logprobs is None
        else np.asarray(logprobs, dtype=np.float32),
    }
    grown: dict[str, Any] = {
        column.name: np.concatenate([getattr(sample, column.name), added[column.name]])
        for column in _RESPONSE
    }
    spans = sample.versions
    if version is not None and (not spans or spans[-1].version != version):
        spans = (*spans, VersionSpan(version, sample.response_length if spans else 0))
    return replace(
        sample,
        tokens=np.concatenate([sample.tokens, new]),
        response_length=sample.response_length + len(new),
        columns={
            name: _grown_column(sample, name, len(new), columns or {}) for name in sample.columns
        },
        versions=spans,
        routed_experts=_grown_routing(sample, len(new), routed_tail, routing),
        response_text=sample.response_text + text,
        **grown,
    )


def mask_response(sample: Sample) -> Sample:
    """The same sample with no response token trained on so far (older off-policy tokens of a resumed rollout)."""
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


def requeue(sample: Sample, *, keep_partial: bool) -> Sample:
    """An aborted rollout on its way back to the scheduler.

    keep_partial False clears everything the old weights made: response, logprobs, routing, versions, trace; True keeps
    all.
    """
    if keep_partial:
        return replace(sample, attempt=sample.attempt + 1)
    empty = _cut_response(sample, 0)
    return replace(
        empty,
        columns={
            name: values
            for name, values in empty.columns.items()
            if OPTIONAL_BY_NAME[name].of_prompt or not OPTIONAL_BY_NAME[name].text
        },
        tokens=sample.tokens[: sample.prompt_length],
        response_length=0,
        versions=(),
        routed_experts=None,
        response_text="",
        finish_reason="",
        reward=None,
        reward_cause="requeued",
        attempt=sample.attempt + 1,
    )


def join_prefill(
    prefill: AnyArray | None, decode: AnyArray, prompt_length: int, routing: RoutingShape
) -> AnyArray:
    """Routing of a prompt that another engine prefilled: its rows for the prompt, the decoding engine's for the rest.

    The decoding engine never ran the prompt; what it reports for those rows is not data. Without `prefill` they are
    marked missing.
    """
    if prefill is not None and len(prefill) < prompt_length:
        raise DamagedDataError(
            f"prefill routing has {len(prefill)} rows for {prompt_length} prompt tokens"
        )
    head = (
        np.full((prompt_length, decode.shape[1]), routing.missing)
        if prefill is None
        else prefill[:prompt_length]
    )
    return np.asarray(np.concatenate([head, decode[prompt_length:]]), dtype=routing.dtype)


def _cut_response(sample: Sample, length: int) -> Sample:
    """The columns of the first `length` response tokens; tokens and routing are the caller's."""
    mandatory: dict[str, Any] = {
        column.name: getattr(sample, column.name)[:length] for column in _RESPONSE
    }
    columns = {}
    for name, values in sample.columns.items():
        column = OPTIONAL_BY_NAME[name]
        if column.edges:
            columns[name] = values[: int(sample.columns[column.edges][length])]
        elif column.axis in ("response_token", "response_edge"):
            columns[name] = values[: length + (column.axis == "response_edge")]
        else:
            columns[name] = values
    return replace(sample, columns=columns, **mandatory)


def _grown_column(
    sample: Sample, name: str, num_new: int, added: Mapping[str, AnyArray]
) -> AnyArray:
    column, values = OPTIONAL_BY_NAME[name], sample.columns[name]
    if column.axis == "response_edge":
        edges = np.asarray(added.get(name, np.zeros(num_new + 1)), dtype=values.dtype)
        _check_added(sample, column, edges, num_new + 1)
        return np.concatenate([values, edges[1:] + values[-1]])
    if column.axis == "response_token":
        missing = np.full(num_new, column.fill, dtype=values.dtype)
        new = np.asarray(added.get(name, missing))
        _check_added(sample, column, new, num_new)
        return np.concatenate([values, new.astype(values.dtype, copy=False)])
    if column.edges and name in added:
        return np.concatenate([values, np.asarray(added[name])])
    return values


def _check_added(sample: Sample, column: Column, values: AnyArray, expected: int) -> None:
    if len(values) != expected:
        raise DamagedDataError(
            f"sample {sample.sample_id}: {expected} values of {column.name} belong to the new tokens, got {len(values)}"
        )


def _grown_routing(
    sample: Sample, num_new: int, tail: AnyArray | None, routing: RoutingShape | None
) -> AnyArray | None:
    if sample.routed_experts is None and tail is None:
        return None
    if sample.routed_experts is None or (tail is None and routing is None):
        raise DamagedDataError(
            f"sample {sample.sample_id}: either all turns bring routing or none does; give `routing` to mark the "
            "rows of a turn without it as missing"
        )
    if tail is None:
        assert routing is not None
        tail = np.full(
            (num_new, sample.routed_experts.shape[1]), routing.missing, dtype=routing.dtype
        )
    if tail.shape != (num_new, sample.routed_experts.shape[1]):
        raise DamagedDataError(
            f"sample {sample.sample_id}: routed_tail has shape {tail.shape}, expected "
            f"({num_new}, {sample.routed_experts.shape[1]}): a row per new token, from the old last token on"
        )
    return np.concatenate(
        [sample.routed_experts, tail]
    )  # numpy widens uint8 and uint16 to uint16, loses nothing
