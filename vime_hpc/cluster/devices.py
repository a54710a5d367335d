"""Which GPUs of its node a process computes on. Looks at device files only: no CUDA context is made here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from vime_hpc.cluster.rank import RankInfo, Role, layout
from vime_hpc.config.tree import RunConfig

_DEVICE_FILE = re.compile(r"nvidia\d+")


def visible_gpus(
    environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> list[str]:
    """Names (for CUDA_VISIBLE_DEVICES) of the GPUs this process may use, in torch's order; empty without any."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name.strip() not in ("", "-1")]
    present = (
        [entry for entry in devices.iterdir() if _DEVICE_FILE.fullmatch(entry.name)]
        if devices.is_dir()
        else []
    )
    return [str(i) for i in range(len(present))]


def own_gpus(config: RunConfig, rank: RankInfo, num_gpus: int) -> list[int]:
    """Indices, of num_gpus visible on this node, that this rank computes on; empty where it needs none.

    The node's trainer ranks and engines take them one after the other, in the order of their ranks. Where there are not
    enough it begins again at 0: trainer and engine then share a GPU (one GPU: both take it).
    """
    needed = _width(config, rank.role)
    if num_gpus == 0 or needed == 0:
        return []
    roles = [role for role, size in layout(config) for _ in range(size)]
    first = sum(
        _width(config, roles[g])
        for g in range(rank.global_rank - rank.local_rank, rank.global_rank)
    )
    return [(first + i) % num_gpus for i in range(needed)]


def _width(config: RunConfig, role: Role) -> int:
    return {Role.TRAINER: 1, Role.ENGINE: config.engine.tp, Role.ROLLOUT: 0}[role]
