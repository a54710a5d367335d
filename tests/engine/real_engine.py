"""Helpers of the engine tests: tiny models, and a real vLLM owned by a process that a test may kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vime_hpc
from vime_hpc.cluster.groups import bridge_group
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import EngineLostError, VimeError
from vime_hpc.weights.bridge import BridgeSender, dtype_name
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.disk import DirectorySender, VersionStore, directory_group
from vime_hpc.weights.plan import TensorSpec, build_plan
from vime_hpc.weights.publish import publish

READY_S = 800  # 25 s on idle cores; 240 s seen with ten busy processes a core
TIMEOUT_S = 60.0
Tensors = dict[str, torch.Tensor]

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "eos_token_id": 256, "pad_token_id": 257,
    "initializer_range": 0.2,  # with the default 0.02 all logits are nearly equal, and stale weights hardly show
}  # fmt: skip


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(path)


def save_model(path: Path, seed: int, moe: bool) -> Path:
    import transformers as hf

    torch.manual_seed(seed)
    if moe:
        more = {
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **more))
    else:
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES))
    model.float().config.dtype = "float32"
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def hf_logprobs(
    path: Path, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> list[float]:
    """log softmax(logits / temperature) of the tokens, float32, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()
    table = (logits / temperature).log_softmax(-1)
    return [table[len(prompt) + j - 1, t].item() for j, t in enumerate(tokens)]


OWNER = """
import json, sys, time
from pathlib import Path
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.server import EngineServer
model, root, tp, moe = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "moe"
server = EngineServer(EngineConfig(device="cpu", tp=tp), ModelConfig(path=model, dtype="float32"),
                      vllm={"max-num-seqs": 16}, max_model_len=512, seed=0, index=0, host="127.0.0.1",
                      token_file=root / "token", log_path=root / "engine.log", routed_experts=moe)
server.start()
server.wait_ready(float(sys.argv[5]))
print(json.dumps({"url": server.url, "session": server.pid, "private": str(server._private_dir)}), flush=True)
time.sleep(3600)
"""


@dataclass
class RealEngine:
    """A running engine and the process that owns it."""

    url: str
    session: int
    private: Path
    token: str
    models: list[Path]
    tp: int
    owner: subprocess.Popen[str]
    epoch: int = 0
    stores: list[Any] = field(default_factory=list)

    def control(self) -> EngineControl:
        return EngineControl(self.url, self.token, timeout_s=TIMEOUT_S, name="engine 0")

    def bridge(
        self,
        train: Callable[[PublishChannel, Callable[[Any], BridgeSender]], None],
        control: EngineControl | None = None,
    ) -> Any:
        """Start `train` in a thread as sender 0 of a new epoch; returns (receiver, thread, errors)."""
        self.epoch += 1
        epoch, world = self.epoch, 1 + self.tp
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores.append(store)
        errors: list[BaseException] = []

        def run() -> None:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            channel = PublishChannel(own, epoch, TIMEOUT_S)

            def sender(plan: Any) -> BridgeSender:
                channel.put_plan(plan)
                agreed = channel.get_agreed(TIMEOUT_S)
                where = (epoch, 0, world, "gloo", TIMEOUT_S, 1, agreed.part_of)
                return BridgeSender(bridge_group(own, *where), agreed, 0)

            try:
                train(channel, sender)
            except VimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        receiver = EngineWeightReceiver(
            [control or self.control()], PublishChannel(store, epoch, TIMEOUT_S), store_host="127.0.0.1", store_port=store.port,
            epoch=epoch, num_sources=1, tp=self.tp, backend="gloo", timeout_s=TIMEOUT_S, send="parts",
        )  # fmt: skip
        return receiver, thread, errors

    def publishing_versions(
        self,
        root: Path,
        sets: list[Tensors],
        files: Any = None,
        control: EngineControl | None = None,
    ) -> Any:
        """Versions 1, 2, … through version directories, as `bridge`; later ones are deltas over the ones before."""
        self.epoch += 1
        where = (self.epoch, 0, 1 + self.tp, TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores.append(store)
        errors: list[BaseException] = []

        def run() -> None:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            channel, plan = PublishChannel(own, where[0], TIMEOUT_S), plan_of(sets[0])
            channel.put_plan(plan)
            try:
                group = directory_group(own, *where)
                versions = VersionStore(root, "job-0", keep=9, max_deltas=8)
                sender = DirectorySender(group, channel, plan, 0, versions, files)
                for version, tensors in enumerate(sets, 1):
                    publish(channel, sender, version, iter(tensors.items()))
            except VimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        receiver = EngineWeightReceiver(
            [control or self.control()], PublishChannel(store, where[0], TIMEOUT_S), store_host="127.0.0.1",
            store_port=store.port, epoch=where[0], num_sources=1, tp=self.tp, backend="disk",
            timeout_s=TIMEOUT_S, directory=str(root),
        )  # fmt: skip
        return receiver, thread, errors

    def publishing(
        self, tensors: Tensors, version: int, control: EngineControl | None = None
    ) -> Any:
        """A bridge whose trainer publishes these tensors honestly."""

        def train(channel: PublishChannel, sender: Any) -> None:
            publish(channel, sender(plan_of(tensors)), version, iter(tensors.items()))

        return self.bridge(train, control)


class LosingControl(EngineControl):
    """Loses the connection once, at one call: `before` it reaches the engine, or "after" the engine has done it."""

    def __init__(self, engine: RealEngine, call: str, moment: str) -> None:
        super().__init__(engine.url, engine.token, timeout_s=TIMEOUT_S, name="engine 0")
        self._call_lost, self._moment = call, moment
        self.lost = False

    async def _call(self, method: str, route: str, **more: Any) -> dict[str, Any]:
        body = more.get("body") or {}
        hit = self._call_lost in (route, body.get("method")) and not self.lost
        self.lost = self.lost or hit
        if hit and self._moment == "before":
            raise EngineLostError(f"engine 0 is lost before {self._call_lost}")
        answer = await super()._call(method, route, **more)
        if hit:
            raise EngineLostError(f"engine 0 is lost after {self._call_lost}")
        return answer


def plan_of(tensors: Tensors) -> Any:
    specs = [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
    return build_plan(specs, bucket_mib=1)


def start_engine(root: Path, *, moe: bool, tp: int) -> RealEngine:
    models = [save_model(root / f"model{seed}", seed, moe) for seed in (0, 1)]
    token_file = new_token_file(root / "token")
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(vime_hpc.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-c",
        OWNER,
        str(models[0]),
        str(root),
        str(tp),
        "moe" if moe else "dense",
        str(READY_S),
    ]
    owner = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    assert owner.stdout is not None
    line = owner.stdout.readline()
    if not line:
        log = root / "engine.log"
        pytest.fail(
            f"the engine did not start: {log.read_text()[-3000:] if log.exists() else 'no log'}"
        )
    found = json.loads(line)
    return RealEngine(
        found["url"],
        found["session"],
        Path(found["private"]),
        read_token(token_file),
        models,
        tp,
        owner,
    )
