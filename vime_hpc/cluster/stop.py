"""Stopping on request: a signal to any one process becomes a stop that all agree on at a step boundary."""

from __future__ import annotations

from collections.abc import Callable

from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.cluster.signal_flag import SignalFlag


class AgreedStop:
    """protocols.StopFlag for one role: local signal or anybody's, made the same on all ranks of the role.

    Args:
        local: this process's flag.
        rendezvous: carries the request to the other roles.
        agree: maximum over the role's ranks of a 0/1 value (collective), or the identity for a single rank.
    """

    def __init__(
        self,
        local: SignalFlag,
        rendezvous: Rendezvous,
        agree: Callable[[int], int] = lambda flag: flag,
    ):
        self._local = local
        self._rendezvous = rendezvous
        self._agree = agree

    def agreed(self) -> bool:
        if not self._agree(int(self._local.is_set() or self._rendezvous.has("stop"))):
            return False
        self._rendezvous.put("stop", True)
        return True
