"""Engine ranks that receive what they hold: how the plan is agreed on, and that each rank is compared with what it was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch.distributed as dist

from vime_hpc.engine.client import EngineControl
from vime_hpc.engine.update import EngineWeightReceiver
from vime_hpc.errors import PublishGivenUpError, WeightsMismatchError
from vime_hpc.weights.channel import PublishChannel
from vime_hpc.weights.digest import root_digest
from vime_hpc.weights.engine_layout import RankLayout, Slice
from vime_hpc.weights.plan import TensorSpec, WeightPlan, build_plan

PLAN = build_plan([TensorSpec("a", "float32", (8,)), TensorSpec("b", "float32", (3,))], 1)
LAYOUTS = [RankLayout({"a": Slice((4 * rank,), (4,))}, 28) for rank in (0, 1)]
SENT = {"0/a": "1" * 32, "0/b": "2" * 32, "1/a": "3" * 32, "1/b": "2" * 32}
ARRIVED = [{"a": "1" * 32, "b": "2" * 32}, {"a": "3" * 32, "b": "2" * 32}]  # on ranks 0 and 1


class TwoRanks(EngineControl):
    """An engine of two ranks that answers as told, and notes what it was asked."""

    def __init__(self, name: str, layouts: list[dict[str, Any]], arrived: Any) -> None:
        super().__init__("http://nowhere", "", name=name)
        self._layouts, self._arrived = layouts, arrived
        self.asked: list[tuple[str, list[Any]]] = []

    async def _call(self, method: str, route: str, **more: Any) -> dict[str, Any]:
        request = more.get("body") or {}
        name, arguments = request.get("method", route), request.get("args", [])
        self.asked.append((name, arguments))
        replies: list[dict[str, Any]] = [{}, {}]
        if name == "vime_layout":
            replies = self._layouts
        elif name == "vime_receive":
            rank = {"nbytes": 28, "received": 28, "held": 28, "seconds": {}}
            replies = [{**rank, "root": root_digest(digests)} for digests in self._arrived]
        elif name == "vime_digests":
            replies = [{"digests": digests} for digests in self._arrived]
        return {"success": True, "results": replies}


def engines(
    layouts: list[dict[str, Any]], *, arrived: Any = ARRIVED, send: Any = "parts"
) -> tuple[EngineWeightReceiver, PublishChannel, list[TwoRanks]]:
    """Two engines of two ranks, the second of which gets `arrived`."""
    channel = PublishChannel(dist.HashStore(), 1, 20.0)
    channel.put_plan(PLAN)
    controls = [TwoRanks("engine 0", layouts, ARRIVED), TwoRanks("engine 1", layouts, arrived)]
    receiver = EngineWeightReceiver(
        controls, channel, store_host="", store_port=0, epoch=1, num_sources=1, tp=2, backend="gloo", timeout_s=20.0,
        send=send,
    )  # fmt: skip
    return receiver, channel, controls


def asked(control: TwoRanks, method: str) -> list[Any]:
    (arguments,) = [arguments for name, arguments in control.asked if name == method]
    return arguments


def test_the_ranks_layouts_complete_the_plan_and_both_sides_are_given_the_same() -> None:
    receiver, channel, controls = engines([{"layout": one.to_json()} for one in LAYOUTS])
    asyncio.run(receiver.join())
    agreed = channel.get_agreed(1.0)
    assert agreed == receiver.plan
    assert (agreed.part_of, agreed.num_parts, agreed.whole) == ((0, 1, 0, 1), 2, "")
    assert agreed.received_over_held == 1.0
    for control in controls:
        assert WeightPlan.from_json(asked(control, "vime_plan")[0]) == agreed
        assert asked(control, "vime_join")[-1] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("layouts", "send", "reason"),
    [
        ([{"layout": LAYOUTS[0].to_json()}, {"whole": "no files"}], "parts", "no files"),
        ([], "whole", 'weights.send = "whole"'),
    ],
)
def test_one_rank_whose_layout_is_not_known_has_all_sent_whole_tensors(
    layouts: list[dict[str, Any]], send: str, reason: str
) -> None:
    receiver, channel, controls = engines(layouts, send=send)
    asyncio.run(receiver.join())
    agreed = channel.get_agreed(1.0)
    assert (agreed.layout, agreed.whole) == (None, reason)
    assert asked(controls[1], "vime_join")[-1] == []


def test_a_layout_of_another_model_is_refused_before_any_rank_joins() -> None:
    other = RankLayout({"a": Slice((4,), (9,))}, 28).to_json()
    receiver, channel, controls = engines([{"layout": other}, {"layout": other}])
    with pytest.raises(WeightsMismatchError, match="reads a from"):
        asyncio.run(receiver.join())
    with pytest.raises(PublishGivenUpError, match="reads a from"):  # the trainer does not wait
        channel.get_agreed(1.0)
    assert "vime_join" not in [name for name, _ in controls[0].asked]


def updated(arrived: Any) -> tuple[PublishChannel, dict[str, float]]:
    receiver, channel, _ = engines([{"layout": one.to_json()} for one in LAYOUTS], arrived=arrived)
    channel.put_sent(1, SENT)

    async def main() -> dict[str, float]:
        await receiver.join()
        return await receiver.receive(1)

    return channel, asyncio.run(main())


def test_every_rank_is_compared_with_what_its_part_was_sent() -> None:
    channel, metrics = updated(ARRIVED)
    channel.wait_confirmed(1, root_digest(SENT))
    assert metrics["weights/received_over_held"] == 1.0


def test_a_rank_that_got_another_ranks_slice_is_named() -> None:
    with pytest.raises(WeightsMismatchError, match=r"engine 1, rank 1.*1 of 2 tensors differ: a"):
        updated([ARRIVED[0], ARRIVED[0]])
