"""The lives of the engines: every start of an engine's server has a number, kept in the job's store.

A life begins when its host says so, before the server is there, and is up once the server answers. Who knew an engine
under another number knows that its weights and its place in the bridge are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime_hpc.cluster.rendezvous import Rendezvous
from vime_hpc.errors import EngineError

FIRST_LIFE = 1
LIFE = "engine/{index}/life"
"""Number of the newest life, put by the host when it begins."""
UP = "engine/{index}"
"""{"url", "pid", "life"} of the newest life that answered, put by the host."""
END = "engine/{index}/end"
"""{"life", "cause"}: what the leading rollout worker cannot work with any more; the host ends it and begins the next."""


class EngineLife:
    """The host's side: begins the lives of one engine, as many as engine.max_restarts lets it.

    Args:
        rendezvous: the job's store, which outlives a host.
        index: number of the engine. max_restarts: lives after the first, in one start of the job.
    """

    def __init__(self, rendezvous: Rendezvous, index: int, max_restarts: int) -> None:
        self._rendezvous, self._index, self._max_restarts = rendezvous, index, max_restarts
        key = LIFE.format(index=index)
        self.number: int = rendezvous.get(key) if rendezvous.has(key) else 0

    def begin(self, cause: str = "") -> int:
        """The next life's number, told to everybody.

        Args:
            cause: why the life before ended.
        Raises:
            EngineError: engine.max_restarts is used up, or there is no trainer any more to give it weights.
        """
        if self.number and self._rendezvous.has("trainer_stopped"):
            raise EngineError(cause)
        if self.number > self._max_restarts:
            used = f" ({self._max_restarts} restarts, engine.max_restarts, are used up)"
            raise EngineError(cause + (used if self._max_restarts else ""))
        self.number += 1
        self._rendezvous.put(LIFE.format(index=self._index), self.number)
        return self.number

    def up(self, url: str, pid: int) -> None:
        """The server of this life answers."""
        record = {"url": url, "pid": pid, "life": self.number}
        self._rendezvous.put(UP.format(index=self._index), record)

    def end_wanted(self) -> str:
        """Why the leading rollout worker wants this life ended; empty when it does not."""
        key = END.format(index=self._index)
        wanted: dict[str, Any] = self._rendezvous.get(key) if self._rendezvous.has(key) else {}
        return str(wanted["cause"]) if wanted.get("life") == self.number else ""

    def last_port(self) -> int | None:
        """The port an earlier life listened on; the router and the clients know no other."""
        key = UP.format(index=self._index)
        if not self._rendezvous.has(key):
            return None
        return int(self._rendezvous.get(key)["url"].rpartition(":")[2])


class EngineLives:
    """Everybody else's view of all engines' lives."""

    def __init__(self, rendezvous: Rendezvous, num_engines: int) -> None:
        self._rendezvous, self._num_engines = rendezvous, num_engines

    def newest(self) -> list[int]:
        """Number of each engine's newest life; 0 before its first."""
        keys = [LIFE.format(index=i) for i in range(self._num_engines)]
        return [self._rendezvous.get(key) if self._rendezvous.has(key) else 0 for key in keys]

    def up(self, at_least: Sequence[int]) -> list[int] | None:
        """Each engine's life once all are up, none of them older than asked for; else None.

        Args:
            at_least: number of the oldest life of each engine that will do.
        """
        newest = self.newest()
        for index, (life, wanted) in enumerate(zip(newest, at_least, strict=True)):
            key = UP.format(index=index)
            if life < wanted or not self._rendezvous.has(key):
                return None
            if self._rendezvous.get(key)["life"] != life:
                return None
        return newest

    def end(self, index: int, life: int, cause: str) -> None:
        """Ask the host to end this life; a later one is left alone."""
        self._rendezvous.put(END.format(index=index), {"life": life, "cause": cause})
