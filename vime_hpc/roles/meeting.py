"""How the processes of one attempt find each other at the start and let go of each other at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from vime_hpc.cluster.rank import layout
from vime_hpc.cluster.rendezvous import POLL_S, Exchange, Rendezvous, host_address
from vime_hpc.errors import RequeueRequested, RoleDiedError
from vime_hpc.roles.context import RoleContext

log = logging.getLogger(__name__)
FAREWELL_S = 30.0


@contextmanager
def meeting(context: RoleContext) -> Iterator[Rendezvous]:
    """The job's rendezvous while this process works in it.

    A failure inside is told to the others, so that their waits end with this process's name. At the end rank 0, which
    hosts the store, stays until everybody has left.
    """
    rank = context.rank
    address = host_address(context.config.cluster.socket_ifname)
    rendezvous = Rendezvous.open(
        context.attempt_directory,
        context.token,
        hosting=rank.global_rank == 0,
        address=address,
        timeout_s=context.config.run.startup_timeout_s,
        exchange=_mpi_exchange(context) if context.config.cluster.mpi else None,
    )
    try:
        yield rendezvous
    except RequeueRequested:
        _leave(context, rendezvous)
        raise
    except Exception as error:
        try:
            if not rendezvous.has("failed"):
                rendezvous.put("failed", f"{rank.name} ({type(error).__name__})")
        except dist.DistError:
            # Rank 0 is gone and the store with it: that end is the cause, this error its consequence.
            raise RoleDiedError(
                f"the job's rendezvous on global rank 0 is gone ({error})"
            ) from error
        if rank.global_rank == 0:
            time.sleep(2 * POLL_S)  # let the others read it before the store goes
        raise
    _leave(context, rendezvous)


def _mpi_exchange(context: RoleContext) -> Exchange:
    from vime_hpc.cluster.mpi import broadcast_record

    return partial(
        broadcast_record,
        world_size=context.rank.world_size,
        timeout_s=context.config.run.startup_timeout_s,
    )


def _leave(context: RoleContext, rendezvous: Rendezvous) -> None:
    rank = context.rank
    rendezvous.put(f"left/{rank.name}", True)
    if rank.global_rank != 0:
        return
    others = [
        f"{role}-{n}"
        for role, size in layout(context.config)
        for n in range(size)
        if f"{role}-{n}" != rank.name
    ]
    end = time.monotonic() + FAREWELL_S
    while missing := [name for name in others if not rendezvous.has(f"left/{name}")]:
        if time.monotonic() > end:
            log.warning(
                "leaving before %s, which did not say goodbye within %g s",
                ", ".join(missing),
                FAREWELL_S,
            )
            return
        time.sleep(POLL_S)


def raise_if_over(rendezvous: Rendezvous, phase: str) -> None:
    """End a wait when the trainer stopped or somebody failed."""
    if rendezvous.has("failed"):
        raise RoleDiedError(
            f"{phase}: {rendezvous.get('failed')} failed; this process ends with it"
        )
    if rendezvous.has("trainer_stopped"):
        raise RequeueRequested(f"{phase}: the trainer stopped")
