"""Version directories: written by many, existing only when whole, built on only once confirmed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vime_hpc.engine.bench_weights import control_calls
from vime_hpc.errors import CheckpointCorruptError, DeadlineError
from vime_hpc.roles.bridge import bridge_backend
from vime_hpc.testing.transport_suite import root_of
from vime_hpc.weights.bench import LEARNING_RATES, _delta
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.disk import (
    DISK,
    DirectoryGroup,
    DirectoryReceiver,
    DirectorySender,
    VersionStore,
)
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.version_directory import VersionReader, read_manifest

NUM_SOURCES, RECEIVER = 2, 2
WAIT_S = 30.0


def plan() -> WeightPlan:
    specs = [TensorSpec(f"s{s}.{n}", "float32", (100,), s) for s in range(2) for n in "ab"]
    return build_plan(specs, bucket_mib=1)


def tensors(source: int, version: int) -> dict[str, torch.Tensor]:
    found = {f"s{source}.{n}": torch.zeros(100) for n in "ab"}
    for tensor in found.values():
        tensor[:version] = 1.0
    return found


class Members:
    """Two senders and a receiver of one store."""

    def __init__(self, root: Path, *, timeout_s: float = WAIT_S, max_deltas: int = 8) -> None:
        self.root, self.store, self.timeout_s = root, dist.HashStore(), timeout_s
        versions = VersionStore(root, "job-0", keep=9, max_deltas=max_deltas, fsync=False)
        self.channel = PublishChannel(self.store, 1, timeout_s)
        self.senders = [
            DirectorySender(self.group(s), self.channel, plan(), s, versions) for s in range(2)
        ]

    def group(self, rank: int) -> DirectoryGroup:
        return DirectoryGroup(
            self.store, 1, rank, NUM_SOURCES + 1, NUM_SOURCES, DISK, self.timeout_s
        )

    def receiver(self) -> DirectoryReceiver:
        return DirectoryReceiver(self.group(RECEIVER), plan(), self.root)

    def send(self, source: int, version: int) -> Any:
        return self.senders[source].send(iter(tensors(source, version).items()), version)

    def publish(self, version: int, *, confirmed: bool = True) -> None:
        self.send(1, version)
        self.send(0, version)
        for sender in self.senders if confirmed else ():
            sender.confirm(version)


def both(version: int) -> dict[str, torch.Tensor]:
    return {**tensors(0, version), **tensors(1, version)}


def test_every_sender_writes_its_own_files_and_all_of_them_are_one_version(tmp_path: Path) -> None:
    members = Members(tmp_path)
    members.publish(1)
    members.publish(2)
    for version, suffix in ((1, "-00000.safetensors"), (2, ".bin")):
        manifest = read_manifest(tmp_path / f"v00000{version}")
        names = sorted(manifest.files)
        assert names == [f"{manifest.kind}-job-0-s00{s}{suffix}" for s in range(2)]
        assert manifest.root == root_of(both(version))
        receiver = members.receiver()
        receiver.prepare(version)
        found = {name: t.clone() for name, t in receiver.receive(version)}
        assert root_of(found) == manifest.root
        assert receiver.digests() == manifest.digests


def test_a_version_of_which_a_sender_is_missing_does_not_exist_and_is_waited_for(
    tmp_path: Path,
) -> None:
    members = Members(tmp_path)
    thread = threading.Thread(target=members.send, args=(0, 1), daemon=True)
    thread.start()
    folder = tmp_path / "v000001"
    end = time.monotonic() + WAIT_S
    while not (folder / "full-job-0-s000-00000.safetensors").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(CheckpointCorruptError, match=r"no version\.json"):
        VersionReader(folder)
    members.send(1, 1)  # late, within the limit
    thread.join(WAIT_S)
    assert members.receiver().prepare(1) == root_of(both(1))


def test_a_sender_that_never_writes_is_named_by_sender_0_and_the_receiver(tmp_path: Path) -> None:
    members = Members(tmp_path, timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"files of version 1: .* trainer sender 1"):
        members.send(0, 1)
    with pytest.raises(DeadlineError, match="trainer sender 1"):
        members.receiver().prepare(1)


def test_what_was_not_confirmed_is_never_built_on(tmp_path: Path) -> None:
    members = Members(tmp_path)
    members.publish(1)
    members.publish(2, confirmed=False)  # an engine refused it
    members.publish(3)
    members.publish(4)
    found = [read_manifest(tmp_path / f"v00000{v}") for v in (1, 2, 3, 4)]
    assert [(m.kind, m.base_version) for m in found] == [
        ("full", None),
        ("delta", 1),
        ("full", None),
        ("delta", 3),
    ]
    VersionReader(tmp_path / "v000004").check_all()


def test_a_shard_that_is_short_is_named_by_the_receiver(tmp_path: Path) -> None:
    members = Members(tmp_path, timeout_s=0.3)
    members.publish(1)
    file = tmp_path / "v000001" / "full-job-0-s001-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointCorruptError, match=rf"{file.name}: \d+ bytes, version.json says"):
        members.receiver().prepare(1)


def test_control_calls_of_a_publish_do_not_depend_on_the_number_of_tensors() -> None:
    for backend, calls in (("gloo", 4), (DISK, 5)):
        assert [control_calls(count, backend) for count in (1, 2000)] == [calls, calls]


def test_the_delta_of_an_adam_update_grows_with_the_learning_rate_and_stays_below_full() -> None:
    shares = [_delta(rate, 1 << 20, 1) for rate in LEARNING_RATES]
    sizes = [found["size_over_full"] for found in shares]
    assert 0 < sizes[0] < sizes[1] < sizes[2] < 0.25
    assert all(found["share_of_bytes_changed"] < found["size_over_full"] for found in shares)


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_files_need_no_process_group_wherever_the_members_compute(transport: str) -> None:
    assert bridge_backend(transport, ["cuda-a"], ["cuda-b", "cpu"], [[], []]) == DISK
