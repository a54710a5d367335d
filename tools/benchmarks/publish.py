"""The stall of a publish by phase, trainer and engine on one GPU, beside a device copy of the same bytes.

    python tools/benchmarks/publish.py --dims 0.6b --transport ipc --versions 6

A real vLLM engine; the sender holds the model's tensors (random, Hugging Face names) in this process. One line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alone import alone
from safetensors.torch import load_file
from trainer_step import DIMS, write_model

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
VLLM = {"gpu-memory-utilization": 0.1, "kv-cache-memory-bytes": 4 << 30, "max-num-seqs": 64}


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


def measure(
    options: argparse.Namespace, server: EngineServer, token: str, model: Path
) -> dict[str, Any]:
    tensors = {
        n: t.cuda()
        for file in sorted(model.glob("*.safetensors"))
        for n, t in load_file(file).items()
    }
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
                sender = IpcSender(
                    ipc_group(own, 1, 0, 2, TIMEOUT_S), plan, 0, torch.device("cuda", 0)
                )
            else:
                sender = BridgeSender(
                    bridge_group(own, 1, 0, 2, options.transport, TIMEOUT_S), plan, 0
                )
            sent.extend(
                publish(channel, sender, version, iter(tensors.items()))
                for version in range(1, options.versions + 1)
            )
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    receiver = EngineWeightReceiver(
        [EngineControl(server.url, token, timeout_s=TIMEOUT_S, name="engine 0")],
        PublishChannel(store, 1, TIMEOUT_S),
        store_host="127.0.0.1",
        store_port=store.port,
        epoch=1,
        num_sources=1,
        tp=1,
        backend=options.transport,
        timeout_s=TIMEOUT_S,
    )

    async def receive() -> list[dict[str, float]]:
        await receiver.join()
        return [(await receiver.receive_newest(v))[1] for v in range(1, options.versions + 1)]

    with alone():
        received = asyncio.run(receive())
        copy_s = copy_seconds(plan.nbytes)
    thread.join(60)
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
        "first": received[0],
        "engine": engine,
        "trainer": median(sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", choices=DIMS, default="0.6b")
    parser.add_argument("--transport", choices=("ipc", "gloo"), nargs="+", default=["ipc"])
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--model", default=tempfile.gettempdir())
    options = parser.parse_args()
    model = write_model(Path(options.model) / f"bench-{options.dims}", options.dims)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token_file = new_token_file(folder / "token")
        server = EngineServer(
            EngineConfig(device="cuda"),
            ModelConfig(path=str(model), dtype="bfloat16"),
            vllm=VLLM,
            max_model_len=1024,
            seed=0,
            index=0,
            host="127.0.0.1",
            token_file=token_file,
            log_path=folder / "engine.log",
        )
        with server:
            server.start()
            server.wait_ready(300)
            for transport in options.transport:
                case = argparse.Namespace(**{**vars(options), "transport": transport})
                print(json.dumps(measure(case, server, read_token(token_file), model)), flush=True)


if __name__ == "__main__":
    main()
