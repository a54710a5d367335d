"""The publish channel on a store in memory: order, deadlines with names, signatures."""

from __future__ import annotations

import threading
import time

import pytest

from vime_hpc.errors import DeadlineError, WeightsMismatchError
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.plan import TensorSpec, build_plan


class Memory:
    """set, get and check of a torch store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(k in self.values for k in keys)


def ends(token: str = "t") -> tuple[PublishChannel, PublishChannel, Memory]:
    store = Memory()
    return PublishChannel(store, 1, 0.3, token), PublishChannel(store, 1, 0.3, token), store


def test_a_publish_goes_announce_want_sent_confirm() -> None:
    trainer, engines, _ = ends()
    plan = build_plan([TensorSpec("a", "float32", (2,))], 1)
    trainer.put_plan(plan)
    assert engines.get_plan() == plan
    trainer.announce(4)
    trainer.announce(5)
    assert engines.wait_newest(4) == 5
    engines.want(5)
    trainer.wait_wanted(5)
    root = trainer.put_sent(5, {"a": "1"})
    assert engines.wait_sent(5).digests == {"a": "1"}
    engines.confirm(5, root)
    trainer.wait_confirmed(5, root)
    engines.confirm(6, "other")
    with pytest.raises(WeightsMismatchError, match="confirmed root digest other for version 6"):
        trainer.wait_confirmed(6, root)


def test_every_wait_ends_at_its_deadline_naming_who_and_what() -> None:
    trainer, engines, _ = ends()
    for wait, message in [
        (lambda: engines.wait_newest(3), "version 3: the trainer .* has announced none"),
        (lambda: trainer.wait_wanted(3), r"send weights of version 3: .* rollout worker"),
        (lambda: engines.wait_sent(3), "digests of version 3: .* trainer sender 0"),
        (lambda: trainer.wait_confirmed(3, "x"), "confirm version 3: .* rollout worker"),
        (lambda: trainer.get_part(3, 2), "trainer sender 2"),
    ]:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=message):
            wait()
        assert time.monotonic() - start < 20


def test_a_failure_on_one_side_ends_the_others_wait_with_its_reason() -> None:
    trainer, engines, store = ends()
    patient = PublishChannel(store, 1, 60.0, "t")
    threading.Timer(0.1, lambda: engines.fail("engine 1 died")).start()
    start = time.monotonic()
    with pytest.raises(WeightsMismatchError, match="gave up: engine 1 died"):
        patient.wait_wanted(1)
    assert time.monotonic() - start < 30
    with pytest.raises(WeightsMismatchError, match="engine 1 died"):
        trainer.wait_newest(1)


def test_a_value_of_a_stranger_or_moved_to_another_key_is_refused() -> None:
    trainer, engines, store = ends()
    PublishChannel(store, 1, 0.3, "another token").announce(9)
    with pytest.raises(WeightsMismatchError, match="not signed with this run's token"):
        engines.wait_newest(1)
    trainer.put_sent(1, {"a": "1"})
    store.values["vime/publish/1/2/sent"] = store.values["vime/publish/1/1/sent"]
    with pytest.raises(WeightsMismatchError, match="not signed"):
        engines.wait_sent(2)


def test_epochs_do_not_see_each_other() -> None:
    store = Memory()
    PublishChannel(store, 1, 0.2, "t").announce(9)
    with pytest.raises(DeadlineError):
        PublishChannel(store, 2, 0.2, "t").wait_newest(1)
