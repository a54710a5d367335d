"""`vime-hpc bench weights`: bridge, version directories and deltas, each as a ratio against a copy made in the same run."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vime_hpc.cluster.groups import bridge_group
from vime_hpc.weights.bridge import BridgeReceiver, BridgeSender
from vime_hpc.weights.delta import Bytes, apply, encode
from vime_hpc.weights.digest import tensor_digest
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.version_directory import VersionReader
from vime_hpc.weights.version_writer import Files, Shard, commit, write_full

TIMEOUT_S = 120.0
ROW = 1024
TENSOR_MIB = 8
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
ADAM_STEPS = 20
"""Updates before the one that is measured: Adam's first are larger than those of a run under way."""
Figures = dict[str, Any]


def bench_weights(work: Path, *, megabytes: int = 256, repeats: int = 5) -> Figures:
    """All figures that need no engine.

    Args:
        work: directory on the file system to measure.
        megabytes: MiB of bfloat16 weights. repeats: of each measurement; medians are reported.
    """
    torch.set_num_threads(1)
    count = max(1, megabytes // TENSOR_MIB)
    tensors = {
        f"layers.{i}.weight": torch.randn(TENSOR_MIB * 2**19 // ROW, ROW).bfloat16()
        for i in range(count)
    }
    nbytes = sum(t.nbytes for t in tensors.values())
    figures: Figures = {"nbytes": nbytes, "tensors": count, "repeats": repeats}
    figures |= _bridge(tensors, repeats)
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        figures |= _disk(Path(name), tensors, repeats)
    for rate in LEARNING_RATES:
        found = _delta(rate, min(nbytes, 64 << 20), repeats)
        figures |= {f"delta_lr{rate:g}_{key}": value for key, value in found.items()}
    return figures


def plan_of(tensors: dict[str, torch.Tensor]) -> WeightPlan:
    specs = [
        TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for n, t in tensors.items()
    ]
    return build_plan(specs, bucket_mib=64)


def _median(action: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _copy_seconds(nbytes: int, repeats: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return _median(lambda: np.copyto(target, source), repeats)


def _bridge(tensors: dict[str, torch.Tensor], repeats: int) -> Figures:
    """One sender and one receiver over gloo on this machine; the receiver drops what it gets."""
    plan = plan_of(tensors)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        path = str(Path(name) / "store")

        def send() -> None:
            torch.set_num_threads(1)
            group = bridge_group(dist.FileStore(path), 1, 0, 2, "gloo", TIMEOUT_S)
            sender = BridgeSender(group, plan, 0)
            for _ in range(repeats):
                sender.send(iter(tensors.items()))
            os._exit(0)

        process = context.Process(target=send, daemon=True)
        process.start()
        group = bridge_group(dist.FileStore(path), 1, 1, 2, "gloo", TIMEOUT_S)
        total, transfer = [], []
        for _ in range(repeats):
            receiver, start = BridgeReceiver(group, plan), time.perf_counter()
            receiver.drain()
            receiver.digests()
            total.append(time.perf_counter() - start)
            transfer.append(receiver.timings.transfer_s)
        process.join(TIMEOUT_S)
    copy_s = _copy_seconds(plan.nbytes, repeats)
    return {
        "memcpy_gb_per_s": plan.nbytes / copy_s / 1e9,
        "bridge_gb_per_s": plan.nbytes / statistics.median(total) / 1e9,
        "bridge_transfer_over_memcpy": statistics.median(transfer) / copy_s,
        "bridge_with_digests_over_memcpy": statistics.median(total) / copy_s,
    }


def _disk(root: Path, tensors: dict[str, torch.Tensor], repeats: int) -> Figures:
    placed = [t for bucket in plan_of(tensors).buckets for t in bucket.tensors]
    data = [tensors[t.name].flatten().view(torch.uint8).numpy() for t in placed]
    folder, raw = root / "v000001", root / "raw"
    folder.mkdir()
    files = Files()

    def write() -> None:
        shard: Shard = write_full(files, folder, "bench-s000", placed, data)
        commit(files, folder, 1, [shard])

    def write_raw() -> None:
        with raw.open("wb", buffering=0) as file:
            for piece in data:
                file.write(memoryview(piece))  # type: ignore[arg-type]
            os.fsync(file.fileno())

    write_s, raw_write_s = _alternating(write, write_raw, repeats)
    buffer = np.empty(max(map(len, data)), np.uint8)

    def read() -> None:
        reader = VersionReader(folder)
        for t in placed:
            found = reader.tensor(t.name)
            assert tensor_digest(found, t.dtype, t.shape) == reader.manifest.tensors[t.name].digest
            np.copyto(buffer[: len(found)], found)

    def read_raw() -> None:
        with raw.open("rb", buffering=0) as file:
            for piece in data:
                file.readinto(memoryview(buffer[: len(piece)]))  # type: ignore[arg-type]

    read_s, raw_read_s = _alternating(read, read_raw, repeats)
    return {
        "disk_write_gb_per_s": sum(map(len, data)) / write_s / 1e9,
        "disk_write_over_raw": write_s / raw_write_s,
        "disk_read_and_check_gb_per_s": sum(map(len, data)) / read_s / 1e9,
        "disk_read_and_check_over_raw": read_s / raw_read_s,
    }


def _alternating(
    ours: Callable[[], None], reference: Callable[[], None], repeats: int
) -> tuple[float, float]:
    """Median seconds of both, taken in turns: a disk's speed drifts."""
    pairs = [(_median(ours, 1), _median(reference, 1)) for _ in range(repeats)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def _delta(rate: float, nbytes: int, repeats: int) -> Figures:
    """One Adam update of bfloat16 weights with float32 masters (sigma 0.02, gradients of unit variance)."""
    base, new = _adam_update(rate, nbytes // 2)
    change = encode(base, new, 2)
    encode_s = _median(lambda: encode(base, new, 2), repeats)
    payload = np.frombuffer(change.payload, np.uint8)
    target = base.copy()
    apply_s = _median(lambda: apply(target, change.encoding, change.count, payload, 2), repeats)
    assert (target == new).all()
    copy_s = _copy_seconds(len(base), repeats)
    return {
        "share_of_bytes_changed": float(np.mean(base != new)),
        "size_over_full": len(change.payload) / len(base),
        "encode_over_memcpy": encode_s / copy_s,
        "apply_over_memcpy": apply_s / copy_s,
        "encode_gb_per_s": len(base) / encode_s / 1e9,
        "apply_gb_per_s": len(base) / apply_s / 1e9,
    }


def _adam_update(rate: float, elements: int) -> tuple[Bytes, Bytes]:
    generator = torch.Generator().manual_seed(0)
    master = (torch.randn(elements, generator=generator) * 0.02).requires_grad_()
    optimizer = torch.optim.Adam([master], lr=rate)
    for _ in range(ADAM_STEPS):
        before = master.detach().bfloat16()
        master.grad = torch.randn(elements, generator=generator)
        optimizer.step()
    after = master.detach().bfloat16()
    return before.view(torch.uint8).numpy(), after.view(torch.uint8).numpy()
