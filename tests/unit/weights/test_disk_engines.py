"""The update transaction over version directories with two stub engines: the order of calls, and what a failure leaves."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import EngineError, VimeError
from vime_hpc.testing.stub_engine import StubEngine, StubKnobs
from vime_hpc.testing.transport_suite import FaultyFiles, plan_of
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.disk import DISK, DirectorySender, VersionStore, directory_group
from vime_hpc.weights.publish import publish
from vime_hpc.weights.version import WeightState

TIMEOUT_S = 10.0
CALLS = [
    "collective_rpc:vime_prepare",
    "pause?mode=wait",
    "collective_rpc:vime_receive",
    "reset_prefix_cache",
    "resume",
]


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((700, 5), float(version)), "b": torch.full((3,), float(version))}


class Bench:
    """Two stub engines and a trainer in a thread that publishes versions 1 and 2 as full and delta."""

    def __init__(self, root: Path, stack: ExitStack, knobs: StubKnobs, flip: bytes | None) -> None:
        token_file = new_token_file(root / "token")
        self.engines = [
            stack.enter_context(StubEngine(token_file, k)) for k in (StubKnobs(), knobs)
        ]
        self.root, self.published = root / "weights", list[int]()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._files = FaultyFiles(None, flip)
        self.error: VimeError | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        token = read_token(token_file)
        self.receiver = EngineWeightReceiver(
            [EngineControl(e.url, token, name=f"engine {i}") for i, e in enumerate(self.engines)],
            PublishChannel(self.store, 1, TIMEOUT_S), store_host="127.0.0.1", store_port=self.store.port, epoch=1,
            num_sources=1, tp=1, backend=DISK, timeout_s=TIMEOUT_S, directory=str(self.root),
        )  # fmt: skip

    def _train(self) -> None:
        store = dist.TCPStore("127.0.0.1", self.store.port, is_master=False)
        channel, plan = PublishChannel(store, 1, TIMEOUT_S), plan_of(tensors(0))
        channel.put_plan(plan)
        try:
            group = directory_group(store, 1, 0, 3, TIMEOUT_S)
            versions = VersionStore(self.root, "job-0", max_deltas=8)
            sender = DirectorySender(group, channel, plan, 0, versions, self._files)
            for version in (1, 2):
                publish(channel, sender, version, iter(tensors(version).items()))
                self.published.append(version)
        except VimeError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(3 * TIMEOUT_S)
        assert not self._thread.is_alive()

    @property
    def calls(self) -> list[list[str]]:
        """Control calls of each engine once it had its plan."""
        return [
            e.app.calls[e.app.calls.index("collective_rpc:vime_plan") + 1 :] for e in self.engines
        ]


def test_a_version_is_checked_before_any_engine_is_paused(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.receiver.join()
        for version in (1, 2):
            metrics = (await bench.receiver.receive_newest(version))[1]
            assert metrics["weights/engine_prepare_s"] > 0

    with ExitStack() as stack:
        bench = Bench(tmp_path, stack, StubKnobs(), None)
        asyncio.run(main(bench))
        bench.join()
        assert bench.calls == [CALLS * 2, CALLS * 2]
    assert (bench.published, bench.error) == ([1, 2], None)
    assert bench.receiver.states == [WeightState.CLEAN] * 2


def test_damage_or_a_failing_loader_leaves_no_mixed_engine_in_service(tmp_path: Path) -> None:
    async def main(bench: Bench) -> str:
        await bench.receiver.join()
        with pytest.raises(EngineError) as found:
            await bench.receiver.receive_newest(1)
        return str(found.value)

    damaged = tensors(1)["a"].numpy().tobytes()
    cases = [
        (StubKnobs(), damaged, "tensor a: found digest", [CALLS[0], "resume"], WeightState.CLEAN),
        (StubKnobs(loader_fails=True), None, "does not like a", CALLS[:3], WeightState.UPDATING),
    ]
    for number, (knobs, flip, words, calls, state) in enumerate(cases):
        with ExitStack() as stack:
            (root := tmp_path / str(number)).mkdir()
            bench = Bench(root, stack, knobs, flip)
            assert words in asyncio.run(main(bench))
            bench.join()
            assert words in str(bench.error)
            assert bench.published == []
            assert bench.calls[1] == calls
            assert bench.receiver.states[1] is state
