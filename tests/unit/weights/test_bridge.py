"""The bridge with real gloo groups: forked trainer senders and engine ranks, and the errors when one is missing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.errors import DeadlineError, VimeError, WeightsMismatchError
from vime_hpc.weights.bridge import BridgeReceiver, BridgeSender, dtype_name
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import root_digest
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.publish import publish

FORK = multiprocessing.get_context("fork")
Tensors = dict[str, torch.Tensor]


def tensors_of(source: int) -> Tensors:
    g = torch.Generator().manual_seed(source)
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


class Ranks:
    """Forked members of one bridge and what each of them returned or raised."""

    def __init__(self) -> None:
        self._results: Any = FORK.SimpleQueue()
        # In a process of its own: a fork beside the store's C++ thread can inherit a held lock.
        host = FORK.Process(target=self._host_store, daemon=True)
        host.start()
        self.processes: dict[str, Any] = {"store": host}
        self._port: int = self._results.get()

    def _host_store(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._results.put(store.port)
        signal.pause()

    def start(self, name: str, target: Callable[[Any], Any]) -> None:
        process = FORK.Process(target=self._run, args=(name, target), daemon=True)
        process.start()
        self.processes[name] = process

    def _run(self, name: str, target: Callable[[Any], Any]) -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        try:
            self._results.put((name, target(store)))
        except (VimeError, RuntimeError) as error:
            self._results.put((name, error))
        os._exit(0)

    def results(self, count: int) -> dict[str, Any]:
        return dict(self._results.get() for _ in range(count))

    def stop(self) -> None:
        for p in self.processes.values():
            p.kill()
            p.join()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.stop()


def sender(
    source: int, world: int, num_sources: int, timeout_s: float = 20.0, change: Any = None
) -> Any:
    def run(store: Any) -> Any:
        plan = plan_of(num_sources)
        channel = PublishChannel(store, 1, timeout_s)
        if source == 0:
            channel.put_plan(plan)
        group = bridge_group(store, 1, source, world, "gloo", timeout_s, num_sources)
        tensors = tensors_of(source)
        if change is not None:
            change(tensors)
        end = BridgeSender(group, plan, source)
        return publish(channel, end, 5, iter(tensors.items()), num_sources=num_sources)

    return run


def receiver(
    rank: int, world: int, num_sources: int, timeout_s: float = 20.0, during: Any = None
) -> Any:
    """An engine rank which, when it is the first one, also speaks for all in the channel."""

    def run(store: Any) -> Any:
        channel = PublishChannel(store, 1, timeout_s)
        group = bridge_group(store, 1, rank, world, "gloo", timeout_s, num_sources)
        plan = channel.get_plan()
        end = BridgeReceiver(group, plan)
        if rank == num_sources:
            assert channel.wait_newest(1) == 5
            channel.want(5)
        found = {}
        for i, (name, tensor) in enumerate(end.receive(5)):
            if during is not None:
                during(i)
            found[name] = tensor.clone()
        root = root_digest(end.digests())
        if rank == num_sources:
            assert channel.wait_sent(5).root == root
            channel.confirm(5, root)
        return {n: t.float().sum().item() for n, t in found.items()}, root

    return run


@pytest.mark.parametrize(("num_sources", "num_engine_ranks"), [(1, 1), (2, 2)])
def test_every_engine_rank_gets_every_tensor_of_every_sender_bit_for_bit(
    ranks: Ranks, num_sources: int, num_engine_ranks: int
) -> None:
    world = num_sources + num_engine_ranks
    for s in range(num_sources):
        ranks.start(f"s{s}", sender(s, world, num_sources))
    for r in range(num_sources, world):
        ranks.start(f"r{r}", receiver(r, world, num_sources))
    results = ranks.results(world)
    expected = {
        n: t.float().sum().item() for s in range(num_sources) for n, t in tensors_of(s).items()
    }
    roots = set()
    for r in range(num_sources, world):
        sums, root = results[f"r{r}"]
        assert sums == expected
        assert list(sums) == list(plan_of(num_sources).names)
        roots.add(root)
    assert len(roots) == 1
    assert results["s0"]["weights/nbytes"] == sum(b.nbytes for b in plan_of(1).buckets)


def test_a_receiver_that_never_joins_is_named_on_every_member(ranks: Ranks) -> None:
    start = time.monotonic()
    ranks.start("s0", sender(0, 3, 1, timeout_s=2.0))
    ranks.start("r1", receiver(1, 3, 1, timeout_s=2.0))
    results = ranks.results(2)
    assert time.monotonic() - start < 6
    for error in results.values():
        assert isinstance(error, DeadlineError)
        assert "joining the bridge" in str(error)
        assert "bridge rank 2 (engine rank 1)" in str(error)


def test_a_receiver_killed_between_buckets_ends_the_publish_with_its_rank_and_the_bucket(
    ranks: Ranks,
) -> None:
    def die(i: int) -> None:
        if i == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    ranks.start("s0", sender(0, 3, 1, timeout_s=4.0))
    ranks.start("r1", receiver(1, 3, 1, timeout_s=4.0))
    ranks.start("r2", receiver(2, 3, 1, timeout_s=4.0, during=die))
    results = ranks.results(2)  # the other receiver is not left waiting
    assert time.monotonic() - start < 12
    assert isinstance(results["r1"], DeadlineError)
    assert isinstance(results["s0"], DeadlineError)
    text = str(results["s0"])
    assert "version 5, bucket" in text
    assert "engine rank 1 (rank 2): version 5, bucket 1 of 5" in text


def test_a_sender_killed_between_buckets_does_not_leave_receivers_waiting(ranks: Ranks) -> None:
    def run(store: Any) -> Any:
        plan = plan_of(1)
        channel = PublishChannel(store, 1, 4.0)
        channel.put_plan(plan)
        group = bridge_group(store, 1, 0, 2, "gloo", 4.0, 1)

        def items() -> Iterator[tuple[str, torch.Tensor]]:
            for n, t in tensors_of(0).items():
                if n == "s0.half":
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield n, t

        return publish(channel, BridgeSender(group, plan, 0), 5, items())

    ranks.start("s0", run)
    ranks.start("r1", receiver(1, 2, 1, timeout_s=4.0))
    error = ranks.results(1)["r1"]
    assert isinstance(error, DeadlineError)
    assert "bucket 5 of 5 of sender 0" in str(error)


def drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


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
    start = time.monotonic()
    ranks.start("s0", sender(0, 2, 1, change=change))
    ranks.start("r1", receiver(1, 2, 1))
    results = ranks.results(2)
    assert time.monotonic() - start < 15  # below the 20 s deadline: the sender's leaving is noticed
    assert isinstance(results["s0"], WeightsMismatchError)
    with pytest.raises(WeightsMismatchError, match=message):
        raise results["s0"]
    assert isinstance(results["r1"], DeadlineError | WeightsMismatchError)
    assert "trainer sender 0" in str(results["r1"])
