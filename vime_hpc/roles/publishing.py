"""The trainer's end of the weights: builds the bridge with the engines and publishes over it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from vime_hpc.cluster.groups import bridge_group, device_identity
from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.tree import RunConfig
from vime_hpc.protocols import Metrics
from vime_hpc.roles.bridge import DEVICE, FIRST_EPOCH, WANTED
from vime_hpc.trainer.export import WeightExporter
from vime_hpc.weights.bridge import BridgeSender
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.disk import (
    DELTA,
    DISK,
    DirectorySender,
    VersionStore,
    directory_group,
)
from vime_hpc.weights.ipc import IPC, IpcSender, ipc_group
from vime_hpc.weights.plan import TensorSpec, build_plan
from vime_hpc.weights.publish import Sender, publish

log = logging.getLogger(__name__)


class NoPublisher:
    """protocols.WeightPublisher for runs in which nothing is generated."""

    def publish(self, version: int) -> Metrics:
        del version
        return {}


class BridgePublisher:
    """protocols.WeightPublisher over the bridge. Collective over the trainer ranks; one rank a pipeline stage sends.

    Args:
        exporter: the trainer's weights under their Hugging Face names.
        config: the run's configuration.
        rendezvous: the job's store.
        device: what this trainer rank computes on.
        versions: where versions on disk go (transports disk and delta).
    """

    def __init__(
        self,
        exporter: WeightExporter,
        config: RunConfig,
        rendezvous: Rendezvous,
        device: torch.device,
        versions: VersionStore,
    ) -> None:
        self._exporter = exporter
        self._early = config.weights.transport != "bridge"
        self._shares_memory = bool(config.engine.sleep_level) and device.type == "cuda"
        self._wait_s = config.run.wait_timeout_s
        specs = [TensorSpec(*spec) for spec in exporter.tensor_specs()]
        plan = build_plan(specs, config.weights.bucket_mib)
        self._num_sources = plan.num_sources
        self._channel = PublishChannel(
            rendezvous.store, FIRST_EPOCH, config.weights.timeout_s, rendezvous.secret
        )
        self._sender: Sender | None = None
        source = exporter.sender_index()
        if source is None:
            return
        if source == 0:
            self._channel.put_plan(plan)
        world = plan.num_sources + config.engine.num_engines * config.engine.tp
        rendezvous.put(DEVICE.format(source=source), device_identity(device))
        backend = rendezvous.wait(
            WANTED,
            timeout_s=config.run.startup_timeout_s,
            who="rollout-0",
            phase="building the bridge",
        )
        where, timeout_s = (rendezvous.store, FIRST_EPOCH, source, world), config.weights.timeout_s
        if backend == DISK:
            group = directory_group(*where, timeout_s, plan.num_sources)
            self._sender = DirectorySender(group, self._channel, plan, source, versions)
        elif backend == IPC:
            self._sender = IpcSender(
                ipc_group(*where, timeout_s, plan.num_sources), plan, source, device
            )
        else:
            self._sender = BridgeSender(
                bridge_group(*where, backend, timeout_s, plan.num_sources), plan, source
            )
        log.info(
            "bridge of %d members is up over %s; %d tensors, %.1f MB in %d buckets",
            world,
            backend,
            len(plan.names),
            plan.nbytes / 1e6,
            len(plan.buckets),
        )

    def publish(self, version: int) -> Metrics:
        """Send the present weights as `version`; every rank returns once every engine confirmed them."""
        metrics: Metrics = {}
        free_gib = self._give_memory_back()
        if self._sender is not None:
            metrics = publish(
                self._channel,
                self._sender,
                version,
                self._tensors(),
                num_sources=self._num_sources,
                engines_timeout_s=self._wait_s,
            )
        else:
            # The engines may take longer to be ready than a collective between trainer ranks may take.
            if not self._early:
                self._channel.wait_wanted(version, self._wait_s)
            for _ in self._exporter.tensors():  # the gathers are collective
                pass
            if self._early:
                self._channel.wait_wanted(version, self._wait_s)
        dist.barrier()
        return {**metrics, **free_gib, **self._free_gib("")}

    def _give_memory_back(self) -> Metrics:
        """What torch keeps for later tensors goes back to the device, where the engines are about to wake up."""
        if not self._shares_memory:
            return {}
        torch.cuda.empty_cache()
        return self._free_gib("engines_asleep_")

    def _free_gib(self, when: str) -> Metrics:
        if not self._shares_memory:
            return {}
        return {f"perf/gpu_free_{when}gib": torch.cuda.mem_get_info()[0] / 2**30}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._exporter.tensors()


def version_store(config: RunConfig, root: Path, tag: str) -> VersionStore:
    """Where this run's versions go. `tag`: of the attempt; part of file names."""
    weights = config.weights
    return VersionStore(
        root=root.resolve(),
        tag="".join(c if c.isalnum() else "-" for c in tag),
        keep=weights.keep_versions,
        max_deltas=weights.max_deltas if weights.transport == DELTA else 0,
        fsync=weights.fsync,
    )
