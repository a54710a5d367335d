"""The bridge with real gloo groups: trainer senders and engine ranks as processes, and the errors when one is missing."""

from __future__ import annotations

import hashlib
import operator
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.errors import (
    DeadlineError,
    PublishGivenUpError,
    VimeError,
    WeightsMismatchError,
)
from vime_hpc.testing.processes import Members
from vime_hpc.testing.transport_suite import JOIN_S, host_store
from vime_hpc.weights.bridge import BridgeReceiver, BridgeSender, dtype_name
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import root_digest
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.publish import publish
from vime_hpc.weights.staging import SLOTS, Staging

Tensors = dict[str, torch.Tensor]


def tensors_of(source: int, version: int = 5) -> Tensors:
    g = torch.Generator().manual_seed(1000 * (version - 5) + source)
    return {
        **{f"s{source}.big{i}": torch.randn(1024, 1024, generator=g) for i in range(4)},
        f"s{source}.half": torch.randn(7, 3, generator=g).bfloat16(),
        f"s{source}.ints": torch.arange(5, dtype=torch.int64) + source,
    }


def plan_of(num_sources: int) -> WeightPlan:
    return build_plan(
        [
            TensorSpec(n, dtype_name(t.dtype), tuple(t.shape), s)
            for s in range(num_sources)
            for n, t in tensors_of(s).items()
        ],
        bucket_mib=1,
    )


def sha256(tensor: torch.Tensor) -> str:
    """Of its bytes, by other means than the bridge's own digests."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Ranks:
    """Members of one bridge, each a process, and what each of them returned or raised."""

    def __init__(self) -> None:
        self._members = Members()
        self._members.start("store", host_store)
        self._port: int = self._members.hear("store", JOIN_S)

    def start(self, name: str, target: Callable[[Any], Any]) -> None:
        self._members.start(name, run_member, self._port, target)

    def results(self, *names: str, lost: str = "") -> dict[str, Any]:
        """What these members returned or raised; `lost` dies and has no result."""
        may_die = frozenset({lost} - {""})
        return dict(self._members.hear_all(set(names), 120.0, may_die=may_die))

    def stop(self) -> None:
        self._members.close()


def run_member(say: Any, port: int, target: Callable[[Any], Any]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        say(target(store))
    except (VimeError, RuntimeError) as error:
        say(error)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.stop()


@dataclass(frozen=True)
class Sender:
    source: int
    world: int
    num_sources: int
    timeout_s: float = 20.0
    change: Any = None
    dies_at: str = ""
    """SIGKILL before this tensor."""
    on_device: bool | None = None
    versions: tuple[int, ...] = (5,)

    def __call__(self, store: Any) -> Any:
        plan = plan_of(self.num_sources)
        channel = PublishChannel(store, 1, self.timeout_s)
        if self.source == 0:
            channel.put_plan(plan)
        where = (self.source, self.world, "gloo", self.timeout_s, self.num_sources)
        group = bridge_group(store, 1, *where)
        end = BridgeSender(group, plan, self.source, on_device=self.on_device)
        for version in self.versions:
            items = self.items(version)
            metrics = publish(channel, end, version, items, num_sources=self.num_sources)
        return metrics

    def items(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = tensors_of(self.source, version)
        if self.change is not None:
            self.change(tensors)
        for name, tensor in tensors.items():
            if name == self.dies_at:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor


@dataclass(frozen=True)
class Receiver:
    """An engine rank which, when it is the first one, also speaks for all in the channel."""

    rank: int
    world: int
    num_sources: int
    timeout_s: float = 20.0
    dies_at: int = -1
    """SIGKILL after this many tensors."""
    on_device: bool | None = None

    def __call__(self, store: Any) -> Any:
        channel = PublishChannel(store, 1, self.timeout_s)
        where = (self.rank, self.world, "gloo", self.timeout_s, self.num_sources)
        group = bridge_group(store, 1, *where)
        end = BridgeReceiver(group, channel.get_plan(), on_device=self.on_device)
        speaks = self.rank == self.num_sources
        if speaks:
            assert channel.wait_newest(1) == 5
            channel.want(5)
        found = {}
        for i, (name, tensor) in enumerate(end.receive(5)):
            if i == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            found[name] = tensor.clone()
        root = root_digest(end.digests())
        if speaks:
            assert channel.wait_sent(5).root == root
            channel.confirm(5, root)
        return {n: sha256(t) for n, t in found.items()}, root


@dataclass(frozen=True)
class StagedReceiver:
    """The one engine rank of versions that pass through the same few buffers, as into an engine's plain parameters."""

    num_sources: int
    versions: tuple[int, ...]
    on_device: bool

    def __call__(self, store: Any) -> Any:
        channel = PublishChannel(store, 1, 20.0)
        where = (self.num_sources, self.num_sources + 1, "gloo", 20.0, self.num_sources)
        group, plan = bridge_group(store, 1, *where), channel.get_plan()
        memory = Staging(plan.buckets_of(0), torch.device("cpu"))
        return [self.one(version, channel, group, plan, memory) for version in self.versions]

    def one(self, version: int, channel: Any, group: Any, plan: Any, memory: Staging) -> Any:
        end = BridgeReceiver(group, plan, on_device=self.on_device, memory=memory)
        channel.wait_newest(version)
        channel.want(version)
        held = {}
        for bucket, tensors in end.receive_buckets(version):
            # what comes next must not overwrite this one while it is read
            time.sleep(0.02)
            held |= {t.name: sha256(x) for t, x in zip(bucket.tensors, tensors, strict=True)}
        root = root_digest(end.digests())
        assert channel.wait_sent(version).root == root
        channel.confirm(version, root)
        return held


