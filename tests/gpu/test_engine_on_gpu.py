"""A real vLLM engine on the GPU: what a publish brings lies bit for bit in the engine's memory, and is what it serves.

Needs 16 GiB of GPU memory and two minutes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_engine import TIMEOUT_S, RealEngine, Tensors, plan_of, save_model
from safetensors.torch import load_file

from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.client import EngineAnswer, EngineHTTPClient
from vime_hpc.engine.server import EngineServer
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.weights.bridge import dtype_name
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.ipc import IpcSender, ipc_group
from vime_hpc.weights.publish import publish as publish_version

pytestmark = pytest.mark.timeout(600)
PROMPT = [1, 2, 3, 4, 5] * 20
OPTIONS = {"max-num-seqs": 16, "gpu-memory-utilization": 0.1, "kv-cache-memory-bytes": 1 << 30}


@pytest.fixture(scope="module", params=["dense", "moe"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    root = tmp_path_factory.mktemp(request.param)
    models = [save_model(root / f"model{seed}", seed, request.param == "moe") for seed in (0, 1)]
    token = new_token_file(root / "token")
    server = EngineServer(
        EngineConfig(device="cuda"),
        ModelConfig(path=str(models[0]), dtype="bfloat16"),
        vllm=OPTIONS,
        max_model_len=512,
        seed=0,
        index=0,
        host="127.0.0.1",
        token_file=token,
        log_path=root / "engine.log",
        routed_experts=request.param == "moe",
    )
    with server:
        server.start()
        server.wait_ready(300)
        yield RealEngine(
            server.url, server.pid, Path(server._private_dir), read_token(token), models, 1, None
        )  # type: ignore[arg-type]


def weights(engine: RealEngine, model: int) -> Tensors:
    return {
        n: t.bfloat16() for n, t in load_file(engine.models[model] / "model.safetensors").items()
    }


def publish(engine: RealEngine, tensors: Tensors, version: int) -> dict[str, float]:
    receiver, thread, errors = engine.publishing(tensors, version)

    async def main() -> dict[str, float]:
        await receiver.join()
        return (await receiver.receive_newest(version))[1]

    metrics = asyncio.run(main())
    thread.join(30)
    assert errors == []
    return metrics


def publish_through_shared_memory(
    engine: RealEngine, sets: list[Tensors]
) -> list[tuple[dict[str, float], dict[str, str]]]:
    """Versions 1, 2, ... over one bridge by CUDA IPC: metrics and readback after each."""
    engine.epoch += 1
    epoch = engine.epoch
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    engine.stores.append(store)
    errors: list[BaseException] = []

    def train() -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        channel = PublishChannel(own, epoch, TIMEOUT_S)
        plan = plan_of(sets[0])
        channel.put_plan(plan)
        try:
            group = ipc_group(own, epoch, 0, 2, TIMEOUT_S)
            sender = IpcSender(group, plan, 0, torch.device("cuda", 0))
            for version, tensors in enumerate(sets, 1):
                publish_version(channel, sender, version, iter(tensors.items()))
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    receiver = EngineWeightReceiver(
        [engine.control()], PublishChannel(store, epoch, TIMEOUT_S), store_host="127.0.0.1",
        store_port=store.port, epoch=epoch, num_sources=1, tp=1, backend="ipc", timeout_s=TIMEOUT_S,
    )  # fmt: skip

    async def main() -> list[tuple[dict[str, float], dict[str, str]]]:
        await receiver.join()
        found = []
        for version in range(1, len(sets) + 1):
            _, metrics = await receiver.receive_newest(version)
            (reply,) = await engine.control().collective_rpc("vime_readback")
            found.append((metrics, plain_names(reply["digests"])))
            assert await compared(engine) == {"compared": len(sets[0]), "different": []}
        return found

    found = asyncio.run(main())
    thread.join(30)
    assert errors == []
    return found


async def compared(engine: RealEngine) -> dict[str, Any]:
    """What `vime-hpc weights verify RUN --engines` asks."""
    (reply,) = await engine.control().collective_rpc("vime_compare")
    return dict(reply)


def readback(engine: RealEngine) -> dict[str, str]:
    (reply,) = asyncio.run(engine.control().collective_rpc("vime_readback"))
    return plain_names(reply["digests"])


def plain_names(digests: dict[str, str]) -> dict[str, str]:
    """vLLM 0.26 put the experts' weights one module deeper."""
    return {name.replace(".routed_experts.", "."): digest for name, digest in digests.items()}


def sample(engine: RealEngine) -> EngineAnswer:
    async def main() -> EngineAnswer:
        async with EngineHTTPClient([engine.url], engine.token) as client:
            return await client.sample(prompt_tokens=PROMPT, seed=11, max_tokens=40)

    return asyncio.run(main())


def as_the_engine_holds_it(tensors: Tensors) -> dict[str, str]:
    """Digests under vLLM's parameter names: query, key and value in one, gate and up in one, experts stacked."""
    whole: dict[str, Any] = dict(tensors)
    for name in tensors:
        if name.endswith("self_attn.q_proj.weight"):
            head = name.removesuffix("q_proj.weight")
            whole[f"{head}qkv_proj.weight"] = torch.cat(
                [whole.pop(f"{head}{x}_proj.weight") for x in "qkv"]
            )
        elif name.endswith("mlp.gate_proj.weight"):
            head = name.removesuffix("gate_proj.weight")
            whole[f"{head}gate_up_proj.weight"] = torch.cat(
                [whole.pop(f"{head}{x}_proj.weight") for x in ("gate", "up")]
            )
        elif name.endswith("experts.0.gate_proj.weight"):
            head = name.removesuffix("0.gate_proj.weight")
            count = sum(n.startswith(head) and n.endswith("gate_proj.weight") for n in tensors)
            one = [
                {x: whole.pop(f"{head}{i}.{x}_proj.weight") for x in ("gate", "up", "down")}
                for i in range(count)
            ]
            whole[f"{head}w13_weight"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in one])
            whole[f"{head}w2_weight"] = torch.stack([e["down"] for e in one])
    return {
        n: tensor_digest(
            t.contiguous().flatten().view(torch.uint8).numpy(), dtype_name(t.dtype), tuple(t.shape)
        )
        for n, t in whole.items()
    }


def test_what_is_published_lies_bit_for_bit_in_the_engines_memory(engine: RealEngine) -> None:
    before = sample(engine)
    first, second = weights(engine, 0), weights(engine, 1)
    assert readback(engine) == as_the_engine_holds_it(first)
    print(publish(engine, second, 1))
    assert readback(engine) == as_the_engine_holds_it(second)
    assert asyncio.run(compared(engine)) == {"compared": len(second), "different": []}
    changed = sample(engine)
    assert changed.tokens != before.tokens
    publish(engine, first, 1)
    assert readback(engine) == as_the_engine_holds_it(first)
    again = sample(engine)
    assert again.tokens == before.tokens
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-6)


def test_weights_in_shared_memory_are_placed_bit_for_bit_once_vllms_own_load_read_back(
    engine: RealEngine,
) -> None:
    """The first version goes through vLLM's reload, later ones straight into the parameters."""
    sets = [weights(engine, i) for i in (1, 0, 1, 0)]
    found = publish_through_shared_memory(engine, sets)
    for tensors, (_, digests) in zip(sets, found, strict=True):
        assert digests == as_the_engine_holds_it(tensors)
    placed = [metrics["weights/rank_placed"] for metrics, _ in found]
    print(placed, [metrics["weights/engine_stall_s"] for metrics, _ in found])
    assert placed == [0.0, 1.0, 1.0, 1.0]
