"""The trainer's end of the weights: builds the bridge with the engines and publishes over it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from vime_hpc.cluster.groups import BridgeGroup, bridge_group, device_identity
from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.tree import RunConfig
from vime_hpc.errors import DeadlineError, PublishGivenUpError, VimeError
from vime_hpc.protocols import Metrics
from vime_hpc.roles.bridge import CALL, DEVICE, FIRST_EPOCH, WANTED
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
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan
from vime_hpc.weights.publish import Sender, publish

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """The trainer's weights under their Hugging Face names (trainer.export.WeightExporter)."""

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """(name, dtype, shape, sender) of every tensor, the same on all ranks."""
        ...

    def sender_index(self) -> int | None:
        """Which sender this rank is; None where it sends nothing."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This sender's tensors in the order of their specs; collective over the trainer ranks."""
        ...


class NoPublisher:
    """protocols.WeightPublisher for runs in which nothing is generated."""

    def publish(self, version: int) -> Metrics:
        del version
        return {}

    def is_called(self) -> bool:
        return False

    def publish_again(self) -> None:
        return


LOST = (PublishGivenUpError, DeadlineError)
"""What a trainer rank sees when an engine is gone: the bridge may be built again."""


class BridgePublisher:
    """protocols.WeightPublisher over the bridge. Collective over the trainer ranks; those with a sender_index send.

    When an engine is lost, the version under way is not published. The leading rollout worker calls for the next epoch once
    all engines are up; all trainer ranks follow, and the version is published again, whole, by senders without a past.

    Args:
        exporter: the trainer's weights under their Hugging Face names.
        config: the run's configuration.
        rendezvous: the job's store.
        device: what this trainer rank computes on.
        versions: where versions on disk go (transports disk and delta).
        any_rank: maximum of a 0/1 value over the trainer ranks.
    """

    def __init__(
        self,
        exporter: Exporter,
        config: RunConfig,
        rendezvous: Rendezvous,
        device: torch.device,
        versions: VersionStore,
        any_rank: Callable[[int], int],
    ) -> None:
        self._exporter, self._config, self._rendezvous = exporter, config, rendezvous
        self._device, self._versions, self._any_rank = device, versions, any_rank
        self._early = config.weights.transport != "bridge"
        self._shares_memory = bool(config.engine.sleep_level) and device.type == "cuda"
        specs = [TensorSpec(*spec) for spec in exporter.tensor_specs()]
        self._plan = build_plan(specs, config.weights.bucket_mib)
        self._source = exporter.sender_index()
        self._sender: Sender | None = None
        self._group: BridgeGroup | None = None
        self._of_plan: Metrics = {}
        self.epoch = FIRST_EPOCH
        """Number of the bridge in use."""
        self._lost = self._join()

    def publish(self, version: int) -> Metrics:
        """Send the present weights as `version`; every rank returns once every engine confirmed them.

        Raises:
            VimeError: of this rank's own; or the engines cannot come back.
        """
        free_gib = self._give_memory_back()
        while True:
            lost = self._lost or self._given_up()
            # Each rank may see another end of the bridge, and all have to go the same way before the next gather.
            if not self._any_rank(lost is not None):
                metrics, lost = self._attempt(version)
                if not self._any_rank(lost is not None):
                    metrics["weights/epoch"] = float(self.epoch)
                    return {**metrics, **self._of_plan, **free_gib, **self._free_gib("")}
            self._follow(lost)

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

    def is_called(self) -> bool:
        """Whether the engines wait for the trainer in the next epoch."""
        return self._rendezvous.has(CALL.format(epoch=self.epoch + 1))

    def _given_up(self) -> VimeError | None:
        try:
            self._channel.raise_if_failed()
        except PublishGivenUpError as error:
            return error
        return None

    def _attempt(self, version: int) -> tuple[Metrics, VimeError | None]:
        """Publish in this epoch. A rank that loses the bridge amid its tensors joins the gathers of the others to the end."""
        tensors = _Resumable(self._exporter.tensors())
        wait_s = self._config.run.wait_timeout_s
        try:
            if self._sender is not None:
                return publish(
                    self._channel,
                    self._sender,
                    version,
                    tensors,
                    num_sources=self._plan.num_sources,
                    engines_timeout_s=wait_s,
                ), None
            # The engines may take longer to be ready than a collective between trainer ranks may take.
            if not self._early:
                self._channel.wait_wanted(version, wait_s)
            for _ in tensors:  # the gathers are collective
                pass
            if self._early:
                self._channel.wait_wanted(version, wait_s)
        except LOST as error:
            if tensors.begun:
                for _ in tensors:
                    pass
            return {}, error
        return {}, None

    def _follow(self, lost: VimeError | None) -> None:
        """Leave this epoch's bridge and come to the next one's, once we are called. Raises what ended this one otherwise."""
        reason = "another trainer rank lost the bridge" if lost is None else str(lost)
        log.warning("bridge %d is given up: %s", self.epoch, reason)
        if self._group is not None:
            self._group.close()
        # A rank that merely ran into its deadline waits no longer than the other side may take to find out.
        is_consequence = lost is None or lost.consequence
        timeout_s = (
            self._config.run.startup_timeout_s if is_consequence else self._config.weights.timeout_s
        )
        try:
            self._rendezvous.wait(
                CALL.format(epoch=self.epoch + 1),
                timeout_s=timeout_s + 2 * self._config.weights.timeout_s,
                who="rollout-0",
                phase="building the bridge again",
            )
        except DeadlineError as error:
            raise (lost or error) from error
        self.epoch += 1
        self._lost = self._join()

    def _join(self) -> VimeError | None:
        """Take this rank's place in the bridge of the present epoch; returns why that failed, if it may be tried again."""
        weights, plan = self._config.weights, self._plan
        self._channel = PublishChannel(
            self._rendezvous.store, self.epoch, weights.timeout_s, self._rendezvous.secret
        )
        source = self._source
        if source is None:
            return None
        try:
            self._connect(source)
        except LOST as error:
            self._channel.fail(f"trainer sender {source}, joining: {error}")
            return error
        log.info(
            "bridge %d of %d members is up over %s; %d tensors, %.1f MB in %d buckets, %s",
            self.epoch,
            self._world,
            weights.transport,
            len(plan.names),
            plan.nbytes / 1e6,
            len(plan.buckets),
            f"cut to what engine ranks hold {self._of_plan}" if self._of_plan else "whole",
        )
        return None

    @property
    def _world(self) -> int:
        engine = self._config.engine
        return self._plan.num_sources + engine.num_engines * engine.tp

    def _connect(self, source: int) -> None:
        plan, timeout_s = self._plan, self._config.weights.timeout_s
        kept = self._sender.memory if isinstance(self._sender, IpcSender) else None
        self._sender = None  # what it keeps of the epoch before goes first
        if source == 0:
            self._channel.put_plan(plan)
        self._rendezvous.put(DEVICE.format(source=source), device_identity(self._device))
        backend = self._rendezvous.wait(
            WANTED.format(epoch=self.epoch),
            timeout_s=self._config.run.startup_timeout_s,
            who="rollout-0",
            phase="building the bridge",
            interrupted=self._channel.raise_if_failed,
        )
        where = (self._rendezvous.store, self.epoch, source, self._world)
        if backend == DISK:
            files = directory_group(*where, timeout_s, plan.num_sources)
            self._group = files
            self._sender = DirectorySender(files, self._channel, plan, source, self._versions)
            return
        plan = self._channel.get_agreed(self._config.run.startup_timeout_s)
        self._of_plan = _metrics_of(plan)
        sizes = (timeout_s, plan.num_sources, plan.part_of)
        if backend == IPC:
            memory = ipc_group(*where, *sizes)
            self._group = memory
            self._sender = IpcSender(memory, plan, source, self._device, kept=kept)
        else:
            self._group = bridge_group(*where, backend, *sizes)
            self._sender = BridgeSender(self._group, plan, source)


def _metrics_of(plan: WeightPlan) -> Metrics:
    ratio = plan.received_over_held
    return {} if ratio is None else {"weights/received_over_held": ratio}


class _Resumable:
    """An iterator that can be gone on with by somebody else, and knows whether it was begun."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.begun = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self.begun = True
        return next(self._tensors)


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
