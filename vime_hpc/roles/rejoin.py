"""The leading rollout worker's end of the bridge: built once all engines are up, and again when one was lost.

    lost ──all engines up──► CALL(epoch) ──trainer there──► WANTED(epoch) ──all joined──► whole ──an engine lost──► lost

Each building is an epoch of its own. Whatever waits in an epoch that is given up is told, on both sides. A step towards a
whole bridge never waits for an engine to start or for the trainer to finish a step, so the survivors go on serving.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.config.tree import RunConfig
from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import DeadlineError, EngineError, PublishGivenUpError, VimeError
from vime_hpc.roles.bridge import CALL, DEVICE, FIRST_EPOCH, WANTED, bridge_backend
from vime_hpc.roles.lives import FIRST_LIFE, EngineLives
from vime_hpc.roles.meeting import raise_if_over
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.version import VersionKeeper, WeightState

log = logging.getLogger(__name__)
LOST = (EngineError, DeadlineError, PublishGivenUpError)
"""What an update ends with when an engine is gone, or its bridge."""
REPEATS = 1
"""How often in a row a bridge is built again although no engine was lost: a transfer that broke, once."""
HEALTH_S = 30.0
"""An engine that does not answer its health route for so long is not there; a busy machine makes it slow."""
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True)
class Fleet:
    """The engines of a run as the leading rollout worker reaches them.

    Args:
        controls: one per engine, in the order of their bridge ranks.
        lives: tells which of them were started again.
        directory: where versions lie, as the engines' nodes name it (disk, delta).
        plan_file: where the plan by which weights travel is kept for `vime-hpc plan`.
    """

    controls: list[EngineControl]
    lives: EngineLives
    directory: str
    plan_file: Path


class LeadingBridge:
    """Builds the bridge, epoch by epoch.

    Args:
        run: runs a coroutine to its end.
    """

    def __init__(self, fleet: Fleet, config: RunConfig, rendezvous: Rendezvous, run: Run) -> None:
        self._fleet, self._config, self._rendezvous, self._run = fleet, config, rendezvous, run
        num = len(fleet.controls)
        self._keepers = [VersionKeeper() for _ in range(num)]
        self._kept = [FIRST_LIFE] * num
        """Life of each engine that its keeper is of."""
        self._oldest = [FIRST_LIFE] * num
        """Oldest life of each engine that will do."""
        self._lives: list[int] = []
        """Lives the present epoch was called with; empty before."""
        self._repeats = 0
        self._since = time.monotonic()
        self.epoch = FIRST_EPOCH
        self.receiver: EngineWeightReceiver | None = None
        """The engines of a whole bridge; None while there is none."""
        self.is_new = True
        """Whether no version came over this epoch's bridge yet."""
        self.channel = self._new_channel()

    def advance(self) -> bool:
        """One step towards a whole bridge; True when it is whole.

        Raises:
            RoleDiedError, RequeueRequested: the job is over.
            DeadlineError: an engine did not come up, or the trainer did not come.
            EngineError: building it failed again and again, although no engine was lost.
        """
        if self._lives and self._fleet.lives.newest() != self._lives:
            self.lose(EngineError("an engine was started again"))
        if self.receiver is not None:
            return True
        raise_if_over(self._rendezvous, f"building bridge {self.epoch}")
        if not self._lives:
            self._call_when_up()
        elif self.channel.has_plan():
            self._join()
        else:
            self._refuse_to_wait("the trainer did not come", self._config.run.wait_timeout_s)
        return self.receiver is not None

    def lose(self, error: VimeError) -> None:
        """Give this epoch up because of what happened in it; engines that cannot be reached are to be started again.

        Raises:
            VimeError: `error`, where no engine is lost and building the bridge again did not help before.
        """
        lost = self._lost_engines()
        if not lost:
            self._repeats += 1
            if self._repeats > REPEATS:
                raise error
        message = f"bridge {self.epoch} is built again: {error}"
        log.warning("%s", message)
        self.channel.fail(message)
        self.channel.end_bridge(message)
        self.epoch += 1
        self.channel = self._new_channel()
        self.receiver, self.is_new, self._lives = None, True, []
        self._since = time.monotonic()

    def received(self) -> None:
        """A version came over this epoch's bridge, and every engine serves it."""
        self.is_new, self._repeats = False, 0

    def _lost_engines(self) -> list[int]:
        """Engines whose present life is over, or is asked to end because nobody reaches it."""
        newest, known = self._fleet.lives.newest(), self._lives or self._oldest
        gone = dict(self.receiver.unreachable) if self.receiver is not None else {}
        if not gone and newest == known:
            gone = self._run(self._unwell())
        for index, cause in gone.items():
            self._fleet.lives.end(index, known[index], cause)
        lost = [i for i, life in enumerate(newest) if i in gone or life != known[i]]
        for i in lost:
            self._oldest[i] = max(newest[i], known[i] + 1)
        return lost

    async def _unwell(self) -> dict[int, str]:
        return {
            index: f"{control.name} does not answer its health route"
            for index, control in enumerate(self._fleet.controls)
            if not await control.healthy(HEALTH_S)
        }

    def _new_channel(self) -> PublishChannel:
        return PublishChannel(
            self._rendezvous.store,
            self.epoch,
            self._config.weights.timeout_s,
            self._rendezvous.secret,
        )

    def _call_when_up(self) -> None:
        up = self._fleet.lives.up(self._oldest)
        if up is None:
            newest = self._fleet.lives.newest()
            self._refuse_to_wait(
                f"not all engines came up (lives {newest}, needed {self._oldest})",
                self._config.run.startup_timeout_s,
            )
            return
        for index, life in enumerate(up):
            if life != self._kept[index]:  # started again: it must not serve before a full version
                self._keepers[index] = VersionKeeper()
                self._keepers[index].state = WeightState.UPDATING
        self._lives, self._kept = up, up
        self._since = time.monotonic()
        self._rendezvous.put(CALL.format(epoch=self.epoch), True)

    def _join(self) -> None:
        """All engines and trainer senders meet; a failure gives the epoch up."""
        try:
            plan = self.channel.get_plan()
            receiver = self._receiver(plan.num_sources)
            self.receiver = receiver  # so that a lost engine is known
            self._run(receiver.join())
        except LOST as error:
            self.lose(error)
            return
        if receiver.plan is not None:
            self._fleet.plan_file.write_text(receiver.plan.to_json())
        log.info("bridge %d with engines in lives %s is whole", self.epoch, self._lives)

    def _receiver(self, num_sources: int) -> EngineWeightReceiver:
        weights, controls = self._config.weights, self._fleet.controls
        senders = [self._sender_device(source) for source in range(num_sources)]
        ranks = self._run(_devices(controls))
        backend = bridge_backend(
            weights.transport, senders, [r["device"] for r in ranks], [r["reach"] for r in ranks]
        )
        log.info("bridge %d over %s", self.epoch, backend)
        self._rendezvous.put(WANTED.format(epoch=self.epoch), backend)
        return EngineWeightReceiver(
            controls,
            self.channel,
            store_host=self._rendezvous.host,
            store_port=self._rendezvous.port,
            epoch=self.epoch,
            num_sources=num_sources,
            tp=self._config.engine.tp,
            backend=backend,
            timeout_s=weights.timeout_s,
            directory=self._fleet.directory,
            keepers=self._keepers,
            send=weights.send,
        )

    def _sender_device(self, source: int) -> str:
        device: str = self._rendezvous.wait(
            DEVICE.format(source=source),
            timeout_s=self._config.run.startup_timeout_s,
            who=f"trainer sender {source}",
            phase="asking for the senders' devices",
        )
        return device

    def _refuse_to_wait(self, what: str, timeout_s: float) -> None:
        if time.monotonic() - self._since > timeout_s:
            raise DeadlineError(
                f"building bridge {self.epoch}: {what} within {timeout_s:g} s; look at the logs"
            )


async def _devices(controls: list[EngineControl]) -> list[dict[str, Any]]:
    """worker.vime_device of every engine rank, in the order of their bridge ranks."""
    replies = [await control.collective_rpc("vime_device") for control in controls]
    return [rank for ranks in replies for rank in ranks]
