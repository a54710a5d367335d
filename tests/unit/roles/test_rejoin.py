"""Engines that end in every phase of a publish, in processes of their own, are started again and get whole weights."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.server import EngineServer
from vime_hpc.engine.tokens import new_token_file, read_token
from vime_hpc.errors import EngineError, VimeError
from vime_hpc.roles.engine import serve_lives
from vime_hpc.roles.lives import EngineLife, EngineLives
from vime_hpc.roles.publishing import BridgePublisher, version_store
from vime_hpc.roles.receiving import LeadingReceiver
from vime_hpc.roles.rejoin import Fleet, LeadingBridge
from vime_hpc.testing.stub_engine import KNOBS_ENV
from vime_hpc.weights.version_directory import read_manifest

pytestmark = pytest.mark.timeout(280)
STUB = "vime_hpc.testing.stub_engine"
DEADLINE_S = 120.0
SHAPES = {"a": (700, 512), "b": (3, 5), "c": (4,)}


class MortalServer(EngineServer):
    """A stub engine each of whose lives ends at a route or method of its own ("" = never)."""

    deaths: list[str]

    def environment(self, private_dir: Path) -> dict[str, str]:
        die_on = self.deaths.pop(0) if self.deaths else ""
        return {**super().environment(private_dir), KNOBS_ENV: json.dumps({"die_on": die_on})}


class Exporter:
    """A pipeline stage's weights, one tensor after the other from stage to stage: every element is the version."""

    value = 0.0

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage, self._num_stages = stage, num_stages

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        specs = [(n, "float32", s, i % self._num_stages) for i, (n, s) in enumerate(SHAPES.items())]
        return sorted(specs, key=lambda spec: spec[3])

    def sender_index(self) -> int:
        return self._stage

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, _, shape, stage in self.tensor_specs():
            if stage == self._stage:
                yield name, torch.full(shape, self.value)


