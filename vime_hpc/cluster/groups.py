"""The only maker of torch.distributed process groups that stand beside a program's default group.

The bridge joins trainer senders (ranks 0 … S-1) and engine ranks (S … world-1). Each sender has one group with all
engine ranks that receive the same, so a sender never receives what another sends. The groups are built directly from a store: neither
Megatron's nor vLLM's default group is touched (the constructors are public classes of torch.distributed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from vime_hpc.errors import ConfigError, DeadlineError

POLL_S = 0.02
POLL_WORK_S = 0.0001  # a bucket of 512 MiB takes 1.5 ms between two GPUs


@dataclass
class InFlight:
    """A broadcast under way. `work` is torch's, None once it is complete or has failed."""

    work: Any
    phase: str


class BridgeGroup:
    """One member's end of the bridge. `broadcast` has a deadline; an error names who is behind and in what."""

    def __init__(
        self,
        store: Any,
        epoch: int,
        rank: int,
        world: int,
        num_sources: int,
        backend: str,
        timeout_s: float,
        part_of: Sequence[int] = (),
    ) -> None:
        self.rank, self.world, self.num_sources, self.backend = rank, world, num_sources, backend
        self.timeout_s = timeout_s
        self._part_of = part_of or (0,) * len(self.receivers)
        self._store = _corner(store, epoch)
        self._groups: dict[tuple[int, int], Any] = {}

    @property
    def receivers(self) -> range:
        return range(self.num_sources, self.world)

    def join(self) -> None:
        """Wait for all members, then build the groups. Raises DeadlineError naming the ranks that are missing."""
        self._store.set(f"member/{self.rank}", "here")
        wait_for_keys(
            self._store,
            {f"member/{r}": f"bridge rank {r} ({self.role_of(r)})" for r in range(self.world)},
            self.timeout_s,
            phase="joining the bridge",
            interrupt=self._raise_if_failed,
        )
        for source in range(self.num_sources):
            for part in range(max(self._part_of) + 1):
                members = self._members(source, part)
                if self.rank in members:
                    try:
                        self._groups[source, part] = self._make(source, part, members)
                    except (RuntimeError, dist.DistError) as error:
                        raise DeadlineError(
                            f"bridge rank {self.rank} ({self.role_of(self.rank)}), connecting to the other "
                            f"members of sender {source}'s group: {error}"
                        ) from error

    @property
    def part(self) -> int:
        """Part of this engine rank."""
        return self._part_of[self.rank - self.num_sources]

    def _members(self, source: int, part: int) -> list[int]:
        """Bridge ranks that take part in what `source` sends to a part, the sender first."""
        pairs = zip(self.receivers, self._part_of, strict=True)
        return [source, *(rank for rank, own in pairs if own == part)]

    def role_of(self, rank: int) -> str:
        return (
            f"trainer sender {rank}"
            if rank < self.num_sources
            else f"engine rank {rank - self.num_sources}"
        )

    def _make(self, source: int, part: int, members: Sequence[int]) -> Any:
        store = PrefixStore(f"source/{source}/{part}", self._store)
        rank, world = members.index(self.rank), len(members)
        timeout = timedelta(seconds=self.timeout_s)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, world, timeout)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, world, options)
        raise ConfigError(f"bridge backend {self.backend!r}: expected gloo (CPU) or nccl (CUDA)")

    def broadcast(self, flat: torch.Tensor, source: int, phase: str, part: int = 0) -> None:
        """Send (on `source`) or fill (on the engine ranks of the part) a flat uint8 tensor; `begin` and `finish` in one."""
        self.finish(self.begin(flat, source, phase, part))

    def begin(self, flat: torch.Tensor, source: int, phase: str, part: int = 0) -> InFlight:
        """Hand a flat uint8 tensor to the group and return at once; it belongs to the group until `finish`.

        On a GPU it travels after everything that is on the present stream by now. Raises as `finish` does.
        """
        start = time.monotonic()
        try:
            return InFlight(self._groups[source, part].broadcast(flat, 0), phase)
        except RuntimeError as error:
            raise self._failure(phase, start, error) from error

    def finish(self, sent: InFlight) -> None:
        """Wait until a broadcast is complete; what is put on the present GPU stream from now on comes after it.

        Raises DeadlineError naming the phase and, as far as the store can tell, the ranks that are behind; one that comes
        before the deadline is the consequence of another member's end.
        """
        start = time.monotonic()
        try:
            self._complete(sent.work, sent.phase)
        except RuntimeError as error:
            raise self._failure(sent.phase, start, error) from error
        finally:
            sent.work = None  # see _failure: nothing of ours keeps the group's sockets
        self.report(sent.phase)

    def _failure(self, phase: str, start: float, error: RuntimeError) -> DeadlineError:
        """Of a time-out or a closed connection; NCCL's DistBackendError is a RuntimeError, too."""
        # Frames of the traceback would keep the work, the work the group, and the group its sockets: whoever waits for
        # us would not see them close as long as this error is being handled.
        error.__traceback__ = None
        failure = DeadlineError(
            f"bridge rank {self.rank} ({self.role_of(self.rank)}), {phase}: {self._behind()}{error}"
        )
        failure.consequence = time.monotonic() - start < self.timeout_s
        return failure

    def _complete(self, work: Any, phase: str) -> None:
        if self.backend == "nccl":
            self._poll(work, phase)
        else:
            work.wait(timedelta(seconds=self.timeout_s))

    def _poll(self, work: Any, phase: str) -> None:
        # NCCL's own wait() only orders streams; the host-side deadline is ours.
        deadline = time.monotonic() + self.timeout_s
        tick = 0
        while not work.is_completed():
            tick += 1
            if tick % 1000 == 0 and self._store.check(["failed"]):
                raise RuntimeError(self._store.get("failed").decode())
            if time.monotonic() > deadline:
                raise RuntimeError(f"not complete after {self.timeout_s:.0f} s")
            time.sleep(POLL_WORK_S)
        work.wait()

    def report(self, phase: str) -> None:
        """Leave a note how far this member got; read by the others when something hangs."""
        self._store.set(f"progress/{self.rank}", phase)

    def _behind(self) -> str:
        try:
            if self._store.check(["failed"]):
                return self._store.get("failed").decode() + "; "
            notes = [
                f"{self.role_of(r)} (rank {r}): "
                + (
                    self._store.get(f"progress/{r}").decode()
                    if self._store.check([f"progress/{r}"])
                    else "nothing yet"
                )
                for r in range(self.world)
                if r != self.rank
            ]
        except (RuntimeError, dist.DistError):
            return "the store does not answer either, so the process that hosts it has probably ended; "
        return f"last completed by the others: {'; '.join(notes)}. "

    def fail(self, message: str) -> None:
        """Leave the bridge so that the others notice at once instead of at their deadline; it cannot be used again.

        gloo's peers see their connections close; NCCL's do not, so they look for this note while they wait.
        """
        self._store.set(
            "failed", f"{self.role_of(self.rank)} (bridge rank {self.rank}) gave up: {message}"
        )
        self.close()

    def _raise_if_failed(self) -> None:
        if self._store.check(["failed"]):
            failure = DeadlineError(self._store.get("failed").decode())
            failure.consequence = True
            raise failure

    def close(self) -> None:
        """Drop the groups (sockets, NCCL communicators)."""
        for group in self._groups.values():
            if self.backend == "nccl":
                group.abort()
        self._groups.clear()


