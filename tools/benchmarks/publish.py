"""The stall of a publish by phase, beside a device copy of the same bytes; between two GPUs also beside NCCL's own broadcast
and vLLM's own packed NCCL transfer into the same engine.

    python tools/benchmarks/publish.py --dims 0.6b --transport ipc --versions 6
    python tools/benchmarks/publish.py --dims 30b-a3b --transport nccl --versions 6   # sender on GPU 0, engine on GPU 1

A real vLLM engine; the sender holds the model's tensors (random, Hugging Face names) in this process. One line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alone import alone
from published_model import DIMS, random_tensors, write_headers
from vllm_transfer import OPTIONS as REFERENCE, Engine, vllm_transfer

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.server import EngineServer
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.weights.bridge import BridgeSender, dtype_name
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.ipc import IpcSender, ipc_group
from vime_hpc.weights.plan import TensorSpec, build_plan
from vime_hpc.weights.publish import publish

TIMEOUT_S = 120.0
VLLM = {
    "load-format": "dummy",
    "enforce-eager": True,  # nothing is generated
    "kv-cache-memory-bytes": 4 << 30,
    "max-num-seqs": 64,
}
MEMORY = dict.fromkeys(DIMS, 0.15) | {"30b-a3b": 0.6}  # share of the GPU the engine may take
WIRE_BYTES, WIRE_ROUNDS = 4 << 30, 10


def copy_seconds(nbytes: int) -> float:
    """A device-to-device copy of so many bytes, in buffers of 1 GiB at most."""
    size = min(nbytes, 1 << 30)
    a, b = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    b.copy_(a)
    start.record()
    for _ in range(20):
        b.copy_(a)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 20e3 * nbytes / size


def wire_member(rank: int, port: int) -> float:
    """Bytes a second of NCCL's own broadcast of one tensor from GPU 0 to GPU 1; both members call it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = bridge_group(store, 1_000, rank, 2, "nccl", TIMEOUT_S)
    flat = torch.ones(WIRE_BYTES, dtype=torch.uint8, device=device)
    nccl = group._groups[0, 0]
    nccl.broadcast(flat, 0).wait()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(WIRE_ROUNDS):
        nccl.broadcast(flat, 0).wait()
    end.record()
    end.synchronize()
    group.close()
    return WIRE_ROUNDS * WIRE_BYTES / (start.elapsed_time(end) / 1e3)


def wire_rate(port: int) -> float:
    """wire_member on both GPUs: here and in a process of its own."""
    other = subprocess.Popen([sys.executable, __file__, "--wire-member", str(port)])
    rate = wire_member(0, port)
    if other.wait(TIMEOUT_S):
        raise RuntimeError(f"the other member of the broadcast ended with {other.returncode}")
    return rate


def measure(options: argparse.Namespace, server: EngineServer, token: str) -> dict[str, Any]:
    tensors = random_tensors(options.dims)
    plan = build_plan(
        [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()], 512
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sent: list[dict[str, float]] = []
    errors: list[BaseException] = []

    def train() -> None:
        try:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            channel = PublishChannel(own, 1, TIMEOUT_S)
            channel.put_plan(plan)
            sender: Any
            if options.transport == "ipc":
                group = ipc_group(own, 1, 0, 2, TIMEOUT_S)
                sender = IpcSender(group, plan, 0, torch.device("cuda", 0))
            else:
                group = bridge_group(own, 1, 0, 2, options.transport, TIMEOUT_S)
                sender = BridgeSender(group, plan, 0)
            sent.extend(
                publish(channel, sender, version, iter(tensors.items()))
                for version in range(1, options.versions + 1)
            )
            group.close()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    control = EngineControl(server.url, token, timeout_s=TIMEOUT_S, name="engine 0")
    receiver = EngineWeightReceiver(
        [control],
        PublishChannel(store, 1, TIMEOUT_S),
        store_host="127.0.0.1",
        store_port=store.port,
        epoch=1,
        num_sources=1,
        tp=1,
        backend=options.transport,
        timeout_s=TIMEOUT_S,
    )

    async def receive() -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
        await receiver.join()
        rows = [(await receiver.receive_newest(v))[1] for v in range(1, options.versions + 1)]
        return rows, await control.collective_rpc("vime_compare")

    own: list[dict[str, float]] = []
    with alone():
        received, compared = asyncio.run(receive())
        thread.join(60)
        copy_s = copy_seconds(plan.nbytes)
        wire = wire_rate(store.port) if options.transport == "nccl" else None
        if options.transport == "nccl" and not errors:
            own = vllm_transfer(Engine(server.url, token, TIMEOUT_S), tensors, 4)[1:]
    if errors:
        raise errors[0]

    def median(rows: list[dict[str, float]]) -> dict[str, float]:
        return {
            k.removeprefix("weights/"): round(statistics.median(r[k] for r in rows[2:]), 5)
            for k in rows[0]
        }

    engine = median(received)
    return {
        "dims": options.dims,
        "transport": options.transport,
        "tensors": len(tensors),
        "nbytes": plan.nbytes,
        "versions": options.versions,
        "copy_s": round(copy_s, 6),
        "stall_s": engine["engine_stall_s"],
        "stall_over_copy": round(engine["engine_stall_s"] / copy_s, 1),
        "wire_s": round(plan.nbytes / wire, 6) if wire else None,
        "stall_over_wire": round(engine["engine_stall_s"] * wire / plan.nbytes, 2)
        if wire
        else None,
        "vllm_transfer_s": [round(one["stall_s"], 4) for one in own],
        "stall_over_vllm_transfer": round(
            engine["engine_stall_s"] / statistics.median(one["stall_s"] for one in own), 3
        )
        if own
        else None,
        "compared": compared,
        "first": received[0],
        "engine": engine,
        "trainer": median(sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", choices=DIMS, default="0.6b")
    parser.add_argument("--transport", choices=("ipc", "gloo", "nccl"), nargs="+", default=["ipc"])
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument(
        "--model", default=tempfile.gettempdir(), help="folder to write the model in"
    )
    parser.add_argument("--log", default="", help="keep the engine's log here")
    parser.add_argument("--wire-member", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wire_member:
        wire_member(1, options.wire_member)
        sys.stdout.flush()
        os._exit(0)  # what libraries' destructors say at the end of a process is no result
    if {"ipc", "nccl"} <= set(options.transport):
        parser.error("ipc needs the engine on the sender's GPU, nccl on another one: two calls")
    model = write_headers(Path(options.model) / f"headers-{options.dims}", options.dims)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token_file = new_token_file(folder / "token")
        server = EngineServer(
            EngineConfig(device="cuda"),
            ModelConfig(path=str(model), dtype="bfloat16"),
            vllm={
                **VLLM,
                **(REFERENCE if "nccl" in options.transport else {}),
                "gpu-memory-utilization": MEMORY[options.dims],
            },
            max_model_len=1024,
            seed=0,
            index=0,
            host="127.0.0.1",
            token_file=token_file,
            log_path=Path(options.log or folder / "engine.log"),
            gpus=[1 if "nccl" in options.transport else 0],
        )
        with server:
            server.start()
            server.wait_ready(300)
            for transport in options.transport:
                case = argparse.Namespace(**{**vars(options), "transport": transport})
                print(json.dumps(measure(case, server, read_token(token_file))), flush=True)


if __name__ == "__main__":
    main()
