"""One scenario for every transport of weights: a trainer and two receiving engine ranks, each a process, over real groups.

What each member held at the end, or the VimeError it ended with, comes back as an `Outcome`. The engine ranks have the real
receivers and no vLLM: the transaction around them, with a real engine, is tested with the engine.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from vime_hpc.cluster import groups
from vime_hpc.cluster.groups import bridge_group, wait_for_keys
from vime_hpc.errors import VimeError
from vime_hpc.testing.processes import CLEAN, Members
from vime_hpc.weights import channel as channel_module, disk as disk_module
from vime_hpc.weights.bridge import BridgeReceiver, BridgeSender, cut_tensor, dtype_name
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import refuse_unless_equal, root_digest, tensor_digest
from vime_hpc.weights.disk import (
    DIRECTORIES,
    DirectoryReceiver,
    DirectorySender,
    VersionStore,
    directory_group,
)
from vime_hpc.weights.engine_layout import EngineLayout, Slice
from vime_hpc.weights.ipc import (
    IPC,
    IpcReceiver,
    IpcSender,
    Opened,
    SharedMemory,
    ipc_group,
)
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.publish import publish
from vime_hpc.weights.version_writer import Files

PARTS = "parts"
"""The bridge, each engine rank receiving what it holds."""
IPC_PARTS = "ipc parts"
"""Shared memory, each engine rank reading what it holds; engine 1 through memory of its own, as on another GPU."""
CUT, SHARED = (PARTS, IPC_PARTS), (IPC, IPC_PARTS)
TRANSPORTS = ("bridge", PARTS, "disk", "delta", IPC, IPC_PARTS)
TRAINER, ENGINES = "trainer", ("engine 0", "engine 1")
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Items = list[tuple[str, torch.Tensor]]
Say = Callable[[Any], None]
JOIN_S = 60.0  # processes may start slowly; the scenario's own deadline counts from there
CONNECTED_S = 30.0  # deadline inside gloo, where it is not what ends a scenario: a dead peer's connection closes
SCENARIO_S = 150.0  # a member that has not ended by then hangs: it is shown where


def tensors_of(version: int) -> Tensors:
    """A model of several buckets and types. One element in a hundred of the large ones differs from version to version."""
    base = torch.Generator().manual_seed(1)
    found = {
        "a.weight": torch.randn(512, 512, generator=base).bfloat16(),
        "b.weight": torch.randn(3, 700, 100, generator=base),
        "c.weight": torch.randn(7, 5, generator=base).half(),
        "d.weight": torch.randn(512, 512, generator=base).bfloat16(),
        "e.steps": torch.arange(5),
    }
    for name in ("a.weight", "b.weight", "d.weight"):
        chosen = torch.rand(found[name].shape, generator=base.manual_seed(version)) < 0.01 * version
        found[name][chosen] += 0.5
    return found


LAYOUT = EngineLayout(
    (0, 1),
    (
        {
            "a.weight": Slice((0, 0), (256, 512)),
            "b.weight": Slice((0, 0, 0), (3, 350, 100)),
            "c.weight": Slice((0, 0), (0, 0)),
            "d.weight": Slice((0, 0), (512, 256)),
        },
        {
            "a.weight": Slice((256, 0), (256, 512)),
            "b.weight": Slice((0, 350, 0), (3, 350, 100)),
            "d.weight": Slice((0, 256), (512, 256)),
        },
    ),
    (0, 0),
)
"""Rows, middle dimension and columns shared out; c only on the second engine rank, e on both (CUT)."""


def should_hold(transport: str, engine: str, version: int) -> str:
    """Root digest of what an engine rank holds of a version when nothing went wrong."""
    tensors = tensors_of(version)
    if transport in CUT:
        slices = LAYOUT.parts[ENGINES.index(engine)]
        tensors = {n: cut_tensor(t, slices[n]) if n in slices else t for n, t in tensors.items()}
    return root_of({n: t for n, t in tensors.items() if t.numel()})


def plan_of(tensors: Tensors) -> WeightPlan:
    """The tensors' plan in buckets of 1 MiB from one sender."""
    specs = [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
    return build_plan(specs, bucket_mib=1)


def root_of(tensors: Tensors) -> str:
    """Root digest over dtype, shape and bytes of these tensors, whatever carried them."""
    return root_digest(
        {
            n: tensor_digest(
                t.contiguous().flatten().view(torch.uint8).numpy(), dtype_name(t.dtype), t.shape
            )
            for n, t in tensors.items()
        }
    )


@dataclass(frozen=True)
class Faults:
    """What goes wrong. Members are "trainer", "engine 0" (speaks for both in the channel), "engine 1"."""

    die: tuple[str, int, str] | None = None
    """(member, version, point): SIGKILL there. Points: before, within, after."""
    hang: tuple[str, int, str] | None = None
    """The same, but it stops answering."""
    change: Callable[[Items], Items] | None = None
    """The tensors the trainer sends as the last version, from those it should."""
    flip: str = ""
    """A byte of this tensor of the last version is flipped on its way (in the file, or in memory where it arrives)."""
    room: int | None = None
    """Bytes after which the disk is full."""
    before: Callable[[int], None] | None = None
    """Called by the trainer before it sends a version."""


@dataclass
class Outcome:
    """Root digest of the bytes each engine rank held after its last complete version, and each member's error."""

    transport: str
    held: dict[str, tuple[int, str]] = field(default_factory=dict)
    errors: dict[str, VimeError] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)

    @property
    def texts(self) -> str:
        return "\n".join(f"{m}: {type(e).__name__}: {e}" for m, e in self.errors.items())


