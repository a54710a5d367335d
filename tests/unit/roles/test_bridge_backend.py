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
    assert bridge_backend("bridge", senders, receivers) == expected


def test_ipc_is_refused_unless_all_share_one_gpu() -> None:
    assert bridge_backend("ipc", ["a"], ["a"]) == "ipc"
    for senders, receivers in ((["a"], ["b"]), (["cpu"], ["cpu"]), (["a", "b"], ["a"])):
        with pytest.raises(ConfigError, match="one GPU"):
            bridge_backend("ipc", senders, receivers)