def _corner(store: Any, epoch: int) -> PrefixStore:
    return PrefixStore(f"vime/bridge/{epoch}", store)


def fail_bridge(store: Any, epoch: int, message: str) -> None:
    """End the waits of all members of a bridge, as a member's own `fail` does: for whoever knows first that one is gone."""
    _corner(store, epoch).set("failed", message)


def bridge_group(
    store: Any,
    epoch: int,
    rank: int,
    world: int,
    backend: str,
    timeout_s: float,
    num_sources: int = 1,
    part_of: Sequence[int] = (),
) -> BridgeGroup:
    """Join the bridge and return this member's end of it.

    Args:
        store: a torch.distributed store all members reach (TCPStore).
        epoch: number of this building of the bridge; a rebuilt bridge takes the next one.
        rank: 0 … num_sources-1 for trainer senders, then engine ranks.
        world: senders and engine ranks together.
        backend: "gloo" or "nccl".
        timeout_s: deadline of joining and of every broadcast.
        num_sources: number of trainer senders.
        part_of: part of every engine rank (WeightPlan.part_of); none = all receive the same.
    Raises:
        DeadlineError: a member did not come; names its rank.
    """
    if not 0 < num_sources < world or not 0 <= rank < world:
        raise ConfigError(
            f"bridge of {world} members with {num_sources} senders and rank {rank}: senders and engine "
            f"ranks must both be there, and the rank below the world size"
        )
    group = BridgeGroup(store, epoch, rank, world, num_sources, backend, timeout_s, part_of)
    group.join()
    return group


def wait_for_keys(
    store: Any,
    keys: dict[str, str],
    timeout_s: float,
    *,
    phase: str,
    interrupt: Callable[[], None] | None = None,
) -> None:
    """Wait until every key is in the store.

    Args:
        keys: key → who is to set it (for the message).
        timeout_s: deadline for all of them.
        phase: what is being waited for (for the message).
        interrupt: called at every look; what it raises ends the wait.
    Raises:
        DeadlineError: names who is missing.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = (
        POLL_S / 40
    )  # what comes at once is seen at once; engines stand still during some of these waits
    missing = dict(keys)
    while missing := {k: who for k, who in missing.items() if not store.check([k])}:
        if interrupt is not None:
            interrupt()
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{phase}: not there after {timeout_s:.0f} s: {', '.join(missing.values())}"
            )
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, POLL_S)


def device_identity(device: torch.device) -> str:
    """ "cpu", or the UUID of a GPU, the same in every process and container that computes on it."""
    if device.type == "cpu":
        return "cpu"
    return f"{device.type}-{torch.cuda.get_device_properties(device).uuid}"


def start_trainer_group(store: Any, rank: int, world: int, backend: str, timeout_s: float) -> None:
    """The default group of the trainer's processes: trainer ranks only, over a corner of the job's own store.

    Args:
        store: a torch.distributed store all trainer ranks reach.
        rank: role_rank among the trainer ranks; world: their number.
        backend: "gloo", or "cpu:gloo,cuda:nccl" (flags and objects of a few bytes stay on the CPU).
        timeout_s: deadline of every collective.
    """
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )


def any_rank(flag: int) -> int:
    """1 on all ranks of the default group where one of them gives 1. Collective, with the group's deadline."""
    value = torch.tensor(flag)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)
