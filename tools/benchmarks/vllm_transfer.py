"""vLLM's own packed NCCL weight transfer into a running engine, as a reference: its routes, its trainer side, its reload."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from typing import Any

import torch

from vime_hpc.engine.supervised import free_port

HOST = "127.0.0.1"
OPTIONS = {"weight-transfer-config": {"backend": "nccl"}}  # of `vllm serve`


class Engine:
    """Control calls of one engine."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self._url, self._token, self._timeout_s = url, token, timeout_s

    def post(self, route: str, body: Any = None) -> None:
        request = urllib.request.Request(
            self._url + route,
            data=json.dumps(body or {}).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            answer.read()

    def beside(self, route: str, body: Any) -> threading.Thread:
        """A call under way, while this thread does the other side of it."""
        thread = threading.Thread(target=self.post, args=(route, body))
        thread.start()
        return thread


def vllm_transfer(
    engine: Engine, tensors: dict[str, torch.Tensor], rounds: int
) -> list[dict[str, float]]:
    """Seconds of every round: in all, and of its parts. Tensors lie on GPU 0, the engine on another one."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    torch.cuda.set_device(0)
    where = {"master_address": HOST, "master_port": free_port(HOST), "world_size": 2}
    joining = engine.beside(
        "/init_weight_transfer_engine", {"init_info": {**where, "rank_offset": 1}}
    )
    group = NCCLWeightTransferEngine.trainer_init(where)
    joining.join()
    info = {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "packed": True,
    }
    found = []
    for _ in range(rounds):
        marks = [time.perf_counter()]
        engine.post("/pause?mode=wait&clear_cache=true")
        marks.append(time.perf_counter())
        engine.post("/start_weight_update")
        receiving = engine.beside("/update_weights", {"update_info": info})
        NCCLWeightTransferEngine.trainer_send_weights(
            iter(tensors.items()), {"group": group, "packed": True}
        )
        receiving.join()
        engine.post("/finish_weight_update")
        marks.append(time.perf_counter())
        engine.post("/resume")
        marks.append(time.perf_counter())
        found.append(
            {
                "stall_s": marks[3] - marks[0],
                "pause_s": marks[1] - marks[0],
                "update_s": marks[2] - marks[1],
                "resume_s": marks[3] - marks[2],
            }
        )
    return found