class FaultyFiles(Files):
    """Files of a disk with so much room, which flips a byte of the first write of the given bytes."""

    def __init__(self, room: int | None, flip: bytes | None) -> None:
        super().__init__(fsync=False)
        self._room, self._flip = room, flip

    def write(self, descriptor: int, data: Any, offset: int) -> None:
        if self._room is not None:
            self._room -= len(data)
            if self._room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._flip is not None and bytes(data) == self._flip:
            data = bytes([self._flip[0] ^ 1]) + self._flip[1:]
        super().write(descriptor, data, offset)


class ClockFromFault:
    """Stands in for `time` where members wait: it stands still until the fault, so that no deadline comes before that.

    On a busy machine a member may take longer to its point of death than the deadline the death is to run into.
    """

    sleep, perf_counter = staticmethod(time.sleep), staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._latest = time.monotonic() + JOIN_S  # a fault that never comes must not hang the test
        self._fault = CLEAN.Value("d", 0.0, lock=False)  # without a lock: its holder may be killed

    def start(self) -> None:
        self._fault.value = time.monotonic()

    def monotonic(self) -> float:
        """Seconds since the fault."""
        return max(0.0, time.monotonic() - (self._fault.value or self._latest))


class FileMemory(SharedMemory):
    """Stands in for a GPU's memory: files mapped by both sides."""

    device_type = "cpu"

    def __init__(self, root: Path, *, elsewhere: bool = False) -> None:
        self._root, self._count, self._elsewhere = root, 0, elsewhere

    def zeros(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self._count += 1
        path = str(self._root / f"memory-{os.getpid()}-{self._count}")
        tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        tensor.vime_path = path  # type: ignore[attr-defined]
        return tensor.zero_()

    def export(self, tensor: torch.Tensor) -> dict[str, Any]:
        return {"path": tensor.vime_path, "nbytes": tensor.numel()}  # type: ignore[attr-defined]

    def open(self, exported: dict[str, Any]) -> torch.Tensor:
        return torch.from_file(
            exported["path"], shared=True, size=exported["nbytes"], dtype=torch.uint8
        )

    def is_on(self, flat: torch.Tensor, device: torch.device) -> bool:
        return not self._elsewhere

    def synchronize(self, device: torch.device) -> None:
        return


class Scenario:
    """A trainer that publishes versions one after another to two engine ranks.

    Args:
        transport: one of TRANSPORTS. root: directory of this run's versions (and of the stand-in's memory).
        timeout_s: deadline of every wait; where a member dies or hangs it counts from there.
        max_deltas: of the delta transport. keep: versions kept.
    """

    def __init__(
        self,
        transport: str,
        root: Path,
        *,
        timeout_s: float = 30.0,
        max_deltas: int = 8,
        keep: int = 9,
        tag: str = "local-0",
    ) -> None:
        self._transport, self._root, self._timeout_s = transport, root, timeout_s
        deltas = max_deltas if transport == "delta" else 0
        self._versions = VersionStore(root, tag, keep=keep, max_deltas=deltas, fsync=False)
        self._faults = Faults()

    def run(self, versions: list[int], faults: Faults | None = None) -> Outcome:
        """Publish the versions; returns when every member ended, at the latest by its deadlines."""
        self._faults, self._list = faults or Faults(), versions
        self._clock = ClockFromFault() if self._faults.die or self._faults.hang else None
        self._root.mkdir(parents=True, exist_ok=True)
        members = {TRAINER: self._train, **dict.fromkeys(ENGINES, self._receive)}
        with Members() as processes:
            processes.start("store", host_store)
            self._port = processes.hear("store", JOIN_S)
            for name, body in members.items():
                processes.start(name, self._member, name, body)
            return self._collect(processes)

    def _collect(self, processes: Members) -> Outcome:
        outcome = Outcome(self._transport)
        lost = {f[0] for f in (self._faults.die, self._faults.hang) if f is not None}
        rest = {TRAINER, *ENGINES} - lost
        for name, (kind, value) in processes.hear_all(rest, SCENARIO_S, may_die=frozenset(lost)):
            if kind == "held":
                outcome.held[name] = value
            elif kind == "published":
                outcome.published.append(value)
            else:
                outcome.errors[name] = value
        return outcome

    def _member(self, say: Say, name: str, body: Callable[..., None]) -> None:
        torch.set_num_threads(1)
        if self._clock is not None:
            for module in (groups, channel_module, disk_module):
                patch.object(module, "time", self._clock).start()
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        error: BaseException | None = None
        try:
            body(name, store, PublishChannel(store, 1, self._timeout_s, "token"), say)
        except VimeError as failure:
            error = failure
        except BaseException as failure:  # noqa: BLE001 - shown by the test, which expects a VimeError
            error = AssertionError(f"{type(failure).__name__}: {failure}")
        if error is not None:
            say(("error", error))

    # --- trainer ---------------------------------------------------------------------------------------------------

    def _train(self, name: str, store: Any, channel: PublishChannel, say: Say) -> None:
        plan = plan_of(tensors_of(0))
        if self._transport in CUT:
            plan = plan.with_layout(LAYOUT)
        channel.put_plan(plan)
        sender = self._sender(store, channel, plan)
        for version in self._list:
            self._at(name, version, "before")
            if self._faults.before is not None:
                self._faults.before(version)
            publish(channel, sender, version, self._items(name, version))
            say(("published", version))
            self._at(name, version, "after")

    def _items(self, name: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        items = list(tensors_of(version).items())
        if self._faults.change is not None and version == self._list[-1]:
            items = self._faults.change(items)
        for number, item in enumerate(items):
            if number == 2:
                self._at(name, version, "within")
            yield item

    def _sender(self, store: Any, channel: PublishChannel, plan: WeightPlan) -> Any:
        group = self._join(store, 0)
        if self._transport in DIRECTORIES:
            files = FaultyFiles(self._faults.room, self._flipped_bytes())
            return DirectorySender(group, channel, plan, 0, self._versions, files)
        if self._transport in SHARED:
            return IpcSender(group, plan, 0, CPU, FileMemory(self._root))
        return BridgeSender(group, plan, 0)

    def _join(self, store: Any, rank: int) -> Any:
        world = 1 + len(ENGINES)
        store.set(f"up/{rank}", "1")
        wait_for_keys(
            store, {f"up/{r}": f"member {r}" for r in range(world)}, JOIN_S, phase="starting"
        )
        where = (store, 1, rank, world)
        if self._transport in DIRECTORIES:
            return directory_group(*where, self._timeout_s)
        part_of = LAYOUT.part_of if self._transport in CUT else ()
        if self._transport in SHARED:
            return ipc_group(*where, self._timeout_s, part_of=part_of)
        # gloo's own clock cannot be stopped: only the deadline that a hanging member is to run into is kept, with a margin.
        timeout_s = 2 * self._timeout_s if self._faults.hang else max(self._timeout_s, CONNECTED_S)
        return bridge_group(*where, "gloo", timeout_s, part_of=part_of)

    def _flipped_bytes(self) -> bytes | None:
        """What the writer writes of the tensor that is to be damaged: all of it, or its changes."""
        if not self._faults.flip:
            return None
        import numpy as np

        from vime_hpc.weights.delta import encode

        def data(version: int) -> Any:
            tensor = tensors_of(version)[self._faults.flip]
            return tensor.flatten().view(torch.uint8).numpy()

        last = self._list[-1]
        if self._transport == "delta" and len(self._list) > 1:
            size = tensors_of(last)[self._faults.flip].element_size()
            return encode(data(self._list[-2]), data(last), size).payload
        return bytes(np.ascontiguousarray(data(last)))

    # --- engine ranks ----------------------------------------------------------------------------------------------

    def _receive(self, name: str, store: Any, channel: PublishChannel, say: Say) -> None:
        rank, opened = 1 + ENGINES.index(name), dict[int, Opened]()
        group, plan = self._join(store, rank), channel.get_plan(JOIN_S)
        for version in self._list:
            self._at(name, version, "before")
            receiver = self._receiver(name, group, plan, opened)
            try:
                held = self._one(name, version, receiver, store, channel)
            except BaseException as error:
                channel.fail(f"{name}: {type(error).__name__}: {error}")
                raise
            say(("held", (version, root_of(held))))
            self._at(name, version, "after")

    def _receiver(self, name: str, group: Any, plan: WeightPlan, opened: dict[int, Opened]) -> Any:
        if self._transport in DIRECTORIES:
            return DirectoryReceiver(group, plan, self._root)
        if self._transport in SHARED:
            apart = self._transport == IPC_PARTS and name == ENGINES[1]
            shared = FileMemory(self._root, elsewhere=apart)
            return IpcReceiver(group, plan, device=CPU, opened=opened, shared=shared)
        return BridgeReceiver(group, plan)

    def _one(
        self, name: str, version: int, receiver: Any, store: Any, channel: PublishChannel
    ) -> Tensors:
        leads = name == ENGINES[0]
        if leads:
            channel.wait_newest(version)
        if isinstance(receiver, DirectoryReceiver):
            receiver.prepare(version)
        if leads:
            channel.want(version)
        held: Tensors = {}
        for number, (tensor_name, tensor) in enumerate(receiver.receive(version)):
            if number == 2:
                self._at(name, version, "within")
            held[tensor_name] = tensor.clone()
            if self._flips_here(name, version, tensor_name):
                tensor.view(torch.uint8).flatten()[0] ^= 1
                held[tensor_name] = tensor.clone()
        found = receiver.digests()
        if self._flips_here(name, version, self._faults.flip):
            found = {**found, self._faults.flip: "of what arrived"}
        store.set(f"held/{version}/{name}", json.dumps(found))
        if leads:
            self._confirm(version, store, channel)
        else:
            channel.wait_confirmed(version, channel.wait_sent_root(version))
        return held

    def _flips_here(self, name: str, version: int, tensor: str) -> bool:
        """Without files there is no disk to damage: the byte changes where it arrives, in the second engine rank."""
        flips = bool(self._faults.flip) and tensor == self._faults.flip
        here = name == ENGINES[1] and version == self._list[-1]
        return flips and here and self._transport not in DIRECTORIES

    def _confirm(self, version: int, store: Any, channel: PublishChannel) -> None:
        keys = {f"held/{version}/{m}": m for m in ENGINES}
        phase = f"waiting for the digests of version {version}"
        wait_for_keys(store, keys, self._timeout_s, phase=phase, interrupt=channel.raise_if_failed)
        sent = channel.wait_sent(version)
        for part, (key, member) in enumerate(keys.items()):
            found: Mapping[str, str] = json.loads(store.get(key))
            to_it = sent.of_part(part) if self._transport in CUT else sent
            refuse_unless_equal(to_it.digests, found, where=member, version=version)
        channel.confirm(version, sent.root)

    # --- faults ----------------------------------------------------------------------------------------------------

    def _at(self, member: str, version: int, point: str) -> None:
        here = (member, version, point)
        if self._clock is not None and here in (self._faults.die, self._faults.hang):
            self._clock.start()
        if self._faults.die == here:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._faults.hang == here:
            time.sleep(3600)


def host_store(say: Say) -> None:
    """A member that hosts the store: says its port, and stays until it is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say(store.port)
    signal.pause()
