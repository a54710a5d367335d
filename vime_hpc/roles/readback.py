"""Engines' weights read back on request and compared, bit for bit, with what was published (weights/readback.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_hpc.engine.client import EngineControl
from vime_hpc.errors import WeightsMismatchError
from vime_hpc.weights.readback import answer, wanted

log = logging.getLogger(__name__)


async def compare_engines(controls: Sequence[EngineControl]) -> list[dict[str, Any]]:
    """{"engine", "rank", "compared", "different"} or {"engine", "rank", "cannot"} of every engine rank."""
    replies = await asyncio.gather(*(c.collective_rpc("vime_compare") for c in controls))
    return [
        {"engine": control.name, "rank": rank, **found}
        for control, ranks in zip(controls, replies, strict=True)
        for rank, found in enumerate(ranks)
    ]


async def answer_requests(run: Path, version: int, controls: Sequence[EngineControl]) -> None:
    """Answer what is asked for, right after a publish. Nothing is asked of the engines where nothing is wanted.

    Raises:
        WeightsMismatchError: an engine rank holds other bytes than were published; names the tensors. The asker has the answer.
    """
    requests = await asyncio.to_thread(wanted, run)
    if not requests:
        return
    ranks = await compare_engines(controls)
    log.info("read back on request: version %d, %s", version, ranks)
    for number in requests:
        await asyncio.to_thread(answer, run, number, {"version": version, "ranks": ranks})
    for rank in ranks:
        if rank.get("different"):
            names = ", ".join(rank["different"][:10])
            raise WeightsMismatchError(
                f"{rank['engine']}, rank {rank['rank']}: {len(rank['different'])} of {rank['compared']} tensors are not what was "
                f"published as version {version}: {names}. Its memory was written to by something else than a publish, or is "
                f"faulty; start the run again on another node"
            )
