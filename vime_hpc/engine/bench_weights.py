"""The engine's part of `vime-hpc bench weights`: control calls per publish, and the stall of a real engine by phase."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.server import EngineServer
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import ConfigError, VimeError
from vime_hpc.weights.bench import plan_of
from vime_hpc.weights.bridge import BridgeSender
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import root_digest
from vime_hpc.weights.disk import DISK, DirectorySender, VersionStore, directory_group
from vime_hpc.weights.publish import Sender, publish

TIMEOUT_S = 120.0
READY_S = 600.0
PHASES = ("prepare", "pause", "load", "verify", "reset", "resume", "stall")
Figures = dict[str, Any]


class _CountedControl(EngineControl):
    """An engine that agrees with everything; counts the calls."""

    def __init__(self, root: str) -> None:
        super().__init__("http://nowhere", "", name="counted")
        self.calls, self._root = 0, root

    async def _call(self, method: str, route: str, **more: Any) -> dict[str, Any]:
        self.calls += 1
        reply = {"root": self._root, "nbytes": 0, "seconds": {}}
        return {"success": True, "results": [reply]}


def control_calls(num_tensors: int, backend: str) -> int:
    """HTTP calls one engine gets in one publish of so many tensors."""
    digests = {f"layers.{i}.weight": f"{i:032x}" for i in range(num_tensors)}
    store = dist.HashStore()
    channel = PublishChannel(store, 1, TIMEOUT_S)
    channel.put_sent(1, digests)
    control = _CountedControl(root_digest(digests))
    receiver = EngineWeightReceiver(
        [control], channel, store_host="", store_port=0, epoch=1, num_sources=1, tp=1, backend=backend,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    asyncio.run(receiver.receive(1))
    return control.calls


def bench_control_calls() -> Figures:
    """Calls per publish and engine for a small and a large number of tensors."""
    return {
        f"control_calls_{name}_{count}_tensors": control_calls(count, backend)
        for name, backend in (("bridge", "gloo"), ("disk", DISK))
        for count in (10, 10_000)
    }


def bench_engine(model: Path, dtype: str, work: Path, *, tp: int = 1, versions: int = 5) -> Figures:
    """Stall of one engine on this machine's CPU or GPU by phase and transport (medians after the first version), and the bytes
    an engine rank receives over the bytes of its parameters.

    Args:
        model: Hugging Face directory; its own tensors, slightly changed from version to version, are published.
        tp: the engine's tensor parallel size.
    """
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{model}: no *.safetensors file; --engine takes a Hugging Face directory"
        )
    tensors = {n: t for file in files for n, t in load_file(file).items()}
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=work) as name:
        token_file = new_token_file(Path(name) / "token")
        server = EngineServer(
            EngineConfig(tp=tp), ModelConfig(path=str(model), dtype=dtype), vllm={"max-num-seqs": 16},  # type: ignore[arg-type]
            max_model_len=256, seed=0, index=0, host="127.0.0.1", token_file=token_file,
            log_path=Path(name) / "engine.log",
        )  # fmt: skip
        with server:
            server.start()
            server.wait_ready(READY_S)
            token = read_token(token_file)
            for epoch, transport in enumerate(("bridge", "disk", "delta"), 1):
                rows = _published(
                    server.url, token, (epoch, tp), transport, Path(name), tensors, versions
                )
                for phase in PHASES:
                    values = [
                        r[f"weights/engine_{phase}_s"]
                        for r in rows[1:]
                        if f"weights/engine_{phase}_s" in r
                    ]
                    figures[f"{transport}_{phase}_s"] = statistics.median(values) if values else 0.0
                figures[f"{transport}_nbytes"] = rows[-1]["weights/rank_nbytes"]
                figures[f"{transport}_received_over_held"] = rows[-1]["weights/received_over_held"]
                figures[f"{transport}_rank_transfer_s"] = statistics.median(
                    r["weights/rank_transfer_s"] for r in rows[1:]
                )
                figures[f"{transport}_rank_apply_s"] = statistics.median(
                    r["weights/rank_consume_s"] for r in rows[1:]
                )
    return figures


def _published(
    url: str,
    token: str,
    epoch_tp: tuple[int, int],
    transport: str,
    root: Path,
    tensors: dict[str, torch.Tensor],
    versions: int,
) -> Sequence[dict[str, float]]:
    epoch, tp = epoch_tp
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors: list[VimeError] = []
    where, folder = (epoch, 0, 1 + tp), root / transport

    def train() -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        channel, plan = PublishChannel(own, epoch, TIMEOUT_S), plan_of(tensors)
        channel.put_plan(plan)
        sender: Sender
        if transport == "bridge":
            agreed = channel.get_agreed(TIMEOUT_S)
            group = bridge_group(own, *where, "gloo", TIMEOUT_S, part_of=agreed.part_of)
            sender = BridgeSender(group, agreed, 0)
        else:
            kept = VersionStore(folder, "bench", max_deltas=versions * (transport == "delta"))
            meeting = directory_group(own, *where, TIMEOUT_S)
            sender = DirectorySender(meeting, channel, plan, 0, kept)
        try:
            for version in range(1, versions + 1):
                for tensor in tensors.values():
                    tensor.view(-1)[:: 101 + version] += 0.001
                publish(channel, sender, version, iter(tensors.items()))
        except VimeError as error:
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    receiver = EngineWeightReceiver(
        [EngineControl(url, token, timeout_s=TIMEOUT_S, name="engine 0")],
        PublishChannel(store, epoch, TIMEOUT_S), store_host="127.0.0.1", store_port=store.port, epoch=epoch,
        num_sources=1, tp=tp, backend="gloo" if transport == "bridge" else DISK, timeout_s=TIMEOUT_S,
        directory=str(folder), send="parts",
    )  # fmt: skip

    async def receive() -> list[dict[str, float]]:
        await receiver.join()
        return [(await receiver.receive_newest(v))[1] for v in range(1, versions + 1)]

    rows = asyncio.run(receive())
    thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    return rows
