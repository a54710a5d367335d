"""A warning seen by one rank stops all of them at the same step boundary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="ranks agree over a torch group")

PROGRAM = """
import json, os, signal, sys, time
from vime_hpc.cluster.signal_flag import SignalFlag
flag = SignalFlag()
import torch.distributed as dist
from vime_hpc.cluster.groups import any_rank, start_trainer_group
from vime_hpc.cluster.stop import AgreedStop

class Rendezvous(dict):
    has, put = dict.__contains__, dict.__setitem__

rank, others = int(sys.argv[1]), Rendezvous()
start_trainer_group(dist.FileStore(sys.argv[2], 2), rank, 2, "gloo", timeout_s=100.0)
stop = AgreedStop(flag, others, any_rank)
found = [stop.agreed()]
if rank == 1:
    os.kill(os.getpid(), signal.SIGUSR2)
    while not flag.is_set():
        time.sleep(0.01)
found += [stop.agreed(), others.get("stop")]
print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


def test_one_rank_s_warning_stops_both_at_the_same_boundary(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), tmp_path / "store"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    assert found == [[False, True, True]] * 2
