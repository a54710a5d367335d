"""Which way the weights take between these devices."""

from __future__ import annotations

import pytest

from vime_hpc.errors import ConfigError
from vime_hpc.roles.bridge import bridge_backend


@pytest.mark.parametrize(
    ("senders", "receivers", "expected"),
    [
        (["a"], ["b"], "nccl"),
        (["a", "b"], ["c", "d"], "nccl"),
        (["a"], ["a"], "gloo"),
        (["a", "b"], ["c", "b"], "gloo"),
        (["cpu"], ["cpu"], "gloo"),
        (["a"], ["cpu"], "gloo"),
    ],
)
def test_nccl_is_taken_exactly_where_every_member_has_a_gpu_of_its_own(
    senders: list[str], receivers: list[str], expected: str
) -> None:
    reach = [[]] * len(receivers)
    assert bridge_backend("bridge", senders, receivers, reach) == expected


def test_ipc_is_taken_where_every_engine_rank_can_open_every_senders_memory() -> None:
    assert bridge_backend("ipc", ["a"], ["a"], [["a"]]) == "ipc"
    assert bridge_backend("ipc", ["a"], ["a", "b"], [["a", "b"], ["b", "a"]]) == "ipc"


@pytest.mark.parametrize(
    ("senders", "receivers", "reach", "named"),
    [
        (["a"], ["b"], [["b"]], "sender 0 on a and engine rank 0 on b"),
        (["cpu"], ["cpu"], [[]], "sender 0 on cpu and engine rank 0 on cpu"),
        (["a", "b"], ["a", "b"], [["a", "b"], ["b"]], "sender 0 on a and engine rank 1 on b"),
    ],
)
def test_ipc_is_refused_naming_who_cannot_open_whose_memory(
    senders: list[str], receivers: list[str], reach: list[list[str]], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        bridge_backend("ipc", senders, receivers, reach)
