"""The update transaction against stub engines over a real gloo bridge: order, proofs, and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.config.model import ModelConfig
from vime_hpc.config.parts import EngineConfig
from vime_hpc.engine.client import EngineControl, EngineHTTPClient
from vime_hpc.engine.server import EngineServer
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import DeadlineError, EngineError, VimeError, WeightsMismatchError
from vime_hpc.testing.stub_engine import KNOBS_ENV, StubEngine, StubKnobs
from vime_hpc.weights.bridge import BridgeSender
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.plan import TensorSpec, build_plan
from vime_hpc.weights.publish import publish
from vime_hpc.weights.version import WeightState

TIMEOUT_S = 4.0


class Bench:
    """Stub engines, and a trainer in a thread that publishes the versions it is given."""

    def __init__(self, knobs: list[StubKnobs], tmp_path: Path) -> None:
        self.token_file = new_token_file(tmp_path / "token")
        self.token = read_token(self.token_file)
        self._stack = ExitStack()
        self.engines = [self._stack.enter_context(StubEngine(self.token_file, k)) for k in knobs]
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trainer_error: BaseException | None = None
        self.trainer_done: list[int] = []
        self._thread: threading.Thread | None = None

    def trainer(self, versions: list[int]) -> None:
        self._thread = threading.Thread(target=self._publish, args=(versions,), daemon=True)
        self._thread.start()

    def _publish(self, versions: list[int]) -> None:
        try:
            store = dist.TCPStore("127.0.0.1", self.store.port, is_master=False)
            shapes = {"a": (700, 512), "b": (3, 5), "c": (4,)}
            plan = build_plan(
                [TensorSpec(n, "float32", s) for n, s in shapes.items()], bucket_mib=1
            )
            channel = PublishChannel(store, 1, TIMEOUT_S)
            channel.put_plan(plan)
            group = bridge_group(store, 1, 0, 1 + len(self.engines), "gloo", TIMEOUT_S)
            sender = BridgeSender(group, plan, 0)
            for v in versions:
                publish(
                    channel, sender, v, ((n, torch.full(s, float(v))) for n, s in shapes.items())
                )
                self.trainer_done.append(v)
        except VimeError as error:
            self.trainer_error = error

    def join_trainer(self) -> None:
        assert self._thread is not None
        self._thread.join(3 * TIMEOUT_S)
        assert not self._thread.is_alive()

    def receiver(self) -> EngineWeightReceiver:
        controls = [
            EngineControl(e.url, self.token, name=f"engine {i}") for i, e in enumerate(self.engines)
        ]
        return EngineWeightReceiver(
            controls, PublishChannel(self.store, 1, TIMEOUT_S), store_host="127.0.0.1", store_port=self.store.port,
            epoch=1, num_sources=1, tp=1, backend="gloo", timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*knobs: StubKnobs) -> Bench:
        made.append(Bench(list(knobs), tmp_path))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


CALLS = ["pause?mode=wait", "collective_rpc:vime_receive", "reset_prefix_cache", "resume"]


def test_the_order_is_pause_receive_reset_resume_on_every_engine(make_bench: Any) -> None:
    bench = make_bench(StubKnobs(), StubKnobs())

    async def main() -> None:
        receiver = bench.receiver()
        await receiver.join()
        for engine in bench.engines:
            engine.app.calls.clear()
        assert receiver.version == -1
        assert (await receiver.receive_newest(3))[0] == 3
        assert [e.app.calls for e in bench.engines] == [CALLS, CALLS]
        assert (await receiver.receive_newest(4))[0] == 4
        assert (await receiver.receive_newest(4)) == (4, {})  # held already: no call at all
        assert [e.app.calls for e in bench.engines] == [CALLS * 2, CALLS * 2]
        assert receiver.version == 4
        assert receiver.states == [WeightState.CLEAN] * 2

    bench.trainer([3, 4])
    asyncio.run(main())
    bench.join_trainer()
    assert bench.trainer_done == [3, 4]
    roots = {e.app.worker.root for e in bench.engines}
    assert len(roots) == 1


def test_sleeping_engines_get_memory_for_weights_then_weights_then_memory_for_the_cache(
    make_bench: Any,
) -> None:
    bench = make_bench(StubKnobs(), StubKnobs())
    woken = list(CALLS)
    woken[1:2] = ["wake_up?tags=weights", CALLS[1], "wake_up?tags=kv_cache"]

    async def main() -> None:
        receiver = bench.receiver()
        await receiver.join()
        await receiver.receive_newest(1)
        for engine in bench.engines:
            engine.app.calls.clear()
        await receiver.sleep(2)
        await receiver.receive_newest(2)
        await receiver.receive_newest(3)  # not asleep this time
        assert [e.app.calls for e in bench.engines] == [["sleep?level=2", *woken, *CALLS]] * 2

    bench.trainer([1, 2, 3])
    asyncio.run(main())
    bench.join_trainer()
    assert bench.trainer_done == [1, 2, 3]


def test_a_version_that_fails_to_arrive_leaves_sleeping_engines_out_of_service(
    make_bench: Any,
) -> None:
    bench = make_bench(StubKnobs(alter_tensor="b"))

    async def main() -> None:
        receiver = bench.receiver()
        await receiver.join()
        await receiver.sleep(1)
        bench.engines[0].app.calls.clear()
        with pytest.raises(WeightsMismatchError):
            await receiver.receive_newest(1)
        assert "resume" not in bench.engines[0].app.calls

    bench.trainer([1])
    asyncio.run(main())


def test_tokens_change_with_the_weights_and_a_request_during_the_update_waits(
    make_bench: Any,
) -> None:
    bench = make_bench(StubKnobs())

    async def main() -> None:
        receiver = bench.receiver()
        await receiver.join()
        async with EngineHTTPClient([bench.engines[0].url], bench.token) as client:

            async def sample() -> list[int]:
                return (await client.sample(prompt_tokens=[1, 2], seed=9, max_tokens=64)).tokens

            old = await sample()
            assert await sample() == old
            control = EngineControl(bench.engines[0].url, bench.token)
            await control.pause("wait")
            during = asyncio.create_task(sample())
            await receiver.receive_newest(1)
            new = await during
            assert new != old
            assert await sample() == new

    bench.trainer([1])
    asyncio.run(main())
    bench.join_trainer()


def failing_update(
    bench: Bench, error: type[BaseException]
) -> tuple[BaseException, EngineWeightReceiver]:
    async def main() -> tuple[BaseException, EngineWeightReceiver]:
        receiver = bench.receiver()
        await receiver.join()
        with pytest.raises(error) as found:
            await receiver.receive_newest(1)
        return found.value, receiver

    bench.trainer([1])
    result = asyncio.run(main())
    bench.join_trainer()
    assert bench.trainer_done == []  # nothing counts as published
    assert bench.trainer_error is not None
    return result


def test_a_tensor_that_arrived_altered_is_named_and_the_engine_stays_out_of_service(
    make_bench: Any,
) -> None:
    bench = make_bench(StubKnobs(), StubKnobs(alter_tensor="b"))
    error, receiver = failing_update(bench, WeightsMismatchError)
    assert "engine 1, rank 0" in str(error)
    assert "1 of 3 tensors differ: b" in str(error)
    assert receiver.states[1] is WeightState.UPDATING
    assert "resume" not in bench.engines[1].app.calls
    assert receiver.version == -1
    assert "differ: b" in str(bench.trainer_error)  # the trainer learns why


def test_a_refused_cache_reset_stops_the_update_before_resume(make_bench: Any) -> None:
    bench = make_bench(StubKnobs(refuse_reset=True))
    error, receiver = failing_update(bench, EngineError)
    assert "refused to reset its prefix cache" in str(error)
    assert "resume" not in bench.engines[0].app.calls
    assert receiver.states == [WeightState.UPDATING]


def test_a_loader_that_fails_is_reported_at_once_and_no_sender_waits_for_it(
    make_bench: Any,
) -> None:
    bench = make_bench(StubKnobs(), StubKnobs(loader_fails=True))
    start = time.monotonic()
    error, receiver = failing_update(bench, EngineError)
    assert time.monotonic() - start < TIMEOUT_S
    assert "engine 1, vime_receive: rank 0: ValueError: the loader does not like a" in str(error)
    assert receiver.states == [WeightState.UPDATING] * 2
    assert "does not like a" in str(bench.trainer_error)


def test_an_engine_process_that_dies_in_the_update_is_named_on_both_sides(
    make_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    monkeypatch.setenv(KNOBS_ENV, json.dumps({"die_on": "vime_receive"}))
    server = EngineServer(
        EngineConfig(device="cpu"), ModelConfig(path="nowhere", dtype="float32"), vllm={}, max_model_len=64, seed=0, index=0,
        host="127.0.0.1", token_file=bench.token_file, log_path=tmp_path / "engine.log",
        module="vime_hpc.testing.stub_engine",
    )  # fmt: skip
    with server:
        server.start()
        server.wait_ready(60)
        bench.engines.append(server)
        error, receiver = failing_update(bench, EngineError)
    assert "engine 0 cannot be reached for POST /collective_rpc" in str(error)
    assert receiver.states == [WeightState.UPDATING]
    assert isinstance(bench.trainer_error, VimeError)


def test_an_engine_that_hangs_in_the_update_is_named_within_the_deadline(make_bench: Any) -> None:
    bench = make_bench(StubKnobs(), StubKnobs(hang_on="vime_receive"))
    start = time.monotonic()
    error, _ = failing_update(bench, VimeError)
    assert time.monotonic() - start < 5 * TIMEOUT_S
    assert "engine 1" in str(error) or "engine rank 1" in str(error)


def test_an_engine_that_never_joins_is_named(make_bench: Any) -> None:
    bench = make_bench(StubKnobs(), StubKnobs(hang_on="vime_join"))

    async def main() -> None:
        with pytest.raises((EngineError, DeadlineError)) as found:
            await bench.receiver().join()
        assert "engine rank 1" in str(found.value)

    bench.trainer([])
    asyncio.run(main())
    bench.join_trainer()
    assert isinstance(bench.trainer_error, DeadlineError)
    assert "bridge rank 2 (engine rank 1)" in str(bench.trainer_error)


def test_a_version_that_goes_back_is_refused_and_the_engines_serve_on(make_bench: Any) -> None:
    bench = make_bench(StubKnobs())

    async def main() -> None:
        receiver = bench.receiver()
        await receiver.join()
        await receiver.receive_newest(5)
        with pytest.raises(WeightsMismatchError, match="never go back"):
            await receiver.receive(4)
        assert receiver.states == [WeightState.CLEAN]
        assert bench.engines[0].app.calls[-1] == "resume"

    bench.trainer([5])
    asyncio.run(main())
    bench.join_trainer()
