"""What trainer and rollout side tell each other about a publish, through the job's store. Small values only.

Keys under vime/publish/EPOCH/ :
    plan                     the trainer's weight plan (JSON), once
    agreed                   the plan with what each engine rank holds, by which both sides send and receive
    newest                   newest version the trainer is ready to send
    V/wanted                 set by the rollout side when every engine is paused and waits for version V
    V/part/SOURCE            {name: digest} of a sender other than 0
    V/shard/SOURCE           files of a sender other than 0 (disk, delta)
    V/sent                   {version, root, digests}: what the trainer sent
    V/confirmed              root digest every engine confirmed; only then does V count as published
    failed                   message of either side's failure; ends every wait of the other side
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from typing import Any

from vime_hpc.cluster.groups import POLL_S, fail_bridge, wait_for_keys
from vime_hpc.errors import DeadlineError, PublishGivenUpError, WeightsMismatchError
from vime_hpc.weights.digest import root_digest
from vime_hpc.weights.plan import WeightPlan, part_prefix


@dataclass(frozen=True, slots=True)
class Sent:
    """What the trainer says it sent."""

    version: int
    root: str
    digests: dict[str, str]

    def of_part(self, part: int) -> Sent:
        """What the ranks of one part were sent, under the tensors' own names."""
        prefix = part_prefix(part)
        digests = {
            n.removeprefix(prefix): d for n, d in self.digests.items() if n.startswith(prefix)
        }
        return Sent(self.version, root_digest(digests), digests)


