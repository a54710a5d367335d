"""Every expert parallel rank is the source of its own experts: what is sent, what no longer travels between trainer ranks, and
that no sender waits for another one that waits for it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trainer_cases import make_model

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import TrainerConfig
from vime_hpc.testing.processes import Members
from vime_hpc.testing.ranks import run_ranks
from vime_hpc.testing.transport_suite import host_store
from vime_hpc.weights.bridge import BridgeReceiver, BridgeSender
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import root_digest
from vime_hpc.weights.disk import (
    DirectoryReceiver,
    DirectorySender,
    VersionStore,
    directory_group,
)
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.publish import publish
from vime_hpc.weights.staging import SLOTS

TIMEOUT_S = 30.0
LAYOUTS = [
    {"num_ranks": 2, "ep": 2},
    {"num_ranks": 4, "ep": 2},  # two replicas of every expert
    {"num_ranks": 4, "pp": 2, "ep": 2},
    {"num_ranks": 4, "tp": 2, "ep": 4, "sequence_parallel": True},
]


def trained_model(source: Path, layout: dict[str, Any]) -> Any:
    """The model of this rank."""
    from vime_hpc.trainer.model import build_model

    return build_model(ModelConfig(path=str(source), dtype="float32"), TrainerConfig(**layout))


@torch.no_grad()
def change(model: Any, version: int) -> None:
    """As a step does: other weights on every rank, equal on the replicas of a parameter."""
    for name, param, conversion in model.parameters():
        cut = 0 if ".experts." in name or conversion.cut is None else model.ranks.tp_rank
        seed = torch.Generator().manual_seed(zlib.crc32(name.encode()) + 1000 * version + cut)
        param.add_(torch.randn(param.shape, generator=seed))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that each dist.gather brings to this rank from others."""
    brought: list[int] = []
    gather = dist.gather

    def counting(tensor: Tensor, parts: list[Tensor] | None = None, **options: Any) -> Any:
        if parts is not None:
            brought.append(tensor.nbytes * (len(parts) - 1))
        return gather(tensor, parts, **options)

    dist.gather = counting
    try:
        yield brought
    finally:
        dist.gather = gather


def gathered_experts(model: Any) -> dict[str, Tensor]:
    """All experts of the stage on the first rank of each expert parallel group, each piece gathered there."""
    from megatron.core import parallel_state as mpu

    group = mpu.get_expert_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    leads = dist.get_rank() == ranks[0]
    found: dict[str, Tensor] = {}
    for name, param, conversion in model.parameters():
        if ".experts." not in name:
            continue
        names: list[Any] = [None] * len(ranks)
        dist.all_gather_object(names, conversion.names, group=group)
        parts = [torch.empty_like(param) for _ in ranks] if leads else None
        dist.gather(param.detach(), parts, dst=ranks[0], group=group)
        for own, part in zip(names, parts or (), strict=parts is not None):
            found |= dict(zip(own, conversion.split(part), strict=True))
    return found


