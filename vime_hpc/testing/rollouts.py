"""Generate functions for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vime_hpc.buffer.values import encode_json
from vime_hpc.protocols import RolloutClient
from vime_hpc.rollout.generate import single_turn
from vime_hpc.types import GroupRequest, Sample

COLUMNS = ("values", "trace")


async def with_columns(
    request: GroupRequest, index_in_group: int, client: RolloutClient, table: Mapping[str, Any]
) -> list[Sample]:
    """A single turn that fills COLUMNS, but for the first rollout of each group: the very first sample of a run has none."""
    samples = await single_turn(request, index_in_group, client, table)
    if index_in_group == 0:
        return samples
    return [
        replace(
            sample,
            columns={
                "values": (sample.tokens[sample.prompt_length :] / 8).astype(np.float32),
                "trace": encode_json({"group": request.group_id, "index": index_in_group}),
            },
        )
        for sample in samples
    ]
