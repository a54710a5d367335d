"""A rank that meets the others through the real rendezvous and adds up 1 + 2 + 3 over a gloo group."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vime_hpc.cluster.rank import rank_info
from vime_hpc.cluster.rendezvous import Rendezvous, host_address
from vime_hpc.config.load import read_resolved
from vime_hpc.config.paths import RunPaths

paths = RunPaths(Path(sys.argv[1]))
config = read_resolved(paths.config)
rank = rank_info(config)
token = bytes.fromhex(paths.token.read_text().strip())
rendezvous = Rendezvous.open(
    paths.attempt(rank.attempt),
    token,
    hosting=rank.global_rank == 0,
    address=host_address(config.cluster.socket_ifname),
    timeout_s=100,
)
dist.init_process_group(
    "gloo",
    store=rendezvous.prefixed("all"),
    rank=rank.global_rank,
    world_size=rank.world_size,
    timeout=timedelta(seconds=60),
)
value = torch.tensor([float(rank.global_rank + 1)])
dist.all_reduce(value)
(paths.root / f"sum-{rank.global_rank}.json").write_text(json.dumps({"sum": value.item()}))
dist.barrier()
dist.destroy_process_group()