@pytest.mark.parametrize("on_device", [False, True])
def test_versions_through_the_same_few_buffers_arrive_bit_for_bit(
    ranks: Ranks, on_device: bool
) -> None:
    num_sources, versions = 2, (5, 6, 7)
    assert len(plan_of(num_sources).buckets) > 3 * SLOTS
    for s in range(num_sources):
        sender = Sender(s, num_sources + 1, num_sources, on_device=on_device, versions=versions)
        ranks.start(f"s{s}", sender)
    ranks.start("r", StagedReceiver(num_sources, versions, on_device))
    held = ranks.results("s0", "s1", "r")["r"]
    assert held == [
        {n: sha256(t) for s in range(num_sources) for n, t in tensors_of(s, v).items()}
        for v in versions
    ]


@pytest.mark.parametrize(
    ("num_sources", "num_engine_ranks", "on_device"),
    [(1, 1, None), (2, 2, None), (2, 1, True)],  # on_device: as between GPUs
)
def test_every_engine_rank_gets_every_tensor_of_every_sender_bit_for_bit(
    ranks: Ranks, num_sources: int, num_engine_ranks: int, on_device: bool | None
) -> None:
    world = num_sources + num_engine_ranks
    for s in range(num_sources):
        ranks.start(f"s{s}", Sender(s, world, num_sources, on_device=on_device))
    for r in range(num_sources, world):
        ranks.start(f"r{r}", Receiver(r, world, num_sources, on_device=on_device))
    results = ranks.results(
        *(f"s{s}" for s in range(num_sources)), *(f"r{r}" for r in range(num_sources, world))
    )
    expected = {n: sha256(t) for s in range(num_sources) for n, t in tensors_of(s).items()}
    roots = set()
    for r in range(num_sources, world):
        held, root = results[f"r{r}"]
        assert held == expected
        assert list(held) == list(plan_of(num_sources).names)
        roots.add(root)
    assert len(roots) == 1
    assert results["s0"]["weights/nbytes"] == sum(b.nbytes for b in plan_of(1).buckets)


def test_a_receiver_that_never_joins_is_named_on_every_member(ranks: Ranks) -> None:
    ranks.start("s0", Sender(0, 3, 1, timeout_s=2.0))
    ranks.start("r1", Receiver(1, 3, 1, timeout_s=2.0))
    for error in ranks.results("s0", "r1").values():
        assert isinstance(error, DeadlineError)
        assert "joining the bridge" in str(error)
        assert "bridge rank 2 (engine rank 1)" in str(error)


def test_a_receiver_killed_between_buckets_ends_the_publish_with_its_rank_and_the_bucket(
    ranks: Ranks,
) -> None:
    ranks.start("s0", Sender(0, 3, 1, timeout_s=8.0))
    ranks.start("r1", Receiver(1, 3, 1, timeout_s=8.0))
    ranks.start("r2", Receiver(2, 3, 1, timeout_s=8.0, dies_at=0))
    results = ranks.results("s0", "r1", lost="r2")  # the other receiver is not left waiting
    # what was on its way may still have come to the survivor; then it hears of it in the channel
    assert isinstance(results["r1"], DeadlineError | PublishGivenUpError)
    assert isinstance(results["s0"], DeadlineError)
    text = str(results["s0"])
    assert "version 5, bucket" in text
    assert "engine rank 1 (rank 2): version 5, bucket 1 of 5" in text


def test_a_sender_killed_between_buckets_does_not_leave_receivers_waiting(ranks: Ranks) -> None:
    ranks.start("s0", Sender(0, 2, 1, timeout_s=8.0, dies_at="s0.half"))
    ranks.start("r1", Receiver(1, 2, 1, timeout_s=8.0))
    error = ranks.results("r1", lost="s0")["r1"]
    assert isinstance(error, DeadlineError)
    assert "bucket 5 of 5 of sender 0" in str(error)


def drop(name: str) -> Callable[[Tensors], Any]:
    return operator.methodcaller("pop", name)


def add_surplus(tensors: Tensors) -> None:
    tensors["s0.extra"] = torch.zeros(1)


def transpose(tensors: Tensors) -> None:
    tensors["s0.half"] = tensors["s0.half"].t()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("s0.half"), "next tensor is s0.half"),
        (drop("s0.ints"), "s0.ints is in the plan, but the trainer did not produce it"),
        (add_surplus, "s0.extra is not in the plan"),
        (transpose, r"s0.half bfloat16 \[7, 3\], the trainer produced s0.half bfloat16 \[3, 7\]"),
    ],
)
def test_a_sender_refuses_tensors_that_are_not_the_plans_and_the_receiver_stops_at_once(
    ranks: Ranks, change: Any, message: str
) -> None:
    # Deadlines longer than the wait for the results: the receiver stops because it notices that the sender left.
    ranks.start("s0", Sender(0, 2, 1, timeout_s=200.0, change=change))
    ranks.start("r1", Receiver(1, 2, 1, timeout_s=200.0))
    results = ranks.results("s0", "r1")
    assert isinstance(results["s0"], WeightsMismatchError)
    with pytest.raises(WeightsMismatchError, match=message):
        raise results["s0"]
    assert isinstance(results["r1"], DeadlineError | WeightsMismatchError)
    assert "trainer sender 0" in str(results["r1"])