def export_both_ways(rank: int, source: Path, layout: dict[str, Any]) -> Any:
    from vime_hpc.trainer.export import WeightExporter

    model = trained_model(source, layout)
    change(model, 1)
    exporter = WeightExporter(model)
    with counted() as now:
        sent = {name: tensor.clone() for name, tensor in exporter.tensors()}
    with counted() as before:
        gathered = {name: tensor.clone() for name, tensor in gathered_experts(model).items()}
    index = exporter.sender_index()
    specs = exporter.tensor_specs()
    return index, specs, hashes(sent), hashes(gathered), sum(now), (index is not None) * sum(before)


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in tensors.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_sent_once_as_it_would_be_gathered_and_no_expert_moves_between_ranks(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source", kind="qwen3_moe")
    ranks = run_ranks(export_both_ways, layout["num_ranks"], source, layout, megatron=True)
    specs = ranks[0][1]
    sent = [(index, name) for index, _, tensors, *_ in ranks for name in tensors]
    assert sorted(sent) == sorted((source, name) for name, _, _, source in specs)

    holds = {name: digest for _, _, tensors, *_ in ranks for name, digest in tensors.items()}
    gathered = {name: digest for _, _, _, tensors, *_ in ranks for name, digest in tensors.items()}
    assert gathered == {name: holds[name] for name in holds if ".experts." in name}
    assert len(gathered) == 4 * 8 * 3  # layers, experts, gate up down

    ep, experts = layout["ep"], 4 * 8 * 3 * (64 * 32 * 4)  # bytes, of 64 * 32 float32 a tensor
    now, before = sum(r[4] for r in ranks), sum(r[5] for r in ranks)
    assert before == experts * (ep - 1) // ep
    if "tp" not in layout:
        assert now == 0
    else:  # the halves of what is no expert, as ever: q k v o, embedding and head
        halves = 4 * ((128 + 64 + 64) * 64 + 64 * 128) + 2 * 250 * 64
        assert now == halves // 2 * 4


@dataclass(frozen=True)
class Engine:
    """The one engine rank; it takes every version and says what it holds, and in which order it came."""

    num_sources: int
    versions: tuple[int, ...]
    directory: Path | None
    """Where versions lie; None = over the bridge."""

    def __call__(self, say: Any, port: int) -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        channel = PublishChannel(store, 1, TIMEOUT_S)
        where = (store, 1, self.num_sources, self.num_sources + 1)
        plan = channel.get_plan()
        if self.directory is None:
            group = bridge_group(*where, "gloo", TIMEOUT_S, self.num_sources)
        else:
            files = directory_group(*where, TIMEOUT_S, self.num_sources)
        for version in self.versions:
            channel.wait_newest(version)
            if self.directory is None:
                end: Any = BridgeReceiver(group, plan)
            else:
                end = DirectoryReceiver(files, plan, self.directory)
                end.prepare(version)
            channel.want(version)
            held = {name: tensor.clone() for name, tensor in end.receive(version)}
            root = root_digest(end.digests())
            assert channel.wait_sent(version).root == root
            channel.confirm(version, root)
            say((list(held), hashes(held)))


def publish_versions(
    rank: int, source: Path, layout: dict[str, Any], port: int, versions: tuple[int, ...], root: Any
) -> Any:
    from vime_hpc.trainer.export import WeightExporter

    model = trained_model(source, layout)
    exporter = WeightExporter(model)
    plan = build_plan((TensorSpec(*spec) for spec in exporter.tensor_specs()), bucket_mib=1)
    index = exporter.sender_index()
    end = None if index is None else connected(plan, index, port, root)
    sent = []
    for version in versions:
        change(model, version)
        sent.append(hashes(dict(exporter.tensors())))
        if end is not None:
            publish(*end, version, exporter.tensors(), num_sources=plan.num_sources)
        else:
            for _ in exporter.tensors():
                pass
    return sent, plan.names, [len(plan.of_source(s)) for s in range(plan.num_sources)]


def connected(plan: WeightPlan, index: int, port: int, root: Path | None) -> Any:
    """(channel, sender) of a source."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    channel = PublishChannel(store, 1, TIMEOUT_S)
    if index == 0:
        channel.put_plan(plan)
    where = (store, 1, index, plan.num_sources + 1)
    if root is None:
        group = bridge_group(*where, "gloo", TIMEOUT_S, plan.num_sources)
        return channel, BridgeSender(group, plan, index)
    files = directory_group(*where, TIMEOUT_S, plan.num_sources)
    versions = VersionStore(root, "test", max_deltas=5, fsync=False)
    return channel, DirectorySender(files, channel, plan, index, versions)


@pytest.mark.parametrize("transport", ["bridge", "delta"])
@pytest.mark.parametrize(
    "layout",
    [
        {"num_ranks": 4, "pp": 2, "ep": 2},
        {"num_ranks": 4, "tp": 2, "ep": 4, "sequence_parallel": True},
    ],
)
def test_senders_that_help_each_other_to_whole_tensors_publish_versions_bit_for_bit(
    layout: dict[str, Any], transport: str, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source", kind="qwen3_moe", hidden_size=2048)
    root, versions = (tmp_path / "weights" if transport == "delta" else None), (1, 2)
    num_sources = layout.get("pp", 1) * layout["ep"]
    with Members() as members:
        members.start("store", host_store)
        port = members.hear("store", TIMEOUT_S)
        members.start("engine", Engine(num_sources, versions, root), port)
        ranks = run_ranks(publish_versions, 4, source, layout, port, versions, root, megatron=True)
        received = [said for _, said in members.hear_all({"engine"}, TIMEOUT_S)]
    _, order, num_buckets = ranks[0]
    assert min(num_buckets) > SLOTS  # so that senders have to wait for the engine
    for version, (names, held) in enumerate(received):
        sent = {name: digest for rank in ranks for name, digest in rank[0][version].items()}
        assert held == sent
        assert names == list(order)
    assert received[0][1].keys() == received[1][1].keys()
    assert all(received[0][1][name] != received[1][1][name] for name in received[0][1])
