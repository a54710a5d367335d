"""Every column of a rollout segment on one page: the table that drives write, read, append, truncate, join, verify, export.

A column is `scalar` (one value per sample) or ragged over an axis of the sample (its tokens, its response tokens, the
edges between them, its weight-version spans, the ids its nuclei kept, the bytes of one text). Ragged columns are stored
flat, with int64 offsets of their axis. A set per response token is two columns: the members of all sets, and R + 1 edges
that say which belong to which token (`edges_of`).
`routed_experts` alone has a layout of its own, [layer, row, top_k], so that a pipeline rank reads only its layers.
Nothing here imports h5py: the table is plain data, and docs/buffer-format.md is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Axis = Literal["sample", "token", "response_token", "response_edge", "span", "kept_token", "byte"]
"""What a column has one value per. Of a sample with T tokens, R of them response: T tokens, R response tokens, R + 1
response edges; spans, kept tokens and bytes are as many as there are."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its dataset's name, stored type, axis, unit, and what an optional one holds where it is missing."""

    name: str
    dtype: str
    axis: Axis
    unit: str
    meaning: str
    fill: float | None = None
    """Value stored for a sample that lacks an optional column; None = the column is mandatory. Where the sample does not
    fix the number of values, none are stored."""
    text: Literal["", "plain", "json"] = ""
    """What the bytes of a column per byte are."""
    edges: str = ""
    """Name of the column of R + 1 edges that deal this one's values out to the response tokens."""
    of_prompt: bool = False
    """True for an optional column about the prompt alone: it stays when a rollout starts again."""

    @property
    def is_optional(self) -> bool:
        return self.fill is not None

    @property
    def offsets(self) -> str:
        """Dataset of [N + 1] int64 offsets into this flat column."""
        return f"{self.name}_offsets" if self.axis == "byte" else f"{self.axis}_offsets"

    @property
    def dimension(self) -> str:
        """Name of the HDF5 dimension scale of this column's first dimension."""
        return f"{self.name}_byte" if self.axis == "byte" else self.axis

    @property
    def present(self) -> str:
        """Dataset of [N] uint8, 1 where an optional column has values of the sample's own."""
        return f"{self.name}_present"


SCALARS: tuple[Column, ...] = (
    Column("sample_id", "<i8", "sample", "id", "rollout_id * 100 + segment of the rollout"),
    Column("group_id", "<i8", "sample", "id", "running number of the prompt group in the run"),
    Column("rollout_id", "<i8", "sample", "id", "group_id * 10000 + index_in_group"),
    Column("prompt_id", "<i8", "sample", "id", "index of the prompt in its data set"),
    Column("index_in_group", "<i4", "sample", "count", "which sibling of its group"),
    Column("attempt", "<i4", "sample", "count", "how often this rollout was started before"),
    Column("seed", "<i8", "sample", "1", "sampling seed"),
    Column("status", "u1", "sample", "code", "index in the attribute status_names"),
    Column("reward", "<f8", "sample", "reward", "NaN where reward_usable is 0"),
    Column("reward_usable", "u1", "sample", "bool", "0 = excluded; reward_cause says why"),
    Column("prompt_length", "<i8", "sample", "token", "T - R"),
    Column("response_length", "<i8", "sample", "token", "R"),
    Column("mask_sum", "<i8", "sample", "token", "number of trained tokens, sum of loss_mask"),
    Column(
        "weight_version", "<i8", "sample", "version", "oldest version of any token; -1 = unknown"
    ),
)

RAGGED: tuple[Column, ...] = (
    Column("tokens", "<i4", "token", "token id", "prompt then response"),
    Column("loss_mask", "u1", "response_token", "bool", "1 where a token is trained on"),
    Column(
        "rollout_logprobs",
        "<f4",
        "response_token",
        "nat",
        "entry j belongs to response token j; of the distribution the engine sampled from",
    ),
    Column(
        "span_version",
        "<i8",
        "span",
        "version",
        "weight version of the response tokens from span_start on",
    ),
    Column("span_start", "<i8", "span", "token", "first response token of the span"),
    Column(
        "finish_reason", "u1", "byte", "UTF-8", "the engine's word for why it stopped", text="plain"
    ),
    Column(
        "reward_cause", "u1", "byte", "UTF-8", "why the reward is unusable, or empty", text="plain"
    ),
    Column("prompt_text", "u1", "byte", "UTF-8", "for display; tokens are the truth", text="plain"),
    Column(
        "response_text", "u1", "byte", "UTF-8", "for display; tokens are the truth", text="plain"
    ),
    Column(
        "metadata", "u1", "byte", "UTF-8 JSON", "extras of the sample, one JSON object", text="json"
    ),
)

OPTIONAL: tuple[Column, ...] = (
    Column(
        "old_logprobs", "<f4", "response_token", "nat", "by the trainer before the update", np.nan
    ),
    Column("ref_logprobs", "<f4", "response_token", "nat", "by the reference model", np.nan),
    Column(
        "teacher_logprobs",
        "<f4",
        "response_token",
        "nat",
        "by the teacher of on-policy distillation",
        np.nan,
    ),
    Column("values", "<f4", "response_token", "reward", "by the critic", np.nan),
    Column("advantages", "<f4", "response_token", "1", "as used by the loss", np.nan),
    Column("returns", "<f4", "response_token", "reward", "targets of the critic", np.nan),
    Column("token_rewards", "<f4", "response_token", "reward", "reward per token", np.nan),
    Column("top_p_num_kept", "<i4", "response_token", "count", "tokens the nucleus kept", -1),
    Column(
        "image_xxh3_64",
        "<u8",
        "sample",
        "digest",
        "XXH3-64 of the prompt's images, in order",
        0,
        of_prompt=True,
    ),
    Column(
        "top_p_token_offsets",
        "<i8",
        "response_edge",
        "index",
        "the nucleus of response token j has the sample's top_p_token_ids [j] to [j + 1]",
        0,
    ),
    Column(
        "top_p_token_ids",
        "<i4",
        "kept_token",
        "token id",
        "ids the nucleus kept, the sampled one among them; none where the engine sampled nothing",
        0,
        edges="top_p_token_offsets",
    ),
    Column(
        "image_digests",
        "u1",
        "byte",
        "UTF-8 JSON",
        "list of one digest per image of the prompt, xxh3_128:HEX or sha256:HEX",
        0,
        text="json",
        of_prompt=True,
    ),
    Column(
        "trace", "u1", "byte", "UTF-8 JSON", "what happened when in the rollout", 0, text="json"
    ),
)
"""Columns a buffer may declare beside routed_experts; a segment holds exactly the declared ones. Only ever appended to:
the order is part of the samples' digests."""

OPTIONAL_BY_NAME = {column.name: column for column in OPTIONAL}
PAIRS = tuple(frozenset((column.name, column.edges)) for column in OPTIONAL if column.edges)
"""Columns of no use without each other."""