class Agreement:
    """The maximum of a number over the trainer ranks, which are threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)
        self._flags: dict[int, int] = {}

    def of(self, rank: int) -> Callable[[int], int]:
        def agree(flag: int) -> int:
            self._flags[rank] = flag
            self._barrier.wait()
            largest = max(self._flags.values())
            self._barrier.wait()  # nobody writes the next one before all have read this
            return largest

        return agree


WAIT, AGAIN, NEXT = 0, 1, 2


class Job:
    """Trainer ranks in threads, engine hosts in threads with stub engines as processes, and a leading receiver."""

    def __init__(
        self,
        root: Path,
        stack: ExitStack,
        deaths: list[list[str]],
        *,
        max_restarts: int = 4,
        **weights: Any,
    ) -> None:
        self.config = RunConfig.model_validate({
            "run": {"startup_timeout_s": DEADLINE_S, "wait_timeout_s": DEADLINE_S},
            "model": {"path": "nowhere", "dtype": "float32"},
            "data": {"train": "nowhere"},
            "engine": {"num_engines": len(deaths), "device": "cpu", "max_restarts": max_restarts},
            "weights": {"bucket_mib": 1, "timeout_s": 30.0, "fsync": False, **weights},
        })  # fmt: skip
        self.root, self.token_file = root, new_token_file(root / "token")
        self.store = self._rendezvous(hosting=True)
        self.errors: list[BaseException] = []
        self.published: list[int] = []
        self.go_on = threading.Event()
        self.servers = [self._server(i, ends) for i, ends in enumerate(deaths)]
        for server in self.servers:
            stack.callback(server.stop)
        stack.callback(self._end)
        self._threads = [self._thread(self._host, server) for server in self.servers]

    def _rendezvous(self, *, hosting: bool = False) -> Rendezvous:
        token = bytes.fromhex(read_token(self.token_file))
        return Rendezvous.open(
            self.root, token, hosting=hosting, address="127.0.0.1", timeout_s=DEADLINE_S
        )

    def _server(self, index: int, deaths: list[str]) -> MortalServer:
        server = MortalServer(
            self.config.engine, self.config.model, vllm={}, max_model_len=64, seed=0, index=index, host="127.0.0.1",
            token_file=self.token_file, log_path=self.root / f"engine-{index}.log", module=STUB,
        )  # fmt: skip
        server.deaths = deaths
        return server

    def _thread(self, target: Any, *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                target(*args)
            except VimeError as error:
                self.errors.append(error)
                self.store.put("failed", str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _host(self, server: MortalServer) -> None:
        rendezvous = self._rendezvous()
        server.start()
        life = EngineLife(rendezvous, server.index, self.config.engine.max_restarts)
        serve_lives(server, life, rendezvous, self.config)

    def _train(
        self, versions: list[int], rank: int, num_ranks: int, agree: Callable[[int], int]
    ) -> None:
        rendezvous, exporter = self._rendezvous(), Exporter(rank, num_ranks)
        store = version_store(self.config, self.root / "weights", "job.0")
        device = torch.device("cpu")
        publisher = BridgePublisher(exporter, self.config, rendezvous, device, store, agree)

        def seen() -> int:  # by rank 0, as a trainer that waits for its batch
            if rank != 0:
                return WAIT
            return NEXT if self.go_on.is_set() else AGAIN if publisher.is_called() else WAIT

        for version in versions:
            exporter.value = float(version)
            publisher.publish(version)
            if rank == 0:
                self.published.append(version)
            while (what := agree(seen())) != NEXT:
                if what == AGAIN:
                    publisher.publish(version)
                time.sleep(0.02)
            if rank == 0:
                self.go_on.clear()
        self.store.put("trainer_stopped", True)

    def train(self, versions: list[int], num_ranks: int = 1) -> None:
        agreement = Agreement(num_ranks)
        self._threads += [
            self._thread(self._train, versions, rank, num_ranks, agreement.of(rank))
            for rank in range(num_ranks)
        ]

    def _end(self) -> None:
        self.store.put("left/rollout-0", True)
        self.go_on.set()
        for thread in self._threads:
            thread.join(30)

    def receiver(self) -> LeadingReceiver:
        urls = [
            self.store.wait(f"engine/{i}", timeout_s=DEADLINE_S, who="engine", phase="start")["url"]
            for i in range(len(self.servers))
        ]
        token = read_token(self.token_file)
        self.controls = [EngineControl(u, token, name=f"engine {i}") for i, u in enumerate(urls)]
        lives = EngineLives(self.store, len(urls))
        fleet = Fleet(
            self.controls, lives, str(self.root / "weights"), self.root / "weight_plan.json"
        )

        async def no_probe() -> list[Any]:
            return []

        return LeadingReceiver(
            LeadingBridge(fleet, self.config, self.store, asyncio.run), self.store, asyncio.run,
            pause_mode="wait", timeout_s=DEADLINE_S, probe=no_probe, probe_is_due=lambda *_: False,
            root=self.root,
        )  # fmt: skip

    def ask(self, index: int, route: str) -> Any:
        return asyncio.run(self.controls[index]._call("GET", route))

    def roots(self) -> set[str]:
        replies = [asyncio.run(c.collective_rpc("vime_digests")) for c in self.controls]
        return {json.dumps(reply, sort_keys=True) for reply in replies}


def phases(calls: list[str]) -> str:
    """P(ause), R(eceive), C(ache reset), and ! for resume."""
    short = {
        "pause?mode=wait": "P",
        "collective_rpc:vime_receive": "R",
        "reset_prefix_cache": "C",
        "resume": "!",
    }
    return "".join(short.get(call, "") for call in calls)


def test_an_engine_killed_in_every_phase_comes_back_and_no_mixed_engine_is_ever_resumed(
    tmp_path: Path,
) -> None:
    deaths = ["/pause", "vime_receive", "/reset_prefix_cache", "/resume"]
    with ExitStack() as stack:
        job = Job(tmp_path, stack, [deaths, []])
        job.train([1, 2], num_ranks=2)
        receiver = job.receiver()
        assert receiver.receive(1) == 1
        assert (job.published, job.errors) == ([1], [])
        job.go_on.set()
        assert receiver.receive(2) == 2
        # The survivor: resumed only where it holds a whole version of its own, or was not touched yet.
        assert phases(job.ask(1, "/calls")["calls"]) == "P!PRPRCPRC!PRC!PRC!"
        assert phases(job.ask(0, "/calls")["calls"]) == "PRC!PRC!"
        for index in (0, 1):
            assert job.ask(index, "/is_paused") == {"is_paused": False}
            assert job.ask(index, "/vime/held") == {"held": False}
        assert len(job.roots()) == 1
        assert EngineLives(job.store, 2).newest() == [5, 1]
    assert (job.published, job.errors) == ([1, 2], [])


def test_over_version_directories_a_version_is_written_whole_again_and_deltas_follow_on_it(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        job = Job(tmp_path, stack, [["", ""]], transport="delta")
        job.train([1, 2, 3])
        receiver = job.receiver()
        receiver.receive(1)
        job.go_on.set()
        receiver.receive(2)
        assert read_manifest(tmp_path / "weights" / "v000002").kind == "delta"
        job.store.put("engine/0/end", {"life": 1, "cause": "the test says so"})
        end = time.monotonic() + DEADLINE_S
        while EngineLives(job.store, 1).up([2]) is None:
            assert time.monotonic() < end
            receiver.mend()
            time.sleep(0.02)
        assert job.ask(0, "/vime/held") == {"held": True}
        while job.ask(0, "/vime/held")["held"]:  # generation goes on meanwhile
            assert time.monotonic() < end
            receiver.mend()
            time.sleep(0.02)
        assert read_manifest(tmp_path / "weights" / "v000002").kind == "full"
        job.go_on.set()
        assert receiver.receive(3) == 3
        assert read_manifest(tmp_path / "weights" / "v000003").kind == "delta"
    assert (job.published, job.errors) == ([1, 2, 3], [])


def test_an_engine_that_uses_up_its_restarts_ends_the_job_with_the_cause(tmp_path: Path) -> None:
    with ExitStack() as stack:
        job = Job(tmp_path, stack, [["/pause"] * 9], max_restarts=1)
        job.train([1])
        receiver = job.receiver()
        with pytest.raises(VimeError):
            receiver.receive(1)
    causes = [str(error) for error in job.errors if isinstance(error, EngineError)]
    assert any("engine 0 ended with code 9 while serving" in c for c in causes), causes
    assert any("1 restarts, engine.max_restarts, are used up" in c for c in causes), causes