class PublishChannel:
    """Both ends' view of the store. Values are signed, for anybody on the network can reach a TCPStore.

    Args:
        store: needs set, get and check.
        epoch: number of this building of the bridge.
        timeout_s: deadline of every wait that is not given its own.
        token: the run's token; both ends must have the same.
    """

    def __init__(self, store: Any, epoch: int, timeout_s: float, token: str = "") -> None:
        self._token, self.epoch = token.encode(), epoch
        self._store, self._prefix, self._timeout_s = store, f"vime/publish/{epoch}/", timeout_s

    # --- trainer, sender 0 -------------------------------------------------------------------------------------------

    def put_plan(self, plan: WeightPlan) -> None:
        self._set("plan", plan.to_json())

    def get_agreed(self, timeout_s: float) -> WeightPlan:
        """The plan as the rollout side completed it."""
        who = "rollout worker (weight plan with the engines' layout)"
        self._wait("agreed", who, "waiting for the engines' layout", timeout_s)
        return WeightPlan.from_json(self._get("agreed"))

    def announce(self, version: int) -> None:
        """Say that `version` can be fetched from now on."""
        self._set("newest", str(version))

    def wait_wanted(self, version: int, timeout_s: float | None = None) -> None:
        """Block until every engine waits for the version."""
        self._wait(
            f"{version}/wanted",
            f"rollout worker (engines paused for version {version})",
            f"waiting to send weights of version {version}",
            timeout_s,
        )

    def put_part(self, version: int, source: int, digests: dict[str, str]) -> None:
        """A further sender's digests, for sender 0 to merge."""
        self._set(f"{version}/part/{source}", json.dumps(digests))

    def get_part(self, version: int, source: int) -> dict[str, str]:
        self._wait(
            f"{version}/part/{source}",
            f"trainer sender {source} (digests)",
            f"collecting the digests of version {version}",
            None,
        )
        part: dict[str, str] = json.loads(self._get(f"{version}/part/{source}"))
        return part

    def put_shard(self, version: int, source: int, shard: str) -> None:
        """What a further sender wrote into the version's directory, for sender 0 to commit (JSON)."""
        self._set(f"{version}/shard/{source}", shard)

    def get_shard(self, version: int, source: int) -> str:
        self._wait(
            f"{version}/shard/{source}",
            f"trainer sender {source} (its files)",
            f"collecting the files of version {version}",
            None,
        )
        return self._get(f"{version}/shard/{source}")

    def wait_sent_root(self, version: int) -> str:
        """Root digest as sender 0 put it together."""
        return self.wait_sent(version).root

    def put_sent(self, version: int, digests: dict[str, str]) -> str:
        """Say what was sent; returns the root digest."""
        root = root_digest(digests)
        self._set(
            f"{version}/sent", json.dumps({"version": version, "root": root, "digests": digests})
        )
        return root

    def wait_confirmed(self, version: int, root: str) -> None:
        """Block until every engine confirmed the root digest. Raises WeightsMismatchError when it is another one."""
        self._wait(
            f"{version}/confirmed",
            "rollout worker (confirmation of every engine)",
            f"waiting for the engines to confirm version {version}",
            # Longer than the rollout side waits for an engine: it knows which one is missing, and says so.
            1.25 * self._timeout_s,
        )
        found = self._get(f"{version}/confirmed")
        if found != root:
            raise WeightsMismatchError(
                f"engines confirmed root digest {found} for version {version}, sent was {root}"
            )

    # --- rollout side ------------------------------------------------------------------------------------------------

    def has_plan(self) -> bool:
        """Whether the trainer is there, too."""
        return bool(self._store.check([self._prefix + "plan"]))

    def get_plan(self, timeout_s: float | None = None) -> WeightPlan:
        self._wait("plan", "trainer (weight plan)", "waiting for the weight plan", timeout_s)
        return WeightPlan.from_json(self._get("plan"))

    def put_agreed(self, plan: WeightPlan) -> None:
        """Tell the trainer's senders by which plan to send."""
        self._set("agreed", plan.to_json())

    def wait_newest(self, at_least: int, timeout_s: float | None = None) -> int:
        """Block until a version >= at_least is announced; returns the newest."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while True:
            self.raise_if_failed()
            newest = (
                int(self._get("newest")) if self._store.check([self._prefix + "newest"]) else -1
            )
            if newest >= at_least:
                return newest
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waiting for weights of version {at_least}: the trainer (sender 0) has announced "
                    f"{'none' if newest < 0 else newest} after {limit:.0f} s"
                )
            time.sleep(POLL_S)

    def want(self, version: int) -> None:
        self._set(f"{version}/wanted", "1")

    def wait_sent(self, version: int) -> Sent:
        self._wait(
            f"{version}/sent",
            "trainer sender 0 (digests)",
            f"waiting for the digests of version {version}",
            None,
        )
        return Sent(**json.loads(self._get(f"{version}/sent")))

    def confirm(self, version: int, root: str) -> None:
        self._set(f"{version}/confirmed", root)

    # --- both --------------------------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """End the other side's waits with this message (PublishGivenUpError there). The first one stays: it is the cause."""
        if not self._store.check([self._prefix + "failed"]):
            self._set("failed", message)

    def end_bridge(self, message: str) -> None:
        """End the waits of all members of this epoch's bridge: one of them is gone."""
        fail_bridge(self._store, self.epoch, message)

    def raise_if_failed(self) -> None:
        if self._store.check([self._prefix + "failed"]):
            raise PublishGivenUpError(
                f"the other side of the bridge gave up: {self._get('failed')}"
            )

    def _wait(self, key: str, who: str, phase: str, timeout_s: float | None) -> None:
        wait_for_keys(
            self._store,
            {self._prefix + key: who},
            self._timeout_s if timeout_s is None else timeout_s,
            phase=phase,
            interrupt=self.raise_if_failed,
        )

    def _set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, f"{self._mac(key, value)}|{value}")

    def _get(self, key: str) -> str:
        mac, _, value = self._store.get(self._prefix + key).decode().partition("|")
        if not hmac.compare_digest(mac, self._mac(key, value)):
            raise WeightsMismatchError(
                f"{self._prefix}{key} in the job's store is not signed with this run's token; somebody else wrote "
                f"it, or one side of the bridge was given another token"
            )
        return str(value)

    def _mac(self, key: str, value: str) -> str:
        text = f"{self._prefix}{key}|{value}".encode()
        return hmac.new(self._token, text, hashlib.sha256).hexdigest()
